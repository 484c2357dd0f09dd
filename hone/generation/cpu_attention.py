"""Causal attention of packed sequences on the CPU, in pieces that stay in the processor's cache.

torch's CPU kernel multiplies tiles by MKL, and its backward pass takes three times its forward pass; for the head sizes of
small models half of a training step. Here the heads of similar sequences are gathered to rectangles, and a piece is some of
their lanes (sequence and key head) and a block of queries: scores by one product, softmax, one more product. The backward
pass computes the scores again, so that none are kept.

A sequence may begin with another's tokens (the prompt that the samples of a group share). Those are keys to it, and no
queries: their outputs are computed once, by the sequence that they come from.

    keys        . . p p p | s s s s        prefixes end in one column; what stands before them (.) is hidden
    queries                 s s s s        a block of queries sees the prefix and the keys up to its own end; only the square
                            [block)        at its end, where queries and keys are the same tokens, needs a mask
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hone.generation.products import fast_float32_products

QUERY_BLOCK = 128
"""Queries of a piece: shorter blocks waste less above the diagonal, longer ones make larger products."""
PIECE = 1 << 19
"""Most scores of a piece, 2 MiB of them."""
_LEAST_FULL = 0.85


class Sequences(NamedTuple):
    """``B`` sequences in a row of ``N`` packed tokens, each ``[B]``; every token is in the own part of one of them.

    Attributes:
        prefix: where the tokens before it begin that it shares with others.
        shared: how many they are.
        start: where its own tokens begin.
        own: how many they are, at least 1.
    """

    prefix: Tensor
    shared: Tensor
    start: Tensor
    own: Tensor


@dataclass(frozen=True)
class _Rectangle:
    """Sequences of similar lengths: their own tokens from the left, prefixes against them from the right.

    Attributes:
        rows: how many.
        before: columns for prefixes.
        width: columns for own tokens.
        queries: ``[rows * width]`` the packed token in each cell (pads repeat one of their own sequence).
        keys: ``[rows * (before + width)]`` likewise.
        hidden: ``[rows, before]`` whether no prefix token stands there, or None when all places are taken.
    """

    rows: int
    before: int
    width: int
    queries: Tensor
    keys: Tensor
    hidden: Tensor | None


class CausalPlan:
    """How packed sequences are gathered for attention; made once for all layers.

    Args:
        sequences: in the packed row.
    """

    def __init__(self, sequences: Sequences) -> None:
        self._rectangles: list[_Rectangle] = []
        self._cell = torch.empty(int(sequences.own.sum()), 2, dtype=torch.int64)  # rectangle's first cell; cell within
        self._width = torch.empty(len(self._cell), dtype=torch.int64)
        self._heads: dict[tuple[int, int], _HeadPlan] = {}
        cells = 0
        for members in _similar(sequences):
            cells += self._gather(Sequences(*(column[members] for column in sequences)), cells)

    @property
    def fullness(self) -> float:
        """Share of the query cells that hold a token of their own."""
        return len(self._cell) / sum(rectangle.rows * rectangle.width for rectangle in self._rectangles)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention, computed and differentiated in float32 (or better, if the inputs are).

        Args:
            query: ``[N, heads, d]``.
            key: ``[N, kv_heads, d]``; query head ``i`` uses key head ``i // (heads / kv_heads)``.
            value: ``[N, kv_heads, d_v]``.
            scale: factor of the scores.

        Returns:
            ``[N, heads, d_v]`` in the dtype of ``value``.
        """
        heads = query.shape[1], key.shape[1]
        if heads not in self._heads:
            self._heads[heads] = self._for_heads(*heads)
        return _Attention.apply(query, key, value, scale, self._heads[heads])  # type: ignore[return-value]

    def _gather(self, members: Sequences, cells: int) -> int:
        """Add the rectangle of these sequences; returns its query cells."""
        before, width = int(members.shared.max()), int(members.own.max())
        column = torch.arange(width)
        own = members.start[:, None] + torch.minimum(column, members.own[:, None] - 1)
        place = torch.arange(before) - (before - members.shared[:, None])
        prefix = torch.where(place < 0, members.start[:, None], members.prefix[:, None] + place)
        real = column < members.own[:, None]
        self._cell[own[real], 0] = cells
        self._cell[own[real], 1] = torch.arange(own.numel()).view_as(own)[real]
        self._width[own[real]] = width
        hidden = place < 0
        self._rectangles.append(
            _Rectangle(
                len(members.own),
                before,
                width,
                own.flatten(),
                torch.cat([prefix, own], 1).flatten(),
                hidden if bool(hidden.any()) else None,
            )
        )
        return own.numel()

    def _for_heads(self, heads: int, kv_heads: int) -> _HeadPlan:
        head, lanes = torch.arange(heads), []
        for rectangle in self._rectangles:
            queries = rectangle.queries.view(rectangle.rows, 1, -1) * heads + head[:, None]
            keys = rectangle.keys.view(rectangle.rows, 1, -1) * kv_heads + torch.arange(kv_heads)[:, None]
            hidden = None
            if rectangle.hidden is not None:
                bias = torch.zeros(rectangle.hidden.shape).masked_fill_(rectangle.hidden, float("-inf"))
                hidden = bias.repeat_interleave(kv_heads, 0)[:, None]
            shape = (rectangle.rows * kv_heads, heads // kv_heads, rectangle.width)
            lanes.append(_Lanes(shape, rectangle.before, queries.flatten(), keys.flatten(), hidden))
        row, place = self._cell[:, 1] // self._width, self._cell[:, 1] % self._width
        first = self._cell[:, 0] + row * self._width
        back = first[:, None] * heads + head * self._width[:, None] + place[:, None]
        return _HeadPlan(lanes, back.flatten())


class _Lanes(NamedTuple):
    """A rectangle, head by head.

    Attributes:
        shape: lanes (sequences x key heads), heads a key head, queries a lane.
        before: columns of a lane's keys for the prefix; its own tokens follow.
        queries: row of ``query.flatten(0, 1)`` in each cell of ``shape``.
        keys: row of ``key.flatten(0, 1)`` in each of a lane's columns.
        hidden: ``[lanes, 1, before]`` minus infinity where no token stands, else 0; None when all places are taken.
    """

    shape: tuple[int, int, int]
    before: int
    queries: Tensor
    keys: Tensor
    hidden: Tensor | None


class _HeadPlan(NamedTuple):
    """All rectangles, and for each row of ``query.flatten(0, 1)`` its cell over all of them."""

    lanes: list[_Lanes]
    back: Tensor

    @property
    def cells(self) -> int:
        """Of all rectangles."""
        return sum(lanes.queries.numel() for lanes in self.lanes)

    def parts(self, cells: Tensor) -> Iterator[tuple[_Lanes, Tensor]]:
        """Each rectangle with its part of ``cells [cells, d]``."""
        yield from zip(self.lanes, cells.split([lanes.queries.numel() for lanes in self.lanes]), strict=True)


class _Piece(NamedTuple):
    """Some lanes, a block of their queries, and the keys that those see; ``whole`` when that is all of the lanes' keys."""

    rows: slice
    queries: slice
    keys: slice
    whole: bool


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, plan: _HeadPlan) -> Tensor:
        cells = torch.empty(plan.cells, value.shape[2], dtype=_working(query))
        with _float32_products(query):
            for lanes, part in plan.parts(cells):
                q, k, v = _gathered(lanes, query, key, value, scale)
                out = part.view(*lanes.shape, -1)
                for piece in _pieces(lanes):
                    _multiply(_probabilities(q, k, piece, lanes), v[piece.rows, piece.keys], into=_of(out, piece))
        ctx.save_for_backward(query, key, value)
        ctx.scale, ctx.plan = scale, plan
        return cells.index_select(0, plan.back).view(*query.shape[:2], value.shape[2]).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        plan, width, dtype = ctx.plan, value.shape[2], _working(query)
        incoming = grads[0].reshape(-1, width).to(_working(value))
        made = incoming.new_zeros if plan.cells > len(incoming) else incoming.new_empty  # pads have no gradient
        incoming = made(plan.cells, width).index_copy_(0, plan.back, incoming)
        grad_q = torch.empty(plan.cells, query.shape[2], dtype=dtype)
        grad_k = torch.zeros(key.shape[0] * key.shape[1], key.shape[2], dtype=dtype)
        grad_v = torch.zeros(value.shape[0] * value.shape[1], width, dtype=dtype)
        with _float32_products(query):
            for (lanes, part), (_, outer) in zip(plan.parts(grad_q), plan.parts(incoming), strict=True):
                q = part.view(*lanes.shape, -1)
                k, v = _lane_gradients(lanes, query, key, value, outer.view(*lanes.shape, width), ctx.scale, into=q)
                grad_k.index_add_(0, lanes.keys, k.view(-1, key.shape[2]))
                grad_v.index_add_(0, lanes.keys, v.view(-1, width))
        return (
            grad_q.index_select(0, plan.back).mul_(ctx.scale).view(query.shape).to(query.dtype),
            grad_k.view(key.shape).to(key.dtype),
            grad_v.view(value.shape).to(value.dtype),
            None,
            None,
        )


