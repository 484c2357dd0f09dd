"""Cases of preflight rules, and the files and machine that they break and repair."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.preflight import SMALL_MODEL, SOUND_MACHINE, rows, write_rows

from hone.preflight import machine


@dataclass
class World:
    """The directory of a run (``model/``, ``train.jsonl``) and a simulated machine."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch

    @property
    def model(self) -> Path:
        """The model directory."""
        return self.folder / "model"

    def settings(self, **changes: Any) -> None:
        """Write config.json of the model."""
        (self.model / "config.json").write_text(json.dumps({**SMALL_MODEL, **changes}))

    def rows(self, count: int = 10, at: dict[int, dict[str, Any]] | None = None, name: str = "train.jsonl") -> None:
        """Write valid rows, some with changed columns."""
        content = rows(count)
        for number, columns in (at or {}).items():
            content[number] = content[number] | columns
        write_rows(self.folder / name, content)

    def write(self, name: str, text: str) -> None:
        """Write a file into the directory."""
        (self.folder / name).write_text(text)

    def machine(self, **facts: Any) -> None:
        """Simulate facts about the machine."""
        self.monkeypatch.setattr(machine, "look", lambda: replace(SOUND_MACHINE, **facts))

    def gpus(self, count: int = 1, *, bfloat16: bool = True) -> None:
        """Simulate GPUs."""
        import torch

        self.monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        self.monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        self.monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla P40")
        self.monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bfloat16)

    def bfloat16(self, cost: float) -> None:
        """Simulate the time of a bfloat16 matmul as a multiple of a float32 one."""
        self.monkeypatch.setattr(machine, "bfloat16_cost", lambda: cost)

    def place(self, text: str) -> str:
        """Return a text with TMP replaced by this directory."""
        return text.replace("TMP", str(self.folder))


Action = Callable[[World], object]


@dataclass(frozen=True)
class Case:
    """A configuration for which one rule has a finding, and the repair.

    Attributes:
        name: code and function of the rule, such as ``R14 batches.mini_batch_divides``.
        keys: wrong overrides, separated by spaces.
        says: numbers, keys and names that the message must contain.
        fix: overrides that the fix must contain; with them there are no findings.
        advice: a text that the fix must contain when it is not (only) an override.
        then: overrides that follow the advice.
        given: overrides before and after the repair.
        breaks: changes files, rows or the machine so that the rule has a finding.
        repairs: reverts that change.
        tree: command of the configuration.
        warns: whether the finding is a warning.
        also: codes of further rules with findings.
    """

    name: str
    keys: str = ""
    says: tuple[str, ...] = ()
    fix: str = ""
    advice: str = ""
    then: str = ""
    given: str = ""
    breaks: Action | None = None
    repairs: Action | None = None
    tree: str = "train"
    warns: bool = False
    also: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """Code of the message."""
        return self.name.split()[0]

    @property
    def repaired_keys(self) -> list[str]:
        """Overrides after the repair: those of the fix replace wrong ones of the same key."""
        repaired = [*self.fix.split(), *self.then.split()]
        names = {override.partition("=")[0] for override in repaired}
        return [override for override in self.keys.split() if override.partition("=")[0] not in names] + repaired


def message(text: str, role: str = "user", **more: Any) -> dict[str, Any]:
    """Return a chat message."""
    return {"role": role, "content": text, **more}
