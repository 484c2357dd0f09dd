"""Log-probabilities and entropies of tokens, without the whole ``[N, V]`` table of logits in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
    hidden: Tensor,  # ``[N, H]``
    weight: Tensor,  # ``[V, H]``, the output embedding
    targets: Tensor,  # ``[N]`` token ids
    *,
    bias: Tensor | None = None,  # ``[V]`` or None
    temperature: float = 1.0,  # logits are divided by it; above 0
    softcap: float | None = None,  # logits are first mapped to ``softcap * tanh(logits / softcap)`` (Gemma 2)
    with_entropy: bool = False,  # also return the entropy of each row's distribution
    chunk_size: int = 2048,  # number of rows whose logits exist at the same time
) -> tuple[Tensor, Tensor | None]:
    """Project hidden states onto the vocabulary, ``chunk_size`` rows at a time, and return log-probs and entropies.

    Equal in value and gradient to ``token_log_probs(hidden @ weight.T + bias, targets, temperature)``. Neither the
    forward nor the backward pass holds vocabulary-sized rows of more than one chunk: the backward pass recomputes a
    chunk's logits. The projection runs in the dtype of its inputs (autocast respected), the softmax in float32.

    Log-probs and entropies are ``[N]`` float32, both differentiable; entropies are None without ``with_entropy``.
    """
    hidden, weight, bias = _in_compute_dtype(hidden, weight, bias)
    log_probs, entropy = _ChunkedLogProbs.apply(
        hidden, weight, targets, bias, temperature, softcap, with_entropy, chunk_size
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
    chunk_size: int = 2048,
) -> Tensor:
    """Return ``sum_pi_squared_from_logits`` of each row, ``[N]`` float32, with ``chunk_size`` rows of logits at a time.

    A constant (no gradient): the optimal token baseline uses it as a weight. Arguments as for :func:`chunked_log_probs`.
    """
    hidden, weight, bias = _in_compute_dtype(hidden, weight, bias)
    sums = torch.empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(hidden), chunk_size):
            part = slice(start, start + chunk_size)
            logits = _logits(hidden[part], weight, bias, softcap).div_(temperature)
            sums[part] = logits.sub_(logits.logsumexp(-1, keepdim=True)).mul_(2.0).exp_().sum(-1)
    return sums


class _ChunkedLogProbs(torch.autograd.Function):
    """Forward keeps two numbers per row (log-sum-exp, entropy); backward recomputes the logits chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        temperature: float,
        softcap: float | None,
        with_entropy: bool,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        rows = len(hidden)
        precise = torch.promote_types(hidden.dtype, torch.float32)
        log_probs, log_sum, entropy = (torch.zeros(rows, dtype=precise, device=hidden.device) for _ in range(3))
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, rows, chunk_size):
                part = slice(start, start + chunk_size)
                logits = _logits(hidden[part], weight, bias, softcap).div_(temperature)
                log_sum[part] = logits.logsumexp(-1)
                log_probs[part] = logits.gather(-1, targets[part, None])[:, 0] - log_sum[part]
                if with_entropy:
                    logits.sub_(log_sum[part, None])
                    entropy[part] = -(logits.exp() * logits.clamp_(min=torch.finfo(precise).min)).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, bias, log_sum, entropy)
        ctx.settings = (temperature, softcap, chunk_size)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)  # an entropy that is only reported has no gradient
        return log_probs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, targets, bias, log_sum, entropy = ctx.saved_tensors
        temperature, softcap, chunk_size = ctx.settings
        grad_log_probs, grad_entropy = grad_outputs
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_sum)
        wants_hidden, wants_weight, _, wants_bias = ctx.needs_input_grad[:4]
        precise = log_sum.dtype
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=precise) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=precise) if wants_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), chunk_size):
                part = slice(start, start + chunk_size)
                logits = _logits(hidden[part], weight, bias, softcap)
                # d softcap(x) / dx = 1 - (softcap(x) / softcap)^2
                slope = None if softcap is None else (logits / softcap).square_().neg_().add_(1.0)
                log_p = logits.div_(temperature).sub_(log_sum[part, None])
                probs = log_p.exp()
                # d log p_target / dz_j = [j = target] - p_j,  d entropy / dz_j = -p_j (log p_j + entropy)
                if grad_entropy is not None:
                    grad = (
                        log_p.clamp_(min=torch.finfo(precise).min)
                        .add_(entropy[part, None])
                        .mul_(-grad_entropy[part, None])
                    )
                    grad.sub_(grad_log_probs[part, None]).mul_(probs)
                else:
                    grad = probs.mul_(-grad_log_probs[part, None])
                grad.scatter_add_(-1, targets[part, None], grad_log_probs[part, None])
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
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 4,
        )


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
