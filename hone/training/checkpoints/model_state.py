"""A model and its optimizer in a checkpoint: staged in memory, then written, and read back."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from typing import Any, Protocol

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from hone.errors import CheckpointError, ConfigError
from hone.models.loading import causal_lm
from hone.training.checkpoints.checksums import leave_checksums
from hone.training.checkpoints.shards import ShardStager, dist_rank, load_shards, read_index
from hone.training.checkpoints.storage import Storage
from hone.training.checkpoints.weights import in_layers, stage_layers, stage_weights
from hone.training.eight_bits import join_parts, parts_of
from hone.training.optimizer import LossScale, WeightAverage, trained_parameters

AVERAGE = "ema/"  # prefix of the averages of the weights, which are saved with the optimizer's state


def named_state(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return this process's part of the optimizer state, by parameter name: any layout of the model can load it.

    Returns tensors as ``<key>/<parameter>`` ("exp_avg/model.norm.weight"), and other values: the class of the
    optimizer, the names of all trained parameters, and state without tensors.

    Raises ConfigError: the state of a sharded parameter is neither sharded in the same way nor a single number.
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for name, parameter in trained_parameters(model):
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
    trained = [name for name, _ in trained_parameters(model)]
    return tensors, {"optimizer": type(optimizer).__name__, "trained": trained, "state": plain}


def load_state(model: nn.Module, optimizer: Optimizer, storage: Storage, names: Collection[str] | None = None) -> None:
    """Load a state that :func:`named_state` returned for a model of any layout.

    ``names``: of all trained parameters, if ``model`` has a part of them.

    Raises CheckpointError: the state is of another optimizer or other parameters, or damaged.
    """
    index = read_index(storage)
    parameters = dict(trained_parameters(model))
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
    """Raise CheckpointError unless a saved state is of an optimizer of class ``kind`` and of parameters with these
    names.
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


_LOSS_SCALE = "loss_scale"

log = logging.getLogger("hone")


class ModelParts(Protocol):
    """A model whose parameters are divided over processes by their names."""

    @property
    def trained(self) -> list[str]: ...

    def layers(self, values: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield all whole parameters by their names in files, or ``values`` in their places. Collective."""
        ...

    def everywhere(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the plain values of all processes. Collective."""
        ...


class ModelStager:
    """Stages the checkpoints of one model. ``stages``: the pipeline stages of a model of which this process has a part;
    None if ``model`` is all.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        loss_scale: LossScale | None = None,
        average: WeightAverage | None = None,
        *,
        stages: ModelParts | None = None,
    ) -> None:
        self._model, self._optimizer, self._loss_scale, self._average = model, optimizer, loss_scale, average
        self._stages = stages
        self._shards = ShardStager()

    def stage(self, location: str, name: str, tokenizer: PreTrainedTokenizerBase | None = None) -> Callable[[], None]:
        """Copy the data that this rank writes, as :meth:`~hone.training.backends.protocol.TrainBackend.stage` says.
        Collective.
        """
        checkpoint = Storage(location).recording()
        writes = [self._stage_weights(checkpoint / name, tokenizer, {})]
        if self._optimizer is not None:
            tensors, about = named_state(self._model, self._optimizer)
            if self._stages is not None:
                about |= {"trained": self._stages.trained, "state": self._stages.everywhere(about["state"])}
            if self._loss_scale is not None:
                about[_LOSS_SCALE] = dataclasses.asdict(self._loss_scale)
            if self._average is not None:
                tensors |= _average_tensors(self._average)
                writes.append(self._stage_weights(checkpoint / f"{name}_ema", tokenizer, self._average.values))
            writes.append(self._shards.stage(tensors, about, checkpoint / optimizer_folder(name)))
        return writer_of_all(writes, checkpoint, name)

    def _stage_weights(
        self, folder: Storage, tokenizer: PreTrainedTokenizerBase | None, values: Mapping[str, Tensor]
    ) -> Callable[[], None]:
        if self._stages is None:
            return stage_weights(self._model, folder, tokenizer, values=values)
        named = self._stages.layers(values)
        layers = [dict(named)] if isinstance(self._model, PeftModel) else in_layers(named, causal_lm(self._model))
        return stage_layers(layers, self._model, folder, tokenizer)

    def restore(self, location: str, name: str) -> None:
        """Load the optimizer state, as :meth:`~hone.training.backends.protocol.TrainBackend.restore` says."""
        if self._optimizer is None:
            raise RuntimeError("this model was built without an optimizer")
        storage = Storage(location) / optimizer_folder(name)
        with storage.restoring():
            names = None if self._stages is None else self._stages.trained
            load_state(self._model, self._optimizer, storage, names)
            if self._loss_scale is not None:
                vars(self._loss_scale).update(read_index(storage).values.get(_LOSS_SCALE, {}))
            if self._average is not None:
                self._load_average(self._average, storage)

    def _load_average(self, average: WeightAverage, storage: Storage) -> None:
        tensors = _average_tensors(average)
        if any(name.startswith(AVERAGE) for name in read_index(storage).tensors):
            load_shards(tensors, storage)
        else:
            log.warning("'%s' has no average of the weights: optim.ema_decay begins at its weights", storage)


def writer_of_all(writes: list[Callable[[], None]], checkpoint: Storage, name: str) -> Callable[[], None]:
    """Return a function that does all writes of this rank to a recording checkpoint, and leaves the checksums."""
    rank = dist_rank()

    def write() -> None:
        while writes:  # frees what is written
            writes.pop(0)()
        leave_checksums(checkpoint, name, rank)

    return write


def _average_tensors(average: WeightAverage) -> dict[str, Tensor]:
    return {f"{AVERAGE}{name}": value for name, value in average.values.items()}


def optimizer_folder(name: str) -> str:
    return f"{name}_optimizer"
