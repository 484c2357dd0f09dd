"""The learner's work, as a check sees it: files, runs, and answers to the quiz; and the call of the check."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.apps.lab.compare import Run, read_whole_run
from hone.apps.learn.progress import FOLDER
from hone.apps.learn.texts import find_box
from hone.errors import HoneError
from hone.insight.archive.read import open_archive
from hone.insight.run_files import RUN
from hone.registry import Registry


class Refused(HoneError):
    """A box that is not done yet.

    Args:
        field: what is wrong, in one word, such as ``steps`` or ``answer 1``.
        what: what was expected and what was seen, with numbers.
    """

    code = "E-learn"

    def __init__(self, box: str, field: str, what: str, hint: str) -> None:
        super().__init__(what, fix=hint, where=f"{box}, {field}")
        self.box, self.field = box, field


_CALLS = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("learners_file", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
results = [getattr(module, sys.argv[2])(*arguments) for arguments in json.load(sys.stdin)]
print()
print(json.dumps(results))
"""


@dataclass
class Work:
    box: str
    hint: str = ""  # what a refusal shows as the fix
    questions: Sequence[str] = ()
    answers: Sequence[str] = ()  # answers of the command line, in order
    # how to get the answers that the command line does not give; None where no one can answer
    ask: Callable[[str], str] | None = None
    folder: Path = FOLDER
    _given: dict[int, str] = field(default_factory=dict)

    def refuse(self, field: str, what: str) -> Refused:
        """Return the error of a box that is not done; see :class:`Refused`."""
        return Refused(self.box, field, what, self.hint)

    def require(self, right: bool, field: str, expected: str, seen: object) -> None:
        """Refuse the box unless ``right``."""
        if not right:
            raise self.refuse(field, f"expected {expected}; seen {seen}")

    def path(self, name: str) -> Path:
        """Return a path below the folder of the course."""
        path = self.folder / name
        if not path.exists():
            raise self.refuse(name, f"expected {path}, which does not exist")
        return path

    def rows(self, name: str, *columns: str) -> list[dict[str, Any]]:
        """Return the rows of a dataset file below the folder of the course, each of which must have ``columns``."""
        from hone.data.files import EVERY_COLUMN, read_rows

        rows = [row.values for row in read_rows(str(self.path(name)), required=(), optional=EVERY_COLUMN)]
        missing = sorted({column for row in rows for column in columns if row.get(column) is None})
        self.require(not missing, "columns", f"{', '.join(columns)} in each row of {name}", f"no {', '.join(missing)}")
        return rows

    def call(self, file: str, function: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """Call a function of the learner's file, in a process of its own, once for each list of arguments; all is as JSON has it."""
        path = self.path(file)
        words = [sys.executable, "-c", _CALLS, str(path), function]
        try:
            ended = subprocess.run(words, input=json.dumps(calls), capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:
            raise self.refuse(file, f"expected {function} to return; it did not within 60 seconds") from None
        lines = ended.stdout.splitlines()
        if ended.returncode or not lines:
            said = (ended.stderr.strip().splitlines() or ["nothing"])[-1]
            raise self.refuse(file, f"expected {function} to return for {len(calls)} calls; seen {said}")
        return json.loads(lines[-1])

    def run(self, name: str, steps: int = 1, keys: Mapping[str, Any] | None = None) -> Run:
        """Return a finished run of at least ``steps`` steps, by its directory, whose configuration has the values of ``keys``."""
        if not (self.folder / name / RUN).is_file():
            raise self.refuse(name, f"expected a run in {self.folder / name}; there is none")
        run = read_whole_run(self.folder / name, name)
        self.require(run.status == "finished", name, "a finished run", f"status {run.status}")
        made = Path(str(run.config.get("trainer.default_local_dir"))).name
        self.require(
            made == Path(name).name, name, f"a run that was trained in {self.folder / name}", f"a copy of {made}"
        )
        self.require(run.steps >= steps, f"{name} steps", f"{steps} steps or more", run.steps)
        for key, value in (keys or {}).items():
            seen = run.config.get(key)
            self.require(seen == value, f"{name} {key}", f"{key}={value}", seen)
        return run

    def metric(self, run: Run, name: str) -> float:
        """Return the last value of a metric."""
        value = run.last(name)
        if value is None:
            raise self.refuse(f"{run.name} {name}", f"expected the metric {name}; the run has none of that name")
        return value

    def samples(self, run: Run, step: int, columns: Sequence[str], *, validation: bool = False) -> list[dict[str, Any]]:
        """Return the stored sequences of a step of a run; see `hone.insight.archive`."""
        archive = open_archive(run.path / ("validation" if validation else "rollouts"))
        if step not in archive.steps() or not (validation or archive.complete(step)):
            raise self.refuse(
                f"{run.name} rollouts",
                f"expected all samples of step {step}; the run stores those of {archive.steps() or 'no step'}",
            )
        return list(archive.records(step, columns))

    def answer(self, number: int) -> str:
        """Return the answer to a question of the quiz, counted from 1."""
        if number not in self._given:
            question = self.questions[number - 1]
            if number <= len(self.answers):
                self._given[number] = self.answers[number - 1].strip()
            elif self.ask is not None:
                self._given[number] = self.ask(f"{number}. {question}").strip()
            else:
                raise self.refuse(
                    f"answer {number}", f"no answer to question {number}: {question} Give it with --answer"
                )
        return self._given[number]

    def answer_number(self, number: int, right: float, *, tolerance: float = 0.0, look: str) -> float:
        """Check an answer that is a number, computed from the learner's run; ``look`` says where it is to be seen."""
        given = self.answer(number)
        try:
            value = float(given.rstrip("%"))
        except ValueError:
            raise self.refuse(f"answer {number}", f"expected a number; seen {given!r}. {look}") from None
        if not abs(value - right) <= tolerance + 1e-9:
            raise self.refuse(f"answer {number}", f"{given} is not what your files say. {look}")
        return value

    def answer_among(self, number: int, right: Collection[str], explain: Callable[[str], str]) -> str:
        """Check an answer that is a word: one of ``right``, whatever its case; ``explain`` says what is true of a wrong one."""
        given = self.answer(number)
        if given.lower() not in {word.lower() for word in right}:
            raise self.refuse(f"answer {number}", f"{given!r} is wrong: {explain(given)}")
        return given


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
