"""The output layer with its softmax: what log-probs and entropies need of the logits, and the gradient of the logits.

Logits exist in tiles alone. They are never rounded to the compute dtype, in which a log-prob could be wrong by several hundredths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.algorithms.masked import wide
from hone.models.kernels.cuda.programs import launched_on_cuda


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return logits ``[N, v]`` and the derivative of the soft cap, or None without."""
    logits, slope = wide(hidden) @ wide(weight).t(), None
    if bias is not None:
        logits = logits + wide(bias)
    if softcap is not None:
        capped = torch.tanh(logits / softcap)
        logits, slope = softcap * capped, 1.0 - capped.square()
    return logits / temperature, slope


@torch.library.custom_op("hone::vocabulary_statistics", mutates_args=(), device_types="cpu")
def _vocabulary_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    softcap: float | None,
) -> Tensor:
    """Return ``[3, N]``: the log-sum-exp, the target's logit (0 if the target is not among the rows of the weight), the mean logit."""
    logits, _ = _logits(hidden, weight, bias, temperature, softcap)
    log_sum = logits.logsumexp(-1)
    inside = (targets >= 0) & (targets < len(weight))
    chosen = logits.gather(-1, targets.where(inside, 0)[:, None])[:, 0] * inside
    return torch.stack([log_sum, chosen, ((logits - log_sum[:, None]).exp() * logits).sum(-1)])


@_vocabulary_statistics.register_fake
def _statistics_shape(hidden: Tensor, *_: Any) -> Tensor:
    return hidden.new_empty(3, len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))


launched_on_cuda(_vocabulary_statistics, "vocabulary", "statistics")


@torch.library.custom_op("hone::vocabulary_gradient", mutates_args=(), device_types="cpu")
def _vocabulary_gradient(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    log_sum: Tensor,
    entropy: Tensor | None,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
    softcap: float | None,
) -> Tensor:
    """Return the gradient ``[N, v]`` of the logits before cap and temperature, in the dtype of the weight.

    ``log_sum [N]`` and ``entropy [N]`` are over the whole vocabulary; ``grad_entropy`` needs the entropy.
    """
    logits, slope = _logits(hidden, weight, bias, temperature, softcap)
    log_p = logits - log_sum[:, None]
    # d log p_target / dz_j = [j = target] - p_j,  d entropy / dz_j = -p_j (log p_j + entropy)
    factor = -grad_log_probs[:, None]
    if entropy is not None and grad_entropy is not None:
        factor = factor - grad_entropy[:, None] * (log_p + entropy[:, None])
    grad = log_p.exp() * factor
    grad = grad + grad_log_probs[:, None] * (torch.arange(len(weight), device=hidden.device) == targets[:, None])
    grad = grad / temperature
    return (grad if slope is None else grad * slope).to(weight.dtype)


@_vocabulary_gradient.register_fake
def _gradient_shape(hidden: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return weight.new_empty(len(hidden), len(weight))


launched_on_cuda(_vocabulary_gradient, "vocabulary", "gradient")
