"""Packing of rows into micro-batches within a token budget, without padding.

A micro-batch is one row of tokens. Rows that begin alike (the samples of a prompt group, turns of an episode whose history was
rewritten, forks of one episode) share their common prefix, however deep they part: the model computes it once, and in attention
it precedes what follows it in each row.

    rows          p p | r r r t        p p | r r u        q | s s
    tokens        p p r r r t u q s s                     u follows p p r r
    predicts        ^ ^ ^ ^ ^   ^ ^                       the output at the token before a response token scores it

Response tokens that rows share are scored once; each row reads the result, and their gradients add up.

The choice of micro-batches changes memory and speed, never a result.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from hone.algorithms.support import Supports
from hone.algorithms.teacher import TeacherTargets
from hone.data.balance import CostModel, Lengths, balance, load_of, part_of_rows
from hone.data.batch import Batch
from hone.data.images import IMAGES
from hone.data.prefixes import PrefixOrder, PrefixSet
from hone.data.ragged import Ragged, offsets_of
from hone.models.attention.packed import PackedContext
from hone.models.experts import UNKNOWN
from hone.models.gather import Gather
from hone.models.images import PackedImages, images_by_key
from hone.models.inputs import PackedSequences
from hone.models.teacher import HIDDEN, IDS, LOG_PROBS, TEACHER


def pack(batch: Batch, device: torch.device, *, sees: bool = False) -> PackedSequences:
    """Pack columns ``prompt_ids`` and ``response_ids``; common prefixes are packed once.

    Every prompt and every response has at least one token. ``sees``: whether the vision tower is computed even if no
    row has an image, because another rank has one.
    """
    prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
    context, index = packed_rows(prompts, responses, device)
    tokens = torch.empty(context.position_ids.shape[1], dtype=torch.int64)
    is_response = _is_response(prompts, responses)
    tokens[index.values[is_response]] = responses.values
    tokens[index.values[~is_response]] = prompts.values
    before = torch.cat([index.values[:1], index.values[:-1]])
    is_target = torch.zeros(len(tokens), dtype=torch.bool)
    is_target[index.values[is_response]] = True
    target_index = is_target.nonzero()[:, 0]
    output_of = (is_target.cumsum(0) - 1)[index.values[is_response]]
    output_index = torch.empty_like(target_index)
    output_index[output_of] = before[is_response]
    supports, teacher = supports_of(batch, device), targets_of(batch, device)
    if supports is not None or teacher is not None:  # rows may have a shared token from different supports or teachers
        output_index, target_index, output_of = (
            before[is_response],
            index.values[is_response],
            torch.arange(len(responses.values)),
        )
    one_each = bool((output_of == torch.arange(len(output_of))).all())
    repeats = len(output_index.unique()) < len(
        output_index
    )  # the last token of a prompt that rows share predicts the first of each
    return PackedSequences(
        input_ids=tokens[None].to(device),
        context=context,
        output_index=output_index.to(device),
        predictors=Gather.from_source(output_index, len(tokens), device) if repeats else None,
        targets=tokens[target_index].to(device),
        target_index=target_index.to(device),
        by_row=None if one_each else Gather.from_source(output_of, len(target_index), device),
        supports=supports,
        experts=_experts_of(batch, index, len(tokens), device),
        teacher=teacher,
        images=_images_of(batch, prompts, responses, index, sees),
    )


def _images_of(batch: Batch, prompts: Ragged, responses: Ragged, index: Ragged, always: bool) -> PackedImages | None:
    """Return the images of the rows; None if no row has some, unless ``always``."""
    by_key = images_by_key(batch.objects(IMAGES)) if IMAGES in batch else {}
    if not by_key and not always:
        return None
    is_response = _is_response(prompts, responses)
    ids = torch.empty(len(index.values), dtype=torch.int64)
    ids[is_response], ids[~is_response] = responses.values, prompts.values
    return PackedImages(by_key, Ragged(ids, index.offsets), index)


def supports_of(batch: Batch, device: torch.device) -> Supports | None:
    """Return the supports of the response tokens; None if none was restricted."""
    sizes = batch.ragged("support_sizes").values.long() if "support_sizes" in batch else torch.zeros(0)
    if not sizes.any():
        return None
    ids, sampled = batch.ragged("support_ids").values.long(), batch.ragged("response_mask").values > 0
    return Supports.from_sizes(sizes, ids, all_restricted=bool(sizes[sampled].all()), device=device)


def _experts_of(batch: Batch, index: Ragged, length: int, device: torch.device) -> Tensor | None:
    """Return the experts of the tokens of the packed row; None if no engine reported some. ``batch``: with
    ``expert_ids``, or without.
    """
    column = batch.ragged("expert_ids") if "expert_ids" in batch else None
    if column is None or not len(column.values):
        return None
    reported = column.lengths > 0
    width = len(column.values) // int(index.lengths[reported].sum())
    choices = column.values.view(-1, width)
    places = index.values[reported.repeat_interleave(index.lengths)]
    known = choices[:, 0] != UNKNOWN
    experts = torch.full((length, width), UNKNOWN, dtype=torch.int16)
    experts[places[known]] = choices[known]
    return experts.to(device)


def targets_of(batch: Batch, device: torch.device) -> TeacherTargets | None:
    """Return a teacher's distributions at the response tokens; None without a column of them."""
    if IDS not in batch and HIDDEN not in batch:
        return None

    def tokens(name: str) -> Tensor | None:
        return batch.ragged(name).values.to(device) if name in batch else None

    ids, layer = tokens(IDS), None
    if TEACHER in batch:
        layer = batch.tensor(TEACHER).repeat_interleave(batch.ragged("response_ids").lengths).to(device)
    return TeacherTargets(None if ids is None else ids.long(), tokens(LOG_PROBS), tokens(HIDDEN), layer)


