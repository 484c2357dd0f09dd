"""Log-probs renormalised over the support of each token: the tokens that top-k, top-p and min-p left when it was sampled.

A truncated sampler draws from the policy divided by the policy's mass on the support. Training on the log-probs of that distribution
makes the importance ratio exact; with those of the full softmax it is biased towards tokens outside the support. The supports are
those of the sampler, so old, current and reference log-probs have the same set of actions ("keep sampling mask", DeepSeek-V3.2,
arXiv:2512.02556).

Only the logits of the support are computed: a gather of rows of the output embedding, not a matmul with all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hone.algorithms.logits import _in_compute_dtype

_ELEMENTS = 1 << 25
"""Gathered elements of the output embedding that exist at the same time."""


@dataclass(frozen=True)
class Supports:
    """The supports of ``R`` tokens."""

    sizes: Tensor  # ``[R]`` int64; 0 where it is the whole vocabulary, and for tokens that were not sampled
    ids: Tensor  # ``[K]`` int64, the tokens of all supports end to end; each support contains the sampled token
    all_restricted: bool  # whether every sampled token has a support
    rows: Tensor  # ``[K]`` int64, the token whose support each id belongs to

    @classmethod
    def from_sizes(
        cls, sizes: Tensor, ids: Tensor, *, all_restricted: bool, device: torch.device | str = "cpu"
    ) -> Supports:
        """Build from ``sizes`` and ``ids`` in host memory, on ``device``."""
        rows = torch.arange(len(sizes)).repeat_interleave(sizes)
        return cls(sizes.to(device), ids.to(device), all_restricted, rows.to(device))

    def select(self, tokens: Tensor) -> Supports:
        """Return the supports of ``tokens``, indices in ascending order."""
        place = torch.full_like(self.sizes, -1)
        place[tokens] = torch.arange(len(tokens), device=place.device)
        rows = place[self.rows]
        kept = rows >= 0
        return Supports(self.sizes[tokens], self.ids[kept], self.all_restricted, rows[kept])


def support_log_probs(
    hidden: Tensor,  # ``[R, H]``; with a group the same on every rank, and so is its gradient
    weight: Tensor,  # ``[v, H]``, rows ``start`` to ``start + v`` of the output embedding
    targets: Tensor,  # ``[R]`` token ids of the whole vocabulary
    supports: Supports,  # of the targets
    *,
    bias: Tensor | None = None,  # ``[v]`` or None
    temperature: float = 1.0,  # logits are divided by it; above 0
    softcap: float | None = None,  # logits are first mapped to ``softcap * tanh(logits / softcap)``
    group: ProcessGroup | None = None,  # ranks that hold the vocabulary; None means this rank holds all of it
    start: int = 0,  # first token id of this rank's part
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target under the policy renormalised over its support.

    Equal in value and gradient to ``token_log_probs`` of logits that are minus infinity outside the support.

    Log-probs are ``[R]`` float32 with a gradient; the sums of squared probabilities over the support have none. Both are 0
    where the support is the whole vocabulary.
    """
    hidden, weight, bias = _in_compute_dtype(hidden, weight, bias)
    row_of = supports.rows
    local = supports.ids - start
    is_local = (local >= 0) & (local < len(weight))
    is_target = supports.ids == targets[row_of]
    return _SupportLogProbs.apply(
        hidden, weight, bias, row_of, local.where(is_local, 0), is_local, is_target, temperature, softcap, group
    )


class _SupportLogProbs(torch.autograd.Function):
    """Forward keeps one number for each token of a support, its logit; backward gathers the embeddings again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        row_of: Tensor,
        ids: Tensor,
        is_local: Tensor,
        is_target: Tensor,
        temperature: float,
        softcap: float | None,
        group: ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logits = torch.empty(len(ids), dtype=wide, device=hidden.device)
        for part in _chunks(len(ids), hidden.shape[1]):
            products = hidden[row_of[part]].to(wide) * weight[ids[part]]
            logits[part] = products.sum(-1) if bias is None else products.sum(-1) + bias[ids[part]]
        slope = None
        if softcap is not None:
            logits = torch.tanh(logits / softcap)
            slope, logits = 1.0 - logits.square(), logits * softcap
        logits = (logits / temperature).masked_fill(~is_local, float("-inf"))
        if group is not None:  # a logit is on one rank
            dist.all_reduce(logits, dist.ReduceOp.MAX, group=group)
        rows = len(hidden)
        highest = logits.new_full((rows,), float("-inf")).scatter_reduce_(0, row_of, logits, "amax")
        highest = highest.masked_fill(highest.isinf(), 0.0)
        log_p = logits - highest[row_of]
        total = logits.new_zeros(rows).index_add_(0, row_of, log_p.exp())
        log_p = log_p - total.log()[row_of]
        log_probs = logits.new_zeros(rows).index_add_(0, row_of, log_p.where(is_target, 0.0))
        squares = logits.new_zeros(rows).index_add_(0, row_of, log_p.mul(2.0).exp_())
        ctx.save_for_backward(hidden, weight, bias, row_of, ids, is_local, is_target, log_p, slope)
        ctx.settings = temperature, group
        ctx.mark_non_differentiable(squares)
        return log_probs, squares

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, row_of, ids, is_local, is_target, log_p, slope = ctx.saved_tensors
        temperature, group = ctx.settings
        # d log p_target / dz_j = [j = target] - p_j
        grad = (is_target.to(log_p) - log_p.exp()) * grad_outputs[0][row_of] * is_local / temperature
        if slope is not None:
            grad = grad * slope
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wide = grad.dtype
        grad_hidden = torch.zeros_like(hidden, dtype=wide) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        for part in _chunks(len(ids), hidden.shape[1]):
            factor, rows, tokens = grad[part, None], row_of[part], ids[part]
            if grad_hidden is not None:
                grad_hidden.index_add_(0, rows, factor * weight[tokens])
            if grad_weight is not None:
                grad_weight.index_add_(0, tokens, factor * hidden[rows])
        grad_bias = torch.zeros_like(bias, dtype=wide).index_add_(0, ids, grad) if wants_bias else None
        if group is not None and grad_hidden is not None:
            dist.all_reduce(grad_hidden, group=group)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 7,
        )


def restricted_logits(logits: Tensor, supports: Supports) -> Tensor:
    """Return logits ``[R, V]`` that are minus infinity outside the support of their row."""
    inside = torch.zeros_like(logits, dtype=torch.bool)
    inside[supports.rows, supports.ids] = True
    return logits.masked_fill(~(inside | (supports.sizes == 0)[:, None]), float("-inf"))


def _chunks(entries: int, width: int) -> list[slice]:
    size = max(1, _ELEMENTS // width)
    return [slice(first, first + size) for first in range(0, entries, size)]
