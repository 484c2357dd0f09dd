"""Numbers of response tokens that depend only on the text, so that random choices do not depend on the batching."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.data.ragged import Ragged

_FACTORS = (-7046029254386353131, -4417276706812531889)  # odd, so that multiplication modulo 2^64 is invertible


def token_keys(prompts: Ragged, responses: Ragged) -> Ragged:
    """Hash each response token by its row's prompt, its row's response and its position.

    Unlike log-probs, keys do not differ in their last bits between micro-batches or numbers of ranks.

    Returns:
        int64 values, aligned with ``responses``; equal for tokens of rows with equal text only.
    """
    row_hashes = _mixed(_row_hashes(prompts) * _FACTORS[1] + _row_hashes(responses))
    keys = _mixed(row_hashes.repeat_interleave(responses.lengths) + _positions(responses) * _FACTORS[0])
    return responses.with_values(keys)


def _row_hashes(column: Ragged) -> Tensor:
    """Return a hash of the tokens of each row and their order, ``[B]``."""
    tokens = _mixed(column.values.long() + _positions(column) * _FACTORS[1])
    rows = torch.arange(len(column)).repeat_interleave(column.lengths)
    return torch.zeros(len(column), dtype=torch.int64).index_add_(0, rows, tokens)


def _positions(column: Ragged) -> Tensor:
    """Return the position of each value in its row, from 1 on."""
    return torch.arange(1, len(column.values) + 1) - column.offsets[:-1].repeat_interleave(column.lengths)


def _mixed(values: Tensor) -> Tensor:
    for factor in _FACTORS:
        values = values * factor
        values = values ^ (values >> 32)
    return values
