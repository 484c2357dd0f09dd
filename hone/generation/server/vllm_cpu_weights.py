"""Weight syncs into a running vLLM on a CPU, along routes that are recorded once.

vLLM's reload rebuilds each layer: weights are copied four times, into memory that the system has to clear first. Here its
loaders run once without weights to record what they copy where, and every weight sync repeats these copies:

    name --> steps (slice of the weight, slice of a parameter) --> norms, embeddings: copied
                                                               --> linear layers: packed in place

A linear layer has only a packed copy, which oneDNN makes of the whole matrix. If all its slices are adjacent in a chunk, as q,
k and v are, they already form that matrix, which is packed without a copy.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import restore_layer_refs, to_meta_tensor
from vllm.platforms import current_platform

from hone.errors import GenerationError

Named = tuple[str, Tensor]
_KNOWN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


class TensorSlice(NamedTuple):
    """A view of a tensor; the offset is relative to the first element of the tensor that it views, in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def from_view(cls, view: Tensor, whole: Tensor) -> TensorSlice:
        return cls(tuple(view.shape), view.stride(), int(view.storage_offset() - whole.storage_offset()))

    def within(self, whole: Tensor) -> Tensor:
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(eq=False)
class TargetParameter:
    """A parameter of vLLM's model."""

    name: str  # in vLLM's model
    saved: Tensor  # its unpacked form: the parameter itself, or a tensor without storage
    packed: nn.Module | None = None  # the layer that packs it; None for an unpacked parameter
    padding: int = 0  # number of elements that no weight fills
    # slices that have arrived in this weight sync
    arrived: dict[TensorSlice, Tensor | None] = field(default_factory=dict)
    matrix: Tensor | None = None  # buffer for the slices of a packed parameter that are not adjacent

    @property
    def whole(self) -> bool:
        """True if all slices have arrived."""
        return sum(slice_.numel for slice_ in self.arrived) + self.padding >= self.saved.numel()

    def load(self, part: TensorSlice, source: Tensor) -> None:
        if self.packed is None:
            part.within(self.saved.data).copy_(source)
            self.arrived[part] = None
            return
        if part in self.arrived:
            raise GenerationError(f"weight '{self.name}' arrived twice in one version")
        self.arrived[part] = source
        if self.whole:
            matrix = self._adjacent_matrix()
            _pack(self.packed, self._gathered() if matrix is None else matrix)
            self.matrix = None

    def keep_incomplete(self) -> None:
        """Copy the slices of an incomplete parameter, before the chunk's memory is reused."""
        if self.packed is not None and not self.whole:
            self._gathered()
        self.arrived = dict.fromkeys(self.arrived)

    def _gathered(self) -> Tensor:
        if self.matrix is None:
            self.matrix = torch.empty_strided(self.saved.shape, self.saved.stride(), dtype=self.saved.dtype)
        for part, source in self.arrived.items():
            if source is not None:
                part.within(self.matrix).copy_(source)
        return self.matrix

    def _adjacent_matrix(self) -> Tensor | None:
        """Return the matrix, if its slices have the layout of the matrix in memory, else None."""
        first = min(self.arrived, key=lambda part: part.offset)
        first_source = self.arrived[first]
        if first_source is None or first_source.dtype != self.saved.dtype or first.offset:
            return None
        memory, base = first_source.untyped_storage().data_ptr(), first_source.storage_offset()
        for part, source in self.arrived.items():
            if source is None or source.dtype != first_source.dtype or source.untyped_storage().data_ptr() != memory:
                return None
            if (source.stride(), source.storage_offset()) != (part.stride, base + part.offset):
                return None
        return first_source.as_strided(self.saved.shape, self.saved.stride(), base)


class UnsupportedCopy(Exception):
    """Raised when vLLM's loaders do something other than copying a weight."""


class WeightRoutes:
    """Destinations of every weight in vLLM's model; ``tied`` names parameters that are aliases of others."""

    def __init__(self, model: nn.Module, tied: Iterable[str]) -> None:
        self._model, self._tied = model, frozenset(tied)
        self._targets = list(_targets(model))
        self._steps: dict[tuple[str, torch.Size], list[tuple[TargetParameter, TensorSlice, TensorSlice]]] = {}

    def begin(self) -> None:
        """Start a weight sync."""
        for target in self._targets:
            target.arrived, target.matrix = {}, None

    def record(self, tensors: Sequence[Named]) -> None:
        """Record the routes of new weights.

        Raises:
            UnsupportedCopy: a weight has no repeatable route.
        """
        new = {name: tensor for name, tensor in tensors if (name, tensor.shape) not in self._steps}
        if not new:
            return
        blank = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in new.items()}
        with _unpacked(self._targets), _CopyRecorder(blank, self._targets) as recorder:
            try:
                self._model.load_weights(blank.items())  # type: ignore[operator]
            except (RuntimeError, NotImplementedError) as error:
                raise UnsupportedCopy(str(error)) from error
        for name, tensor in blank.items():
            self._steps[name, tensor.shape] = recorder.steps[name]
        for target, padding in recorder.padding.items():
            target.padding = padding

    def load(self, tensors: Sequence[Named]) -> None:
        """Load weights; their memory may be reused afterwards."""
        touched: set[TargetParameter] = set()
        for name, tensor in tensors:
            for target, source, place in self._steps[name, tensor.shape]:
                target.load(place, source.within(tensor))
                touched.add(target)
        for target in touched:
            target.keep_incomplete()

    def missing(self) -> list[str]:
        return [target.name for target in self._targets if not target.whole and target.name not in self._tied]


