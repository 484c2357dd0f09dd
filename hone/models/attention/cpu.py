"""Causal attention of packed sequences on the CPU, in blocks whose scores fit the processor's cache.

torch's CPU kernel multiplies by MKL, and its backward pass takes three times its forward pass. For the head sizes of small
models that is half of a training step. Here sequences of similar length are gathered into padded tiles
(:class:`CausalTiles`), and a block is some (sequence, key head) pairs with some of their queries: a matmul for
the scores, softmax, another matmul. The backward pass recomputes the scores, so that none are kept.

A block of queries sees the prefix and the suffix up to its own end. Only the square at that end, where queries and keys are the
same tokens, needs a causal mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hone.models.attention.tiles import Sequences, pack_tiles, score_count
from hone.models.kernels.cpu.matmul import fast_float32_matmuls

KEY_SLOTS = 1 << 14
"""Key slots that a tile may always have; more only up to twice the packed tokens, because each sequence gathers its prefix again."""


@dataclass(frozen=True)
class CausalTile:
    """Sequences of similar lengths."""

    rows: int  # number of sequences
    prefix_width: int  # columns for prefixes
    width: int  # columns for suffixes
    queries: Tensor  # ``[rows * width]`` packed token in each query slot; padding repeats a token of its own sequence
    keys: Tensor  # ``[rows * (prefix_width + width)]`` packed token in each key slot
    hidden: Tensor | None  # ``[rows, prefix_width]`` True where no prefix token is, or None if every column is used


class HeadTile(NamedTuple):
    """A tile with one batch entry for each pair of a sequence and a key head."""

    shape: tuple[int, int, int]  # batch entries, query heads of a key head, queries
    prefix_width: int  # key columns of the prefix; those of the suffix follow
    queries: Tensor  # row of ``query.flatten(0, 1)`` in each slot of ``shape``
    keys: Tensor  # row of ``key.flatten(0, 1)`` in each key slot
    # ``[batch, 1, prefix_width]`` minus infinity where no token is, else 0; None if every column is used
    hidden: Tensor | None


class HeadTiles(NamedTuple):
    """All tiles, and for each row of ``query.flatten(0, 1)`` its slot, counted over all tiles."""

    tiles: list[HeadTile]
    slot_of: Tensor

    @property
    def slots(self) -> int:
        return sum(tile.queries.numel() for tile in self.tiles)

    def split(self, slots: Tensor) -> Iterator[tuple[HeadTile, Tensor]]:
        """Each tile with its part of ``slots [slots, d]``."""
        yield from zip(self.tiles, slots.split([tile.queries.numel() for tile in self.tiles]), strict=True)


class CausalTiles:
    """The tiles of packed sequences; computed once for all layers.

    In a tile, suffixes begin in one column, and prefixes end in the column before it:

        keys        . . p p p | s s s s    columns before a prefix (.) are masked
        queries                 s s s s    prefixes have no queries here: their owner computes their outputs
    """

    def __init__(self, sequences: Sequences) -> None:
        self.tiles: list[CausalTile] = []
        tokens = int(sequences.suffix_length.sum())
        self._slot = torch.empty(
            tokens, 2, dtype=torch.int64
        )  # first slot of the token's tile, and slot within the tile
        self._width = torch.empty(tokens, dtype=torch.int64)
        self._for_heads: dict[tuple[int, int], HeadTiles] = {}
        slots = 0
        lengths = sequences.suffix_length.tolist(), sequences.prefix_length.tolist()
        limit = max(KEY_SLOTS, 2 * tokens)
        for rows in pack_tiles(*lengths, score_count):
            members = torch.tensor(rows)
            keys = len(rows) * int(sequences.prefix_length[members].max() + sequences.suffix_length[members].max())
            for part in members.chunk(-(-keys // limit)):
                slots += self._add_tile(sequences, part, slots)

    @property
    def fullness(self) -> float:
        """Share of the query slots that hold a token of their own."""
        return len(self._slot) / sum(tile.rows * tile.width for tile in self.tiles)

    def for_heads(self, heads: int, kv_heads: int) -> HeadTiles:
        if (heads, kv_heads) not in self._for_heads:
            self._for_heads[heads, kv_heads] = self._with_heads(heads, kv_heads)
        return self._for_heads[heads, kv_heads]

    def _add_tile(self, sequences: Sequences, members: Tensor, slots: int) -> int:
        """Add the tile of these sequences, before which there are ``slots`` query slots; returns its query slots."""
        members = members[:, None]
        prefix_length, suffix_length = sequences.prefix_length[members], sequences.suffix_length[members]
        prefix_width, width = int(prefix_length.max()), int(suffix_length.max())
        column = torch.arange(width)
        suffix = sequences.packed_index(members, prefix_length + torch.minimum(column, suffix_length - 1))
        place = torch.arange(prefix_width) - (prefix_width - prefix_length)
        prefix = sequences.packed_index(members, torch.where(place < 0, prefix_length, place))
        real = column < suffix_length
        self._slot[suffix[real], 0] = slots
        self._slot[suffix[real], 1] = torch.arange(suffix.numel()).view_as(suffix)[real]
        self._width[suffix[real]] = width
        hidden = place < 0
        keys = torch.cat([prefix, suffix], 1).flatten()
        hidden_or_none = hidden if bool(hidden.any()) else None
        self.tiles.append(CausalTile(len(suffix), prefix_width, width, suffix.flatten(), keys, hidden_or_none))
        return suffix.numel()

    def _with_heads(self, heads: int, kv_heads: int) -> HeadTiles:
        head, tiles = torch.arange(heads), []
        for tile in self.tiles:
            queries = tile.queries.view(tile.rows, 1, -1) * heads + head[:, None]
            keys = tile.keys.view(tile.rows, 1, -1) * kv_heads + torch.arange(kv_heads)[:, None]
            hidden = None
            if tile.hidden is not None:
                bias = torch.zeros(tile.hidden.shape).masked_fill_(tile.hidden, float("-inf"))
                hidden = bias.repeat_interleave(kv_heads, 0)[:, None]
            shape = (tile.rows * kv_heads, heads // kv_heads, tile.width)
            tiles.append(HeadTile(shape, tile.prefix_width, queries.flatten(), keys.flatten(), hidden))
        row, place = self._slot[:, 1] // self._width, self._slot[:, 1] % self._width
        first = self._slot[:, 0] + row * self._width
        slot_of = first[:, None] * heads + head * self._width[:, None] + place[:, None]
        return HeadTiles(tiles, slot_of.flatten())


QUERY_BLOCK = 128
"""Queries of a block. Fewer waste less above the diagonal, more make larger matmuls."""
BLOCK_SCORES = 1 << 19
"""Most scores of a block: 2 MiB."""


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, tiles: CausalTiles) -> Tensor:
    """Compute attention ``[N, heads, d_v]`` of ``query [N, heads, d]``, forward and backward in float32 (or better, if inputs are).

    Query head ``i`` uses key head ``i // (heads / kv_heads)`` of ``key [N, kv_heads, d]`` and ``value [N, kv_heads, d_v]``.
    """
    for_heads = tiles.for_heads(query.shape[1], key.shape[1])
    return _Attention.apply(query, key, value, scale, for_heads)  # type: ignore[return-value]


class _Block(NamedTuple):
    """Some batch entries of a tile, a slice of their queries, and the keys that those see."""

    batch: slice
    queries: slice
    keys: slice
    sees_all: bool  # whether that is all keys of the tile


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, tiles: HeadTiles) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale, ctx.tiles = scale, tiles
        slots = torch.empty(tiles.slots, value.shape[2], dtype=_working_dtype(query))
        with _float32_matmuls(query):
            for tile, part in tiles.split(slots):
                q, k, v = _gathered(tile, query, key, value, scale)
                out = part.view(*tile.shape, -1)
                for block in _blocks(tile):
                    probabilities = _probabilities(q, k, block, tile)
                    _multiply(probabilities, v[block.batch, block.keys], into=_queries_of(out, block))
        return slots.index_select(0, tiles.slot_of).view(*query.shape[:2], value.shape[2]).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        return *_gradients(grads[0], query, key, value, ctx.scale, ctx.tiles), None, None


def causal_attention_gradients(
    incoming: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, tiles: CausalTiles
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value from the output's, ``[N, heads, d_v]``; see :func:`causal_attention`."""
    return _gradients(incoming, query, key, value, scale, tiles.for_heads(query.shape[1], key.shape[1]))


