"""Division of a Hugging Face model into pipeline stages of consecutive layers.

Every rank builds the whole model without storage, then cuts away what other stages have. Names stay those of the whole model, so that
files, exports and checkpoints do not depend on the number of stages:

    first stage    embedding, layers 0 to k
    last stage     last layers, final norm, output layer; and a copy of the embedding if the output layer is tied to it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hone.errors import ModelError
from hone.models.loading import causal_lm, layers_of
from hone.models.tied import parts_embeddings
from hone.training.backends.fsdp2.pipeline_models import require_divisible
from hone.training.export_stream import STREAMS, in_buckets, in_dtype

_OUTPUTS = ("lm_head", "score", "classifier")


class Elsewhere(nn.Module):
    """The place of a layer that another stage has; returns its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.attention_type = getattr(layer, "attention_type", None)  # decoders choose a mask by it

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


@dataclass(frozen=True)
class WholeParameter:
    """A parameter of the whole model."""

    name: str
    meta: Tensor  # shape and dtype, without storage
    stage: int  # the first that has it
    trained: bool
    file_name: str | None  # in a checkpoint; None if it is not saved


class Stages:
    """The stages of one model, and what this rank has.

    ``model``: whole, without storage, with its adapters. ``shared``: the tied embedding, which the first and the last
    stage have; None on other stages and without one.

    Raises ModelError: the model cannot be divided into as many stages.
    """

    def __init__(self, model: nn.Module, group: ProcessGroup, device: torch.device) -> None:
        inner = causal_lm(model)
        self.model, self.group, self.device = model, group, device
        self.index, self.count = dist.get_rank(group), group.size()
        require_divisible(inner.config.to_dict(), self.count, str(inner.name_or_path))
        self._layers = {name: number for number, name in enumerate(_layer_names(inner))}
        if parts_embeddings(model):
            raise ModelError(
                "the adapter changes one of two tied embeddings, which pipeline stages hold as one matrix",
                why="the weights sent and saved would be those of another model",
                fix="no pipeline stages, or an adapter without lm_head and embed_tokens: target_modules=all-linear",
                where="model.target_modules",
            )
        tied = _tied(inner)
        self.parameters = [
            WholeParameter(name, meta, self._stage_of(name), meta.requires_grad, saved)
            for (name, meta), saved in zip(_metas(model), _file_names(model), strict=True)
        ]
        self._cut(inner, tied)
        embedding = inner.get_input_embeddings() if tied and self.index in (0, self.count - 1) else None
        self.shared_module = embedding if isinstance(embedding, nn.Module) else None

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @property
    def shared(self) -> nn.Parameter | None:
        return None if self.shared_module is None else self.shared_module.get_parameter("weight")

    @property
    def trained(self) -> list[str]:
        return [parameter.name for parameter in self.parameters if parameter.trained]

    def export(self, which: str, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of all stages, as :mod:`hone.training.export_stream` does for a whole model. Collective."""
        wanted: list[tuple[str, Tensor, int]] = []
        inner = causal_lm(self.model)
        prefix = next((name for name, module in self.model.named_modules() if module is inner), "")
        for parameter in self.parameters:
            name = parameter.name
            if which == "merged":
                name = name.removeprefix(f"{prefix}." if prefix else "").replace(".base_layer.", ".")
            if {"all": True, "adapter": ".lora_" in name, "merged": ".lora_" not in name}[which]:
                wanted.append((name, in_dtype(parameter.meta, dtype), parameter.stage))
        yield from self._from_owners(wanted, lambda: STREAMS[which](self.model, dtype=dtype))

    def layers(self, values: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole parameters (or ``values``) of all stages by their names in a checkpoint's files. Collective."""
        names = {parameter.name: parameter.file_name for parameter in self.parameters}
        wanted = [(p.name, p.meta, p.stage) for p in self.parameters if p.file_name is not None]
        local = {**dict(self.model.named_parameters()), **values}
        for name, value in self._from_owners(wanted, lambda: in_buckets(local.items())):
            yield str(names[name]), value

    def everywhere(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return plain values of the parameters of all stages. Collective."""
        gathered: list[Any] = [None] * self.count
        dist.all_gather_object(gathered, dict(values), group=self.group)
        return {name: value for part in reversed(gathered) for name, value in part.items()}

    def add_shared_gradient(self) -> None:
        """Add up the gradients of the tied embedding, which the first and the last stage have."""
        if self.shared is None or self.shared.grad is None:
            return
        grad = self.shared.grad
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        received = torch.empty_like(local)
        peer = dist.get_global_rank(self.group, self.count - 1 if self.is_first else 0)
        exchange = [
            dist.P2POp(dist.isend, local.contiguous(), peer, self.group),
            dist.P2POp(dist.irecv, received, peer, self.group),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        local.add_(received)

    def _from_owners(self, wanted: list[tuple[str, Tensor, int]], local: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors in the order of the model: each stage gathers its own and sends them to the others."""
        for stage in range(self.count):
            names = {name: meta for name, meta, owner in wanted if owner == stage}
            if stage == self.index:
                tensors = ((name, value) for name, value in local() if name in names)
            else:
                tensors = ((name, torch.empty_like(meta, device=self.device)) for name, meta in names.items())
            for name, value in tensors:
                value = value.contiguous()
                dist.broadcast(value, group_src=stage, group=self.group)
                yield name, value

    def _stage_of(self, name: str) -> int:
        """Return the first stage that has a parameter, by its name in the whole model."""
        for layer, number in self._layers.items():
            if f"{layer}." in f"{name}.":
                return self._stage_of_layer(number)
        return 0 if "embed_tokens" in name else self.count - 1

    def _stage_of_layer(self, number: int) -> int:
        return ((number + 1) * self.count - 1) // len(self._layers)

    def _cut(self, inner: PreTrainedModel, tied: bool) -> None:
        decoder: Any = inner.get_decoder()
        for name, number in self._layers.items():
            if self._stage_of_layer(number) != self.index:
                parent, _, child = name.rpartition(".")
                setattr(inner.get_submodule(parent), child, Elsewhere(inner.get_submodule(name)))
        if not self.is_last:
            decoder.norm = nn.Identity()
            for name in _OUTPUTS:
                if hasattr(inner, name):
                    setattr(inner, name, nn.Identity())
        if not (self.is_first or (self.is_last and tied)):
            decoder.embed_tokens = nn.Identity()


def _layer_names(inner: PreTrainedModel) -> list[str]:
    layers = layers_of(inner)
    return [name for name, module in inner.named_modules() if any(module is layer for layer in layers)]


def _tied(inner: PreTrainedModel) -> bool:
    output, embedding = inner.get_output_embeddings(), inner.get_input_embeddings()
    return output is not None and getattr(output, "weight", None) is getattr(embedding, "weight", output)


def _metas(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names with shape, dtype and whether there is a gradient, without storage."""
    for name, parameter in model.named_parameters():
        meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        yield name, meta.requires_grad_(parameter.requires_grad)


def _file_names(model: nn.Module) -> list[str | None]:
    """Return the name of each parameter in the files of a checkpoint; None for those that an adapter's files lack."""
    metas = dict(_metas(model))
    if not isinstance(model, PeftModel):
        return list(metas)
    saved = {id(meta): name for name, meta in get_peft_model_state_dict(model, state_dict=dict(metas)).items()}
    return [saved.get(id(meta)) for meta in metas.values()]
