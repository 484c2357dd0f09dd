"""Check a box: find its function and call it with the learner's work."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

from hone.apps.learn.progress import FOLDER
from hone.apps.learn.texts import find_box
from hone.apps.learn.work import Work
from hone.registry import Registry

Check = Callable[[Work], str]
"""A check returns one sentence on what it measured, or raises :class:`hone.apps.learn.work.Refused`."""
CHECKS: Registry[Check] = Registry("box")


def run_check(
    name: str, answers: Sequence[str] = (), ask: Callable[[str], str] | None = None, folder: Path = FOLDER
) -> str:
    """Check a box with answers to its quiz, in order, and return what was measured; ``ask`` gets an answer that is missing."""
    box = find_box(name)
    text = box.text()
    importlib.import_module(f"hone.apps.learn.checks.{box.part}")
    work = Work(name, " ".join(text.body("Hint").split()), text.questions, answers, ask, folder)
    try:
        return CHECKS.get(name)(work)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:  # files that the learner wrote
        raise work.refuse(
            "form", f"expected files as the text describes them; reading them ended with {error!r}"
        ) from error
