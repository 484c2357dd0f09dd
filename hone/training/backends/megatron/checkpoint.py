"""Checkpoints in the format of all backends: a Hugging Face directory, and the optimizer's state by Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hone.errors import CheckpointError
from hone.training.backends.megatron.loading import LoadedStage
from hone.training.backends.megatron.optimizer import ShardedOptimizer
from hone.training.checkpoints.checksums import leave_checksums
from hone.training.checkpoints.model_state import optimizer_folder
from hone.training.checkpoints.optimizer_state import check_saved
from hone.training.checkpoints.shards import dist_rank, load_shards, read_index, stage_whole
from hone.training.checkpoints.storage import Storage
from hone.training.checkpoints.weights import in_layers, stage_layers

_STEP = "step"


def stage_checkpoint(
    loaded: LoadedStage,
    optimizer: ShardedOptimizer | None,
    device: torch.device,
    location: str,
    name: str,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Callable[[], None]:
    """Copy what this rank writes of model and optimizer. Collective.

    Returns:
        A function that writes the files, without collectives, in any thread and during training.
    """
    checkpoint = Storage(location).recording()
    whole = loaded.weights.whole(loaded.parameters, device)
    writes = [stage_layers(in_layers(whole, loaded.skeleton), loaded.skeleton, checkpoint / name, tokenizer)]
    if optimizer is not None:
        about: dict[str, Any] = {"optimizer": optimizer.kind, "trained": loaded.weights.all_names, "state": {}}
        state = _named_state(loaded, optimizer, device)
        writes.append(stage_whole(state, about, checkpoint / optimizer_folder(name)))
    rank = dist_rank()

    def write() -> None:
        while writes:  # frees what is written
            writes.pop(0)()
        leave_checksums(checkpoint, name, rank)

    return write


def restore_optimizer(loaded: LoadedStage, optimizer: ShardedOptimizer, location: str, name: str) -> None:
    """Load the optimizer's state of a checkpoint of any backend and layout.

    Raises:
        CheckpointError: the state is of another model or optimizer, or damaged.
    """
    storage = Storage(location) / optimizer_folder(name)
    shapes = {name: parameter.shape for name, parameter in loaded.skeleton.named_parameters()}
    local = {name for names in loaded.weights.names().values() for name in names}
    try:
        index = read_index(storage)
        check_saved(index.values, set(shapes), optimizer.kind, storage)
        steps = {key: torch.zeros(()) for key in index.tensors if key.startswith(f"{_STEP}/")}
        load_shards(steps, storage, index)
        if not steps:
            return  # saved before the first update

        def saved(key: str) -> Iterator[tuple[str, Tensor]]:
            for name in shapes.keys() & local:
                value = torch.zeros(shapes[name])
                load_shards({f"{key}/{name}": value}, storage, index)
                yield name, value

        for key in optimizer.state_keys:
            tensors = {name: torch.zeros_like(parameter) for name, parameter in loaded.parameters.items()}
            loaded.weights.fill(tensors, saved(key))
            optimizer.load_state(key, tensors)
        optimizer.load_steps(int(max(float(step) for step in steps.values())))
    except OSError as error:
        raise CheckpointError(f"'{storage}' cannot be read: {error}", where="trainer.resume_from_path") from error


def _named_state(
    loaded: LoadedStage, optimizer: ShardedOptimizer, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the optimizer's state by Hugging Face names. Collective."""
    steps = optimizer.steps()
    if steps == 0:
        return
    for name in loaded.weights.all_names:
        yield f"{_STEP}/{name}", torch.tensor(float(steps))
    for key in optimizer.state_keys:
        for name, value in loaded.weights.whole(optimizer.state(key), device):
            yield f"{key}/{name}", value
