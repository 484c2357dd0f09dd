"""Route the attention of a Hugging Face model to Hone's, and refuse models that this cannot control."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hone.errors import ModelError
from hone.models.attention.context import GIVEN, NAME
from hone.models.recurrent import hand_on, recurrent_layers, route
from hone.models.registry import STATE_KINDS, family_of, layer_kinds

_TOWERS = ("vision_config", "audio_config")
"""Configs of the parts that read images and sound, whose attention is their own."""
_CAUSAL_LAYERS = {"full_attention", "sliding_attention", "moe", "mlp"}
_PACKED = (
    "sequences are packed end to end; only attention through transformers' ALL_ATTENTION_FUNCTIONS keeps them separate"
)
_LEFT_TO_RIGHT = "a policy generates from left to right"
_NEEDED = {
    "indexed_attention": "its indexer would have to choose keys within each packed sequence, and its own keys would need a cache",
    "chunked_attention": "every kernel and the cache would have to end a token's view at the beginning of its chunk of positions",
    "heavily_compressed_attention": "its compressed keys would need a cache that can be shortened, shared and kept for turns",
}
"""Kinds of layers that are refused, with what they would need."""
_SILENT = ("jamba", "nemotron", "stablelm")
"""Families by ``model_type`` whose layers get the context, and do not hand it on to attention or recurrence."""
_OTHER_PROBABILITIES = {
    "phimoe": "its routers draw experts at random while it trains",
    "diffllama": "each of its layers attends twice, and the cache keeps keys and values once",
    **dict.fromkeys(
        ("inkling_text", "inkling2_text"),
        "convolutions within its attention do not get what separates packed sequences",
    ),
    "hrm_text": "its layers run several times for each token, with keys and values of each time",
}
"""Families by ``model_type`` with the reason why they are refused."""


def use_hone_attention(model: nn.Module) -> None:
    """Switch ``model`` (plain, PEFT-wrapped, with any head) to this attention.

    Raises:
        ModelError: the model's attention cannot be replaced, or tokens meet outside attention.
    """
    for module in _text_modules(model):
        if isinstance(module, PreTrainedModel):
            for part in module.modules():
                route(part, module.config.get_text_config(decoder=True))
            if module.config.model_type in _SILENT:
                _hand_down(module)
            hand_on(module)
        problem, why = _obstacle(module) if isinstance(module, PreTrainedModel) else ("", "")
        if problem:
            raise ModelError(
                f"{type(module).__name__} cannot be trained or sampled from: {problem}",
                why=why,
                where="model.path",
                fix="use a decoder such as Qwen3, Llama, Mistral, Gemma or GPT-OSS, or register the family with an attention of "
                "its own (docs/extending.md)",
            )
    for config in _configs(model):
        _set_attention(config, NAME)


def _hand_down(model: PreTrainedModel) -> None:
    for layer in model.modules():
        if not hasattr(layer, "_hone_handing") and isinstance(layer, GradientCheckpointingLayer):
            layer.__class__ = _handing(type(layer))  # type: ignore[assignment]


@functools.cache
def _handing(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for child in self.children():
            vars(child)[GIVEN] = kwargs.get("context")
        try:
            return kind.forward(self, *args, **kwargs)
        finally:
            for child in self.children():
                vars(child).pop(GIVEN, None)

    return type(kind.__name__, (kind,), {"forward": forward, "_hone_handing": True, "__module__": kind.__module__})


@contextlib.contextmanager
def attention_of(model: nn.Module, name: str) -> Iterator[None]:
    """Within the block ``model`` uses another attention, for example transformers' own ``"eager"``."""
    before = [(config, config._attn_implementation) for config in _configs(model)]
    for config, _ in before:
        config._attn_implementation = name
    try:
        yield
    finally:
        for config, implementation in before:
            _set_attention(config, implementation)


def _set_attention(config: Any, name: str | None) -> None:
    config._attn_implementation = {"": name}


def _obstacle(model: PreTrainedModel) -> tuple[str, str]:
    """Say why engine and trainer would not compute the same with this model, and what that means; empty when they do."""
    config = model.config
    if family_of(config.model_type).own_attention:
        return "", ""
    if config.model_type in _OTHER_PROBABILITIES:
        return _OTHER_PROBABILITIES[config.model_type], "engine and trainer would have other probabilities of a token"
    attention = [
        m for m in model.modules() if "attention" in type(m).__name__.lower() or type(m).__name__.endswith("MLA")
    ]
    recurrent = recurrent_layers(model)
    if not attention and not recurrent:
        return "it has no attention layers", _PACKED
    if attention and not type(model)._can_set_attn_implementation():
        return "its attention does not go through transformers' ALL_ATTENTION_FUNCTIONS", _PACKED
    if any((getattr(module, "layer_idx", None) or 0) < 0 for module in attention):
        return "its attention modules belong to no layer", "the cache keeps keys and values by layer"
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder besides its decoder", _PACKED
    if getattr(config, "use_bidirectional_attention", False) in (True, "all"):
        return "its config sets use_bidirectional_attention", _LEFT_TO_RIGHT
    if {getattr(module, "is_causal", None) for module in attention} - {None} == {False} and model.can_generate():
        return "its attention lets a token see later ones", _LEFT_TO_RIGHT
    known = [
        _CAUSAL_LAYERS | (STATE_KINDS if layer in recurrent else set()) for layer in range(len(layer_kinds(config)))
    ]
    other = sorted({kind for kind, known in zip(layer_kinds(config), known, strict=True) if kind not in known})
    if other or (type(model)._is_stateful and not recurrent):
        needed = "; ".join(_NEEDED[kind] for kind in other if kind in _NEEDED)
        return f"it has layers of kind {', '.join(other) or 'recurrent'}", needed or _PACKED
    if attention and "position_ids" not in inspect.signature(type(model.get_decoder()).forward).parameters:
        return "its decoder takes no position_ids", "sequences are packed end to end, and each begins at position 0"
    return "", ""


def _configs(model: nn.Module) -> list[PretrainedConfig]:
    """Every config that a module of the model holds, sub-configs included, each once; none of a tower."""
    seen: dict[int, PretrainedConfig] = {}
    waiting: list[Any] = [getattr(module, "config", None) for module in _text_modules(model)]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PretrainedConfig) and id(config) not in seen:
            seen[id(config)] = config
            waiting.extend(getattr(config, name, None) for name in config.sub_configs if name not in _TOWERS)
    return list(seen.values())


def _text_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a model without those of its towers."""
    configs: list[Any] = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    towers = {id(part) for config in configs for name in _TOWERS if (part := getattr(config, name, None)) is not None}
    inside = [m for m in model.modules() if isinstance(m, PreTrainedModel) and id(m.config) in towers]
    hidden = {id(module) for tower in inside for module in tower.modules()}
    yield from (module for module in model.modules() if id(module) not in hidden)
