"""Log-probabilities and entropies of tokens, without the whole ``[N, V]`` table of logits in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hone.algorithms.masked import wide


def token_log_probs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log-prob of each target ``[...]`` under ``softmax(logits / temperature)``, in float32 or better."""
    scaled = wide(logits) / temperature
    return scaled.gather(-1, targets[..., None])[..., 0] - scaled.logsumexp(-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Return the entropy in nats of ``softmax(logits)`` along the last dimension, in float32 or better; logits may be -inf."""
    log_probs = wide(logits).log_softmax(-1)
    probs = log_probs.exp()
    return -(probs * log_probs.masked_fill(probs == 0, 0.0)).sum(-1)


def sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """Return the sum of squared probabilities of ``softmax(logits)`` along the last dimension, in float32 or better.

    This is the probability that two draws agree: 1 for a certain distribution, 1 / V for a uniform one.
    """
    return wide(logits).softmax(-1).square().sum(-1)


def chunked_log_probs(
    hidden: Tensor,  # ``[N, H]``; with a group the same on every rank, and so is its gradient
    weight: Tensor,  # ``[v, H]``, the output embedding, or its rows ``start`` to ``start + v``
    targets: Tensor,  # ``[N]`` token ids of the whole vocabulary
    *,
    bias: Tensor | None = None,  # ``[v]`` or None
    temperature: float = 1.0,  # logits are divided by it; above 0
    softcap: float | None = None,  # logits are first mapped to ``softcap * tanh(logits / softcap)`` (Gemma 2)
    with_entropy: bool = False,  # also return the entropy of each row's distribution
    group: ProcessGroup | None = None,  # ranks that hold the vocabulary; None means this rank holds all of it
    start: int = 0,  # first token id of this rank's part
    chunk_size: int = 2048,  # number of rows whose logits exist at the same time
) -> tuple[Tensor, Tensor | None]:
    """Project hidden states onto the vocabulary, ``chunk_size`` rows at a time, and return log-probs and entropies.

    Equal in value and gradient to ``token_log_probs(hidden @ weight.T + bias, targets, temperature)``. Neither the
    forward nor the backward pass holds vocabulary-sized rows of more than one chunk: the backward pass recomputes a
    chunk's logits. The projection runs in the dtype of its inputs (autocast respected), the softmax in float32.

    With a group, every rank keeps three numbers of each row, and one exchange of them gives what is over the whole
    vocabulary; no rank holds or sends a row of logits.

    Log-probs and entropies are ``[N]`` float32, both differentiable; entropies are None without ``with_entropy``.
    """
    hidden, weight, bias = _in_compute_dtype(hidden, weight, bias)
    log_probs, entropy = _ChunkedLogProbs.apply(
        hidden, weight, targets - start, bias, temperature, softcap, with_entropy, group, chunk_size
    )
    return log_probs, entropy if with_entropy else None


@torch.no_grad()
def chunked_sum_pi_squared(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    group: ProcessGroup | None = None,
    chunk_size: int = 2048,
) -> Tensor:
    """Return ``sum_pi_squared_from_logits`` of each row, ``[N]`` float32, with ``chunk_size`` rows of logits at a time.

    A constant (no gradient): the optimal token baseline uses it as a weight. Arguments as for :func:`chunked_log_probs`.
    """
    hidden, weight, bias = _in_compute_dtype(hidden, weight, bias)
    rows = torch.empty(2, len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for first in range(0, len(hidden), chunk_size):
            part = slice(first, first + chunk_size)
            logits = _logits(hidden[part], weight, bias, softcap).div_(temperature)
            rows[0, part] = logits.logsumexp(-1)
            if group is None:
                rows[1, part] = logits.sub_(rows[0, part, None]).mul_(2.0).exp_().sum(-1)
            else:
                rows[1, part] = logits.mul_(2.0).logsumexp(-1)
    if group is None:
        return rows[1]
    sums, doubles = _all_gathered(rows, group).unbind(1)
    return (doubles.logsumexp(0) - 2.0 * sums.logsumexp(0)).exp()


class _ChunkedLogProbs(torch.autograd.Function):
    """Forward keeps two numbers per row (log-sum-exp, entropy); backward recomputes the logits chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        places: Tensor,
        bias: Tensor | None,
        temperature: float,
        softcap: float | None,
        with_entropy: bool,
        group: ProcessGroup | None,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        precise = torch.promote_types(hidden.dtype, torch.float32)
        rows = torch.zeros(
            3, len(hidden), dtype=precise, device=hidden.device
        )  # log-sum-exp, target's logit, the third
        log_sum, chosen, third = rows
        with torch.autocast(hidden.device.type, enabled=False):
            for first in range(0, len(hidden), chunk_size):
                part = slice(first, first + chunk_size)
                logits = _logits(hidden[part], weight, bias, softcap).div_(temperature)
                log_sum[part] = logits.logsumexp(-1)
                place, here = (places[part], 1) if group is None else _within(places[part], len(weight))
                chosen[part] = logits.gather(-1, place[:, None])[:, 0] * here
                if with_entropy and group is None:  # the entropy
                    logits.sub_(log_sum[part, None])
                    third[part] = -(logits.exp() * logits.clamp_(min=torch.finfo(precise).min)).sum(-1)
                elif with_entropy:  # the mean logit
                    third[part] = ((logits - log_sum[part, None]).exp() * logits).sum(-1)
        entropy = third
        if group is not None:
            log_sum, chosen, mean = over_ranks(torch.stack([log_sum, chosen, third]), group)
            entropy = log_sum - mean if with_entropy else torch.zeros_like(log_sum)
        ctx.save_for_backward(hidden, weight, places, bias, log_sum, entropy)
        ctx.settings = temperature, softcap, group, weight.dtype, chunk_size
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)  # an entropy that is only reported has no gradient
        return chosen - log_sum, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return projection_gradients(ctx, grad_outputs, _logit_gradient, _add_matmul)


