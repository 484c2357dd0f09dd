"""From rows to micro-batches: a token budget decides how many sequences go together, packed without padding.

A micro-batch is one row of tokens, sequence after sequence (``prompt ++ response``, ``prompt ++ response``, ...):

    tokens        p p p r r r p p r r r r
    predicts            ^ ^ ^   . . .        the output at the token before r scores r

Which sequences share a micro-batch changes memory and speed, never a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hone.data.batch import Batch
from hone.data.ragged import offsets_of
from hone.generation.attention import PackedLayout


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
    layout: PackedLayout
    output_index: Tensor
    targets: Tensor


def spread(starts: Tensor, lengths: Tensor) -> Tensor:
    """``[starts[0], starts[0] + 1, ... (lengths[0] of them), starts[1], ...]``."""
    offsets = offsets_of(lengths)
    return torch.arange(int(offsets[-1])) + (starts - offsets[:-1]).repeat_interleave(lengths)


def pack(batch: Batch, device: torch.device) -> PackedSequences:
    """Pack columns ``prompt_ids`` and ``response_ids``; every prompt has at least one token."""
    prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
    lengths = prompts.lengths + responses.lengths
    starts = offsets_of(lengths)[:-1]
    input_ids = torch.empty(int(lengths.sum()), dtype=torch.int64)
    input_ids[spread(starts, prompts.lengths)] = prompts.values
    response_index = spread(starts + prompts.lengths, responses.lengths)
    input_ids[response_index] = responses.values
    return PackedSequences(
        input_ids=input_ids[None].to(device),
        layout=PackedLayout.from_lengths(lengths, device),
        output_index=(response_index - 1).to(device),
        targets=responses.values.to(device),
    )


def plan_micro_batches(lengths: Tensor, max_tokens: int, max_sequences: int | None = None) -> list[list[int]]:
    """Cut rows into micro-batches of at most ``max_tokens`` tokens (and ``max_sequences`` rows).

    Rows of similar length go together, so that attention works on tight rectangles. A row longer than the budget gets a
    micro-batch of its own: preflight has told the user.

    Args:
        lengths: ``[B]`` tokens a row.

    Returns:
        Row indices of each micro-batch; every row stands in exactly one.
    """
    plan: list[list[int]] = []
    used = 0
    order = torch.sort(lengths, descending=True, stable=True).indices.tolist()
    for row in order:
        length = int(lengths[row])
        if not plan or used + length > max_tokens or (max_sequences is not None and len(plan[-1]) >= max_sequences):
            plan.append([])
            used = 0
        plan[-1].append(row)
        used += length
    return plan
