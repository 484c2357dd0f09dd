"""Layers whose tokens meet in a state instead of attention: gated delta nets, Mamba2, short convolutions.

Transformers' own modules compute them, for whole sequences and for new tokens after a state. A module that is routed here gets its
sequences from the context of the pass (:mod:`hone.models.attention.context`), and its states from the cache of the engine.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionLayer

from hone.models.attention.cache import Entries, NewTokens
from hone.models.attention.context import NAME, require_context

STATES = -2
"""Layer of the caches of states: that of layer ``i`` is ``STATES - i``, because a layer may have attention besides."""
_PARAMETERS = ("cache", "cache_params", "past_key_values")  # the first since transformers 5.24
_KEPT = ("update_conv_state", "update_recurrent_state", "set_linear_cache")
"""Calls by which a module keeps its states: those of Transformers' caches, and that of MiniMax."""


def route(module: nn.Module, config: Any) -> bool:
    """Let a module get sequences and states from the context; False if it keeps none, or not in the form of transformers 5."""
    if isinstance(module, _Routed):
        return True
    if _parameter(type(module)) is None or not hasattr(module, "layer_idx"):
        return False
    module.__class__ = _routed(type(module))
    vars(module)["_hone_config"] = config
    return True


@functools.cache
def _parameter(kind: type[nn.Module]) -> str | None:
    """Return the parameter by which a recurrent module gets its states."""
    name = next((name for name in _PARAMETERS if name in inspect.signature(kind.forward).parameters), None)
    source = inspect.getsource(kind.forward) if name else ""
    return name if any(f"{call}(" in source for call in _KEPT) else None


@functools.cache
def _needed(kind: type[nn.Module]) -> list[str]:
    """Return the arguments besides the hidden states that a module requires; its tokens meet without them."""
    parameters = [*inspect.signature(kind.forward).parameters.values()][2:]
    return [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]


@functools.cache
def _continues(kind: type[nn.Module]) -> bool:
    """Return whether a module computes several tokens after a state; that of Mamba 1 starts them from an empty one."""
    source = inspect.getsource(kind.forward)
    return "initial_state" in source or "update_recurrent_state(" not in source


def bypassed_linears(model: nn.Module) -> list[str]:
    """Return the names of linear layers whose weight a recurrent module gives to a kernel: an adapter would be passed over."""
    names: list[str] = []
    for name, module in model.named_modules():
        kind = getattr(module, "_hone_kind", type(module))
        if _parameter(kind) is not None:
            read = set(re.findall(r"self\.(\w+)\.weight\b", inspect.getsource(kind.forward)))
            names += [
                f"{name}.{child}" for child in sorted(read) if isinstance(getattr(module, child, None), nn.Linear)
            ]
    return names


class _Routed:
    """Mark of the classes that :func:`_routed` makes."""


@functools.cache
def _routed(kind: type[nn.Module]) -> type[nn.Module]:
    pair = "return attn_output, " in inspect.getsource(kind.forward)

    def forward(self: Any, hidden_states: Tensor, *args: Any, context: Any = None, **kwargs: Any) -> Any:
        if context is None and self._hone_config._attn_implementation != NAME:
            return kind.forward(self, hidden_states, *args, **kwargs)
        if context is None and not isinstance(given := kwargs.get(str(_parameter(kind))), Cache | None):
            context = given  # see `hand_on`
        mixed = require_context(self, context).mix(STATES - self.layer_idx, Mixer(self), hidden_states)
        return (mixed, None) if pair else mixed

    return type(kind.__name__, (_Routed, kind), {"forward": forward, "_hone_kind": kind, "__module__": kind.__module__})


def hand_on(model: PreTrainedModel) -> None:
    """Let a model of states alone pass the context on as its cache, the only argument that its blocks hand to their mixers."""
    names = inspect.signature(type(model).forward).parameters
    of_states = not names.keys().isdisjoint(_PARAMETERS[:2]) and "position_ids" not in names
    if of_states and _as_cache not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_as_cache, with_kwargs=True)


def _as_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if (context := kwargs.pop("context", None)) is not None:
        kwargs.pop("position_ids", None)  # a recurrence has no positions
        kwargs[next(name for name in _PARAMETERS if name in inspect.signature(module.forward).parameters)] = context
    return args, kwargs


