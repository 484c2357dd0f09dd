"""Distance of a student from its teacher at each token, computed from hidden states a chunk of tokens at a time.

    teacher   hidden [R, H]  -> its K likeliest tokens and their log-probs [R, K], or the hidden states themselves
    student   hidden [R, h]  -> logits of a chunk [c, V] -> distance [c]; the backward pass computes the logits again

Neither model holds a row of logits for more than one chunk of tokens, in the forward or the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hone.algorithms.distillation import distillation_token_loss
from hone.algorithms.logits import _in_compute_dtype
from hone.algorithms.masked import wide

_LOGITS = 1 << 26
"""Logits of a chunk that exist at the same time."""


@dataclass(frozen=True)
class OutputLayer:
    """The projection of a teacher onto its vocabulary: ``softcap tanh(x / softcap)`` of ``x = hidden weight^T + bias``."""

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class TeacherTargets:
    """A teacher's distributions of ``R`` tokens: its likeliest tokens, or the hidden states that its output layer projects."""

    ids: Tensor | None = None  # ``[R, K]`` int64, the likeliest tokens
    log_probs: Tensor | None = None  # ``[R, K]`` of these tokens
    hidden: Tensor | None = None  # ``[R, H]`` last hidden states
    layer: Tensor | None = None  # ``[R]`` int64, the output layer of each token; None if there is one

    def select(self, index: Tensor | slice) -> TeacherTargets:
        """Return the targets of some of the tokens."""
        columns = (self.ids, self.log_probs, self.hidden, self.layer)
        return TeacherTargets(*(None if column is None else column[index] for column in columns))


@dataclass(frozen=True)
class TeacherDistance:
    """Distance between the distributions of student and teacher at each token."""

    loss_mode: str  # one of the divergences of :data:`~hone.algorithms.distillation.DISTILLATION_MODES`
    temperature: float = 1.0  # the logits of both are divided by it; above 0
    # further options of :func:`~hone.algorithms.distillation.distillation_token_loss`
    options: dict[str, Any] = field(default_factory=dict)
    layers: Sequence[OutputLayer] = ()  # output layers of the teachers, for divergences over the whole vocabulary

    def from_hidden(
        self,
        hidden: Tensor,  # ``[R, h]`` last hidden states of the student; with a group the same on every rank
        targets: TeacherTargets,  # of the same tokens
        *,
        weight: Tensor,  # ``[V, h]`` output embedding, or this rank's rows of it
        bias: Tensor | None = None,  # ``[V]`` or None
        softcap: float | None = None,  # of the student's logits
        group: ProcessGroup | None = None,  # ranks that hold the vocabulary, in the order of their parts
        chunk_size: int | None = None,  # tokens of a chunk; None follows from the size of the vocabulary
    ) -> dict[str, Tensor]:
        """Return ``distance [R]`` with a gradient, and ``student_mass [R]`` without one, the student's probability of the K tokens."""
        hidden, weight, bias = _in_compute_dtype(hidden, weight, bias)
        with torch.autocast(hidden.device.type, enabled=False):

            def distance(
                hidden: Tensor, weight: Tensor, bias: Tensor | None, part: TeacherTargets
            ) -> dict[str, Tensor]:
                logits = project(hidden, weight, bias, softcap, group)
                return self.from_logits(logits, part)

            ranks = 1 if group is None else dist.get_world_size(group)
            parts = chunks(len(hidden), len(weight) * ranks, chunk_size)
            computed = [_again(distance, hidden[part], weight, bias, targets.select(part)) for part in parts]
        return {name: torch.cat([part[name] for part in computed]) for name in computed[0]}

    def from_logits(self, logits: Tensor, targets: TeacherTargets) -> dict[str, Tensor]:
        """Return the outputs of :meth:`from_hidden` from the student's logits ``[R, V]``."""
        scaled = wide(logits) / self.temperature
        if targets.ids is not None and targets.log_probs is not None:
            student = scaled.gather(-1, targets.ids) - scaled.logsumexp(-1, keepdim=True)
            distance = distillation_token_loss(student, targets.log_probs, self.loss_mode, **self.options)
            return {"distance": distance, "student_mass": student.detach().exp().sum(-1)}
        teacher = self._teacher_logits(targets)
        size = min(scaled.shape[-1], teacher.shape[-1])  # output layers may be padded to different sizes
        student, teacher = (x[..., :size].log_softmax(-1) for x in (scaled, teacher))
        return {"distance": distillation_token_loss(student, teacher, self.loss_mode, **self.options)}

    @torch.no_grad()
    def _teacher_logits(self, targets: TeacherTargets) -> Tensor:
        assert targets.hidden is not None
        if targets.layer is None:
            return self._projected(targets.hidden, self.layers[0])
        size = min(len(layer.weight) for layer in self.layers)
        logits = targets.hidden.new_empty(len(targets.hidden), size)
        for number, layer in enumerate(self.layers):
            rows = (targets.layer == number).nonzero()[:, 0]
            logits[rows] = self._projected(targets.hidden[rows], layer)[:, :size]
        return logits

    def _projected(self, hidden: Tensor, layer: OutputLayer) -> Tensor:
        width = layer.weight.shape[1]
        return (
            project(hidden[:, :width].to(layer.weight.dtype), layer.weight, layer.bias, layer.softcap)
            / self.temperature
        )


