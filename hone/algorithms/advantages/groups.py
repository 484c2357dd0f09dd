"""Statistics over the responses to one prompt, returned for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Groups of rows; rows without a selected token belong to none. Statistics are float64, one per row, ``[B]``.

    Attributes:
        index: ``[B]`` group number of each row.
        member: ``[B]`` true if the row takes part.
        count: ``[B]`` number of members of the row's group, float64.
        size: number of groups.
    """

    index: Tensor
    member: Tensor
    count: Tensor
    size: int

    @classmethod
    def from_ids(cls, group_ids: Sequence[Any] | Tensor, response_mask: Tensor) -> Groups:
        """Number the groups in order of appearance; members are rows with a selected token."""
        return cls.from_numbers(*number(group_ids, response_mask.device), response_mask.any(dim=-1))

    @classmethod
    def from_numbers(cls, index: Tensor, size: int, member: Tensor) -> Groups:
        """Build from group numbers below ``size``."""
        count = torch.bincount(index[member], minlength=size).double()
        return cls(index, member, count[index], size)

    @property
    def singleton(self) -> Tensor:
        """Return ``[B]``, true for groups without another member."""
        return self.count <= 1

    def agree(self, values: Tensor) -> Tensor:
        """Return ``[B]``, true if all members of the group have the same value; for a group of one, if it is 0."""
        lowest = -self.best_two(-values)[0]
        return torch.where(self.singleton, values == 0, self.best_two(values)[0] == lowest)

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over the group's members."""
        values = torch.where(self.member, values.double(), 0.0)
        return values.new_zeros(self.size).index_add_(0, self.index, values)[self.index]

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the group's members in float64, so that the standard deviation of equal values is nearly 0."""
        return self.total(values) / self.count.clamp(min=1)

    def std(self, values: Tensor) -> Tensor:
        """Return the standard deviation (n - 1) over the group's members; 0 for groups of one."""
        squares = (values.double() - self.mean(values)).square()
        return (self.total(squares) / (self.count - 1).clamp(min=1)).sqrt()

    def best_two(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the largest ``[B]`` and second largest ``[B]`` of the group's members, -inf if there are fewer.

        Third is true on the row of the largest (the first of equal ones).
        """
        values = torch.where(self.member, values.double(), -torch.inf)
        best = values.new_full((self.size,), -torch.inf).scatter_reduce_(0, self.index, values, "amax")[self.index]
        row = torch.arange(len(values), device=values.device)
        holder = torch.where(self.member & (values == best), row, len(row))
        first = row.new_full((self.size,), len(row)).scatter_reduce_(0, self.index, holder, "amin")[self.index]
        others = torch.where(row == first, -torch.inf, values)
        second = values.new_full((self.size,), -torch.inf).scatter_reduce_(0, self.index, others, "amax")[self.index]
        return best, second, row == first


def number(ids: Sequence[Any] | Tensor, device: torch.device) -> tuple[Tensor, int]:
    """Number equal ids equally from 0; return the numbers and their count."""
    if isinstance(ids, Tensor):
        distinct, index = torch.unique(ids.to(device), return_inverse=True)
        return index, len(distinct)
    numbers: dict[Any, int] = {}
    index = torch.tensor([numbers.setdefault(i, len(numbers)) for i in ids], dtype=torch.int64)
    return index.to(device), len(numbers)
