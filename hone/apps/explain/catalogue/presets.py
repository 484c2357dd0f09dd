"""Read the methods of each preset from its files, without composing a configuration."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml

from hone.config.layers import PRESETS, preset_names

_CHOICES = {
    "estimator": ("algorithm.adv_estimator", "grpo"),
    "loss": ("actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla"),
    "aggregation": ("actor_rollout_ref.actor.loss_agg_mode", "token-mean"),
}
"""Kind -> (key that selects a method of it, its default)."""

_SWITCHED = (
    ("kl", "algorithm.use_kl_in_reward", "algorithm.kl_penalty", "kl"),
    ("kl", "actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.actor.kl_loss_type", "low_var_kl"),
)
"""(kind, switch, key that selects the method, its default)."""


def presets(command: str = "rl") -> list[str]:
    return preset_names(command)


@functools.cache
def preset_values(name: str, command: str = "rl") -> dict[str, Any]:
    """Return the values of a preset, including its bases: dotted key to value."""
    tree = yaml.safe_load(_file(name, command).read_text(encoding="utf-8")) or {}
    bases = [base for base in tree.pop("defaults", []) if base != "_self_"]
    values: dict[str, Any] = {}
    for base in bases:
        values |= preset_values(base, command)
    return values | dict(_flat(tree, ""))


@functools.cache
def preset_title(name: str, command: str = "rl") -> str:
    """Return the comment in the first line of a preset."""
    return _file(name, command).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def loss_of_preset(name: str) -> str:
    return str(preset_values(name, "prefer").get("loss.name", "dpo"))


def _file(name: str, command: str) -> Path:
    return PRESETS / command / f"{name}.yaml"


def methods_of_preset(name: str) -> dict[str, set[str]]:
    """Return the selected names of a preset by kind, including defaults."""
    values = preset_values(name)
    chosen = {kind: {str(values.get(key, default))} for kind, (key, default) in _CHOICES.items()}
    for kind, switch, key, default in _SWITCHED:
        if values.get(switch):
            chosen.setdefault(kind, set()).add(str(values.get(key, default)).removesuffix("+"))
    chosen["correction"] = {str(values.get("algorithm.rollout_correction.preset"))}
    chosen["block"] = {key.split(".")[-2] for key, value in values.items() if key.endswith(".enable") and value}
    if any(key.startswith("algorithm.rollout_correction.") for key in values):
        chosen["block"].add("rollout_correction")
    if values.get("actor_rollout_ref.actor.preference_loss.loss_mode"):
        chosen["block"].add("online_pairs")
        del chosen["loss"]
    return chosen


def _flat(tree: Any, prefix: str) -> list[tuple[str, Any]]:
    if not isinstance(tree, dict):
        return [(prefix, tree)]
    return [pair for key, value in tree.items() for pair in _flat(value, f"{prefix}.{key}" if prefix else str(key))]
