"""The input of a model in training: one packed row of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hone.algorithms.support import Supports
from hone.models.attention.context import AttentionContext


@dataclass(frozen=True)
class PackedSequences:
    """One micro-batch as the model sees it.

    Attributes:
        input_ids: ``[1, N]``, all sequences end to end.
        context: positions and attention of the sequences.
        output_index: ``[R]``, for every response token the index in the row whose output predicts it.
        targets: ``[R]``, the response tokens.
        supports: of the response tokens; None if all were sampled from the whole vocabulary.
    """

    input_ids: Tensor
    context: AttentionContext
    output_index: Tensor
    targets: Tensor
    supports: Supports | None = None
