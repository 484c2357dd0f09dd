"""Optimizer state by parameter name, so that any layout of the same model can load it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hone.errors import CheckpointError, ConfigError
from hone.training.checkpoints.shards import load_shards, read_index
from hone.training.checkpoints.storage import Storage
from hone.training.eight_bits import join_parts, parts_of

AVERAGE = "ema/"
"""Prefix of the averages of the weights, which are saved with the optimizer's state."""


def named_state(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return this process's part of the optimizer state.

    Returns:
        Tensors as ``<key>/<parameter>`` ("exp_avg/model.norm.weight"), and other values: the class of the optimizer, the
        names of all trained parameters, and state without tensors.

    Raises:
        ConfigError: the state of a sharded parameter is neither sharded in the same way nor a single number.
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for name, parameter in _trained(model):
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                plain[f"{key}/{name}"] = value
                continue
            if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.numel() > 1:
                raise ConfigError(
                    f"{type(optimizer).__name__} has a '{key}' of shape {list(value.shape)} for each shard of {name}",
                    why="another number of ranks could not load it",
                    where="optim.optimizer",
                    fix="optim.optimizer=AdamW, or another one whose state has the shape of the parameter",
                )
            tensors |= {f"{part}/{name}": tensor for part, tensor in parts_of(key, value).items()}
    trained = [name for name, _ in _trained(model)]
    return tensors, {"optimizer": type(optimizer).__name__, "trained": trained, "state": plain}


def load_state(model: nn.Module, optimizer: Optimizer, storage: Storage, names: Collection[str] | None = None) -> None:
    """Load a state that :func:`named_state` returned for a model of any layout.

    Args:
        model: of the parameters.
        optimizer: to load into.
        storage: directory of the state.
        names: of all trained parameters, if ``model`` has a part of them.

    Raises:
        CheckpointError: the state is of another optimizer or other parameters, or damaged.
    """
    index = read_index(storage)
    parameters = dict(_trained(model))
    check_saved(index.values, set(names or parameters), type(optimizer).__name__, storage)
    fused = {id(p): g.get("fused") or g.get("capturable") for g in optimizer.param_groups for p in g["params"]}
    tensors: dict[str, Tensor] = {}
    for full, spec in index.tensors.items():
        key, name = full.split("/", 1)
        if full.startswith(AVERAGE) or name not in parameters:
            continue
        parameter = parameters[name]
        if spec.shape == tuple(parameter.shape):
            value = torch.zeros_like(parameter, dtype=spec.dtype, memory_format=torch.contiguous_format)
        else:
            device = parameter.device if key != "step" or fused[id(parameter)] else "cpu"
            value = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
        tensors[full] = value.detach()
    load_shards(tensors, storage)
    states: dict[str, dict[str, Any]] = {}
    for full, value in tensors.items():
        key, name = full.split("/", 1)
        states.setdefault(name, {})[key] = value
    for name, state in states.items():
        optimizer.state[parameters[name]].update(join_parts(state))
    for full, value in index.values["state"].items():
        key, name = full.split("/", 1)
        if name in parameters:
            optimizer.state[parameters[name]][key] = value


def check_saved(saved: Mapping[str, Any], names: Set[str], kind: str, storage: Storage) -> None:
    """Check that a saved state is of an optimizer of class ``kind`` and of the parameters with these names.

    Raises:
        CheckpointError: it is not.
    """
    if saved["optimizer"] != kind:
        raise CheckpointError(
            f"'{storage}' has the state of {saved['optimizer']}, but this run uses {kind}",
            why="its averages have another meaning",
            fix=f"optim.optimizer={saved['optimizer']}, or a new run from the weights: model.path=<checkpoint>/actor",
        )
    saved_names = set(saved["trained"])
    if names != saved_names:
        different = sorted(names ^ saved_names)
        raise CheckpointError(
            f"'{storage}' has the state of {len(saved_names)} parameters, but this run trains {len(names)}; "
            f"{len(different)} are only in one of them, such as {different[0]}",
            why="it was saved for another model or other adapters",
            fix="use the model and the adapters of the checkpoint (its config.yaml), or start a new run: "
            "trainer.experiment_name=<another name>",
        )


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
