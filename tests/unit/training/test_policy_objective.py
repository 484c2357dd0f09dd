"""The policy objective with every registered loss: no split changes an update, options and weights arrive, metrics are declared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from support.messages import raises
from support.models import random_batch, tiny_model

from hone.algorithms import policy_losses
from hone.config.actor import ActorConfig, PolicyLossConfig
from hone.config.algorithm import RolloutCorrectionConfig
from hone.config.derived import correction_settings
from hone.config.model import OptimConfig
from hone.data.batch import Batch
from hone.errors import ConfigError
from hone.insight.invariants import MASKED_GRADIENT, RATIO_MAX, RATIO_MEAN
from hone.insight.metrics import MetricStore, find_metric
from hone.models.heads import PolicyHead
from hone.trainers.step_metrics import declared_metrics
from hone.training.backends.local import LocalBackend
from hone.training.engine import TrainSettings
from hone.training.objectives import PolicyObjective, ratio_to

LOSSES = policy_losses.names()


def objective_of(mode: str, correction: RolloutCorrectionConfig | None = None, **actor) -> PolicyObjective:
    settings = correction_settings(correction or RolloutCorrectionConfig(bypass_mode=mode == "bypass_mode"))
    loss = actor.pop("policy_loss", {})
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=mode, **loss), **actor)
    return PolicyObjective(config, settings, max_response_length=16)


def ready(engine: LocalBackend, weights: bool = True) -> Batch:
    batch = random_batch(12, seed=4)
    log_probs = engine.infer_batch(batch)["log_probs"]
    columns = {
        "now": log_probs,
        "old_log_probs": log_probs.with_values(log_probs.values + 0.3 * batch.ragged("noise").values),
    }
    if weights:
        columns["rollout_is_weights"] = log_probs.with_values(batch.ragged("values").values.abs())
    return batch.with_columns(**columns)


def engine_of(**kwargs) -> LocalBackend:
    return LocalBackend(
        tiny_model(), PolicyHead(), TrainSettings(torch.device("cpu"), optim=OptimConfig(lr=1e-2), **kwargs)
    )


def update(engine: LocalBackend, batch: Batch, objective: PolicyObjective) -> tuple[torch.Tensor, dict[str, float]]:
    """Gradient and metrics of one update, prepared as a worker does it (with the log-probs in ``now`` where they are: a random
    draw depends on their last bits)."""
    kept = {}

    def keep(step, statistics):
        kept["grad"] = torch.cat([p.grad.flatten() for p in engine.model.parameters() if p.grad is not None])
        kept["statistics"] = statistics

    engine._apply = keep  # type: ignore[method-assign]
    if objective.needs_preparation:
        now = batch.ragged("now") if "now" in batch else engine.infer_batch(batch)["log_probs"]
        batch = objective.prepare(batch, now)
    engine.train_batch(batch, objective, step=0)
    metrics = MetricStore()
    for seen in kept["statistics"]:
        for name, (value, weight) in declared_metrics(seen).items():
            metrics.add(name, value, weight=weight)
    return kept["grad"], metrics.reduce()


@pytest.mark.parametrize("mode", LOSSES)
def test_neither_split_nor_order_changes_an_update(mode: str) -> None:
    share = {"policy_loss": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "kl_cov_ratio": 0.2}}
    objective = objective_of(mode, **share)
    batch = ready(engine_of(max_tokens=10**6))
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0)).tolist()
    whole, metrics = update(engine_of(max_tokens=10**6), batch, objective)
    split, others = update(engine_of(max_tokens=40), batch.reorder(order), objective)
    assert whole.abs().max() > 0
    torch.testing.assert_close(split, whole, atol=2e-6 * max(1.0, float(whole.norm())), rtol=0)
    assert metrics.keys() == others.keys()
    assert others == pytest.approx(metrics, abs=1e-5)
    for name in metrics:
        find_metric(name)


def test_weights_scale_the_gradient() -> None:
    engine = engine_of()
    plain = ready(engine, weights=False)
    ones = plain.ragged("old_log_probs").with_values(torch.full_like(plain.ragged("old_log_probs").values, 3.0))
    first, _ = update(engine_of(), plain, objective_of("vanilla"))
    second, _ = update(engine_of(), plain.with_columns(rollout_is_weights=ones), objective_of("vanilla"))
    torch.testing.assert_close(second, 3 * first, atol=1e-6, rtol=1e-4)


def test_options_are_the_keys_of_their_names() -> None:
    objective = objective_of("sapo", tau_pos=2.0, policy_loss={"loss_kwargs": {"tau_neg": 3.0}})
    assert objective.options == {"tau_pos": 2.0, "tau_neg": 3.0}
    assert objective_of("m2po", policy_loss={"m2_threshold": 0.5}).options == {"m2_threshold": 0.5}
    clips = objective_of("vanilla", clip_ratio=0.1, clip_ratio_high=0.3).options
    assert clips == {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}
    with raises(ConfigError, "sapo", "tau"):
        update(engine_of(), ready(engine_of()), objective_of("sapo", policy_loss={"loss_kwargs": {"tau": 1.0}}))


def test_bypass_mode_takes_the_correction() -> None:
    objective = objective_of(
        "vanilla", RolloutCorrectionConfig("bypass_pg_token_icepop", rollout_is_threshold="0.9_1.2")
    )
    assert objective.loss.name == "bypass_mode"
    assert objective.options["rollout_is_threshold"] == "0.9_1.2" and objective.options["loss_type"] == "reinforce"
    _, metrics = update(engine_of(), ready(engine_of(), weights=False), objective)
    assert 0 < metrics["actor/rollout_is_weight"] < 1


OWN = '''
from hone.algorithms import TokenLoss
from hone.algorithms.policy_losses import token_ratio

def push(old_log_probs, log_probs, advantages, response_mask, *, strength=1.0):
    """-strength A log pi"""
    return TokenLoss(-strength * advantages * log_probs, token_ratio(old_log_probs, log_probs), {"push": advantages.abs()})
'''


def test_a_loss_of_ones_own_and_its_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_losses.py").write_text(OWN)
    batch = ready(engine_of(), weights=False)
    own = objective_of("own_losses:push", policy_loss={"loss_kwargs": {"strength": 2.0}})
    gradient, metrics = update(engine_of(), batch, own)
    expected, _ = update(engine_of(), batch, objective_of("gpg"))
    torch.testing.assert_close(gradient, 2 * expected)
    mask = batch.ragged("response_mask").values == 1
    assert metrics["actor/push"] == pytest.approx(float(batch.ragged("advantages").values[mask].abs().mean()), rel=1e-5)


class Leaking:
    """A loss that forgets the response mask."""

    name = "vanilla"

    def __call__(self, old_log_probs, log_probs, advantages, response_mask, **_):
        return log_probs.sum(), {}


def largest_masked_gradient(objective: PolicyObjective) -> float:
    engine = engine_of()
    result = engine.train_batch(ready(engine, weights=False), objective, step=0)
    return max(float(seen[MASKED_GRADIENT][0]) for seen in result.statistics)


def test_the_gradient_of_masked_tokens_is_measured() -> None:
    assert largest_masked_gradient(objective_of("vanilla")) == 0
    leaking = objective_of("vanilla")
    leaking.loss, leaking.options = Leaking(), {}  # type: ignore[assignment]
    assert largest_masked_gradient(leaking) == 1


def test_how_far_the_policy_is_from_an_older_one() -> None:
    now, old = torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[-1.5, -1.75, -1.0]])
    far = ratio_to(now, old, torch.tensor([[1.0, 1.0, 0.0]]))
    assert {name: (float(value), tokens) for name, (value, tokens) in far.items()} == {
        RATIO_MAX: (0.5, 2.0),
        RATIO_MEAN: (0.375, 2.0),
    }
    assert ratio_to(now, old, torch.zeros(1, 3)) == {}
