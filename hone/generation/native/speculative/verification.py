"""A step with drafts: the tokens of its pass, and those that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

import torch
from torch import Tensor

from hone.generation.native.cache import KVCache
from hone.generation.native.contexts import DecodeContext, RowExtent
from hone.generation.native.prefixes import PrefixGroups
from hone.generation.native.speculative.drafts import accepted
from hone.models.attention.cache import KVLayerCache
from hone.models.attention.context import Scoring


class Places:
    """Places of the tokens of a pass: ``N`` packed tokens, all of row 0, then all of row 1; and a padded tile ``[A, Q]``.

    Args:
        lengths: tokens of each of the ``A`` rows, at least 1.
        device: of the tensors.

    Attributes:
        lengths: ``[A]``.
        first: ``[A]`` packed place of each row's first token.
        row: ``[N]`` row of each token.
        offset: ``[N]`` place of each token among those of its row.
        width: ``Q``, tokens of the row with most.
        source: ``[A * Q]`` packed place of the token in each slot of the tile; an unused slot has the row's first token.
        slot: ``[N]`` slot of each token.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        counts = torch.tensor(lengths)
        self.width = int(counts.max())
        first, column = counts.cumsum(0) - counts, torch.arange(self.width)
        used = column < counts[:, None]
        row, offset = used.nonzero().unbind(1)
        source = torch.where(used, first[:, None] + column, first[:, None]).flatten()
        self.lengths, self.first = counts.to(device), first.to(device)
        self.row, self.offset = row.to(device), offset.to(device)
        self.source, self.slot = source.to(device), (row * self.width + offset).to(device)


class DraftedContext(DecodeContext):
    """One or more new tokens for each of the first ``A`` rows, packed; the rows may continue shared prefixes."""

    def __init__(
        self,
        cache: KVCache,  # to read and append to: each row's tokens, without a shared prefix
        past: Tensor,  # ``[A]`` tokens already in each row
        shared: Tensor,  # ``[A]`` tokens of the shared prefix before each row's tokens
        longest: int,  # tokens of the longest row, the new ones included
        groups: PrefixGroups | None,  # the shared prefix of each row; None without shared prefixes
        places: Places,  # of the new tokens
        rope_offset: Tensor | int = 0,  # ``[A]`` added to the number of a token in its sequence for its rotary position
    ) -> None:
        super().__init__(cache, past, shared, RowExtent(-1, longest - 1, 0), groups)
        self._places, self._tokens = places, places.width
        self._place = past[places.row] + places.offset  # in the row
        self.position_ids = ((shared + rope_offset)[places.row] + self._place)[None]

    @property
    def lengths(self) -> Tensor:  # type: ignore[override]
        """``[A]``: new tokens of each row."""
        return self._places.lengths

    def softmax_attention(
        self, cache: KVLayerCache, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Compute attention of the new tokens over prefix and row: ``[1, heads, N, d]`` to ``[1, N, heads, d]``."""
        del key, value
        heads, width = query.shape[1], query.shape[3]
        rows, kv_heads = len(self.past), cache.keys.shape[1]
        tile = query[0].transpose(0, 1)[self._places.source].view(rows, self._tokens, heads, width).transpose(1, 2)
        mixed = self._mixed(cache, layer, tile.reshape(rows * kv_heads, -1, width), scoring)
        slots = mixed.view(rows, heads, self._tokens, -1).transpose(1, 2).flatten(0, 1)
        return slots[self._places.slot][None]

    def write(self, kv: Tensor, states: Tensor) -> None:
        """Write ``states [1, kv_heads, N, d]`` after the tokens of their rows."""
        kv[self._places.row, :, self._place] = states[0].transpose(0, 1).to(kv.dtype)


class Verification:
    """One pass over the last token and the drafts of every row."""

    def __init__(self, drafts: Sequence[Sequence[int]], device: torch.device) -> None:
        self._drafts, self._device = drafts, device
        self.places = Places(self.lengths, device)  # of the ``N`` tokens of the pass

    @property
    def lengths(self) -> list[int]:
        """Tokens of the pass in each row."""
        return [1 + len(tokens) for tokens in self._drafts]

    def input_ids(self, next_token: Tensor) -> Tensor:
        """Return the tokens of the pass, ``[1, N]``, from the last token of each row, ``[A]``."""
        places = self.places
        ids = next_token[places.row]
        ids[places.offset > 0] = torch.tensor(list(chain(*self._drafts)), device=self._device)
        return ids[None]

    def accept(self, sampled: Sequence[int], stops: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the tokens of each row that are kept, of the ``N`` sampled ones."""
        flat, kept = iter(sampled), []
        for drafts, ends in zip(self._drafts, stops, strict=True):
            tokens = list(islice(flat, 1 + len(drafts)))
            kept.append(tokens[: accepted(tokens, drafts, ends)])
        return kept

    def counts(self, kept: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Return the number of drafts of all rows, and how many of them are among the kept tokens."""
        right = 0
        for tokens, drafts in zip(kept, self._drafts, strict=True):
            right += sum(token == draft for token, draft in zip(tokens, drafts, strict=False))
        return sum(map(len, self._drafts)), right

    def index(self, counts: Tensor) -> Tensor:
        """Return the places of the first ``counts [A]`` tokens of each row."""
        return (self.places.offset < counts[self.places.row]).nonzero()[:, 0]


def all_of_row(values: Tensor, counts: Tensor) -> Tensor:
    """Return ``[A]`` whether all of a row's values are true; ``counts [A]`` of the bool ``values [N]`` are each row's."""
    rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    return torch.ones_like(counts, dtype=torch.bool).index_fill(0, rows[~values], False)
