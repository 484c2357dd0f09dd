"""Play boxes of the course as a learner would: shell commands in a working folder, then `hone learn check`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.forked_python import Forks
from support.launch import Command, Ended
from support.patience import LONG

from hone.apps.learn.texts import find_box

ROOT = Path(__file__).resolve().parents[2]
Answers = Sequence[str] | Callable[[Path], Sequence[str]]
"""Answers to a quiz, or how to read them from the folder `learn`."""


@dataclass(frozen=True)
class Wrong:
    """A wrong solution: commands, answers, and the field that the refusal must name."""

    field: str
    do: str = ""
    answers: Answers = ()


@dataclass(frozen=True)
class Play:
    """How a box is played.

    Attributes:
        untouched: field that the refusal names when nothing has been done.
        do: commands of the model solution; ``{text}`` becomes those of the box's text.
        answers: right answers.
        wrong: wrong solutions, tried in this order before the model solution.
        after: wrong solutions tried after it, on its files.
    """

    untouched: str
    do: str = "{text}"
    answers: Answers = ()
    wrong: Sequence[Wrong] = field(default_factory=tuple)
    after: Sequence[Wrong] = field(default_factory=tuple)


class Learner:
    """A learner in a folder of its own."""

    def __init__(self, folder: Path, forks: Forks) -> None:
        self.folder, self.forks = folder, forks
        (folder / "examples").symlink_to(ROOT / "examples")

    def shell(self, lines: str) -> None:
        """Run commands; fail the test when one fails."""
        path = os.pathsep.join(map(str, (self.forks.bin, Path(sys.executable).parent, os.environ["PATH"])))
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", lines],
            cwd=self.folder,
            env={**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=LONG,
        )
        assert ended.returncode == 0, f"{lines}\n{ended.stdout[-3000:]}{ended.stderr[-3000:]}"

    def hone(self, *words: str) -> Ended:
        """Run a command of `hone`."""
        return Command(words, self.folder / ".log", self.folder).wait()

    def check(self, box: str, answers: Answers) -> Ended:
        """Check a box with these answers."""
        given = answers(self.folder / "learn") if callable(answers) else answers
        return self.hone("learn", "check", box, *(word for answer in given for word in ("--answer", str(answer))))

    def play(self, box: str, play: Play) -> None:
        """Try the box untouched, with its wrong solutions, and with the model solution."""
        self.refused(box, Wrong(play.untouched))
        for wrong in play.wrong:
            self.refused(box, wrong)
        self.shell(play.do.replace("{text}", commands(box)))
        for wrong in play.after:
            self.refused(box, wrong)
        ended = self.check(box, play.answers)
        assert ended.code == 0 and f"{box}: passed." in ended.message, ended.output

    def refused(self, box: str, wrong: Wrong) -> None:
        """Try a wrong solution: exit code 2, for the reason that it names, and no progress."""
        if wrong.do:
            self.shell(wrong.do.replace("{text}", commands(box)))
        ended = self.check(box, wrong.answers)
        assert ended.code == 2, f"{box}: {wrong} passed\n{ended.output}"
        assert f"E-learn {box}, {wrong.field}: " in ended.message, f"{box}: {wrong}\n{ended.output}"
        assert f'"{box}"' not in (self.folder / "learn/progress.json").read_text()


def commands(box: str) -> str:
    """The commands of a box's text, with the files that it shows written at their places."""
    lines = []
    for info, body in re.findall(r"^```([^\n]*)\n(.*?)^```$", find_box(box).text().body("Do"), re.M | re.S):
        language, _, file = info.partition(" ")
        if file:
            lines.append(f"mkdir -p $(dirname {file})\ncat > {file} <<'WHOLE_FILE'\n{body}WHOLE_FILE\n")
        elif language == "python":
            lines.append(f"cat > shown.py <<'WHOLE_FILE'\n{body}WHOLE_FILE\npython shown.py\n")
        elif language == "bash":
            lines.append(body)
    return "\n".join(lines)


def changed(box: str, *changes: tuple[str, str]) -> str:
    """The commands of a box's text with other words; each change must apply."""
    text = commands(box)
    for old, new in changes:
        assert old in text, f"{box}: {old}"
        text = text.replace(old, new)
    return text
