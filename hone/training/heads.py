"""What a model computes for the response tokens of a packed micro-batch: log-probs and entropy, or values."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hone.algorithms.logits import (
    chunked_log_probs,
    chunked_sum_pi_squared,
    entropy_from_logits,
    sum_pi_squared_from_logits,
    token_log_probs,
)
from hone.algorithms.vocabulary import vocabulary_log_probs, vocabulary_sum_pi_squared
from hone.training import fused
from hone.training.model import causal_lm, value_head
from hone.training.packing import PackedSequences


class Head(Protocol):
    """Maps a packed micro-batch to named values, one a response token, each ``[R]`` float32."""

    def __call__(self, model: nn.Module, packed: PackedSequences, *, with_entropy: bool) -> dict[str, Tensor]: ...


class PolicyHead:
    """``log_probs`` of the response tokens (and ``entropy``) under ``softmax(logits / temperature)``.

    The vocabulary projection runs in chunks and only where a response token is predicted; models that do something of
    their own to the logits go through their own forward pass.

    Args:
        temperature: logits are divided by it; 0 (greedy) counts as 1.
        with_sum_pi_squared: also give ``sum_pi_squared``, the sum of the squared probabilities of each token's
            distribution, a constant; it costs a second projection.
        learns_entropy: whether the entropy is part of a loss; otherwise it may be a constant.
    """

    def __init__(
        self, temperature: float = 1.0, *, with_sum_pi_squared: bool = False, learns_entropy: bool = True
    ) -> None:
        self.temperature = temperature if temperature > 0 else 1.0
        self.with_sum_pi_squared, self.learns_entropy = with_sum_pi_squared, learns_entropy

    def __call__(self, model: nn.Module, packed: PackedSequences, *, with_entropy: bool) -> dict[str, Tensor]:
        causal = causal_lm(model)
        output = causal.get_output_embeddings()
        if type(output) is not nn.Linear or _scales_logits(causal):
            logits = causal(
                input_ids=packed.input_ids,
                position_ids=packed.layout.position_ids,
                layout=packed.layout,
                use_cache=False,
                logits_to_keep=packed.output_index,
            ).logits[0]
            result = {"log_probs": token_log_probs(logits, packed.targets, self.temperature)}
            if with_entropy:
                known = logits if self.learns_entropy else logits.detach()
                result["entropy"] = entropy_from_logits(known.float() / self.temperature)
            if self.with_sum_pi_squared:
                result["sum_pi_squared"] = sum_pi_squared_from_logits(logits.detach().float() / self.temperature)
            return result
        hidden = hidden_states(causal, packed)
        softcap = getattr(causal.config, "final_logit_softcapping", None)
        shared = {"temperature": self.temperature, "softcap": softcap} | _output_weights(output)
        divided = "group" in shared
        compute = vocabulary_log_probs if divided else chunked_log_probs
        log_probs, entropy = compute(hidden, targets=packed.targets, with_entropy=with_entropy, **shared)
        result = {"log_probs": log_probs}
        if entropy is not None:
            result["entropy"] = entropy
        if self.with_sum_pi_squared:
            shared.pop("start", None)
            squares = vocabulary_sum_pi_squared if divided else chunked_sum_pi_squared
            result["sum_pi_squared"] = squares(hidden, **shared)
        return result


class ValueHead:
    """``values``: the value of the state in which each response token was chosen."""

    def __call__(self, model: nn.Module, packed: PackedSequences, *, with_entropy: bool) -> dict[str, Tensor]:
        return {"values": value_head(model)(hidden_states(causal_lm(model), packed)).squeeze(-1).float()}


def hidden_states(model: nn.Module, packed: PackedSequences) -> Tensor:
    """Last hidden states ``[R, H]`` where response tokens are predicted."""
    if fused.fits(model):
        hidden = fused.hidden_states(model, packed.input_ids, packed.layout)
    else:
        hidden = model.get_decoder()(  # type: ignore[operator]
            input_ids=packed.input_ids,
            position_ids=packed.layout.position_ids,
            layout=packed.layout,
            use_cache=False,
        ).last_hidden_state
    return hidden.squeeze(0).index_select(0, packed.output_index)


def _output_weights(output: nn.Linear) -> dict[str, Any]:
    """Weight and bias of the output layer; where tensor parallelism cuts it by vocabulary, this rank's part of it."""
    weight, bias = output.weight, output.bias
    if not isinstance(weight, DTensor):
        return {"weight": weight, "bias": bias}
    mesh = weight.device_mesh
    return {
        "weight": weight.to_local(),
        "bias": bias.to_local() if isinstance(bias, DTensor) else bias,
        "group": mesh.get_group(),
        "start": mesh.get_local_rank() * (weight.shape[0] // mesh.size()),
    }


def _scales_logits(model: nn.Module) -> bool:
    """Whether the model multiplies its logits by a constant of its own (Granite, Cohere)."""
    config = model.config
    return any(getattr(config, name, None) not in (None, 1, 1.0) for name in ("logits_scaling", "logit_scale"))


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """The compute-dtype context: bfloat16 matrix products over float32 parameters, or nothing."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16")