class Mixer:
    """One recurrent module: callable on whole sequences, and on new tokens after states."""

    def __init__(self, module: Any) -> None:
        self._module, self._kind = module, module._hone_kind

    def __call__(self, hidden: Tensor) -> Tensor:
        """Whole sequences ``[rows, width, H]``, padded on the right."""
        return self._compute(hidden)

    def _compute(self, hidden: Tensor, **cache: Any) -> Tensor:
        output = self._kind.forward(self._module, hidden, **dict.fromkeys(_needed(self._kind)), **cache)
        return output[0] if isinstance(output, tuple) else output

    def advance(self, hidden: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """New tokens ``[rows, width, H]`` after the states of their rows, none for new sequences; also return the new states."""
        if hidden.shape[1] > 1 and not _continues(self._kind) and any(bool(state.any()) for state in states):
            parts = list[Tensor]()
            for token in hidden.split(1, dim=1):
                part, states = self.advance(token, states)
                parts.append(part)
            return torch.cat(parts, dim=1), list(states)
        name = str(_parameter(self._kind))
        if hasattr(self._module, "slope_rate"):  # lightning attention has a cache of its own
            lightning = _LightningCache(states)
            return self._compute(hidden, **{name: lightning}), lightning.states
        layer: Any = LinearAttentionLayer(getattr(self._module._hone_config, "number_of_conv_states", 1))
        for number in range(len(states) // 2):
            layer.has_previous_state[number] = True
            conv, recurrent = states[2 * number : 2 * number + 2]
            if conv.dim() > 2:
                layer.conv_states[number], layer.conv_kernel_size[number] = conv, conv.shape[-1]
                layer.is_conv_states_initialized[number] = True
            if recurrent.dim() > 2:
                layer.recurrent_states[number] = recurrent
                layer.is_recurrent_states_initialized[number] = True
        cache: Any = Cache(layers=[layer])
        cache.layers = [None] * self._module.layer_idx + [layer]
        output = self._compute(hidden, **{name: cache})
        after: list[Tensor] = []
        for number in range(layer.number_of_states):
            for part in (layer.conv_states[number], layer.recurrent_states[number]):
                after.append(hidden.new_empty(len(hidden), 0) if part is None else part)
        return output, after


class _LightningCache:
    """The state of one layer of lightning attention, as its module reads and writes it."""

    def __init__(self, states: Sequence[Tensor]) -> None:
        self.states = list(states)

    def get_linear_cache(self, layer: int) -> Tensor | None:
        del layer
        return self.states[0] if self.states else None

    def set_linear_cache(self, layer: int, state: Tensor) -> None:
        del layer
        self.states = [state]


class StateCache:
    """The states of every row of one recurrent layer, a :class:`~hone.models.attention.cache.RowCache`.

    They are the last inputs of a convolution, and what a recurrence carries.
    """

    per_token = False

    def __init__(self) -> None:
        self._rows, self._states = 0, list[Tensor]()

    def resize(self, rows: int, capacity: int, *, used: int, device: torch.device, dtype: torch.dtype) -> None:
        del capacity, device, dtype
        self._states = [_resized(state, rows, used) for state in self._states]
        self._rows = rows

    def mix(self, tokens: NewTokens, mixer: Callable[..., Tensor], hidden: Tensor) -> Tensor:
        """Compute the output ``[N, H]`` of new tokens, packed, after the states of their rows, and keep the new states.

        A row whose ``past`` is 0 starts empty: its state is 0.
        """
        assert isinstance(mixer, Mixer)
        if len(hidden) == len(tokens.rows):
            return self._advance(tokens.rows, tokens.past, mixer, hidden[:, None])[:, 0]
        output = torch.empty_like(hidden)
        first = tokens.lengths.cumsum(0) - tokens.lengths
        for length in sorted({*tokens.lengths.tolist()}):
            member = (tokens.lengths == length).nonzero()[:, 0]
            places = (first[member][:, None] + torch.arange(length)).to(hidden.device)
            output[places] = self._advance(tokens.rows[member], tokens.past[member], mixer, hidden[places])
        return output

    def _advance(self, rows: Tensor, past: Tensor, mixer: Mixer, hidden: Tensor) -> Tensor:
        rows, past = rows.to(hidden.device), past.to(hidden.device)
        before = [
            torch.where((past > 0).view(-1, *[1] * (state.dim() - 1)), state[rows], 0.0) for state in self._states
        ]
        output, after = mixer.advance(hidden, before)
        if not self._states:
            self._states = [state.new_zeros(self._rows, *state.shape[1:]) for state in after]
        for state, new in zip(self._states, after, strict=True):
            state[rows] = new.to(state.dtype)
        return output

    def copy_rows(self, sources: Tensor, targets: Tensor, length: int) -> None:
        del length
        for state in self._states:
            state[targets] = state[sources]

    def read_row(self, row: int, length: int) -> Entries:
        del length
        return tuple(state[row].clone() for state in self._states)

    def write_row(self, row: int, length: int, entries: Entries) -> None:
        del length
        self._states = self._states or [part.new_zeros(self._rows, *part.shape) for part in entries]
        for state, part in zip(self._states, entries, strict=True):
            state[row] = part

    def free(self) -> None:
        self._rows, self._states = 0, []


def _resized(state: Tensor, rows: int, used: int) -> Tensor:
    resized = state.new_zeros(rows, *state.shape[1:])
    kept = min(used, len(state))
    resized[:kept] = state[:kept]
    return resized


def states_size(settings: Mapping[str, Any]) -> int:
    """Return how many numbers the states of a sequence are, over all layers, from the content of a ``config.json``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {name: value for name, value in settings.items() if name != "model_type"}
    config = AutoConfig.for_model(settings["model_type"], **given)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    numbers = 0
    for module in model.modules():
        if route(module, config.get_text_config(decoder=True)):
            numbers += _states_of(module, config.hidden_size, model.dtype)
    return numbers


def _states_of(module: nn.Module, width: int, dtype: torch.dtype) -> int:
    try:
        return sum(
            state.numel()
            for state in Mixer(module).advance(torch.zeros(1, 2, width, device="meta", dtype=dtype), [])[1]
        )
    except RuntimeError:  # a convolution within attention has its width
        inner = getattr(getattr(module, "conv1d", None), "in_channels", width)
        if inner == width:
            raise
        return _states_of(module, inner, dtype)


def recurrent_layers(model: nn.Module) -> set[int]:
    """Return the layers whose states come from the context."""
    return {int(module.layer_idx) for module in model.modules() if isinstance(module, _Routed)}  # type: ignore[attr-defined]
