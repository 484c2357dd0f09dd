"""Map of Hugging Face parameters to the numbers of Megatron's parameters, and loading of this rank's part by it.

A :class:`Piece` is one Hugging Face parameter. On the ranks of its pipeline stage, views into Megatron's parameters hold this rank's
part of it: the part of a dimension that is divided over the tensor-parallel ranks, or some of the experts. Nothing is computed, so
import and export copy bit for bit. The same pieces describe gradients and optimizer state, which have the shapes of the parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedConfig, PreTrainedModel

from hone.config.model import ModelConfig
from hone.errors import ModelError
from hone.models.loading import VALUE_SETTINGS, load_empty, value_head
from hone.training.backends.megatron.cpu import on_device
from hone.training.backends.megatron.model import Groups, Stage
from hone.training.backends.protocol import ModelKind

Select = Callable[[Tensor], Tensor]  # view of a part of one of Megatron's parameters


@dataclass(frozen=True)
class Piece:
    """One Hugging Face parameter."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    stage: int
    sources: tuple[str, ...]  # Megatron's parameters of the stage that hold this rank's part, in order
    select: Select  # view of the part in each source
    dim: int | None = None  # divided over ``group``; None for a whole parameter on every rank
    group: ProcessGroup | None = None
    copy: bool = False  # of a parameter of an earlier stage

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    def fill(self, tensors: Mapping[str, Tensor], whole: Tensor) -> None:
        """Copy this rank's part of ``whole`` into Megatron's tensors."""
        part = whole
        if self.dim is not None and self.group is not None:
            part = whole.chunk(self.ranks, self.dim)[self.group.rank()]
        views = self._views(tensors)
        for view, values in zip(views, part.reshape(-1).split([view.numel() for view in views]), strict=True):
            view.copy_(values.view(view.shape))

    def whole(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the whole parameter from all ranks' tensors. Collective over ``group``."""
        part = torch.cat([view.reshape(-1) for view in self._views(tensors)])
        if self.dim is None or self.group is None or self.ranks == 1:
            return part.view(self.shape)
        part = part.view(*self.shape[: self.dim], -1, *self.shape[self.dim + 1 :])
        parts = [torch.empty_like(part) for _ in range(self.ranks)]
        dist.all_gather(parts, part, group=self.group)
        return torch.cat(parts, self.dim)

    def _views(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        return [self.select(tensors[source].detach()) for source in self.sources]


def pieces(settings: PreTrainedConfig, shapes: Mapping[str, tuple[int, ...]], groups: Groups) -> list[Piece]:
    """Return the pieces of a model, the same on every rank."""
    stages = groups.pipeline.size()
    layers = settings.num_hidden_layers // stages
    made: list[Piece] = []
    for name, shape in shapes.items():
        match = _LAYER.match(name)
        if match is None:
            made += _outside(name, shape, groups)
            continue
        number, inner = int(match[1]), match[2]
        place, stage = f"gpt.decoder.layers.{number % layers}.", number // layers
        if (matrix := _EXPERTS.get(inner)) is not None:
            local = range(shape[0] // groups.expert.size())
            sources = tuple(f"{place}mlp.experts.local_experts.{expert}.{matrix}.weight" for expert in local)
            made.append(Piece(name, shape, stage, sources, _all, 0, groups.expert))
            continue
        source, select, dim = _inside(settings, inner, groups)
        group = None if dim is None else groups.tensor
        made.append(Piece(name, shape, stage, (place + source,), select, dim, group))
    if stages > 1 and "lm_head.weight" not in shapes and "score.weight" not in shapes:
        name, last = "model.embed_tokens.weight", stages - 1
        sources = ("gpt.output_layer.weight",)
        made.append(Piece(name, shapes[name], last, sources, _all, 0, groups.tensor, copy=True))
    return made


_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "mlp.gate.weight": "mlp.router.weight",
}
"""Whole parameters of a layer."""
_EXPERTS = {"mlp.experts.gate_up_proj": "linear_fc1", "mlp.experts.down_proj": "linear_fc2"}
"""Parameters of all experts of a layer, and the matrix of an expert."""


def _all(tensor: Tensor) -> Tensor:
    return tensor


def _outside(name: str, shape: tuple[int, ...], groups: Groups) -> Iterator[Piece]:
    """Yield the pieces of a parameter outside the layers."""
    last = groups.pipeline.size() - 1
    if name == "model.embed_tokens.weight":
        yield Piece(name, shape, 0, ("gpt.embedding.word_embeddings.weight",), _all, 0, groups.tensor)
    elif name == "lm_head.weight":
        yield Piece(name, shape, last, ("gpt.output_layer.weight",), _all, 0, groups.tensor)
    elif name == "model.norm.weight":
        yield Piece(name, shape, last, ("gpt.decoder.final_layernorm.weight",), _all)
    elif name.startswith("score."):
        yield Piece(name, shape, last, (name,), _all)
    else:
        raise ValueError(f"no place in Megatron's model for '{name}'")


def _inside(settings: PreTrainedConfig, name: str, groups: Groups) -> tuple[str, Select, int | None]:
    """Return source, view and divided dimension of a parameter of a layer."""
    if name in _NAMES:
        return _NAMES[name], _all, None
    module, _, kind = name.rpartition(".")
    matrix = module.rpartition(".")[2]
    if matrix in ("q_proj", "k_proj", "v_proj"):
        return f"self_attention.linear_qkv.{kind}", _of_qkv(settings, matrix[0], groups.tensor.size()), 0
    if matrix == "o_proj":
        return f"self_attention.linear_proj.{kind}", _all, 1
    if matrix in ("gate_proj", "up_proj"):
        return f"mlp.linear_fc1.{kind}", _half(0 if matrix == "gate_proj" else 1), 0
    if matrix == "down_proj":
        return f"mlp.linear_fc2.{kind}", _all, 1
    raise ValueError(f"no place in Megatron's layers for '{name}'")


def _of_qkv(settings: PreTrainedConfig, which: str, ranks: int) -> Select:
    """Return the view of queries, keys or values, which Megatron keeps together for each key-value head."""
    heads, key_value = settings.num_attention_heads, settings.num_key_value_heads
    queries = heads // key_value
    places = {"q": slice(0, queries), "k": slice(queries, queries + 1), "v": slice(queries + 1, queries + 2)}

    def select(tensor: Tensor) -> Tensor:
        by_head = tensor.view(key_value // ranks, queries + 2, -1, *tensor.shape[1:])
        return by_head[:, places[which]]

    return select


def _half(which: int) -> Select:
    return lambda tensor: tensor.chunk(2)[which]


class WeightMap:
    """All pieces of a model, with the parameters of this rank."""

    def __init__(self, settings: PreTrainedConfig, shapes: Mapping[str, tuple[int, ...]], groups: Groups) -> None:
        self._groups = groups
        self._pieces = pieces(settings, shapes, groups)

    @property
    def all_names(self) -> list[str]:
        return [piece.name for piece in self._pieces if not piece.copy]

    def names(self) -> dict[str, list[str]]:
        """Return the Hugging Face names in each of this rank's parameters."""
        names: dict[str, list[str]] = {}
        for piece in self._local():
            for source in piece.sources:
                names.setdefault(source, []).append(piece.name)
        return names

    def divided(self) -> dict[str, int]:
        """Return this rank's parameters that are divided over the tensor-parallel ranks, with the divided dimension."""
        pieces = [piece for piece in self._local() if piece.dim is not None and piece.group is self._groups.tensor]
        return {source: piece.dim for piece in pieces for source in piece.sources if piece.dim is not None}

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor], named: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy whole values into this rank's tensors.

        ``named``: whole values by Hugging Face names; others are passed over. Returns names of this rank's pieces that
        had no value.
        """
        local: dict[str, list[Piece]] = {}
        for piece in self._local():
            local.setdefault(piece.name, []).append(piece)
        for name, value in named:
            for piece in local.pop(name, ()):
                piece.fill(tensors, value)
        return set(local)

    @torch.no_grad()
    def whole(self, tensors: Mapping[str, Tensor], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names with whole values, the same on every rank. Collective: every rank iterates to the end.

        Args:
            tensors: this rank's, by Megatron's names, in float32. Each is read in the same order on all ranks of a stage.
        """
        pipeline = self._groups.pipeline
        for piece in self._pieces:
            if piece.copy:
                continue
            if piece.stage == self._groups.stage:
                value = piece.whole(tensors)
            else:
                value = torch.empty(piece.shape, device=device)
            if pipeline.size() > 1:
                value = value.contiguous()
                dist.broadcast(value, group_src=piece.stage, group=pipeline)
            yield piece.name, value

    def _local(self) -> list[Piece]:
        return [piece for piece in self._pieces if piece.stage == self._groups.stage]


@dataclass(frozen=True)
class LoadedStage:
    """This rank's part of a model."""

    stage: Stage
    skeleton: PreTrainedModel  # the Hugging Face model without storage, for its configuration and names
    weights: WeightMap

    @property
    def parameters(self) -> dict[str, Tensor]:
        return dict(self.stage.named_parameters())


def load_stage(kind: ModelKind, model: ModelConfig, groups: Groups, device: torch.device) -> LoadedStage:
    """Build this rank's pipeline stage and fill it from the safetensors files, one tensor at a time. Collective. Raises
    ModelError: the model cannot be loaded.
    """
    valued = kind == "value"
    if valued:
        skeleton, files = load_empty(AutoModelForTokenClassification, model, **VALUE_SETTINGS)
        value_head(skeleton)
    else:
        skeleton, files = load_empty(AutoModelForCausalLM, model)
    with on_device(device):
        stage = Stage(skeleton, groups, device, valued=valued)
    if kind != "frozen" and model.enable_gradient_checkpointing:
        stage.checkpoint_layers(model.gradient_checkpointing_keeps)
    shapes = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
    weights = WeightMap(skeleton.config, shapes, groups)
    parameters = dict(stage.named_parameters())
    for name, dim in weights.divided().items():  # Megatron does so when it initialises parameters
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameters[name])
        parameters[name].tensor_model_parallel, parameters[name].partition_dim = True, dim  # type: ignore[attr-defined]
    missing = weights.fill(parameters, files.tensors())
    for name in [name for name in missing if valued and name.startswith("score.")]:
        parameters[name].detach().zero_()
        missing.discard(name)
    if missing:
        raise ModelError(
            f"the weights lack {len(missing)} tensors, {min(missing)} among them",
            why="they would be random",
            where="model.path",
            fix="check that the directory holds config.json and *.safetensors of one model",
        )
    return LoadedStage(stage, skeleton, weights)
