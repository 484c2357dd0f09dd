"""A step with drafts: the tokens of its pass, and those that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

import torch
from torch import Tensor

from hone.generation.native.speculative.context import Places
from hone.generation.native.speculative.drafts import accepted


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
