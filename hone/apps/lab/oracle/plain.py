"""The plain path: each sequence alone, unpacked and unpadded, with eager attention, in float64 or in a run's dtype."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hone.algorithms.support import restricted_logits
from hone.data.batch import Batch
from hone.errors import HoneError
from hone.models.heads import autocast
from hone.models.layer_states import layer_hooks
from hone.models.loading import causal_lm, load_policy, saved_model
from hone.models.registry import family_of
from hone.models.routing import attention_of
from hone.training.microbatches import MAX_ELEMENTS, SavedMicroBatch
from hone.training.packing import packed_rows, supports_of

CPU = torch.device("cpu")
_LOW = (torch.float16, torch.bfloat16, torch.float32)


class InFloat64(TorchFunctionMode):
    """Replaces casts to float32 and below by casts to float64: models compute norms, softmax and RoPE in float32."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        return func(*map(_widened, args), **{name: _widened(value) for name, value in (kwargs or {}).items()})


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _LOW else value


@dataclass(frozen=True)
class Places:
    """The tokens whose states are compared: every token of every sequence that the run saved."""

    sequence: Tensor  # ``[P]``, row of the micro-batch
    token: Tensor  # ``[P]``, position in prompt + response
    slot: Tensor  # ``[P]``, row of the saved states
    packed: Tensor  # ``[P]``, index in the run's packed row

    @classmethod
    def from_saved(cls, batch: Batch, token_index: Tensor) -> Places:
        """Find the tokens in the packed row; a token that rows share is compared in each."""
        _, index = packed_rows(batch.ragged("prompt_ids"), batch.ragged("response_ids"))
        slot_of = torch.full((max(int(index.values.max()), int(token_index.max())) + 1,), -1)
        slot_of[token_index] = torch.arange(len(token_index))
        lengths, slot = index.lengths, slot_of[index.values]
        sequence = torch.arange(len(index)).repeat_interleave(lengths)
        token = torch.arange(len(slot)) - index.offsets[:-1].repeat_interleave(lengths)
        return cls(*(values[slot >= 0] for values in (sequence, token, slot, index.values)))


@dataclass
class PlainPass:
    states: dict[str, Tensor]  # ``hidden.<layer>`` and ``router.<layer>`` at the compared tokens, ``[P, ...]`` float64
    outputs: dict[str, Tensor]  # ``log_probs`` and ``entropy`` of the response tokens, ``[R]`` float64
    norms: dict[str, float]  # gradient norm of every trained parameter
    gradients: dict[str, Tensor]  # whole gradients of small parameters


def load_plain(saved: SavedMicroBatch) -> nn.Module:
    """Load the saved weights in float32, without the run's savings of memory."""
    config = saved.config.actor_rollout_ref.model
    plain = dataclasses.replace(
        saved_model(dataclasses.replace(config, path=saved.about["base_model"]), saved.directory / "model"),
        enable_gradient_checkpointing=False,
        tiled_mlp=dataclasses.replace(copy.deepcopy(config.tiled_mlp), enabled=False),
    )
    model = load_policy(plain, device=CPU, seed=saved.config.trainer.seed, trainable=True).eval()
    causal = causal_lm(model)
    dropout = max([module.p for module in model.modules() if isinstance(module, nn.Dropout)], default=0.0)
    if max(dropout, getattr(causal.config, "attention_dropout", 0.0) or 0.0) > 0:
        raise HoneError("the model has dropout", why="its draws cannot be repeated", fix="train without dropout")
    if family_of(causal.config.model_type).own_attention:
        raise HoneError(
            f"a {causal.config.model_type} model has an attention of its own, without an eager form to compare with",
            fix="hone oracle works for models whose attention goes through transformers' interface",
        )
    causal.config._experts_implementation = "eager"
    return model


def plain_pass(
    model: nn.Module, saved: SavedMicroBatch, places: Places, output_gradients: Mapping[str, Tensor], *, dtype: str
) -> PlainPass:
    """Run every sequence alone, forward and backward; float64 converts the model.

    ``output_gradients [R]`` of the head's outputs are where the backward pass begins; ``places`` are the tokens whose states
    are returned.
    """
    precise = dtype == "float64"
    model = model.double() if precise else model
    model.zero_grad()
    batch, causal = saved.batch, causal_lm(model)
    rollout = saved.config.actor_rollout_ref.rollout
    temperature = rollout.temperature if rollout.temperature > 0 else 1.0
    prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
    states: dict[str, list[Tensor]] = {}
    outputs: dict[str, list[Tensor]] = {"log_probs": [], "entropy": []}
    for row in range(len(batch)):
        prompt, response = prompts.row(row), responses.row(row)
        tokens = places.token[places.sequence == row]

        def record(kind: str, layer: int, values: Tensor, tokens: Tensor = tokens) -> None:
            kept = values.detach().reshape(-1, values.shape[-1])[tokens].double()
            states.setdefault(f"{kind}.{layer}", []).append(kept)

        with _precision(dtype), attention_of(causal, "eager"), layer_hooks(causal, record):
            logits = causal(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits[0]
            scores = logits[len(prompt) - 1 : -1].float() / temperature
            log_softmax = scores.log_softmax(-1)
            supports = supports_of(batch.reorder([row]), CPU)
            restricted = scores if supports is None else restricted_logits(scores, supports)
            computed = {
                "log_probs": restricted.log_softmax(-1).gather(1, response[:, None])[:, 0],
                "entropy": -(log_softmax.exp() * log_softmax).sum(-1),
            }
        begin, end = int(responses.offsets[row]), int(responses.offsets[row + 1])
        objective = [(computed[name] * values[begin:end].to(scores)).sum() for name, values in output_gradients.items()]
        torch.stack(objective).sum().backward()
        for name, values in computed.items():
            outputs[name].append(values.detach().double())
    gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return PlainPass(
        {name: torch.cat(parts) for name, parts in states.items()},
        {name: torch.cat(parts) for name, parts in outputs.items()},
        {name: float(gradient.norm()) for name, gradient in gradients.items()},
        {name: gradient for name, gradient in gradients.items() if gradient.numel() <= MAX_ELEMENTS},
    )


@contextlib.contextmanager
def _precision(dtype: str) -> Iterator[None]:
    with InFloat64() if dtype == "float64" else autocast(CPU, dtype):
        yield
