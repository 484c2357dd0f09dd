"""Causal attention on the CPU, for training, in pieces that stay in the processor's cache.

torch's CPU kernel multiplies tiles by MKL, and its backward pass takes three times its forward pass; for the head sizes of
small models half of a training step. Here a piece is some sequences and a block of queries: scores of all of them by one
product, softmax, one more product. The backward pass computes the scores again, so that none are kept.

    keys     0 ...... end of the block          a query block sees the keys up to its end; only the square at its end,
    queries  block [start, end)                 where queries and keys are the same tokens, needs a mask
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hone.generation.products import fast_float32_products

QUERY_BLOCK = 128
"""Queries of a piece: shorter blocks waste less above the diagonal, longer ones make larger products."""
PIECE = 1 << 19
"""Most scores of a piece, 2 MiB of them."""


def blocked_causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention, computed and differentiated in float32 (or better, if the inputs are).

    Args:
        query: ``[b, heads, L, d]``.
        key: ``[b, kv_heads, L, d]``; query head ``i`` uses key head ``i // (heads / kv_heads)``.
        value: ``[b, kv_heads, L, d_v]``.
        scale: factor of the scores.

    Returns:
        ``[b, heads, L, d_v]`` in the dtype of ``value``.
    """
    return _Blocked.apply(query, key, value, scale)  # type: ignore[return-value]


class _Piece(NamedTuple):
    rows: slice
    queries: slice


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        q, k, v = _lanes(query, key, value)
        out = q.new_empty(*q.shape[:3], v.shape[2])
        with _float32_products(q):
            for piece in _pieces(*q.shape[:3]):
                probabilities = _probabilities(q, k, piece, scale)
                seen = v[piece.rows, : piece.queries.stop]
                block = torch.bmm(probabilities, seen)
                out[piece.rows, :, piece.queries] = block.view(len(seen), q.shape[1], -1, v.shape[2])
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        return out.view(*query.shape[:3], v.shape[2]).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        q, k, v = _lanes(query, key, value)
        grad = grads[0].to(q.dtype).reshape(*q.shape[:3], v.shape[2])
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        with _float32_products(q):
            for piece in _pieces(*q.shape[:3]):
                probabilities = _probabilities(q, k, piece, ctx.scale)
                until = slice(0, piece.queries.stop)
                keys, values = k[piece.rows, until], v[piece.rows, until]
                queries = q[piece.rows, :, piece.queries].flatten(1, 2)
                incoming = grad[piece.rows, :, piece.queries].flatten(1, 2)
                grad_v[piece.rows, until] += torch.bmm(probabilities.transpose(1, 2), incoming)
                grad_p = torch.bmm(incoming, values.transpose(1, 2))
                grad_s = torch.ops.aten._softmax_backward_data(grad_p, probabilities, -1, q.dtype).mul_(ctx.scale)
                found = torch.bmm(grad_s, keys)
                grad_q[piece.rows, :, piece.queries] = found.view(len(keys), q.shape[1], -1, q.shape[3])
                grad_k[piece.rows, until] += torch.bmm(grad_s.transpose(1, 2), queries)
        return (
            grad_q.view(query.shape).to(query.dtype),
            grad_k.view(key.shape).to(key.dtype),
            grad_v.view(value.shape).to(value.dtype),
            None,
        )


@contextlib.contextmanager
def _float32_products(states: Tensor) -> Iterator[None]:
    with fast_float32_products(states.device), torch.autocast(states.device.type, enabled=False):
        yield


def _lanes(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """By lane (sequence and key head): queries ``[lanes, heads a key head, L, d]``, keys and values ``[lanes, L, d]``."""
    lanes, group = key.shape[0] * key.shape[1], query.shape[1] // key.shape[1]
    q, k, v = (states.to(torch.promote_types(states.dtype, torch.float32)) for states in (query, key, value))
    return q.reshape(lanes, group, *q.shape[2:]), k.reshape(lanes, *k.shape[2:]), v.reshape(lanes, *v.shape[2:])


def _pieces(lanes: int, group: int, length: int) -> Iterator[_Piece]:
    blocks = -(-length // QUERY_BLOCK)
    edges = [length * i // blocks for i in range(blocks + 1)]
    for start, end in zip(edges, edges[1:], strict=False):
        together = max(1, PIECE // (group * (end - start) * end))
        for first in range(0, lanes, together):
            yield _Piece(slice(first, min(lanes, first + together)), slice(start, end))


def _probabilities(q: Tensor, k: Tensor, piece: _Piece, scale: float) -> Tensor:
    """``[lanes of the piece, heads a key head * queries, keys seen]``."""
    start, end = piece.queries.start, piece.queries.stop
    queries = q[piece.rows, :, piece.queries]
    scores = torch.bmm(queries.flatten(1, 2) * scale, k[piece.rows, :end].transpose(1, 2))
    later = torch.full((end - start, end - start), float("-inf"), dtype=q.dtype).triu_(1)
    scores.view(*queries.shape[:3], end)[..., start:] += later
    return scores.softmax(-1)
