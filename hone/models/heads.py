"""Heads: log-probs and entropy, or values, of the response tokens of a packed micro-batch."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from hone.algorithms.logits import (
    chunked_log_probs,
    chunked_sum_pi_squared,
    entropy_from_logits,
    over_ranks,
    projection_gradients,
    sum_pi_squared_from_logits,
    token_log_probs,
)
from hone.algorithms.support import restricted_logits, support_log_probs
from hone.algorithms.teacher import TeacherDistance
from hone.config.dtypes import is_narrow
from hone.models import images
from hone.models.devices import compute_dtype
from hone.models.inputs import PackedSequences
from hone.models.kernels import cuda
from hone.models.kernels.cuda import matmuls, vocabulary  # noqa: F401  registers the operators
from hone.models.llama import cuda as llama_cuda
from hone.models.llama import train as llama_train
from hone.models.loading import causal_lm, value_head


class Head(Protocol):
    """Maps a packed micro-batch to named outputs, each ``[U]`` float32 with one number for each entry of ``output_index``.

    Outputs without a gradient may be ``[U, ...]``, and of integers. A head whose outputs are for the response tokens themselves, not for
    the tokens that predict them, has an attribute ``reads_targets = True``.
    """

    def __call__(self, model: nn.Module, packed: PackedSequences, *, with_entropy: bool) -> dict[str, Tensor]: ...


class Backbone(nn.Module, ABC):
    """A model that is not a module of transformers and computes the inputs of a head itself. Its logits are plain projections."""

    @abstractmethod
    def hidden_states(self, packed: PackedSequences) -> Tensor:
        """Return the last hidden states ``[U, H]`` at ``output_index``."""

    @abstractmethod
    def output_weights(self) -> dict[str, Any]:
        """Return the output layer like :func:`output_weights`."""

    @abstractmethod
    def value_layer(self) -> nn.Linear:
        """Return the output layer of a value model."""


def reads_targets(head: Head) -> bool:
    """Return whether a head reads the hidden states at ``target_index`` instead of ``output_index``."""
    return getattr(head, "reads_targets", False)


class PolicyHead:
    """``log_probs`` of the response tokens (and ``entropy``) under ``softmax(logits / temperature)``.

    Where a token has a support, its log-prob and ``sum_pi_squared`` are those of the policy renormalised over it
    (:mod:`hone.algorithms.support`); the entropy is always of the whole policy.

    The vocabulary projection runs in chunks, and only where a response token is predicted. A model that transforms its logits
    in a way not known here goes through its own forward pass.

    Args:
        temperature: logits are divided by it; 0 (greedy) counts as 1.
        with_sum_pi_squared: also return ``sum_pi_squared``, the sum of squared probabilities of each token's distribution,
            without a gradient; it costs a second projection.
        learns_entropy: whether a loss uses the entropy; otherwise it may come without a gradient.
        distance: from the teacher, over the whole vocabulary; None without one. Where a gradient is enabled and the micro-batch has
            the teacher's targets, its outputs are added.
    """

    def __init__(
        self,
        temperature: float = 1.0,
        *,
        with_sum_pi_squared: bool = False,
        learns_entropy: bool = True,
        distance: TeacherDistance | None = None,
    ) -> None:
        self.temperature = temperature if temperature > 0 else 1.0
        self.with_sum_pi_squared, self.learns_entropy = with_sum_pi_squared, learns_entropy
        self.distance = distance

    def __call__(self, model: nn.Module, packed: PackedSequences, *, with_entropy: bool) -> dict[str, Tensor]:
        causal = transformers_or_backbone(model)
        teacher = packed.teacher if torch.is_grad_enabled() else None
        if not projects_plainly(causal):
            logits = causal_logits(causal, packed)
            restricted = logits if packed.supports is None else restricted_logits(logits, packed.supports)
            result = {"log_probs": token_log_probs(restricted, packed.targets, self.temperature)}
            if with_entropy:
                source = logits if self.learns_entropy else logits.detach()
                result["entropy"] = entropy_from_logits(source.float() / self.temperature)
            if self.with_sum_pi_squared:
                result["sum_pi_squared"] = sum_pi_squared_from_logits(restricted.detach().float() / self.temperature)
            if self.distance is not None and teacher is not None:
                result |= self.distance.from_logits(logits, teacher)
            return result
        hidden = hidden_states(causal, packed)
        shared: dict[str, Any] = {"temperature": self.temperature} | output_weights(causal)
        compute = fused_log_probs if fuses(hidden) else chunked_log_probs
        result: dict[str, Tensor] = {}
        supports = packed.supports
        only_supports = supports is not None and supports.all_restricted
        if with_entropy or not only_supports:
            unneeded = only_supports and not self.learns_entropy  # no loss depends on the whole vocabulary
            with torch.no_grad() if unneeded else contextlib.nullcontext():
                log_probs, entropy = compute(hidden, targets=packed.targets, with_entropy=with_entropy, **shared)
            result["log_probs"] = log_probs
            if entropy is not None:
                result["entropy"] = entropy
        if self.with_sum_pi_squared and not only_supports:
            result["sum_pi_squared"] = chunked_sum_pi_squared(hidden, **whole_vocabulary(shared))
        if supports is not None:
            log_probs, squares = support_log_probs(hidden, targets=packed.targets, supports=supports, **shared)
            restricted = {"log_probs": log_probs}
            if self.with_sum_pi_squared:
                restricted["sum_pi_squared"] = squares
            for name, values in restricted.items():
                result[name] = values if only_supports else torch.where(supports.sizes > 0, values, result[name])
        if self.distance is not None and teacher is not None:
            result |= self.distance.from_hidden(hidden, teacher, **whole_vocabulary(output_weights(causal)))
        return result


class ValueHead:
    """``values``: the value of the state before each response token."""

    def __call__(self, model: nn.Module, packed: PackedSequences, *, with_entropy: bool) -> dict[str, Tensor]:
        layer = model.value_layer() if isinstance(model, Backbone) else value_head(model)
        return {"values": layer(hidden_states(transformers_or_backbone(model), packed)).squeeze(-1).float()}


def transformers_or_backbone(model: nn.Module) -> Any:
    """Return the Hugging Face model inside ``model``, or a :class:`Backbone` itself."""
    return model if isinstance(model, Backbone) else causal_lm(model)


def hidden_states(model: nn.Module, packed: PackedSequences) -> Tensor:
    """Last hidden states ``[U, H]`` at ``output_index``, the positions that predict response tokens."""
    if isinstance(model, Backbone):
        return model.hidden_states(packed)
    if packed.hidden is not None:
        hidden = model.get_decoder()(**decoder_inputs(packed)).last_hidden_state  # type: ignore[operator]
    elif packed.images is not None:
        hidden = images.hidden_states(model, packed.input_ids, packed.images, packed.context)
    elif llama_train.supports_training(model):
        hidden = llama_train.hidden_states(model, packed.input_ids, packed.context)
    elif llama_cuda.supports_training(model):
        hidden = llama_cuda.hidden_states(model, packed.input_ids, packed.context)
    else:
        hidden = model.get_decoder()(**decoder_inputs(packed)).last_hidden_state  # type: ignore[operator]
    return packed.of_outputs(hidden.squeeze(0))


def causal_logits(model: nn.Module, packed: PackedSequences) -> Tensor:
    """Logits ``[U, V]`` at ``output_index`` by the model's own forward pass."""
    return model(**decoder_inputs(packed), logits_to_keep=packed.output_index).logits[0]


