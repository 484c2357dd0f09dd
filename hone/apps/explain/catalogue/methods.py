"""One record per method: formula, paper, needs, knobs, cost, presets, from the registries, and from ``methods.yaml`` for methods without one."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hone import algorithms
from hone.algorithms.advantages import INPUTS
from hone.algorithms.preference_losses.base import NEEDS as preference_needs
from hone.config import RLConfig, documentation
from hone.config.environment import flatten
from hone.config.keys import KeyDoc, yaml_value
from hone.config.load import PRESETS, preset_names
from hone.config.offline import PreferenceConfig
from hone.errors import ConfigError, did_you_mean
from hone.registry import Registry

KINDS = {
    "estimator": "advantage estimator",
    "loss": "policy loss",
    "kl": "KL estimator",
    "aggregation": "loss aggregation",
    "correction": "rollout correction",
    "preference": "preference loss",
    "block": "building block",
}
"""Short name, as given to ``--kind``, to its words. A name may exist in two kinds (``gpg`` does)."""


@dataclass(frozen=True)
class Need:
    """A required input of a method, and its source."""

    name: str
    argument: str
    source: str


@dataclass(frozen=True)
class Knob:
    """An option of the function, and the configuration key that sets it."""

    name: str
    default: str
    key: str
    meaning: str


@dataclass(frozen=True)
class Cost:
    """Cost of a step in addition to the policy and its update."""

    trained: tuple[str, ...] = ("policy",)  # models with gradients and optimizer state, the policy first
    frozen: tuple[str, ...] = ()  # models that are only evaluated
    forward: tuple[str, ...] = ()  # forward passes over the batch before the update
    generation: str = ""  # samples that a prompt needs
    saving: str = ""  # condition under which a part is saved

    def sentence(self) -> str:
        """Return the cost in words."""
        copies = (
            f"{len(self.trained) + len(self.frozen)} model{'s' if len(self.trained) + len(self.frozen) > 1 else ''}"
        )
        models = " and ".join([f"{', '.join(self.trained)} (trained)", *(f"{name} (frozen)" for name in self.frozen)])
        passes = f"{len(self.forward)} forward pass{'' if len(self.forward) == 1 else 'es'} before the update"
        listed = f": {', '.join(self.forward)}" if self.forward else ""
        sampled = f"; generation: {self.generation}" if self.generation else ""
        saved = f"; {self.saving}" if self.saving else ""
        return f"{copies}: {models}; {passes}{listed}{sampled}{saved}"


@dataclass(frozen=True)
class Method:
    """A method of one kind."""

    kind: str  # a key of :data:`KINDS`
    name: str  # the first registered name
    aliases: tuple[str, ...]
    formula: str  # formula in one line
    paper: str
    description: str  # first part of the docstring
    needs: tuple[Need, ...]  # required inputs
    knobs: tuple[Knob, ...]
    cost: Cost
    select: str  # ``key=value`` or a call that selects it
    presets: tuple[str, ...] = ()  # presets of `hone train` (of `hone prefer` for preference losses) that use it
    remarks: dict[str, str] = field(default_factory=dict)  # further facts, label to text (``group of one``)
    entry: Any = field(default=None, compare=False, repr=False)

    @property
    def page(self) -> str:
        """Return the file of its page in ``docs/algorithms``; rollout corrections share one, a custom method has none."""
        if ":" in self.name:
            return ""
        return "rollout_correction.md" if self.kind == "correction" else f"{self.name}.md"

    @property
    def command(self) -> str:
        """Return the command that runs it, without model and data; names in capitals stand for the user's own."""
        words = self.select.partition(" (")[0]
        if words.startswith("hone "):
            return words
        return f"hone {'prefer' if self.kind == 'preference' else 'train'} {words}"

    def as_json(self) -> dict[str, Any]:
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "entry"}
        plain = {
            "needs": [dataclasses.asdict(need) for need in self.needs],
            "knobs": [dataclasses.asdict(knob) for knob in self.knobs],
            "command": self.command,
            "cost": {**dataclasses.asdict(self.cost), "sentence": self.cost.sentence()},
        }
        return {**fields, **plain, "page": f"docs/algorithms/{self.page}" if self.page else ""}


@dataclass(frozen=True)
class Block:
    """Facts of a method without a registry, and the function that computes it."""

    formula: str
    paper: str
    description: str
    select: str
    aliases: tuple[str, ...] = ()
    cost: Cost = field(default_factory=Cost)
    keys: tuple[str, ...] = ()
    remarks: dict[str, str] = field(default_factory=dict)
    function: Callable[..., Any] | None = None


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
    return values | dict(flatten(tree))


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


NO_COPY = "no copy with LoRA: the reference is the policy with its adapter off"
BYPASS = "no old log-probs pass with algorithm.rollout_correction.bypass_mode=true"
NO_OLD = "no old log-probs pass with one update per batch, or with algorithm.rollout_correction.bypass_mode=true"

NEED_COSTS = {
    "values": Cost(("critic",), (), ("values",)),
    "process_rewards": Cost(("critic",), ("reference",), ("values", "reference log-probs")),
    "greedy_baseline": Cost((), (), (), "one additional greedy response per prompt"),
    "groups": Cost((), (), (), "2 or more responses per prompt"),
}
"""Cost that a need of an estimator adds to a step; other needs add nothing."""

