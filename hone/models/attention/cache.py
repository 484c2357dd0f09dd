"""The KV cache of one layer: what it must do, and the usual one of keys and values.

The native engine gives each running sequence a row of the cache. In every forward pass it appends the new tokens to their rows
and asks for their attention over what the rows then hold. A family with other state (compressed keys and values, linear
attention) implements :class:`LayerCache` and names it in :attr:`hone.models.registry.ModelFamily.layer_cache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from hone.models.attention.context import Scoring

Entries = tuple[Tensor, ...]
"""What one layer's cache holds for one row; keys and values are ``[kv_heads, length, head_dim]``."""


class NewTokens(Protocol):
    """The tokens of a forward pass and their places in the cache.

    Attributes:
        rows: ``[R]`` cache rows that get tokens.
        past: ``[R]`` tokens in each before.
        lengths: ``[R]`` new tokens of each. In the pass they follow one another: first all of row 0, then of row 1.
    """

    @property
    def rows(self) -> Tensor: ...
    @property
    def past(self) -> Tensor: ...
    @property
    def lengths(self) -> Tensor: ...


class KVTokens(NewTokens, Protocol):
    """Tokens of a pass that can write keys and values to KV tensors and read them; what ``context.attend`` passes to a cache."""

    def write(self, kv: Tensor, states: Tensor) -> None:
        """Write ``states [batch, kv_heads, length, d]`` of the new tokens into ``kv [rows, kv_heads, capacity, d]``."""
        ...

    def softmax_attention(
        self, cache: KVLayerCache, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Compute attention of the new tokens over their rows of ``cache``, which holds their keys and values already."""
        ...


class RowCache(Protocol):
    """Memory of one layer for every row, whatever its tokens compute with it."""

    # True if each token has entries of its own that softmax attention reads. Then a row's first tokens can be kept
    # without the rest, and rows may read a prompt's entries from one place that they share. False if a row is one
    # state: it is copied only as a whole, and every row holds its own prompt.
    per_token: bool

    def resize(self, rows: int, capacity: int, *, used: int, device: torch.device, dtype: torch.dtype) -> None:
        """Reserve ``rows`` rows of ``capacity`` tokens, keeping the first ``used`` rows."""
        ...

    def copy_rows(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy rows with their first ``length`` tokens: ``sources[i]`` to ``targets[i]``."""
        ...

    def read_row(self, row: int, length: int) -> Entries:
        """Return a copy of a row that holds ``length`` tokens; with ``per_token`` it may hold more."""
        ...

    def write_row(self, row: int, length: int, entries: Entries) -> None:
        """Begin a row with the first ``length`` tokens of what :meth:`read_row` returned."""
        ...

    def free(self) -> None:
        """Give the memory back; the cache is empty afterwards."""
        ...


class LayerCache(RowCache, Protocol):
    """The state that one layer keeps of every row's tokens."""

    def append(self, tokens: NewTokens, *states: Tensor) -> None:
        """Add the new tokens to their rows. A row whose ``past`` is 0 starts empty, whatever it held.

        ``states`` are what the model passed to ``context.attend`` (queries, keys, values) or ``context.mix``.
        """
        ...

    def attend(self, tokens: NewTokens, layer: int, *states: Tensor, scoring: Scoring | None) -> Tensor:
        """Compute the output of each new token over its row up to itself; :meth:`append` was called for them before.

        Without ``per_token`` every row has exactly one new token. ``scoring`` is what ``context.attend`` was given; None from
        ``context.mix``.
        """
        ...


class KVLayerCache:
    """Keys and values of every token, in tensors ``[rows, kv_heads, capacity, head_dim]`` written in place.

    The tensors are made when the first keys and values arrive, in their shapes. A subclass whose values are its keys (a latent of
    both) passes only the keys to :meth:`append`.
    """

    per_token = True

    def __init__(self) -> None:
        self._shape: tuple[int, int, torch.device, torch.dtype] | None = None
        self._tensors: tuple[Tensor, ...] = ()

    @property
    def keys(self) -> Tensor:
        """``[rows, kv_heads, capacity, head_dim]``."""
        return self._tensors[0]

    @property
    def values(self) -> Tensor:
        """``[rows, kv_heads, capacity, value_dim]``."""
        return self._tensors[-1]

    def resize(self, rows: int, capacity: int, *, used: int, device: torch.device, dtype: torch.dtype) -> None:
        self._shape = (rows, capacity, device, dtype)
        self._tensors = tuple(_resized(kv, rows, capacity, used) for kv in self._tensors)

    def append(self, tokens: NewTokens, *states: Tensor) -> None:
        _, *parts = states
        self.require(*(part.shape for part in parts))
        for kv, part in zip(self._tensors, parts, strict=True):
            cast("KVTokens", tokens).write(kv, part)

    def attend(self, tokens: NewTokens, layer: int, *states: Tensor, scoring: Scoring | None) -> Tensor:
        assert scoring is not None
        query, key, value = states
        return cast("KVTokens", tokens).softmax_attention(self, layer, query, key, value, scoring)

    def copy_rows(self, sources: Tensor, targets: Tensor, length: int) -> None:
        for kv in self._tensors:
            kv[targets, :, :length] = kv[sources, :, :length]

    def read_row(self, row: int, length: int) -> Entries:
        return tuple(kv[row, :, :length].clone() for kv in self._tensors)

    def write_row(self, row: int, length: int, entries: Entries) -> None:
        self.require(*((1, *part.shape) for part in entries))
        for kv, part in zip(self._tensors, entries, strict=True):
            kv[row, :, :length] = part[:, :length]

    def free(self) -> None:
        self._tensors, self._shape = (), None

    def require(self, *shapes: Sequence[int]) -> None:
        """Make tensors for keys and values of these shapes ``[any, kv_heads, any, head_dim]``, unless they exist."""
        if self._tensors:
            return
        assert self._shape is not None, "the cache has no rows yet"
        rows, capacity, device, dtype = self._shape
        self._tensors = tuple(torch.zeros(rows, s[1], capacity, s[3], dtype=dtype, device=device) for s in shapes)


def _resized(kv: Tensor, rows: int, capacity: int, used: int) -> Tensor:
    resized = kv.new_empty(rows, kv.shape[1], capacity, kv.shape[3])
    kept, used = min(kv.shape[2], capacity), min(used, kv.shape[0])
    resized[:used, :, :kept] = kv[:used, :, :kept]
    resized[:used, :, kept:].zero_()  # masked values are multiplied by probability 0, and must be numbers
    resized[used:].zero_()
    return resized
