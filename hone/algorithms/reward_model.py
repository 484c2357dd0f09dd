"""Reward models from preferences: the Bradley-Terry loss on scalar scores."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hone.errors import ConfigError


def bradley_terry_loss(
    chosen_scores: Tensor,  # scores of the better response of each pair, ``[P]``
    rejected_scores: Tensor,  # scores of the worse one, ``[P]``
    *,
    margin: Tensor | None = None,  # required difference of scores, ``[P]``; None means 0
    centering_coeff: float = 0.0,  # weight of the centering term, 0 or more; 0.01 is usual
    # pairs of the whole mini-batch over all ranks, so that micro-batches add up
    global_batch_size: int | Tensor | None = None,
    dp_size: int = 1,  # data-parallel ranks whose gradients are averaged
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean over pairs of ``-log sigmoid(s_chosen - s_rejected - margin) + centering_coeff (s_chosen + s_rejected)^2``.

    Bradley and Terry 1952, as the loss of a reward model in Ouyang et al. 2022, arXiv:2203.02155, eq. 1; the margin in
    Touvron et al. 2023 (Llama 2), arXiv:2307.09288, eq. 2; the centering term, which fixes the free constant of the
    scores at 0, in Eisenstein et al. 2023, arXiv:2312.09244.

    Metrics have no gradient and are means over these pairs: ``rewards/chosen``, ``rewards/rejected``, ``rewards/margins`` and
    ``rewards/accuracies`` (a tie counts half).

    Raises:
        ValueError: ``dp_size > 1`` without ``global_batch_size``, or sides of different length.
    """
    if centering_coeff < 0:
        raise ConfigError(
            f"centering_coeff={centering_coeff} is negative",
            why="the scores would grow without limit",
            fix="loss.centering_coeff=0.01, or 0 for no centering",
            where="loss.centering_coeff",
        )
    if chosen_scores.shape != rejected_scores.shape:
        raise ValueError(f"{len(chosen_scores)} chosen and {len(rejected_scores)} rejected scores")
    if dp_size > 1 and global_batch_size is None:
        raise ValueError(f"with dp_size={dp_size} the loss needs global_batch_size over all ranks")
    dtype = torch.promote_types(chosen_scores.dtype, torch.float32)
    chosen, rejected = chosen_scores.to(dtype), rejected_scores.to(dtype)
    gap = chosen - rejected
    loss = -logsigmoid(gap if margin is None else gap - margin.to(gap))
    if centering_coeff:
        loss = loss + centering_coeff * (chosen + rejected).square()
    pairs = len(gap) if global_batch_size is None else global_batch_size
    pairs = pairs.clamp(min=1) if isinstance(pairs, Tensor) else max(pairs, 1)
    with torch.no_grad():
        pair_count = max(len(gap), 1)
        correct = (gap > 0).to(dtype) + 0.5 * (gap == 0).to(dtype)
        numbers = {"chosen": chosen, "rejected": rejected, "margins": gap, "accuracies": correct}
        metrics = {f"rewards/{name}": value.detach().sum() / pair_count for name, value in numbers.items()}
    return loss.sum() / pairs * dp_size, metrics