def _gradients(
    incoming: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, tiles: HeadTiles
) -> tuple[Tensor, Tensor, Tensor]:
    width, dtype = value.shape[2], _working_dtype(query)
    incoming = incoming.reshape(-1, width).to(_working_dtype(value))
    new = incoming.new_zeros if tiles.slots > len(incoming) else incoming.new_empty  # padding has no gradient
    incoming = new(tiles.slots, width).index_copy_(0, tiles.slot_of, incoming)
    grad_q = torch.empty(tiles.slots, query.shape[2], dtype=dtype)
    grad_k = torch.zeros(key.shape[0] * key.shape[1], key.shape[2], dtype=dtype)
    grad_v = torch.zeros(value.shape[0] * value.shape[1], width, dtype=dtype)
    with _float32_matmuls(query):
        for (tile, part), (_, outer) in zip(tiles.split(grad_q), tiles.split(incoming), strict=True):
            q = part.view(*tile.shape, -1)
            k, v = _tile_gradients(tile, query, key, value, outer.view(*tile.shape, width), scale, into=q)
            grad_k.index_add_(0, tile.keys, k.view(-1, key.shape[2]))
            grad_v.index_add_(0, tile.keys, v.view(-1, width))
    return (
        grad_q.index_select(0, tiles.slot_of).mul_(scale).view(query.shape).to(query.dtype),
        grad_k.view(key.shape).to(key.dtype),
        grad_v.view(value.shape).to(value.dtype),
    )


