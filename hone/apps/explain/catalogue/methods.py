"""Read one record per method from the registries: formula, paper, needs, knobs, cost, presets."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hone import algorithms
from hone.algorithms.advantages import INPUTS
from hone.algorithms.preference_losses.base import NEEDS as preference_needs
from hone.apps.explain.catalogue import building_blocks
from hone.apps.explain.catalogue.presets import loss_of_preset, methods_of_preset, presets
from hone.apps.explain.catalogue.records import KINDS, Block, Cost, Knob, Method, Need
from hone.config import RLConfig, documentation
from hone.config.check import yaml_value
from hone.config.keys import KeyDoc
from hone.config.preference import PreferenceConfig
from hone.errors import ConfigError, did_you_mean
from hone.registry import Registry


@functools.cache
def methods() -> tuple[Method, ...]:
    """Return every method, by kind and then by name."""
    records = [*_estimators(), *_losses(), *_kl(), *_aggregation(), *_corrections(), *_preferences(), *_blocks()]
    return tuple(records)


def find(name: str, kind: str | None = None) -> list[Method]:
    """Return the methods with the name or alias ``name``, at most one per kind.

    An import path, ``my_file:my_function``, is a custom method: an estimator unless ``kind`` says otherwise.
    """
    if ":" in name:
        return [_custom(name, kind or "estimator")]
    candidates = [method for method in methods() if kind in (None, method.kind)]
    matches = [method for method in candidates if name == method.name or name in method.aliases]
    if not matches:
        names = {alias for method in candidates for alias in (method.name, *method.aliases)}
        what = KINDS[kind] if kind else "method"
        raise ConfigError(
            f"unknown {what} '{name}'", fix=f"{did_you_mean(name, names)} `hone algorithms list` shows all."
        )
    return matches


def _custom(path: str, kind: str) -> Method:
    if kind == "estimator":
        return _estimator([path], algorithms.advantage_estimators.get(path))
    if kind == "loss":
        return _loss([path], algorithms.policy_losses.get(path))
    raise ConfigError(
        f"a custom {KINDS[kind]} cannot be given as an import path", fix="--kind estimator or --kind loss"
    )


# -------------------------------------------------------------------------------------------------------- of each kind


def _estimators() -> Iterator[Method]:
    return (_estimator(names, entry) for names, entry in _entries(algorithms.advantage_estimators))


def _estimator(names: list[str], entry: Any) -> Method:
    needs = sorted(entry.needs)
    extra = [building_blocks.NEED_COSTS[need] for need in needs if need in building_blocks.NEED_COSTS]
    recomputes = "sum_pi_squared" in needs
    cost = Cost(
        trained=("policy", *(name for part in extra for name in part.trained)),
        forward=(
            "old log-probs",
            *(name for part in extra for name in part.forward),
        ),
        generation="; ".join(part.generation for part in extra if part.generation) or "1 or more responses per prompt",
        saving="" if recomputes else building_blocks.NO_OLD,
    )
    remarks = {"A group of one": entry.group_of_one} if entry.group_of_one else {}
    return _method("estimator", names, entry, "algorithm.adv_estimator", "algorithm.", needs, cost, remarks)


def _losses() -> Iterator[Method]:
    return (_loss(names, entry) for names, entry in _entries(algorithms.policy_losses))


def _loss(names: list[str], entry: Any) -> Method:
    key, block = "actor_rollout_ref.actor.policy_loss.loss_mode", "actor_rollout_ref.actor."
    bypass = names[0] == "bypass_mode"
    saving = building_blocks.BYPASS if entry.needs_preparation else building_blocks.NO_OLD
    cost = Cost() if bypass else Cost(forward=("old log-probs",), saving=saving)
    return _method("loss", names, entry, key, block, [], cost)


def _preferences() -> Iterator[Method]:
    for names, entry in _entries(algorithms.preference_losses):
        frozen = "reference" in entry.needs
        cost = Cost(
            frozen=("reference",) if frozen else (),
            forward=("reference log-probs",) if frozen else (),
            saving=f"{building_blocks.NO_COPY}; none with ref.mode=precompute" if frozen else "",
        )
        yield _method("preference", names, entry, building_blocks.PREFERENCE_KEY, "loss.", sorted(entry.needs), cost)


def _kl() -> Iterator[Method]:
    for name, block in building_blocks.KL_ESTIMATORS.items():
        cost = Cost(frozen=("reference",), forward=("reference log-probs",), saving=building_blocks.NO_COPY)
        yield _from_block("kl", name, block, cost, block.keys)


def _aggregation() -> Iterator[Method]:
    for name, block in building_blocks.AGGREGATIONS.items():
        knobs = ["actor_rollout_ref.actor.loss_scale_factor"] if name == "seq-mean-token-sum-norm" else []
        yield _from_block("aggregation", name, block, Cost(), knobs)


def _corrections() -> Iterator[Method]:
    for name, values in algorithms.ROLLOUT_CORRECTION_PRESETS.items():
        yield _from_block("correction", name, *building_blocks.correction(name, values))


def _blocks() -> Iterator[Method]:
    for name, block in building_blocks.BLOCKS.items():
        yield _from_block("block", name, block, block.cost, block.keys)


# ------------------------------------------------------------------------------------------------------------- helpers


def _entries(registry: Registry[Any]) -> Iterator[tuple[list[str], Any]]:
    """Yield each registered object once, with its names, the primary one first."""
    names: dict[int, list[str]] = {}
    for name in registry:
        names.setdefault(id(registry.get(name)), []).append(name)
    for group in names.values():
        entry = registry.get(group[0])
        yield sorted(group, key=lambda name: (name != entry.name, name)), entry


def _method(
    kind: str,
    names: list[str],
    entry: Any,
    key: str,
    block: str,
    needs: list[str],
    cost: Cost,
    remarks: dict[str, str] | None = None,
) -> Method:
    return Method(
        kind=kind,
        name=names[0],
        aliases=tuple(names[1:]),
        formula=entry.formula,
        paper=entry.paper,
        description=description(function_of(entry)),
        needs=tuple(_need(need) for need in needs),
        knobs=tuple(_knob(kind, option, entry, block) for option in sorted(entry.options)),
        cost=cost,
        select=f"{key}={names[0]}",
        presets=_presets(kind, names),
        remarks=remarks or {},
        entry=entry,
    )


def _need(name: str) -> Need:
    if name in INPUTS:
        return Need(name, *INPUTS[name])
    return Need(name, name, preference_needs.get(name, name))


def _from_block(kind: str, name: str, block: Block, cost: Cost, keys: list[str] | tuple[str, ...]) -> Method:
    return Method(
        kind=kind,
        name=name,
        aliases=block.aliases,
        formula=block.formula,
        paper=block.paper,
        description=block.description,
        needs=(),
        knobs=tuple(_key_knob(_tree(kind)[key]) for key in keys),
        cost=cost,
        select=block.select,
        presets=_presets(kind, [name, *block.aliases]),
        remarks=block.remarks,
        entry=block.function,
    )


def _presets(kind: str, names: Sequence[str]) -> tuple[str, ...]:
    if kind == "preference":
        return tuple(preset for preset in presets("prefer") if loss_of_preset(preset) in names)
    return tuple(preset for preset in presets() if methods_of_preset(preset).get(kind, set()) & set(names))


def function_of(entry: Any) -> Callable[..., Any]:
    """Return the function of a registered object."""
    for attribute in ("compute", "per_token", "per_pair", "function"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry


def description(function: Callable[..., Any]) -> str:
    """Return the docstring up to its sections, with Sphinx marks converted to Markdown."""
    text = re.split(r"\n\s*(?:Args|Returns|Raises|Attributes|Yields):\n", inspect.getdoc(function) or "")[0].strip()
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`").replace("::\n", ":\n")


@functools.cache
def _tree(kind: str) -> dict[str, KeyDoc]:
    """Return the keys of the command that the methods of a kind belong to."""
    return {key.path: key for key in documentation(PreferenceConfig if kind == "preference" else RLConfig)}


def _knob(kind: str, option: str, entry: Any, block: str) -> Knob:
    signature = inspect.signature(function_of(entry)).parameters
    option_default = getattr(entry, "defaults", {name: parameter.default for name, parameter in signature.items()})[
        option
    ]
    for key in _tree(kind).values():
        if key.last == option and key.path.startswith(block):
            knob = _key_knob(key)
            falls_back = (
                key.default is None and option_default is not inspect.Parameter.empty and option_default is not None
            )
            return dataclasses.replace(knob, default=f"null ({yaml_value(option_default)})") if falls_back else knob
    mapping = {"estimator": "algorithm.adv_kwargs", "loss": f"{block}policy_loss.loss_kwargs"}[kind]
    return Knob(option, yaml_value(option_default), f"{mapping}.{option}", "an entry of this mapping")


def _key_knob(key: KeyDoc) -> Knob:
    return Knob(key.last, yaml_value(key.default), key.path, key.meaning)
