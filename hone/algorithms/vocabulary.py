"""Log-probs and entropies if each rank holds the output embedding of a part of the vocabulary.

Every rank computes the logits of its part, chunk by chunk, and keeps three numbers per row: the log-sum-exp, the target's
logit (if the target is in its part) and the mean logit. One exchange of these gives the log-prob and the entropy over the
whole vocabulary; no rank holds or sends a row of logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hone.algorithms.logits import _add_matmul, _in_compute_dtype, _logits


def vocabulary_log_probs(
    hidden: Tensor,  # ``[N, H]``, the same on every rank; so is its gradient
    weight: Tensor,  # ``[v, H]``, rows ``start`` to ``start + v`` of the output embedding
    targets: Tensor,  # ``[N]`` token ids of the whole vocabulary
    *,
    group: ProcessGroup,  # ranks that hold the vocabulary
    start: int,  # first token id of this rank's part
    bias: Tensor | None = None,  # ``[v]`` or None
    temperature: float = 1.0,
    softcap: float | None = None,
    with_entropy: bool = False,
    chunk_size: int = 2048,
) -> tuple[Tensor, Tensor | None]:
    """Return the result of :func:`hone.algorithms.logits.chunked_log_probs` for a vocabulary split over ``group``, on every rank."""
    hidden, weight, bias = _in_compute_dtype(hidden, weight, bias)
    log_probs, entropy = _VocabularyLogProbs.apply(
        hidden, weight, targets, bias, group, start, temperature, softcap, with_entropy, chunk_size
    )
    return log_probs, entropy if with_entropy else None


@torch.no_grad()
def vocabulary_sum_pi_squared(
    hidden: Tensor,
    weight: Tensor,
    *,
    group: ProcessGroup,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_size: int = 2048,
) -> Tensor:
    """Return the result of :func:`hone.algorithms.logits.chunked_sum_pi_squared` for a vocabulary split over ``group``."""
    hidden, weight, bias = _in_compute_dtype(hidden, weight, bias)
    log_sums = torch.empty(2, len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for first in range(0, len(hidden), chunk_size):
            part = slice(first, first + chunk_size)
            logits = _logits(hidden[part], weight, bias, softcap).div_(temperature)
            log_sums[0, part] = logits.logsumexp(-1)
            log_sums[1, part] = logits.mul_(2.0).logsumexp(-1)
    sums, doubles = _of_all_ranks(log_sums, group).unbind(1)
    return (doubles.logsumexp(0) - 2.0 * sums.logsumexp(0)).exp()


class _VocabularyLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        group: ProcessGroup,
        start: int,
        temperature: float,
        softcap: float | None,
        with_entropy: bool,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        local_rows = torch.zeros(
            3, len(hidden), dtype=wide, device=hidden.device
        )  # log-sum-exp, target's logit, mean logit
        with torch.autocast(hidden.device.type, enabled=False):
            for first in range(0, len(hidden), chunk_size):
                part = slice(first, first + chunk_size)
                logits = _logits(hidden[part], weight, bias, softcap).div_(temperature)
                place, mine = _within(targets[part], start, len(weight))
                local_rows[0, part] = logits.logsumexp(-1)
                local_rows[1, part] = logits.gather(-1, place[:, None])[:, 0] * mine
                if with_entropy:
                    local_rows[2, part] = ((logits - local_rows[0, part, None]).exp() * logits).sum(-1)
        sums, chosen, means = _of_all_ranks(local_rows, group).unbind(1)
        log_sum = sums.logsumexp(0)
        log_probs = chosen.sum(0) - log_sum
        entropy = log_sum - ((sums - log_sum).exp() * means).sum(0) if with_entropy else torch.zeros_like(log_sum)
        ctx.save_for_backward(hidden, weight, targets, bias, log_sum, entropy)
        ctx.settings = (group, start, temperature, softcap, chunk_size)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)  # an entropy that is only reported has no gradient
        return log_probs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, targets, bias, log_sum, entropy = ctx.saved_tensors
        group, start, temperature, softcap, chunk_size = ctx.settings
        grad_log_probs, grad_entropy = grad_outputs
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_sum)
        wants_hidden, wants_weight, _, wants_bias = ctx.needs_input_grad[:4]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=log_sum.dtype) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=log_sum.dtype) if wants_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for first in range(0, len(hidden), chunk_size):
                part = slice(first, first + chunk_size)
                logits = _logits(hidden[part], weight, bias, softcap)
                # d softcap(x) / dx = 1 - (softcap(x) / softcap)^2
                slope = None if softcap is None else (logits / softcap).square_().neg_().add_(1.0)
                log_p = logits.div_(temperature).sub_(log_sum[part, None])
                grad = log_p.exp()
                # d log p_target / dz_j = [j = target] - p_j,  d entropy / dz_j = -p_j (log p_j + entropy)
                factor = -grad_log_probs[part, None]
                if grad_entropy is not None:
                    factor = factor - grad_entropy[part, None] * (log_p + entropy[part, None])
                grad.mul_(factor)
                place, mine = _within(targets[part], start, len(weight))
                grad.scatter_add_(-1, place[:, None], (grad_log_probs[part] * mine)[:, None])
                grad.div_(temperature)
                if slope is not None:
                    grad.mul_(slope)
                if grad_bias is not None:
                    grad_bias.add_(grad.sum(0))
                grad = grad.to(weight.dtype)
                if grad_hidden is not None:
                    torch.mm(grad, weight, out=grad_hidden[part])
                if grad_weight is not None:
                    _add_matmul(grad_weight, grad.t(), hidden[part])
        if grad_hidden is not None:
            dist.all_reduce(grad_hidden, group=group)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 6,
        )


def _within(targets: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the index of each target in this rank's part (0 if elsewhere), and whether it is in the part."""
    place = targets - start
    mine = (place >= 0) & (place < size)
    return place.where(mine, 0), mine


def _of_all_ranks(local_rows: Tensor, group: ProcessGroup) -> Tensor:
    """Return ``[ranks, ...]``: the local rows of every rank."""
    rows = local_rows.new_empty(dist.get_world_size(group), *local_rows.shape)
    dist.all_gather(list(rows.unbind()), local_rows, group=group)
    return rows
