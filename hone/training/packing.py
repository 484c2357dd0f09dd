"""From rows to micro-batches: a token budget decides how many sequences go together, packed without padding.

A micro-batch is one row of tokens: the different prompts end to end, then all responses. The samples of a prompt group
share their prompt: it goes through the model once, and in attention it stands before each of its responses.

    tokens        p p p q q r r r r r s s s        responses r and r follow prompt p, s follows q
    predicts          ^   ^ ^ ^   ^                the output at the token before a response token scores it

Which sequences share a micro-batch changes memory and speed, never a result.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.data.balance import CostModel, Lengths, balance, load_of, part_of_rows
from hone.data.batch import Batch
from hone.data.ragged import Ragged, offsets_of
from hone.generation.attention import Layout, PackedLayout


@dataclass(frozen=True)
class PackedSequences:
    """One micro-batch as the model sees it.

    Attributes:
        input_ids: ``[1, N]``, all sequences end to end.
        layout: where each begins; carries the positions and the attention.
        output_index: ``[R]``, for every response token the place in the row whose output predicts it.
        targets: ``[R]``, the response tokens.
    """

    input_ids: Tensor
    layout: Layout
    output_index: Tensor
    targets: Tensor


def spread(starts: Tensor, lengths: Tensor) -> Tensor:
    """``[starts[0], starts[0] + 1, ... (lengths[0] of them), starts[1], ...]``."""
    offsets = offsets_of(lengths)
    return torch.arange(int(offsets[-1])) + (starts - offsets[:-1]).repeat_interleave(lengths)


def pack(batch: Batch, device: torch.device) -> PackedSequences:
    """Pack columns ``prompt_ids`` and ``response_ids``; neighbouring rows with equal prompts share one.

    Every prompt and every response has at least one token.
    """
    prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
    prompt_of = share_prompts(prompts)
    first = torch.cat([torch.ones(1, dtype=torch.bool), prompt_of.diff() > 0])
    unique = prompts.select(first.nonzero()[:, 0])
    response_starts = len(unique.values) + responses.offsets[:-1]
    output_index = spread(response_starts - 1, responses.lengths)
    output_index[responses.offsets[:-1]] = unique.offsets[1:][prompt_of] - 1  # the prompt's last token scores the first
    return PackedSequences(
        input_ids=torch.cat([unique.values, responses.values])[None].to(device),
        layout=PackedLayout.with_shared_prefixes(unique.lengths, responses.lengths, prompt_of, device),
        output_index=output_index.to(device),
        targets=responses.values.to(device),
    )


def share_prompts(prompts: Ragged) -> Tensor:
    """``[B]``: rows get the same number as their neighbour when they have the same prompt, else the next one."""
    lengths = prompts.lengths
    same = lengths[1:] == lengths[:-1]
    # of neighbours of equal length, compare token by token
    left = prompts.select(same.nonzero()[:, 0])
    right = prompts.select(same.nonzero()[:, 0] + 1)
    differs = torch.zeros(len(left), dtype=torch.int64)
    differs.index_add_(0, torch.arange(len(left)).repeat_interleave(left.lengths), (left.values != right.values).long())
    same[same.clone()] = differs == 0
    return torch.cat([torch.zeros(1, dtype=torch.int64), (~same).long().cumsum(0)])


def plan_micro_batches(
    prompts: Ragged,
    responses: Tensor,
    max_tokens: int,
    max_sequences: int | None = None,
    together: Tensor | None = None,
    *,
    count: int | None = None,
    cost: CostModel | None = None,
) -> list[list[int]]:
    """Cut rows into micro-batches of at most ``max_tokens`` tokens (and ``max_sequences`` rows).

    Rows of one prompt stay neighbours and their prompt counts once a micro-batch; groups of similar length go together, so
    that attention works on tight rectangles. What is longer than the budget gets a micro-batch of its own: preflight has
    told the user.

    Ranks that work in step need the same number of micro-batches: each plans, they agree on the largest number, and plan again
    with ``count``. Then the work is spread evenly, so that no rank waits for another at any of them.

    Args:
        prompts: of each row.
        responses: ``[B]`` tokens of each response.
        together: ``[B]``, neighbours with equal numbers share a micro-batch (the two sides of a preference); None lets
            every row go its own way.
        count: exactly so many micro-batches, at least as many as a plan without it has.
        cost: how work is counted where it is spread.

    Returns:
        Row indices of each micro-batch; every row stands in exactly one. With ``count`` the heaviest come first, and at the
        end some are empty when there are fewer rows.
    """
    plan = _fewest(prompts, responses, max_tokens, max_sequences, together)
    if count is None:
        return plan
    if count < len(plan):
        raise ValueError(f"{len(responses)} rows take {len(plan)} micro-batches of {max_tokens} tokens, not {count}")
    lengths = Lengths(prompts.lengths, responses, share_prompts(prompts), None if together is None else _runs(together))
    even = balance(
        lengths, count, cost, equal_count=max_sequences is not None, max_tokens=max_tokens, max_rows=max_sequences
    )
    plan = _split_to(plan, count, together) if even is None else even
    work = load_of(lengths, part_of_rows(plan), count, cost or CostModel()).cost
    return [plan[index] for index in sorted(range(count), key=lambda index: -work[index])]


def _split_to(plan: list[list[int]], count: int, together: Tensor | None) -> list[list[int]]:
    """The same micro-batches, those of most rows halved until there are ``count``; empty ones where nothing can be halved."""
    unit_of = None if together is None else _runs(together).tolist()
    plan = [list(rows) for rows in plan]
    while len(plan) < count:
        rows = max(plan, key=lambda rows: len(_units(rows, unit_of)), default=[])
        units = _units(rows, unit_of)
        kept = [row for unit in units[: len(units) - len(units) // 2] for row in unit]
        plan.append(rows[len(kept) :])
        rows[:] = kept
    return plan


def _units(rows: list[int], unit_of: list[int] | None) -> list[list[int]]:
    """Neighbouring rows that may not be parted."""
    if unit_of is None:
        return [[row] for row in rows]
    return [list(members) for _, members in itertools.groupby(rows, key=unit_of.__getitem__)]


def _fewest(
    prompts: Ragged, responses: Tensor, max_tokens: int, max_sequences: int | None, together: Tensor | None
) -> list[list[int]]:
    """The plan of one rank: as few micro-batches as filling them one after the other gives."""
    prompt_of, prompt_lengths = share_prompts(prompts), prompts.lengths
    unit_of = torch.arange(len(prompts)) if together is None else _runs(together)
    longest = _largest(_largest(prompt_lengths + responses, prompt_of), unit_of)
    order = torch.sort(longest, descending=True, stable=True).indices.tolist()
    groups, sizes, lengths, units = prompt_of.tolist(), responses.tolist(), prompt_lengths.tolist(), unit_of.tolist()

    def cost(rows: list[int], previous: int | None) -> int:
        """Tokens that ``rows`` add behind row ``previous``, whose prompt they may share."""
        total = 0
        for row in rows:
            total += sizes[row] + (0 if previous is not None and groups[previous] == groups[row] else lengths[row])
            previous = row
        return total

    plan: list[list[int]] = []
    used = 0
    for _, members in itertools.groupby(order, key=units.__getitem__):
        rows = list(members)
        added = cost(rows, plan[-1][-1]) if plan else 0
        crowded = plan and max_sequences is not None and len(plan[-1]) + len(rows) > max_sequences
        if not plan or used + added > max_tokens or crowded:
            plan.append([])
            used, added = 0, cost(rows, None)
        plan[-1] += rows
        used += added
    return plan


def _runs(values: Tensor) -> Tensor:
    """``[B]``: neighbours with equal values get the same number, from 0 on."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), (values.diff() != 0).long().cumsum(0)])


def _largest(values: Tensor, group_of: Tensor) -> Tensor:
    """``[B]``: of each row the largest value in its group."""
    found = torch.zeros(int(group_of[-1]) + 1, dtype=torch.int64)
    return found.scatter_reduce(0, group_of, values, reduce="amax")[group_of]
