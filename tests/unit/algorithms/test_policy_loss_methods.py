"""What each policy loss promises beyond its formula, and what a caller gets wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.messages import raises
from support.ragged_cases import Case, build
from torch import Tensor

from hone.algorithms import policy_losses, rollout_correction
from hone.algorithms.policy_losses.covariance import draw, draw_largest, exact_mean
from hone.errors import ConfigError


def batch(seed: int = 0, rows: int = 6, columns: int = 8, gap: float = 1.0) -> Case:
    return build(seed, rows, columns, holes=True, equal=False, gap=gap, dtype=torch.float64)


def token(name: str, ratio: float, advantage: float, log_prob: float = -1.0, **options: Any) -> tuple[float, float]:
    """Loss and gradient of a batch of one token."""
    new = torch.tensor([[log_prob]], dtype=torch.float64, requires_grad=True)
    old = new.detach() - math.log(ratio)
    loss, _ = policy_losses.get(name)(old, new, torch.full_like(old, advantage), torch.ones(1, 1), **options)
    loss.backward()
    assert new.grad is not None
    return float(loss.detach()), float(new.grad)


# ------------------------------------------------------------------------------------------------------ token by token


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "gradient"),
    [
        ("vanilla", 1.1, 1.0, -1.1),
        ("vanilla", 1.3, 1.0, 0.0),  # above 1 + 0.2: clipped
        ("vanilla", 0.7, 1.0, -0.7),  # moved the wrong way: not clipped
        ("vanilla", 0.7, -1.0, 0.0),
        ("vanilla", 2.9, -1.0, 2.9),
        ("vanilla", 3.1, -1.0, 0.0),  # the dual clip
        ("cispo", 1.3, 1.0, -1.2),  # a bounded gradient in place of none
        ("cispo", 0.5, -1.0, 0.8),
        ("gpg", 7.0, 1.0, -1.0),
        ("topr", 7.0, 1.0, -1.0),
        ("topr", 7.0, -1.0, 1.0),
        ("topr", 0.1, -1.0, 0.1),
        ("topr", 0.1, 1.0, -1.0),
        ("sapo", 1.0, 2.0, -2.0),
        ("vespo", 1.0, 2.0, -2.0),
        ("vespo", 2.0, 1.0, -4 * math.exp(-3)),
        ("vespo", 0.5, -1.0, 0.125 * math.e),
        ("dro", math.exp(0.1), 1.0, -1.0 + 0.05 * 0.1),
        ("gspo", 1.3, 1.0, 0.0),
        ("geo_mean", math.exp(0.21), 1.0, 0.0),  # the clip is in log space: e^0.2
        ("geo_mean", math.exp(0.19), 1.0, -math.exp(0.19)),
        ("m2po", math.exp(0.19), 1.0, -math.exp(0.19)),
        ("m2po", math.exp(0.21), 1.0, 0.0),  # 0.21^2 > 0.04
        ("m2po", math.exp(-0.9), 1.0, -math.exp(-0.9)),  # not beyond the trust region
    ],
)
def test_gradient_of_one_token(name: str, ratio: float, advantage: float, gradient: float) -> None:
    assert token(name, ratio, advantage)[1] == pytest.approx(gradient)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_divergence_lets_rare_tokens_move_and_holds_frequent_ones(name: str) -> None:
    """A ratio of 2 is nothing for a token of probability 0.001, and far for one that goes from 0.4 to 0.8."""
    assert token(name, 2.0, 1.0, math.log(0.002))[1] == pytest.approx(-2.0)
    assert token(name, 2.0, 1.0, math.log(0.8))[1] == 0.0
    assert token(name, 2.0, -1.0, math.log(0.8))[1] == pytest.approx(2.0)  # moved the other way
    assert token(name, 5.0, 1.0, math.log(0.005))[1] == pytest.approx(-3.0)  # truncated at clip_ratio_c


def test_sapo_fades_faster_with_a_larger_temperature() -> None:
    strength = [abs(token("sapo", 1.5, -1.0, tau_neg=tau)[1]) for tau in (0.5, 1.0, 4.0)]
    assert strength == sorted(strength, reverse=True) and strength[2] < 0.7 * strength[0]


def test_gspo_gradient_is_that_of_the_sequence_ratio() -> None:
    """With one advantage a row, the straight-through form has the gradient of exp(mean log r) itself."""
    case = batch(gap=0.1)
    advantage = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64)[:, None].expand_as(case.old)
    mask = case.mask.bool()

    def sequence_loss(new: Tensor) -> Tensor:
        gap = torch.where(mask, new - torch.where(mask, case.old, 0.0), 0.0)
        ratio = torch.exp(gap.sum(-1) / mask.sum(-1).clamp(min=1))
        rows = torch.maximum(-advantage[:, 0] * ratio, -advantage[:, 0] * ratio.clamp(0.8, 1.2))
        return rows[mask.any(-1)].mean()

    new = torch.where(mask, case.new, 0.0).requires_grad_()
    loss, _ = policy_losses.get("gspo")(case.old, new, advantage, mask, loss_agg_mode="seq-mean-token-mean")
    expected = sequence_loss(new)
    torch.testing.assert_close(loss, expected)
    got, want = (torch.autograd.grad(x, new)[0] for x in (loss, expected))
    torch.testing.assert_close(got, want)


# ----------------------------------------------------------------------------------------------------- across the batch


def test_clip_cov_draws_from_the_whole_band_evenly() -> None:
    """The hash is a fair draw: no part of the band is favoured, and another batch draws other tokens."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 200, 500, generator=generator)
    candidates = values[0] > 0
    drawn = draw(candidates, 10_000, *values)
    assert int(drawn.sum()) == 10_000 and not (drawn & ~candidates).any()
    share = 10_000 / int(candidates.sum())
    for part in (values[0] > 1, values[1] > 0, values[2] < -1, torch.arange(500).expand(200, 500) < 100):
        size = int((part & candidates).sum())
        spread = math.sqrt(size * share * (1 - share))
        assert abs(int((drawn & part).sum()) - size * share) < 5 * spread
    again = draw(candidates, 10_000, values[0], values[1] + 1e-3, values[2])
    assert 0.1 < int((again & drawn).sum()) / 10_000 < 0.3  # share is 0.2: as good as independent


