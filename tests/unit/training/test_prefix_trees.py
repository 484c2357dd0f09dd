"""Sharing prefixes changes no number: log-probs, losses, statistics and gradients against the same rows, each packed alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.models import tiny_model
from support.prefix_trees import tree_batch

from hone.algorithms import policy_losses
from hone.config.actor import ActorConfig, PolicyLossConfig
from hone.config.algorithm import RolloutCorrectionConfig
from hone.config.derived import correction_settings
from hone.config.model import ModelConfig, OptimConfig
from hone.data.batch import Batch
from hone.data.prefixes import PrefixOrder
from hone.data.ragged import Ragged
from hone.insight.metrics import MetricStore
from hone.models.heads import PolicyHead, ValueHead
from hone.models.loading import load_policy, load_value_model
from hone.trainers.step_metrics import declared_metrics
from hone.training.backends.local import LocalBackend
from hone.training.engine import TrainSettings
from hone.training.objectives import DIVISORS, LossFn, PolicyObjective, value_objective
from hone.training.packing import pack

pytestmark = pytest.mark.application("hone/training", "hone/models")

CPU = torch.device("cpu")
TOLERANCE = 1e-5
SELECTING = {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "kl_cov_ratio": 0.2}


@contextmanager
def unshared() -> Iterator[None]:
    """Pack every row whole, whatever it has in common with others."""

    def separate(*columns: Ragged) -> PrefixOrder:
        rows = len(columns[0])
        return PrefixOrder(np.arange(rows), np.zeros(rows, np.int64))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefixOrder, "from_tokens", separate)
        yield


def objective_of(mode: str, aggregation: str) -> PolicyObjective:
    settings = correction_settings(RolloutCorrectionConfig(bypass_mode=mode == "bypass_mode"))
    loss = PolicyLossConfig(loss_mode=mode, **SELECTING)
    actor = ActorConfig(
        policy_loss=loss, loss_agg_mode=aggregation, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1
    )
    return PolicyObjective(actor, settings, max_response_length=16)


def with_log_probs(batch: Batch) -> Batch:
    """Old and reference log-probs, which in a run differ between rows by rounding, and here by more."""
    noise = batch.ragged("noise")
    old = noise.with_values(-4.0 + 0.3 * noise.values)
    return batch.with_columns(
        old_log_probs=old,
        ref_log_probs=noise.with_values(old.values - 0.2),
        rollout_is_weights=noise.with_values(batch.ragged("values").values.abs()),
    )


def gradient(model: torch.nn.Module, batch: Batch, objective: LossFn, budget: int) -> tuple[torch.Tensor, dict]:
    """Gradient of all trained parameters, and the metrics of the mini-batch."""
    head = PolicyHead() if isinstance(objective, PolicyObjective) else ValueHead()
    engine = LocalBackend(model, head, TrainSettings(CPU, optim=OptimConfig(), max_tokens=budget))
    statistics = engine._loop.accumulate_gradients(batch, head, objective, with_entropy=True)
    metrics = MetricStore()
    for seen in map(declared_metrics, statistics):
        for name, (value, weight) in seen.items():
            metrics.add(name, value, weight=weight)
    grad = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return grad, metrics.reduce()


def assert_sharing_changes_nothing(model: torch.nn.Module, batch: Batch, objective: LossFn, budget: int) -> None:
    shared, statistics = gradient(model, batch, objective, budget)
    with unshared():
        expected, others = gradient(model, batch, objective, 10**6)
    assert float(expected.norm()) > 0
    torch.testing.assert_close(shared, expected, atol=TOLERANCE * max(1.0, float(expected.norm())), rtol=0)
    assert statistics == pytest.approx(others, rel=TOLERANCE, abs=TOLERANCE)


@given(
    seed=st.integers(0, 10**6), rows=st.integers(1, 9), budget=st.integers(20, 200), mode=st.sampled_from([*DIVISORS])
)
@examples(30)
def test_random_trees_in_any_micro_batches(seed: int, rows: int, budget: int, mode: str) -> None:
    batch = with_log_probs(tree_batch(seed, rows))
    assert_sharing_changes_nothing(tiny_model(), batch, objective_of("vanilla", mode), budget)


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 9))
@examples(20)
def test_outputs_of_a_shared_token_are_those_of_every_row(seed: int, rows: int) -> None:
    batch, model = tree_batch(seed, rows), tiny_model()
    engine = LocalBackend(model, PolicyHead(with_sum_pi_squared=True), TrainSettings(CPU))
    together = engine.infer_batch(batch, with_entropy=True)
    with unshared():
        alone = engine.infer_batch(batch, with_entropy=True)
    assert together.keys() == alone.keys() == {"log_probs", "entropy", "sum_pi_squared"}
    for name, column in alone.items():
        torch.testing.assert_close(together[name].values, column.values, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("mode", policy_losses.names())
def test_every_loss_with_every_aggregation(mode: str) -> None:
    """Choices of tokens (``clip_cov``, ``kl_cov``) are made before the passes, from the same log-probs."""
    model, batch = tiny_model(), with_log_probs(tree_batch(5, 9))
    packed = pack(batch, CPU)
    assert packed.by_row is not None and len(packed.targets) < len(batch.ragged("response_ids").values)
    for aggregation in DIVISORS:
        objective = objective_of(mode, aggregation)
        ready = objective.prepare(batch, batch.ragged("ref_log_probs")) if objective.needs_preparation else batch
        assert_sharing_changes_nothing(model, ready, objective, 60)


@pytest.mark.parametrize("kind", ["lora", "critic"])
def test_adapters_and_values(kind: str, tmp_path) -> None:
    tiny_model().save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), lora_rank=4 if kind == "lora" else 0)
    if kind == "lora":
        model = load_policy(config, device=CPU, seed=1, trainable=True)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        objective: LossFn = objective_of("vanilla", "token-mean")
    else:
        model = load_value_model(config, device=CPU)
        objective = value_objective(cliprange_value=0.5, loss_agg_mode="token-mean", loss_scale_factor=16)
    for seed in range(3):
        assert_sharing_changes_nothing(model, with_log_probs(tree_batch(seed, 8)), objective, 50)


def test_a_row_alone_is_packed_as_it_is() -> None:
    packed = pack(tree_batch(1, 1), CPU)
    assert packed.by_row is None and packed.input_ids.shape == packed.context.position_ids.shape
