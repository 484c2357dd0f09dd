"""Soft penalty on responses that come close to the length limit."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.errors import ConfigError

KEY = "reward.overlong_buffer"


def overlong_penalty(lengths: Tensor, max_resp_len: int, buffer_len: int, penalty_factor: float = 1.0) -> Tensor:
    """Return the penalty to add to the reward of each response (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 13).

    The penalty is 0 up to ``max_resp_len - buffer_len`` tokens, then falls linearly to ``-penalty_factor`` at
    ``max_resp_len``, and not below.

    >>> overlong_penalty(torch.tensor([80, 90, 100, 120]), max_resp_len=100, buffer_len=20).tolist()
    [-0.0, -0.5, -1.0, -1.0]

    Raises:
        ConfigError: the buffer is empty or longer than the longest response, or the factor is negative (a reward).
    """
    if not 0 < buffer_len <= max_resp_len:
        raise ConfigError(
            f"buffer_len={buffer_len} must be between 1 and max_resp_len={max_resp_len}",
            why="the penalty grows over the last buffer_len of max_resp_len tokens",
            fix=f"{KEY}.len={max(1, max_resp_len // 5)}",
            where=f"{KEY}.len",
        )
    if penalty_factor < 0:
        raise ConfigError(
            f"penalty_factor={penalty_factor} must not be negative",
            why="it would reward responses for being too long",
            fix=f"{KEY}.penalty_factor={-penalty_factor}",
            where=f"{KEY}.penalty_factor",
        )
    excess = (lengths - (max_resp_len - buffer_len)).to(torch.float32) / buffer_len
    return -penalty_factor * excess.clamp(0.0, 1.0)
