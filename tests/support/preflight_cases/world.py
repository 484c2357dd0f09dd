"""What a case of the casebook is, and the small world of files that it spoils and mends."""

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
    """The folder of a run: ``model/``, ``train.jsonl``, and what the machine is said to be."""

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
        """Write sound rows, some with other columns."""
        content = rows(count)
        for number, columns in (at or {}).items():
            content[number] = content[number] | columns
        write_rows(self.folder / name, content)

    def write(self, name: str, text: str) -> None:
        """Write a file of the folder."""
        (self.folder / name).write_text(text)

    def machine(self, **facts: Any) -> None:
        """Say what the machine is like."""
        self.monkeypatch.setattr(machine, "look", lambda: replace(SOUND_MACHINE, **facts))

    def gpus(self, count: int = 1, *, bfloat16: bool = True) -> None:
        """Let torch see GPUs."""
        import torch

        self.monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        self.monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        self.monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla P40")
        self.monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bfloat16)

    def bfloat16(self, cost: float) -> None:
        """Say how long a product in bfloat16 takes, in times of one in float32."""
        self.monkeypatch.setattr(machine, "bfloat16_cost", lambda: cost)

    def place(self, text: str) -> str:
        """Return a text with TMP for this folder."""
        return text.replace("TMP", str(self.folder))


Deed = Callable[[World], object]


@dataclass(frozen=True)
class Case:
    """A configuration that one rule refuses or warns of, and the repair.

    Attributes:
        name: code and function of the rule, as in ``R14 batches.mini_batch_divides``.
        keys: overrides that are wrong, one a word.
        says: what the message must say of it: numbers and names.
        fix: overrides that the message gives as its fix, letter by letter; with them the check is silent.
        advice: what the fix says where it is not (only) an override.
        then: overrides that follow the advice.
        given: overrides before and after.
        spoil, mend: the same for what is no key: files, rows, the machine.
        tree: the command whose configuration it is.
        warns: whether the run goes on all the same.
        beside: codes of further rules that the same mistake calls up.
    """

    name: str
    keys: str = ""
    says: tuple[str, ...] = ()
    fix: str = ""
    advice: str = ""
    then: str = ""
    given: str = ""
    spoil: Deed | None = None
    mend: Deed | None = None
    tree: str = "train"
    warns: bool = False
    beside: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """The code that the message bears."""
        return self.name.split()[0]

    @property
    def repaired_keys(self) -> list[str]:
        """The overrides after the repair: what is given anew takes the place of what was wrong."""
        anew = [*self.fix.split(), *self.then.split()]
        names = {override.partition("=")[0] for override in anew}
        return [override for override in self.keys.split() if override.partition("=")[0] not in names] + anew


def message(text: str, role: str = "user", **more: Any) -> dict[str, Any]:
    """A chat message."""
    return {"role": role, "content": text, **more}