def test_ties_are_drawn_by_value_and_twins_together() -> None:
    score = torch.zeros(1, 6)
    column = torch.tensor([[1.0, 2.0, 3.0, 3.0, 4.0, 5.0]])
    for count in range(1, 6):
        chosen = draw_largest(score, torch.ones(1, 6).bool(), count, column)
        assert int(chosen.sum()) in (count, count + 1) and chosen[0, 2] == chosen[0, 3]
    graded = torch.tensor([[3.0, 2.0, 1.0, 1.0, 1.0, 0.0]])
    chosen = draw_largest(graded, torch.ones(1, 6).bool(), 3, torch.arange(6.0)[None])
    assert int(chosen.sum()) == 3 and chosen[0, :2].all() and not chosen[0, 5]  # one of the three that are level
    assert not draw_largest(score, torch.zeros(1, 6).bool(), 3, column).any()
    assert not draw(torch.ones(1, 6).bool(), 0, column).any()


def test_means_do_not_depend_on_the_order() -> None:
    values = torch.randn(50_000, generator=torch.Generator().manual_seed(1)) * 1e3
    mask = torch.ones_like(values).bool()
    means = {
        float(exact_mean(values[torch.randperm(50_000, generator=torch.Generator().manual_seed(i))], mask))
        for i in range(20)
    }
    assert len(means) == 1


def test_kl_cov_penalises_the_share_with_the_largest_covariance() -> None:
    case = batch(3, 10, 20)
    case.new, case.advantages = case.new.clone(), case.advantages + 0.1
    prepared = policy_losses.get("kl_cov").prepare(case.old, case.new, case.advantages, case.mask, kl_cov_ratio=0.1)
    keep = case.mask.bool()
    moves = (case.new - case.new[keep].mean()) * (case.advantages - case.advantages[keep].mean())
    chosen = prepared["chosen"].bool()
    assert int(chosen.sum()) == int(0.1 * int(keep.sum())) and not (chosen & ~keep).any()
    assert moves[chosen].min() >= moves[keep & ~chosen].max()


def test_m2po_drops_as_few_tokens_as_the_threshold_asks_for() -> None:
    case = batch(5, 20, 30, gap=0.8)
    loss = policy_losses.get("m2po")
    keep = case.mask.bool()
    gap = case.new - case.old
    trust = keep & (gap * case.advantages > 0)
    for threshold in (0.01, 0.04, 0.1):
        dropped = loss.prepare(case.old, case.new, case.advantages, keep, m2_threshold=threshold)["dropped"].bool()
        left = trust & ~dropped
        assert dropped.any() and not (dropped & ~trust).any()
        assert gap[left].square().mean() <= threshold
        back = gap.square().where(dropped, torch.inf).argmin()  # the mildest of those that were dropped
        one_more = left.flatten().index_fill(0, back, True).view_as(left)
        assert gap[one_more].square().mean() > threshold
    assert not loss.prepare(case.old, case.new, case.advantages, keep, m2_threshold=1.0)["dropped"].any()


def test_without_preparation_the_choice_is_made_within_the_micro_batch() -> None:
    """Why the trainer prepares: the two halves of a batch do not choose what the whole would."""
    case = batch(3, 12, 20)
    loss = policy_losses.get("kl_cov")
    whole = loss.prepare(case.old, case.new, case.advantages, case.mask, kl_cov_ratio=0.1)["chosen"]
    halves = [case.select(list(range(i, i + 6))) for i in (0, 6)]
    per_half = [loss.prepare(h.old, h.new, h.advantages, h.mask, kl_cov_ratio=0.1)["chosen"] for h in halves]
    assert not torch.equal(torch.cat(per_half), whole)


# -------------------------------------------------------------------------------------------------------------- bypass


