"""The worked batch of docs/handbook/concepts.md: every number of its tables, computed by hone.algorithms."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms import (
    advantage_estimators,
    aggregate_loss,
    apply_kl_penalty,
    kl_penalty,
    policy_losses,
    rollout_correction,
)
from hone.algorithms.off_policy import off_policy_metrics
from hone.text import replace_between

BEGIN = "<!-- {name}: computed by tests/support/worked_batch.py; scripts/make_docs writes it -->"
END = "<!-- {name}: to here -->"

LENGTHS = torch.tensor([2, 4, 3, 3, 3, 2, 2, 4])
SCORES = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0])
GROUPS = ["A"] * 4 + ["B"] * 4
MASK = (torch.arange(4) < LENGTHS[:, None]).float()
REWARDS = torch.zeros(8, 4)
REWARDS[torch.arange(8), LENGTHS - 1] = SCORES
VALUES = torch.tensor([0.25] * 4 + [0.75] * 4)[:, None] * MASK
VALUES[0, 1] = 0.5  # the critic has noticed that the first answer goes well

OLD = torch.log(torch.tensor([0.5, 0.4, 0.8]))
NEW = torch.log(torch.tensor([0.55, 0.6, 0.72]))
REFERENCE = torch.log(torch.tensor([0.45, 0.5, 0.7]))
ENGINE = torch.log(torch.tensor([0.5, 0.38, 0.82]))
TRACED = 4
"""Row of the batch whose three tokens are followed through ratio, clip and KL."""


def advantages(name: str, **options: object) -> Tensor:
    """Advantages of the batch ``[8, 4]`` by an estimator."""
    inputs = {"values": VALUES} if name == "gae" else {"group_ids": GROUPS}
    return advantage_estimators.get(name)(REWARDS, MASK, **inputs, **options)[0]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _numbers(values: Tensor, digits: int = 2) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values.tolist())


def advantage_table() -> str:
    """Scores and advantages of the eight answers."""
    columns = {
        "`grpo`": advantages("grpo"),
        "Dr. GRPO": advantages("grpo", norm_adv_by_std_in_grpo=False),
        "`rloo`": advantages("rloo"),
        "`maxrl`": advantages("maxrl"),
    }
    gae = advantages("gae", gamma=1.0, lam=1.0)
    rows = [
        [
            f"{GROUPS[row]}{row % 4 + 1}",
            str(int(LENGTHS[row])),
            f"{SCORES[row]:.0f}",
            *(f"{values[row, 0]:.2f}" for values in columns.values()),
            _numbers(gae[row, : LENGTHS[row]]),
        ]
        for row in range(8)
    ]
    return _table(["Answer", "Tokens", "Score", *columns, "`gae`, each token"], rows)


def loss_table() -> str:
    """Ratio, clipped loss and gradient of the tokens of one answer, for both signs of the advantage."""
    advantage = float(advantages("grpo")[TRACED, 0])
    rows = [
        ["probability when sampled", *(f"{p:.2f}" for p in OLD.exp().tolist())],
        ["probability now", *(f"{p:.2f}" for p in NEW.exp().tolist())],
        ["ratio", *(f"{r:.2f}" for r in (NEW - OLD).exp().tolist())],
    ]
    for value in (advantage, -advantage):
        new = NEW.clone()[None].requires_grad_()
        ones = torch.ones(1, 3)
        loss, _ = policy_losses.get("vanilla")(OLD[None], new, value * ones, ones, loss_agg_mode="token-sum")
        loss.backward()
        ratio = (NEW - OLD).exp()
        each = torch.maximum(-value * ratio, -value * ratio.clamp(0.8, 1.2))
        assert torch.isclose(each.sum(), loss.detach())
        assert new.grad is not None
        rows.append([f"loss, advantage {value:.2f}", *(f"{x:.2f}" for x in each.tolist())])
        rows.append([f"push on the log-prob, advantage {value:.2f}", *(f"{0.0 - x:.2f}" for x in new.grad[0].tolist())])
    return _table(["Of B1", "token 1", "token 2", "token 3"], rows)


def aggregation_table() -> str:
    """The loss of the whole batch at ratio 1 by each aggregation, and the share of the two wrong answers of four tokens."""
    losses = -advantages("grpo") * MASK
    long = torch.tensor([False, True, False, False, False, False, False, True])
    rows = []
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        total = float(aggregate_loss(losses, MASK, mode))
        part = float(aggregate_loss(losses * long[:, None], MASK, mode))
        rows.append([f"`{mode}`", f"{abs(total) if abs(total) < 1e-6 else total:.3f}", f"{part:.3f}"])
    return _table(["`loss_agg_mode`", "Loss of the batch", "From the two answers of 4 tokens"], rows)


def kl_table() -> str:
    """Three estimates of the KL to the reference, and the reward after the penalty."""
    rows = [["log-ratio d", *(f"{x:.3f}" for x in (OLD - REFERENCE).tolist())]]
    for kind in ("k1", "k2", "k3"):
        values = kl_penalty(OLD[None], REFERENCE[None], kind)[0]
        rows.append([f"`{kind}`", *(f"{x:.3f}" for x in values.tolist())])
    scores = REWARDS[TRACED, :3][None]
    penalized = apply_kl_penalty(scores, OLD[None], REFERENCE[None], torch.ones(1, 3), 0.1, "k1")[0][0]
    rows.append(["reward", *(f"{x:.3f}" for x in scores[0].tolist())])
    rows.append(["reward after 0.1 x `k1`", *(f"{x:.3f}" for x in penalized.tolist())])
    return _table(["Of B1", "token 1", "token 2", "token 3"], rows)


def mismatch_table() -> str:
    """Probabilities of engine and trainer, the importance weights, and what a run reports."""
    ones = torch.ones(1, 3)
    weights = rollout_correction(OLD[None], ENGINE[None], ones, rollout_is="token", rollout_is_threshold=2.0).weights
    assert weights is not None
    metrics = off_policy_metrics(OLD[None], ENGINE[None], ones)
    rows = [
        ["engine", *(f"{p:.2f}" for p in ENGINE.exp().tolist())],
        ["trainer", *(f"{p:.2f}" for p in OLD.exp().tolist())],
        ["importance weight", *(f"{w:.3f}" for w in weights[0].tolist())],
    ]
    text = _table(["Of B1", "token 1", "token 2", "token 3"], rows)
    gap = (ENGINE.exp() - OLD.exp()).abs().mean()
    return (
        f"{text}\n\nHere `training/rollout_probs_diff_mean` would be {gap:.4f} and `rollout_corr/k3_kl` "
        f"{float(metrics['rollout_corr/k3_kl']):.4f}."
    )


TABLES = {
    "advantages": advantage_table,
    "loss": loss_table,
    "aggregation": aggregation_table,
    "kl": kl_table,
    "mismatch": mismatch_table,
}


def concepts_page(existing: str) -> str:
    """Return the page with new tables between the markers."""
    page = existing
    for name, table in TABLES.items():
        page = replace_between(page, BEGIN.format(name=name), END.format(name=name), table())
    return page