def packed_rows(prompts: Ragged, responses: Ragged, device: torch.device | str = "cpu") -> tuple[PackedContext, Ragged]:
    """Lay the rows out in one packed row. Returns positions and attention of the packed row, and for every token of
    every row (its prompt, then its response) the index in the packed row. Common prefixes have the same indices.
    """
    tree = PrefixOrder.from_tokens(prompts, responses)
    order, shared = torch.from_numpy(tree.order), torch.from_numpy(tree.shared)
    lengths = prompts.lengths + responses.lengths
    adds = shared < lengths[order]  # a row whose tokens are all in the row before it adds none
    context = PackedContext.from_lengths(lengths[order][adds], device, shared=shared[adds])
    sequence = torch.empty_like(order)
    sequence[order] = adds.long().cumsum(0) - 1
    offsets = offsets_of(lengths)
    position = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(lengths)
    index = context.sequences.packed_index(sequence.repeat_interleave(lengths), position)
    return context, Ragged(index, offsets)


def _is_response(prompts: Ragged, responses: Ragged) -> Tensor:
    lengths = torch.stack([prompts.lengths, responses.lengths], 1).flatten()
    return (torch.arange(len(lengths)) % 2 == 1).repeat_interleave(lengths)


def plan_micro_batches(
    prompts: Ragged,
    responses: Ragged,
    max_tokens: int,
    max_sequences: int | None = None,
    together: Tensor | None = None,
    *,
    count: int | None = None,
    cost: CostModel | None = None,
) -> list[list[int]]:
    """Divide rows into micro-batches of at most ``max_tokens`` tokens (and ``max_sequences`` rows).

    Rows that begin alike stay neighbours, and their common tokens count once per micro-batch. Rows of similar length share a
    micro-batch, so that attention has little padding. A row longer than the budget gets a micro-batch alone; preflight warns
    about it.

    All ranks need the same number of micro-batches: each plans, they agree on the largest number, and plan again with
    ``count``. Then the work is balanced, so that ranks do not wait for each other.

    Args:
        together: ``[B]``, neighbours with equal numbers share a micro-batch (the two sides of a preference); None for no
            such constraint.
        count: exact number of micro-batches, at least that of a plan without it.
        cost: cost model for the balance.

    Returns:
        Row indices of each micro-batch; every row is in exactly one. With ``count`` the most expensive come first, and the
        last ones are empty if there are fewer rows.
    """
    lengths = Lengths(
        (prompts.lengths + responses.lengths).numpy(),
        PrefixOrder.from_tokens(prompts, responses),
        None if together is None else _runs(together).numpy(),
    )
    plan = _fewest(lengths, max_tokens, max_sequences)
    if count is None:
        return plan
    if count < len(plan):
        raise ValueError(f"{len(lengths)} rows need {len(plan)} micro-batches of {max_tokens} tokens, not {count}")
    even = balance(
        lengths, count, cost, equal_count=max_sequences is not None, max_tokens=max_tokens, max_rows=max_sequences
    )
    plan = _split_to(plan, count, lengths) if even is None else even
    work = load_of(lengths, part_of_rows(plan), count, cost or CostModel()).cost
    return [plan[index] for index in sorted(range(count), key=lambda index: -work[index])]


def _split_to(plan: list[list[int]], count: int, lengths: Lengths) -> list[list[int]]:
    """Halve the micro-batches with most rows until there are ``count``; add empty ones if none can be halved."""
    plan = [list(rows) for rows in plan]
    while len(plan) < count:
        rows = max(plan, key=lambda rows: len(_units(rows, lengths)), default=[])
        units = _units(rows, lengths)
        kept = [row for unit in units[: len(units) - len(units) // 2] for row in unit]
        plan.append(rows[len(kept) :])
        rows[:] = kept
    return plan


def _units(rows: list[int], lengths: Lengths) -> list[list[int]]:
    """Return the groups of neighbouring rows that must share a micro-batch."""
    if lengths.unit_of is None:
        return [[row] for row in rows]
    return [list(members) for _, members in itertools.groupby(rows, key=lengths.unit_of.__getitem__)]


def _fewest(lengths: Lengths, max_tokens: int, max_sequences: int | None) -> list[list[int]]:
    """Return the plan of one rank: rows fill one micro-batch after the other, in the order of their prefixes."""
    tokens = lengths.tokens.tolist()
    units: dict[int, list[int]] = {}
    unit_of = range(len(lengths)) if lengths.unit_of is None else lengths.unit_of.tolist()
    for row, unit in enumerate(unit_of):
        units.setdefault(unit, []).append(row)
    plan: list[list[int]] = []
    packed, used = PrefixSet(lengths.prefixes, tokens), 0
    for unit in dict.fromkeys(unit_of[row] for row in lengths.prefixes.order.tolist()):
        rows = units[unit]
        added = sum(map(packed.add, rows))
        too_many_rows = plan and max_sequences is not None and len(plan[-1]) + len(rows) > max_sequences
        if not plan or used + added > max_tokens or too_many_rows:
            plan.append([])
            packed, used = PrefixSet(lengths.prefixes, tokens), 0
            added = sum(map(packed.add, rows))
        plan[-1] += rows
        used += added
    return plan


def _runs(values: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), (values.diff() != 0).long().cumsum(0)])