def _lane_gradients(
    lanes: _Lanes, query: Tensor, key: Tensor, value: Tensor, incoming: Tensor, scale: float, *, into: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the gathered keys and values of one rectangle; those of the (scaled) queries go ``into`` their cells."""
    q, k, v = _gathered(lanes, query, key, value, scale)
    grad_k, grad_v = torch.empty_like(k), torch.empty_like(v)
    for piece in _pieces(lanes, last_block_first=True):
        probabilities = _probabilities(q, k, piece, lanes)
        keys, values = k[piece.rows, piece.keys], v[piece.rows, piece.keys]
        queries, outer = _of(q, piece).flatten(1, 2), _of(incoming, piece).flatten(1, 2)
        _put(grad_v, piece, _transposed_product(probabilities, outer))
        grad_p = torch.bmm(outer, values.transpose(1, 2))
        grad_s = torch.ops.aten._softmax_backward_data(grad_p, probabilities, -1, q.dtype)
        _multiply(grad_s, keys, into=_of(into, piece))
        _put(grad_k, piece, _transposed_product(grad_s, queries))
    return grad_k, grad_v


def _of(cells: Tensor, piece: _Piece) -> Tensor:
    """``[lanes of the piece, heads a key head, queries of the block, d]`` of those of all lanes."""
    return cells[piece.rows, :, piece.queries]


def _multiply(left: Tensor, right: Tensor, *, into: Tensor) -> None:
    """``left [b, m, k]`` with ``right [b, k, d]``, into a piece's cells."""
    if into.is_contiguous():
        torch.bmm(left, right, out=into.view(len(left), -1, right.shape[2]))
    else:
        into.copy_(torch.bmm(left, right).view(into.shape))


def _transposed_product(scores: Tensor, states: Tensor) -> Tensor:
    """``scores [b, q, k]``, transposed, with ``states [b, q, d]``: ``[b, k, d]``, as the transpose of a product that reads the
    many scores as they lie, in half the time.
    """
    return torch.bmm(states.transpose(1, 2), scores).transpose(1, 2)


@contextlib.contextmanager
def _float32_products(states: Tensor) -> Iterator[None]:
    with fast_float32_products(states.device), torch.autocast(states.device.type, enabled=False):
        yield


def _gathered(lanes: _Lanes, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled queries ``[lanes, heads a key head, width, d]``, keys and values ``[lanes, before + width, d]``."""
    q = query.flatten(0, 1).index_select(0, lanes.queries).to(_working(query)).mul_(scale)
    k, v = (states.flatten(0, 1).index_select(0, lanes.keys).to(_working(states)) for states in (key, value))
    width = lanes.before + lanes.shape[2]
    return q.view(*lanes.shape, -1), k.view(lanes.shape[0], width, -1), v.view(lanes.shape[0], width, -1)


def _working(states: Tensor) -> torch.dtype:
    return torch.promote_types(states.dtype, torch.float32)


def _pieces(lanes: _Lanes, *, last_block_first: bool = False) -> Iterator[_Piece]:
    count, group, length = lanes.shape
    blocks = -(-length // QUERY_BLOCK)
    edges = [length * i // blocks for i in range(blocks + 1)]
    found = [*zip(edges, edges[1:], strict=False)]
    for start, end in reversed(found) if last_block_first else found:
        seen = lanes.before + end
        together = max(1, PIECE // (group * (end - start) * seen))
        for first in range(0, count, together):
            yield _Piece(slice(first, min(count, first + together)), slice(start, end), slice(0, seen), end == length)


def _put(gradient: Tensor, piece: _Piece, part: Tensor) -> None:
    """The last block of queries sees all keys and comes first: it writes, the others add."""
    if piece.whole:
        gradient[piece.rows] = part
    else:
        gradient[piece.rows, piece.keys] += part


def _probabilities(q: Tensor, k: Tensor, piece: _Piece, lanes: _Lanes) -> Tensor:
    """``[lanes of the piece, heads a key head * queries, keys seen]``."""
    start, end = piece.queries.start, piece.queries.stop
    queries = _of(q, piece)
    scores = torch.bmm(queries.flatten(1, 2), k[piece.rows, piece.keys].transpose(1, 2))
    scores.view(*queries.shape[:3], -1)[..., lanes.before + start :] += _later(end - start, q.dtype)
    if lanes.hidden is not None:
        scores[..., : lanes.before] += lanes.hidden[piece.rows]
    return scores.softmax(-1)


@lru_cache(maxsize=16)
def _later(length: int, dtype: torch.dtype) -> Tensor:
    """``[length, length]`` minus infinity where a key comes after a query, else 0."""
    with torch.inference_mode(False):
        return torch.full((length, length), float("-inf"), dtype=dtype).triu_(1)


def _similar(sequences: Sequences) -> list[list[int]]:
    """Sequences in groups of similar lengths, as few as keep every rectangle at least 85 % full of scores that count. Those
    with a prefix and those without stay apart.
    """
    own, shared = sequences.own.tolist(), sequences.shared.tolist()
    groups: list[list[int]] = []
    area = before = width = 0
    for row in sorted(range(len(own)), key=lambda row: (not shared[row], -own[row], -shared[row], row)):
        added, widest = own[row] * (own[row] + shared[row]), max(before, shared[row])
        first_without = bool(groups) and not shared[row] and before > 0
        if not groups or first_without or area + added < _LEAST_FULL * (len(groups[-1]) + 1) * width * (widest + width):
            groups.append([])
            area, widest, width = 0, shared[row], own[row]
        groups[-1].append(row)
        area, before = area + added, widest
    return groups
