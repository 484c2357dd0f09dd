"""New weights into a running vLLM on a CPU, along ways that are found once.

vLLM's own reload makes each layer anew: the weights are copied four times, into memory that the system has to clear first. Here its
loaders are asked once what they copy where, without any weights, and every update then does just that:

    name --> steps (which part of it, into which part of which parameter) --> norms, embeddings: copied
                                                                          --> linear layers: packed from where the weights lie

A linear layer keeps nothing but a packed copy, which oneDNN makes of the whole matrix. Where all its parts arrive side by side, as
q, k and v do, they are that matrix, and it is packed as it lies in the parcel.
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


class Part(NamedTuple):
    """Some of a tensor, as a view of it; the offset is from the tensor's own beginning, in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, view: Tensor, whole: Tensor) -> Part:
        """What ``view`` is of ``whole``."""
        return cls(tuple(view.shape), view.stride(), int(view.storage_offset() - whole.storage_offset()))

    def within(self, whole: Tensor) -> Tensor:
        """The view."""
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)

    @property
    def numel(self) -> int:
        """Its elements."""
        return torch.Size(self.shape).numel()


@dataclass(eq=False)
class Target:
    """A parameter of vLLM's model.

    Attributes:
        name: as vLLM calls it.
        saved: its form before it is packed: the parameter itself, or one without storage.
        packed: the layer whose packed copy it becomes; None of one that is kept as it is.
        padding: elements that no weight fills.
        arrived: what has come of it in this update.
        matrix: a place for what has come of a packed one, when its parts do not come side by side.
    """

    name: str
    saved: Tensor
    packed: nn.Module | None = None
    padding: int = 0
    arrived: dict[Part, Tensor | None] = field(default_factory=dict)
    matrix: Tensor | None = None

    @property
    def whole(self) -> bool:
        """Whether all of it has come."""
        return sum(part.numel for part in self.arrived) + self.padding >= self.saved.numel()

    def take(self, part: Part, source: Tensor) -> None:
        """Some of it has come."""
        if self.packed is None:
            part.within(self.saved.data).copy_(source)
            self.arrived[part] = None
            return
        if part in self.arrived:
            raise GenerationError(f"weight '{self.name}' arrived twice in one version")
        self.arrived[part] = source
        if self.whole:
            matrix = self._side_by_side()
            _pack(self.packed, self._gathered() if matrix is None else matrix)
            self.matrix = None

    def keep(self) -> None:
        """The parcel goes away: copy what waits for the rest."""
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

    def _side_by_side(self) -> Tensor | None:
        """The matrix, where its parts lie in memory just as they do in it."""
        first = min(self.arrived, key=lambda part: part.offset)
        beginning = self.arrived[first]
        if beginning is None or beginning.dtype != self.saved.dtype or first.offset:
            return None
        memory, base = beginning.untyped_storage().data_ptr(), beginning.storage_offset()
        for part, source in self.arrived.items():
            if source is None or source.dtype != beginning.dtype or source.untyped_storage().data_ptr() != memory:
                return None
            if (source.stride(), source.storage_offset()) != (part.stride, base + part.offset):
                return None
        return beginning.as_strided(self.saved.shape, self.saved.stride(), base)


class UnknownWay(Exception):
    """vLLM's loaders do something else with a weight than copying it."""


class WeightWays:
    """Where every weight goes in vLLM's model.

    Args:
        model: vLLM's.
        tied: names of parameters that are others under another name.
    """

    def __init__(self, model: nn.Module, tied: Iterable[str]) -> None:
        self._model, self._tied = model, frozenset(tied)
        self._targets = list(_targets(model))
        self._steps: dict[tuple[str, torch.Size], list[tuple[Target, Part, Part]]] = {}

    def begin(self) -> None:
        """An update follows."""
        for target in self._targets:
            target.arrived, target.matrix = {}, None

    def learn(self, tensors: Sequence[Named]) -> None:
        """Find the ways of weights that were not seen before.

        Raises:
            UnknownWay: they have none that could be repeated.
        """
        new = {name: tensor for name, tensor in tensors if (name, tensor.shape) not in self._steps}
        if not new:
            return
        blank = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in new.items()}
        with _unpacked(self._targets), _Watch(blank, self._targets) as watch:
            try:
                self._model.load_weights(blank.items())  # type: ignore[operator]
            except (RuntimeError, NotImplementedError) as error:
                raise UnknownWay(str(error)) from error
        for name, tensor in blank.items():
            self._steps[name, tensor.shape] = watch.steps[name]
        for target, padding in watch.padding.items():
            target.padding = padding

    def take(self, tensors: Sequence[Named]) -> None:
        """Put weights where they go; they may be gone afterwards."""
        touched: set[Target] = set()
        for name, tensor in tensors:
            for target, source, place in self._steps[name, tensor.shape]:
                target.take(place, source.within(tensor))
                touched.add(target)
        for target in touched:
            target.keep()

    def missing(self) -> list[str]:
        """Names of the parameters that have not arrived whole."""
        return [target.name for target in self._targets if not target.whole and target.name not in self._tied]