def test_bypass_with_ppo_clip_is_vanilla_against_the_engine() -> None:
    case = batch()
    arguments = (case.old, case.new, case.advantages, case.mask)
    bypass, _ = policy_losses.get("bypass_mode")(*arguments, clip_ratio_high=0.3)
    vanilla, _ = policy_losses.get("vanilla")(*arguments, clip_ratio_high=0.3)
    assert torch.equal(bypass, vanilla)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_bypass_weighs_and_rejects_as_rollout_correction_does(level: str) -> None:
    case = batch(8)
    options: dict[str, Any] = {"rollout_is": level, "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.3}
    correction = rollout_correction(case.new, case.old, case.mask, **options)
    assert correction.weights is not None and 0 < int(correction.response_mask.sum()) < int(case.mask.sum())
    bypass, metrics = policy_losses.get("bypass_mode")(
        case.old, case.new, case.advantages, case.mask, loss_type="reinforce", **options
    )
    plain, _ = policy_losses.get("gpg")(
        case.old, case.new, case.advantages, correction.response_mask, rollout_is_weights=correction.weights,
        batch_num_tokens=int(case.mask.sum()),
    )  # fmt: skip
    torch.testing.assert_close(bypass, plain)
    rejected = 1 - int(correction.response_mask.sum()) / int(case.mask.sum())
    assert float(metrics["actor/rollout_rejected"]) == pytest.approx(rejected)


# ------------------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("name", "options", "mention"),
    [
        ("vanilla", {"clip_ratio_lo": 0.1}, "clip_ratio_low"),
        ("vanilla", {"clip_ratio_c": 1.0}, "clip_ratio_c=1.0"),
        ("dppo_tv", {"clip_ratio_c": 0.5}, "clip_ratio_c=0.5"),
        ("gspo", {"clip_ratio_high": -0.1}, "clip_ratio_high=-0.1"),
        ("sapo", {"tau_neg": 0.0}, "tau_neg=0.0"),
        ("dro", {"dro_beta": 0.0}, "dro_beta=0.0"),
        ("m2po", {"m2_threshold": 0.0}, "m2_threshold=0.0"),
        ("clip_cov", {"clip_cov_ratio": 1.5}, "clip_cov_ratio=1.5"),
        ("clip_cov", {"clip_cov_lb": 5.0}, "clip_cov_lb=5.0"),
        ("kl_cov", {"kl_cov_ratio": 0.0}, "kl_cov_ratio=0.0"),
        ("kl_cov", {"ppo_kl_coef": -1.0}, "ppo_kl_coef=-1.0"),
        ("bypass_mode", {"loss_type": "reinfore"}, "reinforce"),
        ("bypass_mode", {"rollout_is": "token"}, "ppo_clip"),
        ("bypass_mode", {"rollout_is_batch_normalize": True}, "rollout_is_batch_normalize"),
        ("gpg", {"dro_beta": 1.0}, "'dro_beta'"),
    ],
)
def test_mistakes_say_what_to_do(name: str, options: dict[str, Any], mention: str) -> None:
    x = torch.zeros(1, 2)
    with raises(ConfigError, mention, "Fix:"):
        policy_losses.get(name)(x, x, x, x + 1, **options)
    if name in ("clip_cov", "m2po"):
        with raises(ConfigError, mention):
            policy_losses.get(name).prepare(x, x, x, x + 1, **options)


def test_common_options_are_always_taken_and_others_never() -> None:
    x = torch.zeros(1, 2)
    policy_losses.get("gpg")(x, x, x, x + 1, clip_ratio_low=0.1, clip_ratio_high=0.1, clip_ratio_c=2.0)
    with raises(ConfigError, "'prepared'"):
        policy_losses.get("m2po").prepare(x, x, x, x + 1, prepared={})


def test_shapes_that_would_broadcast_are_refused() -> None:
    x = torch.zeros(2, 3)
    with raises(ValueError, "(2, 1)", "(2, 3)"):
        policy_losses.get("vanilla")(x, x, x[:, :1], x)


def test_a_loss_of_ones_own_by_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_losses.py").write_text(
        "from hone.algorithms.policy_losses import TokenLoss, token_ratio\n\n"
        "NUMBER = 3\n\n"
        "def unclipped(old_log_probs, log_probs, advantages, response_mask, *, scale=1.0):\n"
        '    """The surrogate without a clip."""\n'
        "    ratio = token_ratio(old_log_probs, log_probs)\n"
        "    return TokenLoss(-scale * advantages * ratio, ratio)\n"
    )
    monkeypatch.chdir(tmp_path)
    my_loss = policy_losses.get("my_losses:unclipped")
    assert my_loss.formula == "The surrogate without a clip." and my_loss.options == {"scale"}
    x = torch.zeros(1, 2)
    assert float(my_loss(x, x, x + 1, x + 1, scale=2.0, clip_ratio_low=0.1)[0]) == -2.0
    with raises(ConfigError, "my_losses:NUMBER", "(old_log_probs, log_probs, advantages, response_mask, *, options)"):
        policy_losses.get("my_losses:NUMBER")