def weight_routes(model: nn.Module, tied: Iterable[str]) -> WeightRoutes | None:
    """Return the routes of a model's weights; None on a GPU, or if more than packed copies is derived from weights."""
    if not current_platform.is_cpu():
        return None
    for module in model.modules():
        if hasattr(module, "base_layer"):  # adapter layers expose the weights of the layers that they wrap
            return None
        if type(getattr(module, "quant_method", None)) not in (type(None), *_KNOWN_METHODS):
            return None
        if is_deferred_attention_layer(module) and type(module) is not Attention:
            return None
        if any(saved.ndim != 2 for saved in _packed_weights(module)):
            return None
    return WeightRoutes(model, tied)


def _targets(model: nn.Module) -> Iterator[TargetParameter]:
    for name, module in model.named_modules():
        for saved in _packed_weights(module):
            yield TargetParameter(f"{name}.weight", restore_layer_refs(to_meta_tensor(saved), module), module)
    for name, parameter in model.named_parameters():
        if parameter.numel():
            yield TargetParameter(name, parameter)


def _packed_weights(module: nn.Module) -> list[Tensor]:
    """Return the weight of a layer with only a packed copy, in its unpacked form without storage."""
    weight = getattr(module, "weight", None)
    if not hasattr(module, "cpu_linear") or weight is None or weight.numel():
        return []
    return [get_layerwise_info(module).restore_metadata[0]["weight"]]


@contextlib.contextmanager
def _unpacked(targets: Sequence[TargetParameter]) -> Iterator[None]:
    """Give layers their unpacked weights without storage, for the time of the block."""
    kept = {target: target.packed._parameters["weight"] for target in targets if target.packed is not None}
    try:
        for target in kept:
            target.packed._parameters["weight"] = target.saved  # type: ignore[union-attr, assignment]
        yield
    finally:
        for target, weight in kept.items():
            target.packed._parameters["weight"] = weight  # type: ignore[union-attr]


class _CopyRecorder(TorchDispatchMode):
    """Mode that records what loaders copy where, and copies nothing."""

    def __init__(self, weights: dict[str, Tensor], targets: Sequence[TargetParameter]) -> None:
        super().__init__()
        self._weights = {_storage(tensor): (name, tensor) for name, tensor in weights.items()}
        self._targets = {_storage(target.saved): target for target in targets}
        # of every weight: (parameter, slice of the weight, slice of the parameter)
        self.steps: dict[str, list[tuple[TargetParameter, TensorSlice, TensorSlice]]] = {name: [] for name in weights}
        self.padding: dict[TargetParameter, int] = {}  # number of elements that are set to a constant, by parameter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        changes = func._schema.is_mutable and isinstance(args[0], Tensor)
        target = self._targets.get(_storage(args[0])) if changes else None
        if target is None:
            return func(*args, **(kwargs or {}))
        into = TensorSlice.from_view(args[0], target.saved)
        copies = func is torch.ops.aten.copy_.default and args[0].shape == args[1].shape
        if copies and _storage(args[1]) in self._weights:
            name, weight = self._weights[_storage(args[1])]
            self.steps[name].append((target, TensorSlice.from_view(args[1], weight), into))
        elif func is torch.ops.aten.fill_.Scalar and target.packed is None:
            self.padding[target] = into.numel  # the parameter has that constant already
        else:
            raise UnsupportedCopy(f"{func} of '{target.name}'")
        return args[0]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _pack(layer: Any, matrix: Tensor) -> None:
    """Pack a layer's weight again. The old copy is freed first, so that its memory can be reused."""
    empty, layer.cpu_linear = layer.weight, None
    layer._parameters["weight"] = nn.Parameter(matrix, requires_grad=False)
    try:
        layer.quant_method.process_weights_after_loading(layer)
        if layer.weight.numel():
            raise GenerationError("vLLM did not pack a linear layer's new weight, and would compute with the old one")
    finally:
        layer._parameters["weight"] = empty