def ways_of(model: nn.Module, tied: Iterable[str]) -> WeightWays | None:
    """The ways of a model's weights; None where more is derived from them than packed copies, or not on a CPU."""
    if not current_platform.is_cpu():
        return None
    for module in model.modules():
        if hasattr(
            module, "base_layer"
        ):  # adapters are around: their layers show the weights of those inside as their own
            return None
        if type(getattr(module, "quant_method", None)) not in (type(None), *_KNOWN_METHODS):
            return None
        if is_deferred_attention_layer(module) and type(module) is not Attention:
            return None
        if any(saved.ndim != 2 for saved in _packed_weights(module)):
            return None
    return WeightWays(model, tied)


def _targets(model: nn.Module) -> Iterator[Target]:
    for name, module in model.named_modules():
        for saved in _packed_weights(module):
            yield Target(f"{name}.weight", restore_layer_refs(to_meta_tensor(saved), module), module)
    for name, parameter in model.named_parameters():
        if parameter.numel():
            yield Target(name, parameter)


def _packed_weights(module: nn.Module) -> list[Tensor]:
    """The weight of a layer that keeps only a packed copy, in its form before, without storage."""
    weight = getattr(module, "weight", None)
    if not hasattr(module, "cpu_linear") or weight is None or weight.numel():
        return []
    return [get_layerwise_info(module).restore_metadata[0]["weight"]]


@contextlib.contextmanager
def _unpacked(targets: Sequence[Target]) -> Iterator[None]:
    """Layers have their weights in the form in which they take them, without storage."""
    kept = {target: target.packed._parameters["weight"] for target in targets if target.packed is not None}
    try:
        for target in kept:
            target.packed._parameters["weight"] = target.saved  # type: ignore[union-attr, assignment]
        yield
    finally:
        for target, weight in kept.items():
            target.packed._parameters["weight"] = weight  # type: ignore[union-attr]


class _Watch(TorchDispatchMode):
    """Notes what loaders copy where, and copies nothing.

    Attributes:
        steps: of every weight: into which parameter, which part of it, and where.
        padding: elements of parameters that are set to a number.
    """

    def __init__(self, weights: dict[str, Tensor], targets: Sequence[Target]) -> None:
        super().__init__()
        self._weights = {_storage(tensor): (name, tensor) for name, tensor in weights.items()}
        self._targets = {_storage(target.saved): target for target in targets}
        self.steps: dict[str, list[tuple[Target, Part, Part]]] = {name: [] for name in weights}
        self.padding: dict[Target, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        changes = func._schema.is_mutable and isinstance(args[0], Tensor)
        target = self._targets.get(_storage(args[0])) if changes else None
        if target is None:
            return func(*args, **(kwargs or {}))
        into = Part.of(args[0], target.saved)
        copies = func is torch.ops.aten.copy_.default and args[0].shape == args[1].shape
        if copies and _storage(args[1]) in self._weights:
            name, weight = self._weights[_storage(args[1])]
            self.steps[name].append((target, Part.of(args[1], weight), into))
        elif func is torch.ops.aten.fill_.Scalar and target.packed is None:
            self.padding[target] = into.numel  # it has that number already
        else:
            raise UnknownWay(f"{func} of '{target.name}'")
        return args[0]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _pack(layer: Any, matrix: Tensor) -> None:
    """Make a layer's packed copy anew. The old one goes first, so that its memory serves again.

    Raises:
        GenerationError: vLLM keeps the matrix itself, which it did not before.
    """
    empty, layer.cpu_linear = layer.weight, None
    layer._parameters["weight"] = nn.Parameter(matrix, requires_grad=False)
    try:
        layer.quant_method.process_weights_after_loading(layer)
        if layer.weight.numel():
            raise GenerationError("vLLM did not pack a linear layer's new weight, and would compute without it")
    finally:
        layer._parameters["weight"] = empty
