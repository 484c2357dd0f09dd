"""The fused attention kernels of CUDA (FlashAttention 2) on tensors without storage, with their costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpu_simulation.kernels import Work
from gpu_simulation.operators import size_of

Add = Callable[..., None]
"""Records a kernel; takes the fields of :class:`~gpu_simulation.kernels.Kernel`."""

VARLEN, VARLEN_BACKWARD = "_varlen_attn", "_varlen_attn_backward"
"""Operators of ``torch.nn.attention.varlen``."""
PAGES = "attend_pages"
"""Hone's operator over pages."""
_BACKWARD_OPERATIONS = 2.5
"""Operations of the backward pass divided by those of the forward pass: it multiplies five times instead of twice."""


def attention_operations(query: Tensor, key: Tensor, *, causal: bool) -> float:
    """Return the operations of ``query [b, heads, Q, d]`` over ``key [b, kv_heads, K, d]``; a causal kernel skips masked blocks."""
    rows, heads, queries, width = query.shape
    keys = key.shape[2]
    pairs = queries * (queries + 1) / 2 if causal else queries * keys
    return 4.0 * rows * heads * pairs * width


def varlen_pairs(query_ends: Tensor, key_ends: Tensor, window: int) -> float:
    """Return the visible pairs of queries and keys in a causal variable-length call.

    Args:
        query_ends: ``[B + 1]`` int32 on the CPU, first query of each sequence, and the number of queries.
        key_ends: ``[B + 1]`` the same for keys; the last query sees the last key.
        window: keys before a query's own that it sees; negative means all.
    """
    queries, keys = query_ends.diff().double(), key_ends.diff().double()
    if window < 0:
        return float((queries * (keys - queries) + queries * (queries + 1) / 2).sum())
    first = keys - queries + 1  # keys that the first query would see
    few = (window + 1 - first).clamp(
        min=torch.zeros_like(queries), max=queries
    )  # queries that the window does not limit
    return float((few * first + few * (few - 1) / 2 + (queries - few) * (window + 1)).sum())


def record_varlen(add: Add, name: str, arguments: Sequence[Any], ends: tuple[Tensor, Tensor]) -> None:
    """Record a call of torch's variable-length attention, or of its backward pass.

    Args:
        add: records a kernel.
        name: of the operator.
        arguments: of the operator.
        ends: of queries and keys, on the CPU.
    """
    backward = name == VARLEN_BACKWARD
    query, key, value = arguments[1:4] if backward else arguments[:3]
    window = (arguments[13] if backward else arguments[9])[0]
    operations = 4.0 * query.shape[1] * query.shape[2] * varlen_pairs(*ends, window)
    if backward:
        _record_backward(add, query, key, value, operations)
        return
    moved = 2 * size_of(query) + size_of(key) + size_of(value) + 4 * query.shape[0] * query.shape[1]
    add("attention", moved=moved, operations=operations, work=Work.ATTENTION)


def record_pages(add: Add, arguments: Sequence[Any], lengths: Tensor) -> None:
    """Record a call over pages; each row reads its keys and values, also those in pages that it shares.

    The second kernel merges the results of the pages, which the first has written in float32.

    Args:
        add: records a kernel.
        arguments: of ``hone::attend_pages``.
        lengths: ``[R]`` keys of each row, on the CPU.
    """
    query, keys, values, tables = arguments[:4]
    window = arguments[7]
    read = lengths if window is None else lengths.clamp(max=window)
    pages = lengths.add(keys.shape[1] - 1) // keys.shape[1] - (lengths - read) // keys.shape[1]
    count, width = query.shape[1:]
    token = sum(states.shape[2] * states.shape[3] * states.element_size() for states in (keys, values))
    parts = 4.0 * float(pages.sum()) * count * (width + 1)
    moved = size_of(query) + float(read.sum()) * token + size_of(tables) + parts
    add("attention", moved=moved, operations=4.0 * float(read.sum()) * count * width, work=Work.ATTENTION)
    add("attention, merge of pages", moved=parts + size_of(query))


def fused_attention(
    add: Add, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, causal: bool = False
) -> Tensor:
    """Return an output ``[b, heads, Q, d]`` without content, and record the kernel; its backward pass records its own."""
    return _FusedAttention.apply(query, key, value, mask, causal, add)  # type: ignore[return-value]


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, add: Add
    ) -> Tensor:
        operations = attention_operations(query, key, causal=causal)
        ctx.save_for_backward(query, key, value)
        ctx.settings = operations, add
        moved = sum(size_of(x) for x in (query, key, value, query, mask) if x is not None)
        add("attention", moved=moved, operations=operations, work=Work.ATTENTION)
        return _like(query)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        operations, add = ctx.settings
        _record_backward(add, query, key, value, operations)
        return _like(query), _like(key), _like(value), None, None, None


def _record_backward(add: Add, query: Tensor, key: Tensor, value: Tensor, operations: float) -> None:
    """Record the backward pass of attention whose forward pass takes ``operations``; the number of heads is dimension 1."""
    moved = 4 * size_of(query) + 2 * (size_of(key) + size_of(value)) + 8 * query.numel()  # float32 dQ, read again
    launches = 3  # row sums, the main kernel, dQ to the compute dtype
    if query.shape[1] != key.shape[1]:  # dK and dV of each query head, then their sum
        moved += 4 * query.shape[1] // key.shape[1] * size_of(key)
        launches += 2
    add(
        "attention backward",
        moved=moved,
        operations=_BACKWARD_OPERATIONS * operations,
        work=Work.ATTENTION_BACKWARD,
        launches=launches,
    )


def _like(states: Tensor) -> Tensor:
    """Return memory in the kernel's layout: ``[b, length, heads, d]``, seen as ``[b, heads, length, d]``."""
    rows, heads, length, width = states.shape
    return states.new_empty(rows, length, heads, width).transpose(1, 2)
