"""Find the rows of a batch that form preference pairs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from hone.errors import DataError


def pair_rows(labels: Tensor, pair_ids: Sequence[Hashable] | Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the row numbers of the chosen and of the rejected side of every pair, ``[P]`` each.

    The two rows of a pair share an id; without ids the i-th chosen row is paired with the i-th rejected one.

    Raises:
        DataError: an id is not on exactly one chosen and one rejected row, or the two kinds differ in number.
    """
    labels = labels.bool()
    if pair_ids is None:
        chosen, rejected = labels.nonzero()[:, 0], (~labels).nonzero()[:, 0]
        if len(chosen) != len(rejected):
            raise DataError(
                f"{len(chosen)} chosen and {len(rejected)} rejected rows cannot be paired",
                why="without pair_ids the i-th chosen row is paired with the i-th rejected row",
                fix="pass pair_ids, or use a loss for single labelled rows such as kto",
            )
        return chosen, rejected
    numbers = numbered(pair_ids, labels.device)
    order = torch.argsort(2 * numbers + (~labels).long(), stable=True)  # by pair, the chosen row first
    chosen, rejected = order[0::2], order[1::2]
    whole = len(chosen) == len(rejected)
    if not whole or not bool(
        (
            (numbers[chosen] == torch.arange(len(chosen), device=labels.device))
            & (numbers[rejected] == numbers[chosen])
            & labels[chosen]
            & ~labels[rejected]
        ).all()
    ):
        raise DataError(
            f"{len(labels)} rows do not form whole pairs",
            why="a preference needs one chosen and one rejected row under one id",
            fix="pass both sides of every pair, each once",
        )
    return chosen, rejected


def best_worst_pairs(
    scores: Tensor, group_ids: Sequence[Hashable] | Tensor, *, margin: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the best and the worst response of every prompt group: the pairs of online DPO.

    Groups whose scores are all equal, or whose best and worst differ by less than ``margin``, give no pair; nor do groups
    of one. (Online DPO: Guo et al. 2024, arXiv:2402.04792, with two responses per prompt; best and worst of n: Yuan et
    al. 2024, arXiv:2401.10020, section 2.)

    The result is ``(chosen, rejected)``, row numbers ``[P]``, at most one pair per group, in order of the groups' first rows.
    """
    if len(scores) == 0:
        nothing = torch.zeros(0, dtype=torch.int64, device=scores.device)
        return nothing, nothing
    numbers = numbered(group_ids, scores.device)
    order = torch.argsort(scores, stable=True)
    order = order[torch.argsort(numbers[order], stable=True)]  # group by group, rising scores
    last = torch.bincount(numbers).cumsum(0) - 1
    first = torch.cat([last.new_zeros(1), last[:-1] + 1])
    worst, best = order[first], order[last]
    gap = scores[best] - scores[worst]
    keep = (gap > 0) & (gap >= margin)
    return best[keep], worst[keep]


def numbered(ids: Sequence[Hashable] | Tensor, device: torch.device) -> Tensor:
    """Return ``[B]`` int64: equal ids get equal numbers, 0, 1, ... in order of first appearance."""
    values = ids.tolist() if isinstance(ids, Tensor) else ids
    names: dict[Hashable, int] = {}
    return torch.tensor([names.setdefault(value, len(names)) for value in values], dtype=torch.int64, device=device)
