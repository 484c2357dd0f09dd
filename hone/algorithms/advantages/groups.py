"""Statistics over the responses to one prompt, given back row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Rows by group; rows without a selected token belong to none. Statistics are float64 and come a row, ``[B]``.

    Attributes:
        index: ``[B]`` group number of each row.
        member: ``[B]`` true where the row takes part.
        count: ``[B]`` members of the row's group, float64.
        size: number of groups.
    """

    index: Tensor
    member: Tensor
    count: Tensor
    size: int

    @classmethod
    def of(cls, group_ids: Sequence[Any] | Tensor, response_mask: Tensor) -> Groups:
        """Number the groups, in order of appearance; members are rows with a selected token in ``[B, T]``."""
        return cls.numbered(*number(group_ids, response_mask.device), response_mask.any(dim=-1))

    @classmethod
    def numbered(cls, index: Tensor, size: int, member: Tensor) -> Groups:
        """From group numbers below ``size``."""
        count = torch.bincount(index[member], minlength=size).double()
        return cls(index, member, count[index], size)

    @property
    def alone(self) -> Tensor:
        """``[B]`` true where there is no other member to compare with."""
        return self.count <= 1

    def agree(self, values: Tensor) -> Tensor:
        """``[B]`` true where all members of the group have exactly the same value; a group of one agrees on 0 only."""
        lowest = -self.best_two(-values)[0]
        return torch.where(self.alone, values == 0, self.best_two(values)[0] == lowest)

    def total(self, values: Tensor) -> Tensor:
        """Sum over the group's members."""
        values = torch.where(self.member, values.double(), 0.0)
        return values.new_zeros(self.size).index_add_(0, self.index, values)[self.index]

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the group's members; float64, so that equal values have hardly any spread."""
        return self.total(values) / self.count.clamp(min=1)

    def std(self, values: Tensor) -> Tensor:
        """Standard deviation (n - 1) over the group's members; 0 for groups of one."""
        squares = (values.double() - self.mean(values)).square()
        return (self.total(squares) / (self.count - 1).clamp(min=1)).sqrt()

    def best_two(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The largest and second largest value of the group's members, -inf where there are not so many.

        Returns:
            largest ``[B]``, second ``[B]``, and true on the row that holds the largest (the first of equals).
        """
        values = torch.where(self.member, values.double(), -torch.inf)
        best = values.new_full((self.size,), -torch.inf).scatter_reduce_(0, self.index, values, "amax")[self.index]
        row = torch.arange(len(values), device=values.device)
        holder = torch.where(self.member & (values == best), row, len(row))
        first = row.new_full((self.size,), len(row)).scatter_reduce_(0, self.index, holder, "amin")[self.index]
        rest = torch.where(row == first, -torch.inf, values)
        second = values.new_full((self.size,), -torch.inf).scatter_reduce_(0, self.index, rest, "amax")[self.index]
        return best, second, row == first


def number(ids: Sequence[Any] | Tensor, device: torch.device) -> tuple[Tensor, int]:
    """Number equal ids equally, from 0; return the numbers and how many there are."""
    if isinstance(ids, Tensor):
        known, index = torch.unique(ids.to(device), return_inverse=True)
        return index, len(known)
    numbers: dict[Any, int] = {}
    index = torch.tensor([numbers.setdefault(i, len(numbers)) for i in ids], dtype=torch.int64)
    return index.to(device), len(numbers)
