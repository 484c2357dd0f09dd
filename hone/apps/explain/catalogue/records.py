"""Records of the catalogue."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
