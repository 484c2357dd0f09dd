"""Log-probs and entropies of tokens on CUDA, from the fused operators of the output layer; whole, or divided by vocabulary over ranks.

The forward pass keeps two numbers of each row. The backward pass computes the gradient of the logits of some rows at a time, in the
compute dtype, and adds up the gradient of the weight in float32 inside the matmul.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hone.algorithms.logits import over_ranks, projection_gradients
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
        log_sum, chosen, mean = local_rows if group is None else over_ranks(local_rows, group)
        log_probs, entropy = chosen - log_sum, log_sum - mean
        ctx.save_for_backward(hidden, narrow, places, bias, log_sum, entropy)
        chunk_size = max(128, _GRADIENTS // len(weight) // 128 * 128)
        ctx.settings = temperature, softcap, group, weight.dtype, chunk_size
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)  # an entropy that is only reported has no gradient
        return log_probs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        operators = torch.ops.hone
        return projection_gradients(ctx, grad_outputs, operators.vocabulary_gradient, operators.add_matmul_wide)