def projection_gradients(
    ctx: Any,
    grad_outputs: Sequence[Tensor | None],
    logit_gradient: Callable[..., Tensor],
    add_matmul: Callable[[Tensor, Tensor, Tensor], object],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of hidden states, weight and bias from those of log-probs and entropies, chunk by chunk.

    Args:
        ctx: of a function with the inputs ``hidden, weight, places, bias, ...``. It has saved these, log-sum-exp and entropy,
            and in ``settings`` temperature, soft cap, group, dtype of the weight's gradient, and rows of a chunk.
        logit_gradient: the gradient of a chunk's logits, with arguments as of :func:`_logit_gradient`.
        add_matmul: adds a product of two matrices to its first argument.
    """
    hidden, weight, places, bias, log_sum, entropy = ctx.saved_tensors
    temperature, softcap, group, weight_dtype, chunk_size = ctx.settings
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
            of_entropy = (None, None) if grad_entropy is None else (entropy[part], grad_entropy[part])
            grad = logit_gradient(
                *(hidden[part], weight, bias, places[part], log_sum[part], of_entropy[0]),
                *(grad_log_probs[part], of_entropy[1], temperature, softcap),
            )
            if grad_bias is not None:
                grad_bias.add_(wide(grad).sum(0))
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[part])
            if grad_weight is not None:
                add_matmul(grad_weight, grad.t(), hidden[part])
            del grad  # before the next one is allocated
    if group is not None and grad_hidden is not None:
        dist.all_reduce(grad_hidden, group=group)
    return (
        grad_hidden,
        None if grad_weight is None else grad_weight.to(weight_dtype),
        None,
        None if grad_bias is None else grad_bias.to(bias.dtype),
        *(None,) * (len(ctx.needs_input_grad) - 4),
    )


def _logit_gradient(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    places: Tensor,
    log_sum: Tensor,
    entropy: Tensor | None,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
    softcap: float | None,
) -> Tensor:
    """Return the gradient ``[N, v]`` of the logits before cap and temperature, in float32 or better."""
    logits = _logits(hidden, weight, bias, softcap)
    # d softcap(x) / dx = 1 - (softcap(x) / softcap)^2
    slope = None if softcap is None else (logits / softcap).square_().neg_().add_(1.0)
    log_p = logits.div_(temperature).sub_(log_sum[:, None])
    probs = log_p.exp()
    # d log p_target / dz_j = [j = target] - p_j,  d entropy / dz_j = -p_j (log p_j + entropy)
    if entropy is not None and grad_entropy is not None:
        grad = log_p.clamp_(min=torch.finfo(log_p.dtype).min).add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        grad.sub_(grad_log_probs[:, None]).mul_(probs)
    else:
        grad = probs.mul_(-grad_log_probs[:, None])
    place, here = _within(places, len(weight))
    grad.scatter_add_(-1, place[:, None], (grad_log_probs * here)[:, None])
    grad.div_(temperature)
    return grad if slope is None else grad.mul_(slope)


def _within(places: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the place of each target in this rank's part of the vocabulary (0 if elsewhere), and whether it is in the part."""
    here = (places >= 0) & (places < size)
    return places.where(here, 0), here


def over_ranks(rows: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-sum-exp, the target's logit and the mean logit ``[N]`` over the vocabulary of all ranks, from this rank's."""
    sums, chosen, means = _all_gathered(rows, group).unbind(1)
    log_sum = sums.logsumexp(0)
    return log_sum, chosen.sum(0), ((sums - log_sum).exp() * means).sum(0)


def _all_gathered(rows: Tensor, group: ProcessGroup) -> Tensor:
    """Return ``[ranks, ...]``: the rows of every rank."""
    gathered = rows.new_empty(dist.get_world_size(group), *rows.shape)
    dist.all_gather(list(gathered.unbind()), rows, group=group)
    return gathered


def _in_compute_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the operands of the projection in autocast's dtype, if autocast is on."""
    device_type = hidden.device.type
    if not torch.is_autocast_enabled(device_type):
        return hidden, weight, bias
    compute = torch.get_autocast_dtype(device_type)
    return hidden.to(compute), weight.to(compute), None if bias is None else bias.to(compute)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    logits = wide(torch.nn.functional.linear(hidden, weight, bias))
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _add_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute ``total += left @ right``, in place if the dtypes allow it."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
