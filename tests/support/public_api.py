"""The public API of Hone, name by name with signatures: the page `docs/public_api.txt`, and how it changed since a release.

``scripts/make_docs`` writes the page. `docs/versions.md` says what a version promises about it.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

PUBLIC: dict[str, str] = {
    "hone": "NoVerdict Run evaluate generate prefer push serve sft train train_reward_model",
    "hone.api": "Answer",
    "hone.errors": "HoneError",
    "hone.config": "RLConfig SFTConfig PreferenceConfig RewardModelConfig load_config",
    "hone.algorithms": "advantage_estimators policy_losses preference_losses aggregate_loss kl_penalty full_kl",
    "hone.algorithms.advantages": "register_estimator Groups Turns",
    "hone.algorithms.policy_losses": "register_policy_loss TokenLoss token_ratio",
    "hone.algorithms.preference_losses": "register_preference_loss PairLoss LabelLoss",
    "hone.algorithms.masked": "masked_sum where_mask",
    "hone.rewards.scorers": "register_scorer scorer_for",
    "hone.rewards.score": "Score Cause",
    "hone.data.tasks.base": "TASKS Task Problem parse_options",
    "hone.data.tasks.make": "make_task write_task",
    "hone.data.files": "read_rows",
    "hone.agents.tools": "Tool ToolError ToolResult tool",
    "hone.agents.environments": "ENVIRONMENTS Environment Step",
    "hone.agents.interactions": "Interaction Reply",
    "hone.agents.base": "AGENT_LOOPS AgentLoop",
    "hone.agents.messages": "AssistantTurn",
    "hone.agents.parsers.base": "TOOL_PARSERS ToolParser",
    "hone.insight.trackers": "TRACKERS Tracker RunInfo",
    "hone.insight.archive.read": "open_archive Archive",
    "hone.generation": "ENGINES",
    "hone.generation.protocol": "Engine GenerationRequest SamplingParams Completion",
    "hone.models.registry": "ARCHITECTURES ModelFamily register_model",
    "hone.training.backends.registry": "BACKENDS",
    "hone.training.backends.protocol": "TrainBackend",
    "hone.trainers.stages": "Stage",
    "hone.cluster.dispatch": "Split dispatch",
}
"""Module to the names that others may import from it: the functions of `hone`, and the extension points of `docs/extending.md`,
`docs/agents.md`, `docs/rewards.md` and `CONTRIBUTING.md`."""


def public_api() -> str:
    """Return the page: one line for each function, class, attribute and method, in the order of :data:`PUBLIC`."""
    lines = ["# The public API of Hone. Written by scripts/make_docs; docs/versions.md says what it promises."]
    for module, names in PUBLIC.items():
        lines.append("")
        for name in names.split():
            lines += _lines(f"{module}.{name}", getattr(importlib.import_module(module), name))
    return "\n".join(lines) + "\n"


def changed_names(before: str, after: str) -> list[str]:
    """Return the names of lines that were added, removed or have another signature."""
    old, new = _by_name(before), _by_name(after)
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def unmentioned(names: list[str], changelog: str) -> list[str]:
    """Return the names that no code span of the changelog's unreleased section has.

    A span names a thing by its last part, and a member of a class by the class and itself: `train`, `hone.train`, `Run.plot`.
    """
    section = _unreleased(changelog)
    spans = re.findall(r"`([^`]+)`", section)
    return [name for name in names if not any(_names(span, name) for span in spans)]


def _names(span: str, name: str) -> bool:
    said = span.partition("(")[0].split(".")
    parts = name.split(".")
    if said != parts[-len(said) :]:
        return False
    member = next((at for at, part in enumerate(parts) if part[:1].isupper()), len(parts) - 1)
    return len(said) >= len(parts) - member  # a member needs its class before it


def _unreleased(changelog: str) -> str:
    sections = re.split(r"^## ", changelog, flags=re.M)[1:]
    return "\n".join(section for section in sections if "unreleased" in section.partition("\n")[0].lower())


def _by_name(page: str) -> dict[str, str]:
    lines = [line for line in page.splitlines() if line and not line.startswith("#")]
    return {re.split(r"[(: ]", line, maxsplit=1)[0]: line for line in lines}


def _lines(name: str, value: Any) -> Iterator[str]:
    if not inspect.isclass(value):
        yield f"{name}{_signature(value)}" if inspect.isroutine(value) else f"{name}: {type(value).__name__}"
        return
    if value.__module__.startswith("hone.config."):
        yield f"{name}: its keys are in docs/config.md"
        return
    made = "" if getattr(value, "_is_protocol", False) or "__init__" not in vars(value) else _signature(value)
    yield f"{name}{made or ': class'}"
    members: Mapping[str, Any] = {
        **{field.name: field for field in (dataclasses.fields(value) if dataclasses.is_dataclass(value) else ())},
        **dict.fromkeys(vars(value).get("__annotations__", {})),
        **{key: found for key, found in vars(value).items() if not key.startswith("_")},
    }
    for member in members:
        if member.startswith("_"):
            continue
        found = inspect.getattr_static(value, member, None)
        plain = found.__func__ if isinstance(found, classmethod | staticmethod) else found
        if inspect.isfunction(plain):
            yield f"{name}.{member}{_signature(plain)}"
        elif isinstance(plain, property):
            returned = plain.fget.__annotations__.get("return", "") if plain.fget else ""
            yield f"{name}.{member}: {returned or 'property'}"
        elif not (dataclasses.is_dataclass(value) and made):
            yield f"{name}.{member}: {vars(value).get('__annotations__', {}).get(member, type(plain).__name__)}"


def _signature(value: Any) -> str:
    found = inspect.signature(value)
    shown = [
        each.replace(default=_default(each.default), annotation=_Text.of(each.annotation))
        for each in found.parameters.values()
    ]
    later = ", async" if inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value) else ""
    return f"{found.replace(parameters=shown, return_annotation=_Text.of(found.return_annotation))}{later}"


def _default(value: Any) -> Any:
    """Return the default itself, or a text that is the same in every process."""
    plain = value is inspect.Parameter.empty or isinstance(value, str | int | float | bool | tuple | None)
    return value if plain and not isinstance(value, Enum) else _Text(getattr(value, "__name__", str(value)))


class _Text:
    """A text that a signature shows without quotes."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    @classmethod
    def of(cls, annotation: Any) -> Any:
        """Return an annotation that was written as text, shown as it was written."""
        return cls(annotation) if isinstance(annotation, str) else annotation
