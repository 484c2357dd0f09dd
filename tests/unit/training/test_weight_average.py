"""The moving average of the weights: its definition, its directory, its resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.models import random_batch, tiny_model
from transformers import AutoModelForCausalLM

from hone.config.model import OptimConfig
from hone.models.heads import PolicyHead
from hone.training.backends.local import LocalBackend
from hone.training.engine import TrainSettings
from hone.training.export import find_actor
from hone.training.objectives import imitation_objective


def backend(decay: float | None = 0.75) -> LocalBackend:
    settings = TrainSettings(torch.device("cpu"), optim=OptimConfig(lr=0.01, ema_decay=decay))
    return LocalBackend(tiny_model(), PolicyHead(), settings)


def train(engine: LocalBackend, steps: range) -> list[dict[str, torch.Tensor]]:
    """The weights before the first and after every update."""
    weights = [weights_of(engine)]
    for step in steps:
        engine.train_batch(random_batch(6, seed=step), imitation_objective(), step=step)
        weights.append(weights_of(engine))
    return weights


def weights_of(engine: LocalBackend) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}


def averages(engine: LocalBackend) -> dict[str, torch.Tensor]:
    assert engine.optimizer is not None and engine.optimizer.average is not None
    return engine.optimizer.average.values


def test_it_is_the_recursion_from_the_initial_weights() -> None:
    engine = backend()
    first, *later = train(engine, range(4))
    for name, average in averages(engine).items():
        expected = first[name].double()
        for weights in later:
            expected = 0.75 * expected + 0.25 * weights[name].double()
        assert average.dtype == torch.float32
        torch.testing.assert_close(average.double(), expected, rtol=1e-6, atol=1e-7)
        assert not torch.equal(average, later[-1][name])


def test_training_is_the_same_with_and_without_it() -> None:
    expected, weights = (train(backend(decay), range(2))[-1] for decay in (None, 0.9))
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_a_skipped_update_leaves_it() -> None:
    engine = backend()
    before = {name: value.clone() for name, value in averages(engine).items()}
    assert engine.optimizer is not None
    engine.optimizer.step(0, float("nan"))
    assert all(torch.equal(value, before[name]) for name, value in averages(engine).items())


def test_a_checkpoint_has_it_as_a_model_and_a_resumed_run_continues_exactly(tmp_path: Path) -> None:
    engine = backend()
    weights = train(engine, range(2))[-1]
    engine.stage(str(tmp_path), "actor")()
    saved = {name: value.clone() for name, value in averages(engine).items()}
    model = AutoModelForCausalLM.from_pretrained(find_actor(tmp_path / "actor_ema"))
    assert all(torch.equal(value, saved[name]) for name, value in model.named_parameters())
    trained = load_file(tmp_path / "actor/model.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in trained.items())
    train(engine, range(2, 4))
    resumed = backend()
    resumed.model.load_state_dict(weights, strict=False)
    resumed.restore(str(tmp_path), "actor")
    assert all(torch.equal(value, saved[name]) for name, value in averages(resumed).items())
    train(resumed, range(2, 4))
    assert all(torch.equal(value, averages(engine)[name]) for name, value in averages(resumed).items())


@pytest.mark.parametrize(("before", "after"), [(None, 0.75), (0.75, None)])
def test_it_may_begin_or_end_at_a_checkpoint(before: float | None, after: float | None, tmp_path: Path) -> None:
    engine = backend(before)
    weights = train(engine, range(1))[-1]
    engine.stage(str(tmp_path), "actor")()
    assert (tmp_path / "actor_ema").exists() == (before is not None)
    resumed = LocalBackend(
        engine.model, PolicyHead(), TrainSettings(torch.device("cpu"), optim=OptimConfig(ema_decay=after))
    )
    resumed.restore(str(tmp_path), "actor")
    if after is not None:
        assert all(torch.equal(value, weights[name]) for name, value in averages(resumed).items())
