"""What the updates learn from: tokens not rejected, weights, rows drawn anew; and the settings behind them."""

from __future__ import annotations

import pytest
import torch
from support.messages import raises
from support.models import random_batch

from hone.algorithms import ROLLOUT_CORRECTION_PRESETS, check_rollout_correction
from hone.algorithms.resampling import resampling_weights
from hone.config.actor import policy_loss_name
from hone.config.algorithm import AlgorithmConfig, PFPPOConfig, RolloutCorrectionConfig, corrects
from hone.config.derived import correction_settings
from hone.data.batch import Batch
from hone.errors import ConfigError
from hone.insight.metrics import MetricStore
from hone.trainers.algorithm import learnt_tokens
from hone.trainers.estimates import correct, update_view


def batch(gap: float = 0.5) -> Batch:
    made = random_batch(8, seed=2)
    old = made.ragged("noise").with_values(-made.ragged("noise").values.abs())
    rollout = old.with_values(old.values + gap * made.ragged("advantages").values)
    return made.with_columns(old_log_probs=old, rollout_log_probs=rollout, reward=torch.arange(8.0))


def config(**changes) -> AlgorithmConfig:
    return AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(**changes))


def test_measuring_changes_nothing() -> None:
    metrics, rows = MetricStore(), batch()
    found = correct(rows, config(), metrics)
    assert "rollout_is_weights" not in found
    kept, mask = found.ragged("kept_mask"), rows.ragged("response_mask")
    assert torch.equal(kept.values, mask.values) and torch.equal(kept.offsets, mask.offsets)
    reduced = metrics.reduce()
    gap = (rows.ragged("rollout_log_probs").values - rows.ragged("old_log_probs").values)[mask.values == 1]
    assert reduced["rollout_corr/kl"] == pytest.approx(float(gap.mean()), abs=1e-6)
    assert not any("rollout_is_" in name or "rollout_rs_" in name for name in reduced)


def test_weights_and_rejection_reach_the_update_and_not_the_rest() -> None:
    metrics, rows = MetricStore(), batch()
    settings = {
        "rollout_is": "token",
        "rollout_is_threshold": "1.5",
        "rollout_rs": "token_k1",
        "rollout_rs_threshold": "0.7_1.4",
    }
    found = correct(rows, config(**settings), metrics)
    mask = rows.ragged("response_mask").values
    assert torch.equal(found.ragged("response_mask").values, mask), "advantages are of whole responses"
    view = update_view(learnt_tokens(found), config(**settings), n=2, seed=0, step=1)
    ratio = (rows.ragged("old_log_probs").values - rows.ragged("rollout_log_probs").values).exp()
    kept = (mask == 1) & (ratio >= 0.7) & (ratio <= 1.4)
    assert 0 < kept.sum() < mask.sum()
    assert torch.equal(view.ragged("response_mask").values == 1, kept)
    torch.testing.assert_close(view.ragged("rollout_is_weights").values[kept], ratio[kept].clamp(max=1.5))
    share = metrics.reduce()["rollout_corr/rollout_rs_masked_fraction"]
    assert share == pytest.approx(1 - float(kept.sum() / mask.sum()))


@pytest.mark.parametrize("preset", [name for name in ROLLOUT_CORRECTION_PRESETS if not name.startswith("bypass")])
def test_every_decoupled_preset_gives_declared_metrics(preset: str) -> None:
    metrics, rows = MetricStore(), batch(gap=1e-4)
    found = correct(rows, config(preset=preset), metrics)
    assert ("rollout_is_weights" in found) == (
        correction_settings(RolloutCorrectionConfig(preset))["rollout_is"] is not None
    )
    assert len(metrics.reduce()) > 10


def test_rejecting_everything_stops_the_run() -> None:
    with raises(ConfigError, "rollout_rs_threshold=1e-9", where="algorithm.rollout_correction"):
        correct(batch(gap=5.0), config(rollout_rs="seq_max_k2", rollout_rs_threshold="1e-9"), MetricStore())


def test_resampled_rows() -> None:
    rows = batch()
    algorithm = AlgorithmConfig(use_pf_ppo=True, pf_ppo=PFPPOConfig("max_min"))
    view = update_view(rows, algorithm, n=2, seed=1, step=3)
    assert len(view) == 8 and set(view.tensor("reward").tolist()) == {0.0, 7.0}
    assert view.objects("uid") == ["0", "0", "1", "1", "2", "2", "3", "3"], "mini-batches keep their size"
    again = update_view(rows, algorithm, n=2, seed=1, step=3)
    assert torch.equal(view.tensor("reward"), again.tensor("reward")), "critic and actor learn from one draw"
    draws = {tuple(update_view(rows, algorithm, n=2, seed=1, step=s).tensor("reward").tolist()) for s in range(6)}
    assert len(draws) > 1
    assert rows.objects("uid")[0] == "p0", "the batch itself stays"


def test_rows_come_as_often_as_their_weights_say() -> None:
    rows, algorithm = batch(), AlgorithmConfig(use_pf_ppo=True)
    drawn = torch.cat([update_view(rows, algorithm, n=1, seed=0, step=s).tensor("reward") for s in range(400)])
    weights = resampling_weights(torch.arange(8.0), "pow", weight_pow=2.0)
    share = torch.bincount(drawn.long(), minlength=8) / len(drawn)
    torch.testing.assert_close(share.double(), weights / weights.sum(), atol=0.03, rtol=0)


def test_explicit_keys_override_a_preset() -> None:
    named = correction_settings(RolloutCorrectionConfig("decoupled_token_is", rollout_is_threshold="5.0"))
    assert named["rollout_is"] == "token" and named["rollout_is_threshold"] == "5.0"
    assert "preset" not in named
    assert correction_settings(RolloutCorrectionConfig("bypass_pg_is"))["loss_type"] == "reinforce"
    with raises(ConfigError, "decoupled_token_si", "decoupled_token_is"):
        correction_settings(RolloutCorrectionConfig("decoupled_token_si"))


@pytest.mark.parametrize("preset", ROLLOUT_CORRECTION_PRESETS)
def test_every_preset_is_a_sound_combination(preset: str) -> None:
    settings = correction_settings(RolloutCorrectionConfig(preset))
    check_rollout_correction(**settings)
    mode = policy_loss_name("vanilla", settings)
    own = settings["bypass_mode"] and (corrects(settings) or settings["loss_type"] == "reinforce")
    assert mode == ("bypass_mode" if own else "vanilla")
    assert policy_loss_name("gspo", settings) == "gspo"
