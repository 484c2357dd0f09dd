"""Updates in float16: exact scaling, skipped overflows, exact resume, and log-probs closer to float32 than bfloat16's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import random_batch, tiny_model

from hone.config.model import OptimConfig
from hone.insight.invariants import Invariants
from hone.insight.metrics import MetricStore
from hone.models.heads import PolicyHead
from hone.models.routing import use_hone_attention
from hone.trainers.step_metrics import update_metrics
from hone.training.backends.local import LocalBackend
from hone.training.engine import TrainSettings
from hone.training.objectives import imitation_objective
from hone.training.optimizer import GROWTH_INTERVAL, INITIAL, LossScale

CPU = torch.device("cpu")


def backend(dtype: str, lr: float = 0.01) -> LocalBackend:
    model = tiny_model()
    use_hone_attention(model)
    return LocalBackend(model, PolicyHead(), TrainSettings(CPU, optim=OptimConfig(lr=lr), dtype=dtype))


def log_probs(dtype: str) -> torch.Tensor:
    return backend(dtype).infer_batch(random_batch(8, seed=1))["log_probs"].values.double()


def test_scoring_is_closer_to_float32_than_in_bfloat16():
    exact = log_probs("float32")
    error = {dtype: (log_probs(dtype) - exact).abs().mean() for dtype in ("bfloat16", "float16")}
    assert 0 < error["float16"] < error["bfloat16"] / 3
    assert error["float16"] < 2e-3


def gradients(engine: LocalBackend) -> dict[str, torch.Tensor]:
    kept: dict[str, torch.Tensor] = {}
    step = engine.optimizer.step

    def keep(number: int, norm: float) -> bool:
        kept.update({name: p.grad.clone() for name, p in engine.model.named_parameters() if p.grad is not None})
        return step(number, norm)

    engine.optimizer.step = keep
    engine.train_batch(random_batch(6, seed=0), imitation_objective(), step=0)
    engine.optimizer.step = step
    return kept


@pytest.mark.parametrize("scale", [1.0, 2.0**10, INITIAL])
def test_a_power_of_two_changes_no_bit_in_float32(scale):
    plain, scaled = backend("float32"), backend("float32")
    scaled.optimizer.loss_scale = scaled._loop._loss_scale = LossScale(scale)
    expected, results = gradients(plain), gradients(scaled)
    assert expected.keys() == results.keys() and len(expected) > 5
    assert all(torch.equal(results[name], gradient) for name, gradient in expected.items())


def test_gradients_in_float16_are_closer_than_in_bfloat16():
    exact = gradients(backend("float32"))
    norm = torch.cat([gradient.flatten() for gradient in exact.values()]).norm()

    def error(dtype: str) -> torch.Tensor:
        results = gradients(backend(dtype))
        return torch.cat([(results[name] - gradient).flatten() for name, gradient in exact.items()]).norm() / norm

    assert error("float16") < error("bfloat16") / 3
    assert error("float16") < 5e-3


def test_an_overflow_is_skipped_and_counted():
    engine = backend("float16")
    engine.optimizer.loss_scale.value = 2.0**40
    before = {name: p.clone() for name, p in engine.model.named_parameters()}
    invariants, metrics = Invariants("float16"), MetricStore()
    result = engine.train_batch(random_batch(6, seed=0), imitation_objective(), step=0)
    assert (result.applied, result.overflow, result.loss_scale) == (False, True, 2.0**40)
    assert engine.optimizer.loss_scale == LossScale(2.0**39)
    assert all(torch.equal(p, before[name]) for name, p in engine.model.named_parameters())
    for _ in range(50):  # no violation, however often
        invariants.check_updates("actor", [result])
    update_metrics(metrics, [result], "actor", 0.01)
    reduced = metrics.reduce()
    assert (reduced["actor/overflows"], reduced["actor/loss_scale"]) == (1, 2.0**40)
    assert "actor/grad_norm" not in reduced
    while not engine.train_batch(random_batch(6, seed=0), imitation_objective(), step=0).applied:
        pass
    assert 2.0**10 < engine.optimizer.loss_scale.value < 2.0**40
    assert any(not torch.equal(p, before[name]) for name, p in engine.model.named_parameters())


def test_a_gradient_that_no_scale_makes_finite_is_not_an_overflow():
    engine = backend("float16")
    engine.optimizer.loss_scale.value = 1.0
    result = engine.optimizer.update(0, float("nan"), [])
    assert (result.applied, result.overflow) == (False, False)
    assert engine.optimizer.loss_scale.value == 1.0


def test_the_rule_of_growth():
    scale = LossScale(8.0)
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(finite=True)
    assert scale == LossScale(8.0, GROWTH_INTERVAL - 1)
    scale.update(finite=True)
    assert scale == LossScale(16.0, 0)
    scale.update(finite=True)
    scale.update(finite=False)
    assert scale == LossScale(8.0, 0)


def test_the_rule_is_that_of_grad_scaler():
    ours, theirs = LossScale(), torch.amp.GradScaler("cpu", init_scale=INITIAL, growth_interval=GROWTH_INTERVAL)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    theirs.scale(torch.ones(()))
    for finite in [False, True, False, False, *[True] * (GROWTH_INTERVAL + 3), False]:
        parameter.grad = torch.full((1,), 1.0 if finite else float("inf"))
        theirs.unscale_(optimizer)
        theirs.step(optimizer)
        theirs.update()
        ours.update(finite=finite)
        assert ours.value == theirs.get_scale()


def test_resume_is_exact(tmp_path: Path):
    def run(engine: LocalBackend, steps: range) -> list[Any]:
        batches = (random_batch(6, seed=step) for step in steps)
        return [engine.train_batch(b, imitation_objective(), step=i) for i, b in zip(steps, batches, strict=True)]

    engine = backend("float16")
    engine.optimizer.loss_scale.value, engine.optimizer.loss_scale.streak = 2.0**20, 7
    run(engine, range(2))
    engine.stage(str(tmp_path), "actor")()
    weights = {name: p.clone() for name, p in engine.model.state_dict().items()}
    expected = run(engine, range(2, 4))
    resumed = backend("float16")
    resumed.model.load_state_dict(weights)
    resumed.restore(str(tmp_path), "actor")
    results = run(resumed, range(2, 4))
    assert [result.grad_norm for result in results] == [result.grad_norm for result in expected]
    assert [result.loss_scale for result in results] == [result.loss_scale for result in expected]
    assert resumed.optimizer.loss_scale == engine.optimizer.loss_scale != LossScale()
    final = resumed.model.state_dict()
    assert all(torch.equal(final[name], value) for name, value in engine.model.state_dict().items())