def _tile_gradients(
    tile: HeadTile, query: Tensor, key: Tensor, value: Tensor, incoming: Tensor, scale: float, *, into: Tensor
) -> tuple[Tensor, Tensor]:
    """Return gradients of the gathered keys and values of one tile; write those of the scaled queries ``into`` their slots."""
    q, k, v = _gathered(tile, query, key, value, scale)
    grad_k, grad_v = torch.empty_like(k), torch.empty_like(v)
    for block in _blocks(tile, last_queries_first=True):
        probabilities = _probabilities(q, k, block, tile)
        keys, values = k[block.batch, block.keys], v[block.batch, block.keys]
        queries, outer = _queries_of(q, block).flatten(1, 2), _queries_of(incoming, block).flatten(1, 2)
        _accumulate(grad_v, block, _transposed_matmul(probabilities, outer))
        grad_p = torch.bmm(outer, values.transpose(1, 2))
        grad_s = torch.ops.aten._softmax_backward_data(grad_p, probabilities, -1, q.dtype)
        _multiply(grad_s, keys, into=_queries_of(into, block))
        _accumulate(grad_k, block, _transposed_matmul(grad_s, queries))
    return grad_k, grad_v


def _queries_of(slots: Tensor, block: _Block) -> Tensor:
    """The block's part ``[batch, query heads of a key head, queries, d]`` of a tile's query slots."""
    return slots[block.batch, :, block.queries]


def _multiply(left: Tensor, right: Tensor, *, into: Tensor) -> None:
    """Write ``left [b, m, k]`` times ``right [b, k, d]`` into a block's slots."""
    if into.is_contiguous():
        torch.bmm(left, right, out=into.view(len(left), -1, right.shape[2]))
    else:
        into.copy_(torch.bmm(left, right).view(into.shape))


def _transposed_matmul(scores: Tensor, states: Tensor) -> Tensor:
    """Multiply transposed ``scores [b, q, k]`` with ``states [b, q, d]`` to ``[b, k, d]``.

    It is computed as the transpose of a matmul that reads the large scores contiguously, which takes half the time.
    """
    return torch.bmm(states.transpose(1, 2), scores).transpose(1, 2)


@contextlib.contextmanager
def _float32_matmuls(states: Tensor) -> Iterator[None]:
    with fast_float32_matmuls(states.device), torch.autocast(states.device.type, enabled=False):
        yield


def _gathered(tile: HeadTile, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled queries ``[batch, query heads of a key head, width, d]``; keys and values ``[batch, prefix_width + width, d]``."""
    q = query.flatten(0, 1).index_select(0, tile.queries).to(_working_dtype(query)).mul_(scale)
    k, v = (states.flatten(0, 1).index_select(0, tile.keys).to(_working_dtype(states)) for states in (key, value))
    width = tile.prefix_width + tile.shape[2]
    return q.view(*tile.shape, -1), k.view(tile.shape[0], width, -1), v.view(tile.shape[0], width, -1)


def _working_dtype(states: Tensor) -> torch.dtype:
    return torch.promote_types(states.dtype, torch.float32)


def _blocks(tile: HeadTile, *, last_queries_first: bool = False) -> Iterator[_Block]:
    batch, group, length = tile.shape
    count = -(-length // QUERY_BLOCK)
    edges = [length * i // count for i in range(count + 1)]
    spans = [*zip(edges, edges[1:], strict=False)]
    for start, end in reversed(spans) if last_queries_first else spans:
        visible = tile.prefix_width + end
        together = max(1, BLOCK_SCORES // (group * (end - start) * visible))
        for first in range(0, batch, together):
            yield _Block(
                slice(first, min(batch, first + together)), slice(start, end), slice(0, visible), end == length
            )


def _accumulate(gradient: Tensor, block: _Block, part: Tensor) -> None:
    """Write or add a block's gradient of keys or values; the last queries come first, see all keys, and write."""
    if block.sees_all:
        gradient[block.batch] = part
    else:
        gradient[block.batch, block.keys] += part


def _probabilities(q: Tensor, k: Tensor, block: _Block, tile: HeadTile) -> Tensor:
    """Attention probabilities ``[batch, query heads of a key head * queries, visible keys]`` of a block."""
    start, end = block.queries.start, block.queries.stop
    queries = _queries_of(q, block)
    scores = torch.bmm(queries.flatten(1, 2), k[block.batch, block.keys].transpose(1, 2))
    scores.view(*queries.shape[:3], -1)[..., tile.prefix_width + start :] += _causal_bias(end - start, q.dtype)
    if tile.hidden is not None:
        scores[..., : tile.prefix_width] += tile.hidden[block.batch]
    return scores.softmax(-1)


@lru_cache(maxsize=16)
def _causal_bias(length: int, dtype: torch.dtype) -> Tensor:
    """``[length, length]`` minus infinity where a key comes after a query, else 0."""
    with torch.inference_mode(False):
        return torch.full((length, length), float("-inf"), dtype=dtype).triu_(1)
