"""Dropout, which RL and preference training do without: engines sample without it, and log-probs of the same tokens would differ."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedConfig

from hone.errors import ModelError

log = logging.getLogger(__name__)

_RANDOM = re.compile("drop|jitter")
_ATTRIBUTE = "_hone_dropout"


def set_dropout(model: nn.Module, *, on: bool) -> None:
    """Set every dropout and jitter of modules, of the configs that they read, and of adapters to 0, or keep them.

    Raises ModelError: they are to be kept, and there are none.
    """
    values = list(_dropouts(model))
    if on and not values:
        raise ModelError(
            f"{type(model).__name__} has no dropout",
            why="each value in its config.json is 0, and training would be the same without the key",
            where="model.dropout",
            fix="model.dropout=false, or a value such as model.override_config.attention_dropout=0.1",
        )
    if not on:
        by_name = {name: value for _, name, value in values}
        model.__dict__[_ATTRIBUTE] = {name: value for name, value in by_name.items() if name != "p"} or by_name
        for holder, name, _ in values:
            setattr(holder, name, 0.0)


def say_what_is_off(model: nn.Module) -> None:
    """Log the values that :func:`set_dropout` has set to 0, if there were any."""
    if off := model.__dict__.get(_ATTRIBUTE):
        values = ", ".join(f"{name}={value:g}" for name, value in sorted(off.items()))
        log.info("%s trains without its dropout: %s", type(model).__name__, values)


def _dropouts(model: nn.Module) -> Iterator[tuple[Any, str, float]]:
    """Yield what has a value above 0, the attribute, and the value."""
    adapters: dict[str, Any] = getattr(model, "peft_config", {})
    for holder in (*_configs(model), *adapters.values(), *model.modules()):
        for name, value in vars(holder).items():
            of_that_name = _RANDOM.search(name) or (name == "p" and isinstance(holder, _DropoutNd))
            if of_that_name and isinstance(value, float) and value > 0:
                yield holder, name, value


def _configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Return every config that a module holds, and those within it, each once."""
    configs: dict[int, PreTrainedConfig] = {}
    waiting = [module.__dict__.get("config") for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in configs:
            configs[id(config)] = config
            waiting.extend(vars(config).values())
    return list(configs.values())
