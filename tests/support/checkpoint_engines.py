"""What ranks do in tests of checkpoints with the engines that runs use."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch.distributed as dist
from support.backend_cases import Case, averages_of, backend_of, continued, trained
from support.checkpoint_cases import whole_state
from torch import Tensor

from hone.config.model import ModelConfig
from hone.models.loading import saved_model
from hone.training.backends.protocol import TrainBackend


def train_and_save(case: Case, directory: Path) -> dict[str, Tensor]:
    """Some updates and a checkpoint; what it should hold."""
    engine, *_ = trained(case, range(case.updates))
    engine.stage(str(directory), "actor")()
    return _state(engine)


def resume(case: Case, directory: Path) -> dict[str, Tensor]:
    """What an engine finds in the checkpoint."""
    return _state(_resumed(case, directory)[0])


def go_on(case: Case, directory: Path) -> dict[str, Tensor]:
    """As many updates more."""
    engine, layout = _resumed(case, directory)
    continued(engine, layout, case, range(case.updates, 2 * case.updates))
    return _state(engine)


def _resumed(case: Case, directory: Path) -> tuple[TrainBackend, Any]:
    saved = saved_model(ModelConfig(path=str(case.model), **case.model_settings), directory / "actor")
    settings = {key: value for key, value in vars(saved).items() if key != "path"}
    engine, layout = backend_of(dataclasses.replace(case, model=Path(str(saved.path)), model_settings=settings))
    engine.restore(str(directory), "actor")
    return engine, layout


def _state(engine: Any) -> dict[str, Tensor]:
    assert engine.optimizer is not None
    if dist.is_initialized():
        dist.barrier()
    return whole_state(engine.model, engine.optimizer.inner) | averages_of(engine)
