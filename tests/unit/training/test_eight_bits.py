"""AdamW with moments in 8 bits: close to AdamW, exact across a checkpoint, a quarter of the state."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.messages import raises
from support.models import random_batch, tiny_model

from hone.config.model import OptimConfig
from hone.errors import ConfigError
from hone.models.heads import PolicyHead
from hone.preflight.plan.memory import moment_bytes
from hone.training.backends.local import LocalBackend
from hone.training.eight_bits import join_parts, parts_of
from hone.training.engine import TrainSettings
from hone.training.objectives import imitation_objective
from hone.training.optimizer import build_optimizer

EIGHT_BITS = OptimConfig(lr=1e-2, optimizer="AdamW8bit")


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package, with steps that are not compiled."""
    package = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    return package


def model() -> torch.nn.Module:
    """A model with an embedding of more than 4,096 numbers; its other parameters keep float32 moments."""
    wide = tiny_model()
    wide.resize_token_embeddings(160)  # type: ignore[operator]
    return wide


def backend(optim: OptimConfig) -> LocalBackend:
    return LocalBackend(model(), PolicyHead(), TrainSettings(torch.device("cpu"), optim=optim))


def train(engine: LocalBackend, steps: range) -> dict[str, torch.Tensor]:
    for step in steps:
        engine.train_batch(random_batch(6, seed=step), imitation_objective(), step=step)
    return {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}


def test_without_the_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with raises(ConfigError, "optim8bit", where="optim.optimizer"):
        build_optimizer(tiny_model(), EIGHT_BITS)


def test_plain_state_is_one_part() -> None:
    state = {"exp_avg": torch.ones(2), "step": torch.tensor(1.0)}
    parts = {part: tensor for key, value in state.items() for part, tensor in parts_of(key, value).items()}
    assert parts.keys() == state.keys() and join_parts(parts).keys() == state.keys()


def test_steps_are_close_to_those_of_adamw(torchao: Any) -> None:
    start = {name: parameter.detach().clone() for name, parameter in model().named_parameters()}
    expected, weights = (train(backend(optim), range(4)) for optim in (OptimConfig(lr=1e-2), EIGHT_BITS))
    moved = sum((value - start[name]).abs().sum() for name, value in expected.items())
    apart = sum((weights[name] - value).abs().sum() for name, value in expected.items())
    assert 0 < apart < 0.05 * moved


def test_a_resumed_run_continues_exactly(torchao: Any, tmp_path: Path) -> None:
    engine = backend(EIGHT_BITS)
    weights = train(engine, range(2))
    engine.stage(str(tmp_path), "actor")()
    expected = train(engine, range(2, 4))
    resumed = backend(EIGHT_BITS)
    resumed.model.load_state_dict(weights, strict=False)
    resumed.restore(str(tmp_path), "actor")
    for name, value in train(resumed, range(2, 4)).items():
        assert torch.equal(value, expected[name]), name


def test_the_state_has_the_bytes_of_the_plan(torchao: Any) -> None:
    engine = backend(EIGHT_BITS)
    train(engine, range(1))
    assert engine.optimizer is not None
    large = {
        p: state for p, state in engine.optimizer.inner.state.items() if p.numel() >= 4096 and p.numel() % 256 == 0
    }
    assert large
    for parameter, state in large.items():
        parts = [part for key in ("exp_avg", "exp_avg_sq") for part in parts_of(key, state[key]).values()]
        assert sum(part.nbytes for part in parts) == moment_bytes(EIGHT_BITS) * parameter.numel()