def decoder_inputs(packed: PackedSequences) -> dict[str, Any]:
    """Return the arguments of a transformers decoder: token ids, or the hidden states of an earlier pipeline stage."""
    given = {"input_ids": packed.input_ids} if packed.hidden is None else {"inputs_embeds": packed.hidden}
    return {**given, "position_ids": packed.context.position_ids, "context": packed.context, "use_cache": False}


def projects_plainly(model: Any) -> bool:
    """True if the logits are a linear layer of the last hidden states, with a soft cap at most."""
    if isinstance(model, Backbone):
        return True
    return type(model.get_output_embeddings()) is nn.Linear and not _scales_logits(model)


def output_weights(model: Any) -> dict[str, Any]:
    """Weight, bias and soft cap of the output layer; of this rank's part if tensor parallelism divides it by vocabulary."""
    if isinstance(model, Backbone):
        return model.output_weights()
    config = model.config.get_text_config(decoder=True)
    output, softcap = model.get_output_embeddings(), getattr(config, "final_logit_softcapping", None)
    weight, bias = output.weight, output.bias
    if not isinstance(weight, DTensor):
        return {"weight": weight, "bias": bias, "softcap": softcap}
    mesh = weight.device_mesh
    return {
        "softcap": softcap,
        "weight": weight.to_local(),
        "bias": bias.to_local() if isinstance(bias, DTensor) else bias,
        "group": mesh.get_group(),
        "start": mesh.get_local_rank() * (weight.shape[0] // mesh.size()),
    }


def whole_vocabulary(weights: dict[str, Any]) -> dict[str, Any]:
    """The output layer without the place of this rank's part, for functions that gather the parts."""
    return {name: value for name, value in weights.items() if name != "start"}


def _scales_logits(model: nn.Module) -> bool:
    """True if the model multiplies its logits by a constant (Granite, Cohere)."""
    config = model.config
    return any(getattr(config, name, None) not in (None, 1, 1.0) for name in ("logits_scaling", "logit_scale"))


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """Autocast context of the compute dtype: bfloat16 or float16 matmuls over float32 parameters, or nothing for float32."""
    enabled = is_narrow(dtype)
    return torch.autocast(device.type, dtype=getattr(torch, dtype) if enabled else torch.bfloat16, enabled=enabled)


_GRADIENTS = 1 << 29
"""Logits whose gradients exist at the same time: 1 GiB in bfloat16."""


def fuses(hidden: Tensor) -> bool:
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
    """Keep two numbers of each row; the backward pass computes the gradient of the logits of some rows at a time.

    It does so in the compute dtype, and adds up the gradient of the weight in float32 inside the matmul.
    """

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
