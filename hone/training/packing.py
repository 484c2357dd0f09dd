"""Packing of rows into micro-batches within a token budget, without padding.

A micro-batch is one row of tokens: the different prompts end to end, then all responses. The samples of a prompt group
share their prompt: the model computes it once, and in attention it precedes each of its responses.

    tokens        p p p q q r r r r r s s s        responses r and r follow prompt p, s follows q
    predicts          ^   ^ ^ ^   ^                the output at the token before a response token scores it

The choice of micro-batches changes memory and speed, never a result.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from hone.algorithms.support import Supports
from hone.data.balance import CostModel, Lengths, balance, load_of, part_of_rows
from hone.data.batch import Batch
from hone.data.ragged import Ragged, offsets_of
from hone.models.attention.packed import PackedContext
from hone.models.inputs import PackedSequences


def concatenated_ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return ``[starts[0], starts[0] + 1, ... (lengths[0] values), starts[1], ...]``."""
    offsets = offsets_of(lengths)
    return torch.arange(int(offsets[-1])) + (starts - offsets[:-1]).repeat_interleave(lengths)


def pack(batch: Batch, device: torch.device) -> PackedSequences:
    """Pack columns ``prompt_ids`` and ``response_ids``; neighbouring rows with equal prompts share it.

    Every prompt and every response has at least one token.
    """
    prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
    prompt_of = prompt_numbers(prompts)
    first = torch.cat([torch.ones(1, dtype=torch.bool), prompt_of.diff() > 0])
    unique = prompts.select(first.nonzero()[:, 0])
    response_starts = len(unique.values) + responses.offsets[:-1]
    output_index = concatenated_ranges(response_starts - 1, responses.lengths)
    output_index[responses.offsets[:-1]] = unique.offsets[1:][prompt_of] - 1  # the prompt's last token scores the first
    return PackedSequences(
        input_ids=torch.cat([unique.values, responses.values])[None].to(device),
        context=PackedContext.with_shared_prefixes(unique.lengths, responses.lengths, prompt_of, device),
        output_index=output_index.to(device),
        targets=responses.values.to(device),
        supports=supports_of(batch, device),
    )


def supports_of(batch: Batch, device: torch.device) -> Supports | None:
    """Return the supports of the response tokens; None if none was restricted."""
    sizes = batch.ragged("support_sizes").values.long() if "support_sizes" in batch else torch.zeros(0)
    if not sizes.any():
        return None
    ids, sampled = batch.ragged("support_ids").values.long(), batch.ragged("response_mask").values > 0
    return Supports(sizes.to(device), ids.to(device), all_restricted=bool(sizes[sampled].all()))


def prompt_numbers(prompts: Ragged) -> Tensor:
    """Return ``[B]`` prompt numbers: the previous row's number if the prompt is the same, else the next number."""
    lengths = prompts.lengths
    same = lengths[1:] == lengths[:-1]
    # neighbours of equal length are compared token by token
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
    """Divide rows into micro-batches of at most ``max_tokens`` tokens (and ``max_sequences`` rows).

    Rows of one prompt stay neighbours, and their prompt counts once per micro-batch. Groups of similar length share a
    micro-batch, so that attention has little padding. A row longer than the budget gets a micro-batch alone; preflight warns
    about it.

    All ranks need the same number of micro-batches: each plans, they agree on the largest number, and plan again with
    ``count``. Then the work is balanced, so that ranks do not wait for each other.

    Args:
        prompts: of each row.
        responses: ``[B]`` tokens of each response.
        together: ``[B]``, neighbours with equal numbers share a micro-batch (the two sides of a preference); None for no
            such constraint.
        count: exact number of micro-batches, at least that of a plan without it.
        cost: cost model for the balance.

    Returns:
        Row indices of each micro-batch; every row is in exactly one. With ``count`` the most expensive come first, and the
        last ones are empty if there are fewer rows.
    """
    plan = _fewest(prompts, responses, max_tokens, max_sequences, together)
    if count is None:
        return plan
    if count < len(plan):
        raise ValueError(f"{len(responses)} rows need {len(plan)} micro-batches of {max_tokens} tokens, not {count}")
    lengths = Lengths(
        prompts.lengths, responses, prompt_numbers(prompts), None if together is None else _runs(together)
    )
    even = balance(
        lengths, count, cost, equal_count=max_sequences is not None, max_tokens=max_tokens, max_rows=max_sequences
    )
    plan = _split_to(plan, count, together) if even is None else even
    work = load_of(lengths, part_of_rows(plan), count, cost or CostModel()).cost
    return [plan[index] for index in sorted(range(count), key=lambda index: -work[index])]


def _split_to(plan: list[list[int]], count: int, together: Tensor | None) -> list[list[int]]:
    """Halve the micro-batches with most rows until there are ``count``; add empty ones if none can be halved."""
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
    """Return the groups of neighbouring rows that must share a micro-batch."""
    if unit_of is None:
        return [[row] for row in rows]
    return [list(members) for _, members in itertools.groupby(rows, key=unit_of.__getitem__)]


def _fewest(
    prompts: Ragged, responses: Tensor, max_tokens: int, max_sequences: int | None, together: Tensor | None
) -> list[list[int]]:
    """Return the plan of one rank: rows fill one micro-batch after the other."""
    prompt_of, prompt_lengths = prompt_numbers(prompts), prompts.lengths
    unit_of = torch.arange(len(prompts)) if together is None else _runs(together)
    longest = _largest(_largest(prompt_lengths + responses, prompt_of), unit_of)
    order = torch.sort(longest, descending=True, stable=True).indices.tolist()
    groups, sizes, lengths, units = prompt_of.tolist(), responses.tolist(), prompt_lengths.tolist(), unit_of.tolist()

    def cost(rows: list[int], previous: int | None) -> int:
        """Return the tokens that ``rows`` add after row ``previous``, whose prompt they may share."""
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
        too_many_rows = plan and max_sequences is not None and len(plan[-1]) + len(rows) > max_sequences
        if not plan or used + added > max_tokens or too_many_rows:
            plan.append([])
            used, added = 0, cost(rows, None)
        plan[-1] += rows
        used += added
    return plan


def _runs(values: Tensor) -> Tensor:
    """Return ``[B]`` numbers from 0 on, equal for neighbours with equal values."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), (values.diff() != 0).long().cumsum(0)])


def _largest(values: Tensor, group_of: Tensor) -> Tensor:
    """Return for each row the largest value in its group, ``[B]``."""
    zeros = torch.zeros(int(group_of[-1]) + 1, dtype=torch.int64)
    return zeros.scatter_reduce(0, group_of, values, reduce="amax")[group_of]
