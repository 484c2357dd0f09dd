"""Log-probs and entropies of tokens on CUDA, from the fused operators of the output layer; whole, or divided by vocabulary over ranks.

The forward pass keeps two numbers of each row. The backward pass computes the gradient of the logits of some rows at a time, in the
compute dtype, and adds up the gradient of the weight in float32 inside the matmul.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hone.algorithms.masked import wide
from hone.models.devices import compute_dtype
from hone.models.kernels import cuda
from hone.models.kernels.cuda import matmuls, vocabulary  # noqa: F401  registers the operators

_GRADIENTS = 1 << 29
"""Logits whose gradients exist at the same time: 1 GiB in bfloat16."""


def supports(hidden: Tensor) -> bool:
    """True if the fused operators compute the output layer of ``hidden [N, H]``: on a GPU that has them, in 16 bits."""
    return cuda.available(hidden.device) and compute_dtype(hidden) in (torch.bfloat16, torch.float16)


def fused_log_probs(
    hidden: Tensor,  # ``[N, H]``; with a group the same on every rank, and so is its gradient
    # ``[v, H]``, rows ``start`` to ``start + v`` of the output embedding; its gradient is float32 before it gets its
    # dtype
    weight: Tensor,
    targets: Tensor,  # ``[N]`` token ids of the whole vocabulary
    *,
    bias: Tensor | None = None,  # ``[v]`` or None
    temperature: float = 1.0,  # logits are divided by it; above 0
    softcap: float | None = None,  # logits are first mapped to ``softcap * tanh(logits / softcap)``
    with_entropy: bool = False,  # also return the entropy of each row's distribution
    group: ProcessGroup | None = None,  # ranks that hold the vocabulary; None means this rank holds all of it
    start: int = 0,  # first token id of this rank's part
) -> tuple[Tensor, Tensor | None]:
    """Return what :func:`hone.algorithms.logits.chunked_log_probs` returns, or with ``group`` its divided counterpart."""
    dtype = compute_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        log_probs, entropy = _FusedLogProbs.apply(
            hidden.to(dtype), weight, targets - start, bias, dtype, temperature, softcap, with_entropy, group
        )
    return log_probs, entropy if with_entropy else None


class _FusedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        places: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        temperature: float,
        softcap: float | None,
        with_entropy: bool,
        group: ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        narrow = weight.to(dtype)
        local_rows = torch.ops.hone.vocabulary_statistics(hidden, narrow, bias, places, temperature, softcap)
        log_sum, chosen, mean = local_rows if group is None else _of_all_ranks(local_rows, group)
        log_probs, entropy = chosen - log_sum, log_sum - mean
        ctx.save_for_backward(hidden, narrow, places, bias, log_sum, entropy)
        ctx.settings = temperature, softcap, group, weight.dtype
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)  # an entropy that is only reported has no gradient
        return log_probs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, places, bias, log_sum, entropy = ctx.saved_tensors
        temperature, softcap, group, weight_dtype = ctx.settings
        grad_log_probs, grad_entropy = grad_outputs
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_sum)
        wants_hidden, wants_weight, _, wants_bias = ctx.needs_input_grad[:4]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=log_sum.dtype) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=log_sum.dtype) if wants_bias else None
        chunk = max(128, _GRADIENTS // len(weight) // 128 * 128)
        for first in range(0, len(hidden), chunk):
            part = slice(first, first + chunk)
            grad = torch.ops.hone.vocabulary_gradient(
                hidden[part],
                weight,
                bias,
                places[part],
                log_sum[part],
                None if grad_entropy is None else entropy[part],
                grad_log_probs[part],
                None if grad_entropy is None else grad_entropy[part],
                temperature,
                softcap,
            )
            if grad_bias is not None:
                grad_bias.add_(wide(grad).sum(0))
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[part])
            if grad_weight is not None:
                torch.ops.hone.add_matmul_wide(grad_weight, grad.t(), hidden[part])
            del grad  # before the next one is allocated
        if group is not None and grad_hidden is not None:
            dist.all_reduce(grad_hidden, group=group)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight_dtype),
            None,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 5,
        )


def _of_all_ranks(local_rows: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-sum-exp, the target's logit and the mean logit ``[N]`` over the vocabulary of all ranks."""
    rows = local_rows.new_empty(dist.get_world_size(group), *local_rows.shape)
    dist.all_gather(list(rows.unbind()), local_rows, group=group)
    sums, chosen, means = rows.unbind(1)
    log_sum = sums.logsumexp(0)
    return log_sum, chosen.sum(0), ((sums - log_sum).exp() * means).sum(0)