_CHOSEN_BY = {
    "kl": (
        "kind",
        "algorithm.use_kl_in_reward=true algorithm.kl_penalty={0} (in the reward) or "
        "actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_type={0} (in the loss)",
    ),
    "aggregation": ("mode", "actor_rollout_ref.actor.loss_agg_mode={0}"),
}
"""Argument that chooses a method of a kind, and the setting that does."""


@functools.cache
def blocks() -> dict[str, dict[str, Block]]:
    """Return the methods of ``methods.yaml`` by kind and name."""
    tables = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {
        kind: {name: _block(kind, name, **entry) for name, entry in tables[kind].items()}
        for kind in ("kl", "aggregation", "block")
    }


def _block(
    kind: str, name: str, *, cost: Mapping[str, Any] | None = None, function: str | None = None, **facts: Any
) -> Block:
    compute: Any = getattr(algorithms, function) if function else None
    if kind in _CHOSEN_BY:
        argument, select = _CHOSEN_BY[kind]
        compute, facts["select"] = functools.partial(compute, **{argument: name}), select.format(name)
    if name == "rollout_correction":
        facts["remarks"] = {"Named presets": ", ".join(algorithms.ROLLOUT_CORRECTION_PRESETS)}
    return Block(cost=Cost(**(cost or {})), function=compute, **facts)


_CORRECTION = "algorithm.rollout_correction"


def correction(name: str, values: Mapping[str, Any]) -> tuple[Block, Cost, tuple[str, ...]]:
    """Return the record of a named preset of rollout correction: ``values`` maps its configuration keys to values."""
    unset = algorithms.ROLLOUT_CORRECTION_PRESETS["disabled"]
    changed = {key: value for key, value in values.items() if value != unset[key]}
    settings = ", ".join(f"{key}={_value_text(value)}" for key, value in changed.items())
    block = Block(
        formula=_correction_formula(values),
        paper="Espeholt et al. 2018 (truncated importance sampling), arXiv:1802.01561; Yao et al. 2025, "
        "https://fengyao.notion.site/off-policy-rl; Liu et al. 2025, https://richardli.xyz/rl-collapse",
        description="A named set of switches for the gap between the engine that samples and the model that trains.",
        select=f"{_CORRECTION}.preset={name}",
        remarks={"Sets": settings or "nothing"},
    )
    forward = () if values["bypass_mode"] else ("old log-probs",)
    return block, Cost(forward=forward), tuple(f"{_CORRECTION}.{key}" for key in changed)


def _correction_formula(values: Mapping[str, Any]) -> str:
    ratio = "policy / engine" if values.get("bypass_mode") else "old policy / engine"
    parts = []
    if values.get("rollout_is"):
        limit = str(values.get("rollout_is_threshold", 2.0))
        how = "0 outside " + limit.replace("_", " to ") if "_" in limit else f"at most {limit}"
        parts.append(f"weight = {ratio} by {values['rollout_is']}, {how}")
    if values.get("rollout_rs"):
        parts.append(f"reject by {values['rollout_rs']} beyond {values.get('rollout_rs_threshold')}")
    if values.get("bypass_mode"):
        parts.append(f"ratio and weight against the engine, loss {values.get('loss_type', 'ppo_clip')}")
    return "; ".join(parts) or "measured, not corrected"


def _value_text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@functools.cache
def methods() -> tuple[Method, ...]:
    """Return every method, by kind and then by name."""
    plain = [*_blocks("kl"), *_blocks("aggregation"), *_corrections()]
    return (*_estimators(), *_losses(), *plain, *_preferences(), *_blocks("block"))


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
    extra = [NEED_COSTS[need] for need in needs if need in NEED_COSTS]
    recomputes = "sum_pi_squared" in needs
    cost = Cost(
        trained=("policy", *(name for part in extra for name in part.trained)),
        frozen=tuple(name for part in extra for name in part.frozen),
        forward=(
            "old log-probs",
            *(name for part in extra for name in part.forward),
        ),
        generation="; ".join(part.generation for part in extra if part.generation) or "1 or more responses per prompt",
        saving="" if recomputes else NO_OLD,
    )
    remarks = {"A group of one": entry.group_of_one} if entry.group_of_one else {}
    return _method("estimator", names, entry, "algorithm.adv_estimator", "algorithm.", needs, cost, remarks)


def _losses() -> Iterator[Method]:
    return (_loss(names, entry) for names, entry in _entries(algorithms.policy_losses))


def _loss(names: list[str], entry: Any) -> Method:
    key, block = "actor_rollout_ref.actor.policy_loss.loss_mode", "actor_rollout_ref.actor."
    bypass = names[0] == "bypass_mode"
    saving = BYPASS if entry.needs_preparation else NO_OLD
    cost = Cost() if bypass else Cost(forward=("old log-probs",), saving=saving)
    return _method("loss", names, entry, key, block, [], cost)


def _preferences() -> Iterator[Method]:
    for names, entry in _entries(algorithms.preference_losses):
        frozen = "reference" in entry.needs
        cost = Cost(
            frozen=("reference",) if frozen else (),
            forward=("reference log-probs",) if frozen else (),
            saving=f"{NO_COPY}; none with ref.mode=precompute" if frozen else "",
        )
        yield _method("preference", names, entry, "loss.name", "loss.", sorted(entry.needs), cost)


def _corrections() -> Iterator[Method]:
    for name, values in algorithms.ROLLOUT_CORRECTION_PRESETS.items():
        yield _from_block("correction", name, *correction(name, values))


def _blocks(kind: str) -> Iterator[Method]:
    for name, block in blocks()[kind].items():
        yield _from_block(kind, name, block, block.cost, block.keys)


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
