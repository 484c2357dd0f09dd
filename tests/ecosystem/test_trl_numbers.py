"""Losses of policies and of preferences against the trainers in TRL's wheel, with their gradients."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support.peer_numbers import ROWS, Case, batch, gaps_of, loss_and_gradient, numbers_of
from torch import Tensor

from hone.algorithms import kl_penalty, largest_share, masked_mean, preference_losses

pytestmark = pytest.mark.long("hone/algorithms")
TRL = "trl==1.16.0"
SEEDS = range(4)
CLIP = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}
NO_DUAL_CLIP = {**CLIP, "clip_ratio_c": 1e9}
POLICY: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    # TRL's loss and settings, and Hone's
    ("grpo", {}, "vanilla", {"loss_agg_mode": "seq-mean-token-mean", **NO_DUAL_CLIP}),
    ("bnpo", {}, "vanilla", {"loss_agg_mode": "token-mean", **NO_DUAL_CLIP}),
    ("dapo", {}, "vanilla", {"loss_agg_mode": "token-mean", **NO_DUAL_CLIP}),
    ("dr_grpo", {}, "vanilla", {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 11, **NO_DUAL_CLIP}),
    ("grpo", {"delta": 1.6}, "vanilla", {"loss_agg_mode": "seq-mean-token-mean", **CLIP, "clip_ratio_c": 1.6}),
    ("grpo", {"importance_sampling_level": "sequence"}, "gspo", {"loss_agg_mode": "seq-mean-token-mean", **CLIP}),
    ("luspo", {"importance_sampling_level": "sequence"}, "gspo", {"loss_agg_mode": "seq-mean-token-sum", **CLIP}),
    ("cispo", {"epsilon_high": 1.3}, "cispo", {"clip_ratio_low": 1.0, "clip_ratio_high": 0.3}),
    ("sapo", {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.4}, "sapo",
     {"loss_agg_mode": "seq-mean-token-mean", "tau_pos": 1.0, "tau_neg": 1.4}),
    ("vespo", {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}, "vespo", {}),
]  # fmt: skip
PAIRS: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("sigmoid", {}, "dpo", {}),
    ("robust", {"label_smoothing": 0.2}, "robust", {"label_smoothing": 0.2}),
    ("hinge", {}, "hinge", {}),
    ("ipo", {}, "ipo", {"average_log_prob": True}),
    ("sppo_hard", {}, "sppo", {}),
]


def policy(seed: int, *, holes: bool) -> list[Case]:
    made = batch(seed, holes=holes)
    of_row = made["advantages"][:, 0]  # as TRL has them, one a sequence
    columns = {name: made[name] for name in ("old_log_probs", "log_probs", "response_mask")}
    cases = []
    for name, settings, ours, options in POLICY:
        theirs = {"epsilon_low": 0.1, "epsilon_high": 0.3, **settings}
        tensors = {
            **columns,
            "advantages": of_row,
            "entropies": made["entropies"],
            "ref_log_probs": made["ref_log_probs"],
        }
        wide = {**columns, "advantages": of_row[:, None] * made["response_mask"]}
        cases.append(Case("grpo", name, tensors, theirs, functools.partial(loss_and_gradient, ours, wide, options)))
    for share in (0.2, 0.5):
        entropies = made["entropies"].float()  # TRL takes the quantile in float32
        chosen, _ = largest_share(entropies.flatten(), made["response_mask"].flatten(), share)
        few = {**columns, "advantages": wide["advantages"] * chosen.view_as(entropies)}
        theirs = {"epsilon_low": 0.1, "epsilon_high": 0.3, "top_entropy_quantile": share}
        call = functools.partial(loss_and_gradient, "vanilla", few, {"loss_agg_mode": "token-mean", **NO_DUAL_CLIP})
        cases.append(Case("grpo", "dapo", {**tensors, "entropies": entropies}, theirs, call))

    def with_kl() -> list[Tensor]:
        new = made["log_probs"].clone().requires_grad_()
        loss = masked_mean(kl_penalty(new, made["ref_log_probs"], "k3"), made["response_mask"])
        first, gradient = loss_and_gradient("vanilla", wide, {"loss_agg_mode": "token-mean", **NO_DUAL_CLIP})
        return [first + 0.3 * loss.detach(), gradient + 0.3 * torch.autograd.grad(loss, new)[0]]

    return [*cases, Case("grpo", "bnpo", tensors, {"epsilon_low": 0.1, "epsilon_high": 0.3, "beta": 0.3}, with_kl)]


def preference(name: str, columns: dict[str, Tensor], labels: Tensor, options: dict[str, Any]) -> list[Tensor]:
    new = columns["log_probs"].clone().requires_grad_()
    loss, _ = preference_losses.get(name)(
        new, columns["response_mask"], labels, ref_log_probs=columns["ref_log_probs"], **options
    )
    return [loss.detach(), torch.autograd.grad(loss, new)[0]]


def preferences(seed: int, *, holes: bool) -> list[Case]:
    made, cases = batch(seed, holes=holes), []
    columns = {name: made[name] for name in ("log_probs", "ref_log_probs", "response_mask")}
    chosen = torch.arange(ROWS) < ROWS // 2  # TRL's batches have the chosen ones first
    for name, settings, ours, options in PAIRS:
        call = functools.partial(preference, ours, columns, chosen, {"beta": 0.2, **options})
        cases.append(Case("dpo", name, columns, {"beta": 0.2, **settings}, call))
    labels = torch.rand(ROWS, generator=torch.Generator().manual_seed(seed)) < 0.6
    for kl in (0.4, -0.3):  # a negative estimate counts as 0
        weights = {"desirable_weight": 1.2, "undesirable_weight": 0.7, "beta": 0.2}
        call = functools.partial(preference, "kto", columns, labels, {**weights, "kl": max(kl, 0.0)})
        cases.append(Case("kto", "kto", {**columns, "labels": labels}, {**weights, "kl": kl}, call))
    return cases


CASES = [
    case
    for seed in SEEDS
    for holes in (False, True)
    for make in (policy, preferences)
    for case in make(seed, holes=holes)
]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What TRL computes for every case."""
    return numbers_of("trl_numbers.py", TRL, CASES, tmp_path_factory.mktemp("trl"))


@pytest.mark.parametrize(("kind", "name"), sorted({(case.kind, case.name) for case in CASES}))
def test_the_numbers_are_those_of_trl(theirs: list[Any], kind: str, name: str) -> None:
    pairs = [pair for pair in zip(CASES, theirs, strict=True) if (pair[0].kind, pair[0].name) == (kind, name)]
    assert not (gaps := [gap for case, found in pairs for gap in gaps_of(case, found, torch.tensor(1.0))]), gaps[:4]
