"""The input of a model in training: one packed row of tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from hone.algorithms.support import Supports
from hone.algorithms.teacher import TeacherTargets
from hone.models.attention.context import AttentionContext
from hone.models.gather import Gather
from hone.models.images import PackedImages


@dataclass(frozen=True)
class PackedSequences:
    """One micro-batch as the model sees it.

    A head computes ``U`` outputs, one for each token that is a response token of some row. Rows that share response tokens share
    their outputs.
    """

    input_ids: Tensor  # ``[1, N]``, all sequences end to end, shared prefixes once
    context: AttentionContext  # positions and attention of the sequences
    output_index: Tensor  # ``[U]``, for every output the index in the row whose hidden state it is computed from
    targets: Tensor  # ``[U]``, the response tokens
    target_index: Tensor  # ``[U]``, the index in the row of each response token
    # gathers the outputs ``[U]`` for every response token of every row, ``[R]``; None where they are so already
    by_row: Gather | None = None
    supports: Supports | None = None  # of the outputs; None if all tokens were sampled from the whole vocabulary
    # ``[N, width]`` int16 of the tokens, see :meth:`hone.models.experts.ExpertRouters.follow`; None to follow none
    experts: Tensor | None = None
    teacher: TeacherTargets | None = None  # a teacher's distributions at the outputs; None without them
    images: PackedImages | None = None  # of the rows; None without images
    # ``[1, N, H]`` hidden states of an earlier pipeline stage, which are the model's input; None to read ``input_ids``
    hidden: Tensor | None = None
    # gathers the hidden states at ``output_index`` where indices repeat, with gradients in a fixed order; else None
    predictors: Gather | None = None

    def at_targets(self) -> PackedSequences:
        """Return the same rows with each output at its response token, not at the token that predicts it."""
        return dataclasses.replace(self, output_index=self.target_index, predictors=None)

    def of_outputs(self, hidden: Tensor) -> Tensor:
        """Return the hidden states ``[U, H]`` that outputs are computed from, of those of all tokens ``[N, H]``."""
        return hidden.index_select(0, self.output_index) if self.predictors is None else self.predictors(hidden)

    def outputs_by_row(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs ``[R]`` of the rows' response tokens end to end, from those of the head ``[U]``."""
        return outputs if self.by_row is None else {name: self.by_row(values) for name, values in outputs.items()}