@torch.no_grad()
def chunked_top_k(
    hidden: Tensor,  # ``[R, H]``
    weight: Tensor,  # ``[V, H]`` output embedding, or this rank's rows of it
    k: int,  # number of tokens; at most the vocabulary
    *,
    bias: Tensor | None = None,  # ``[V]`` or None
    temperature: float = 1.0,  # logits are divided by it; above 0
    softcap: float | None = None,  # of the logits
    group: ProcessGroup | None = None,  # ranks that hold the vocabulary, in the order of their parts
    vocabulary: int | None = None,  # only the first tokens exist for the student; None: all
    chunk_size: int | None = None,  # rows of a chunk; None follows from the size of the vocabulary
) -> tuple[Tensor, Tensor]:
    """Return the ``k`` likeliest tokens of each row and their log-probs, both ``[R, k]``, the likeliest first."""
    hidden, weight, bias = _in_compute_dtype(hidden, weight, bias)
    ranks = 1 if group is None else dist.get_world_size(group)
    with torch.autocast(hidden.device.type, enabled=False):
        parts = [
            top_k(project(hidden[part], weight, bias, softcap, group), k, temperature, vocabulary)
            for part in chunks(len(hidden), len(weight) * ranks, chunk_size)
        ]
    ids, log_probs = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(log_probs)


def top_k(logits: Tensor, k: int, temperature: float = 1.0, vocabulary: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the ``k`` likeliest tokens and their log-probs, ``[..., k]``, from logits ``[..., V]``."""
    scaled = wide(logits)[..., :vocabulary] / temperature
    values, ids = scaled.topk(min(k, scaled.shape[-1]), dim=-1)
    return ids, values - scaled.logsumexp(-1, keepdim=True)


def chunks(rows: int, vocabulary: int, chunk_size: int | None = None) -> list[slice]:
    """Return the chunks of ``rows``, one at least, so that their logits are few enough."""
    size = chunk_size or max(1, _LOGITS // vocabulary)
    return [slice(first, first + size) for first in range(0, max(1, rows), size)]


def project(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, group: ProcessGroup | None = None
) -> Tensor:
    """Return logits ``[c, V]`` in float32 or better, differentiable; with a group every rank gets those of the whole vocabulary.

    Every rank of the group must compute the same loss from them.
    """
    if group is not None:
        hidden = _Shared.apply(hidden, group)  # type: ignore[assignment]
    logits = wide(functional.linear(hidden, weight, bias))
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits if group is None else _Joined.apply(logits, group)  # type: ignore[return-value]


def _again(compute: Callable[..., Any], *arguments: Any) -> Any:
    """Compute now, and again in the backward pass, so that nothing inside is kept."""
    if not torch.is_grad_enabled():
        return compute(*arguments)
    return checkpoint(compute, *arguments, use_reentrant=False, preserve_rng_state=False)


class _Shared(torch.autograd.Function):
    """Identity whose gradient is the sum over the ranks, each of which has a part of it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Joined(torch.autograd.Function):
    """Concatenation of the ranks' parts in the last dimension; the gradient of a part is its slice, the same loss on every rank."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        ctx.rank, ctx.size = dist.get_rank(group), part.shape[-1]
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].narrow(-1, ctx.rank * ctx.size, ctx.size).contiguous(), None
