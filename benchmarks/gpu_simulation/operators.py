"""Bytes, operations and launches of torch's operators, from the tensors that go in and come out.

A kernel reads each of its inputs once and writes each of its outputs once. A gather reads only what it returns. Operators that
CUDA implements by several kernels are listed with their passes over the input (read from ``aten/src/ATen/native`` of torch 2.13).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpu_simulation.kernels import Work

VIEWS = frozenset(
    [
        "view",
        "expand",
        "slice",
        "select",
        "transpose",
        "t",
        "permute",
        "unsqueeze",
        "squeeze",
        "detach",
        "alias",
        "as_strided",
        "split",
        "split_with_sizes",
        "unbind",
        "_unsafe_view",
        "unfold",
        "lift_fresh",
        "_reshape_alias",
        "view_as_real",
        "view_as_complex",
        "diagonal",
    ]
)
"""Operators that launch nothing."""
ALLOCATIONS = frozenset(["empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"])
"""Operators that only reserve memory."""
_GATHERS = frozenset(["index_select", "gather", "embedding", "index", "take", "searchsorted"])
_WRITES = frozenset(
    [
        "zeros",
        "ones",
        "full",
        "zeros_like",
        "ones_like",
        "full_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "fill_",
        "zero_",
        "arange",
    ]
)
_SCATTERS = {"index_put_": 2, "_index_put_impl_": 2, "index_copy_": 3, "scatter_": -1, "scatter": -1, "scatter_add_": 3}
"""Operators that write some places of their first argument, and the index of the argument with the values."""
_ACCUMULATING = frozenset(["scatter_add_", "index_add_", "index_add", "embedding_dense_backward"])
_MATMULS = frozenset(["mm", "addmm", "bmm", "baddbmm", "addmm_", "matmul_wide", "add_matmul_wide"])
_PASSES: Mapping[str, tuple[float, int]] = {
    # passes over the largest input, launches
    "logsumexp": (6.0, 9),  # amax reads, the subtraction and exp_ read and write, sum reads; the rest is small
    "sort": (16.0, 8),  # radix sort of values and indices
    "cumsum": (2.0, 2),
    "repeat_interleave": (2.0, 3),
    "nonzero": (3.0, 4),
    "argmax": (1.0, 1),
}
_COLUMNS = 128
"""Logits of a row in a tile of the output layer's programs."""
_LAUNCHES = {"add_rms_norm_backward": 3, "split_heads_backward": 3, "attend_pages": 2}
"""Launches of fused operators that sum over rows (the program, the sum of its partial sums, and that in the weight's dtype) or pages."""


class Cost(NamedTuple):
    """Bytes, operations, their unit, and launches of one call."""

    moved: float
    operations: float = 0.0
    work: Work = Work.MEMORY
    launches: int = 1


def size_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's distinct numbers; expanded dimensions count once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count * tensor.element_size()


def cost_of(name: str, arguments: Sequence[object], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Cost:
    """Return the cost of an operator.

    Args:
        name: of the operator, without namespace and overload.
        arguments: its positional arguments.
        inputs: all tensors in its arguments, each once.
        outputs: the tensors that it returns; one that it changes in place is an input too.
    """
    written = sum(map(size_of, outputs))
    if name in _MATMULS:
        left, right = [x for x in arguments if isinstance(x, Tensor)][-2:]
        unit = Work.MATMUL_FLOAT32 if left.dtype == torch.float32 else Work.MATMUL
        used = inputs if name in ("addmm", "addmm_", "baddbmm", "add_matmul_wide") else (left, right)
        written = size_of(inputs[0]) if name == "add_matmul_wide" else written
        return Cost(sum(map(size_of, used)) + written, 2.0 * left.numel() * right.shape[-1], unit)
    if name in ("vocabulary_statistics", "vocabulary_gradient"):
        hidden, weight = [x for x in arguments if isinstance(x, Tensor)][:2]
        operations, forward = 2.0 * hidden.numel() * len(weight), name == "vocabulary_statistics"
        between = (
            24.0 * len(hidden) * len(weight) / _COLUMNS if forward else 0.0
        )  # three numbers a tile, written and read
        launches = 3 if forward else 1  # zeros, the tiles, and what puts them together
        return Cost(sum(map(size_of, inputs)) + written + between, operations, Work.OWN_MATMUL, launches)
    if name in _WRITES:
        return Cost(written)
    if name in _GATHERS:
        return Cost(2 * written + sum(size_of(x) for x in inputs if not x.is_floating_point()))
    if name == "_embedding_bag_forward_only":  # each row of the table is used once
        return Cost(sum(map(size_of, inputs)) + size_of(outputs[0]))
    if name in _ACCUMULATING and inputs:
        added = inputs[-1] if name != "embedding_dense_backward" else inputs[0]
        target = written if name in ("embedding_dense_backward", "index_add") else 0
        return Cost(target + 3 * size_of(added))
    if name in _SCATTERS:
        place = _SCATTERS[name]
        values = arguments[place] if place >= 0 and len(arguments) > place else inputs[-1]
        index = sum(size_of(x) for x in inputs if x.dtype == torch.int64)
        return Cost(index + 2 * (size_of(values) if isinstance(values, Tensor) else 0))
    if name in _PASSES:
        passes, launches = _PASSES[name]
        return Cost(passes * max(map(size_of, inputs)), launches=launches)
    if name == "copy_":
        return Cost(size_of(inputs[-1]) + written)
    return Cost(sum(map(size_of, inputs)) + written, launches=_LAUNCHES.get(name, 1))


@functools.cache
def is_composite(func: Any) -> bool:
    """Return whether torch implements an operator by other operators alone."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def caller() -> str:
    """Name the autograd node that is computed, or else the innermost function of Hone or transformers."""
    node = torch._C._current_autograd_node()
    if node is not None:
        return node.name()
    frame: Any = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("hone.", "transformers.")):
            return frame.f_code.co_qualname
        frame = frame.f_back
    return ""
