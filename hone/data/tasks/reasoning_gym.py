"""Any dataset of the reasoning-gym package (about 100 generators, each with a verifier), as a task.

The ground truth of a problem is its whole entry (question, answer, metadata) as JSON text, the input of the dataset's
``score_answer(answer, entry)``. Every new entry is checked: the verifier must score the reference answer the same with the
stored entry as with the original (``arc_agi`` and ``rearc`` fail this and are refused). Two datasets give no reference
answer; their rows have no solution and serve RL only.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from hone.data.seeding import derive_seed
from hone.data.tasks.base import TASKS, Problem, json_options
from hone.errors import ConfigError, DataError, HoneError, did_you_mean
from hone.extras import install_command

INSTRUCTION = "Write the final answer in <answer></answer>."
_EXAMPLES = ("possible_answer", "example_answer", "example_correct_answer")
_CHUNK = 256  # problems of one generator object


class ReasoningGym:
    """The task ``reasoning_gym:<dataset>``.

    Args:
        options: ``key=value`` for the dataset's configuration; values are read as JSON if they are JSON.

    Raises:
        HoneError: the package is not installed.
        ConfigError: unknown dataset or option, or a value that the dataset refuses.
    """

    def __init__(self, dataset: str, options: Sequence[str]) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise HoneError(
                f"reasoning_gym:{dataset} needs the package reasoning-gym: {error}",
                fix=install_command("tasks"),
                code="E-extra",
            ) from error
        if dataset not in DATASETS:
            raise ConfigError(f"reasoning-gym has no dataset '{dataset}'", fix=did_you_mean(dataset, DATASETS))
        self._create, self._name, self._config = reasoning_gym.create_dataset, dataset, DATASETS[dataset][1]
        self._options = self._parsed(options)
        self._generator(0, 1)  # raises for bad options
        self._verifier = self._create(dataset, seed=0, size=1)  # default options, as in the scorer
        self.data_source = f"reasoning_gym/{dataset}"

    def problems(self, seed: int) -> Iterator[Problem]:
        for chunk in itertools.count():
            generator = self._generator(derive_seed(seed, "chunk", chunk) % 2**31, _CHUNK)
            for index in range(_CHUNK):
                yield self._problem(generator, generator[index])

    def _problem(self, generator: Any, entry: dict[str, Any]) -> Problem:
        fields = {name: entry[name] for name in ("question", "answer", "metadata")}
        text = json.dumps(fields, default=str)  # fractions, dates and the like as text
        answer = _reference(entry)
        if answer is not None:
            try:
                stored = self._verifier.score_answer(answer, json.loads(text))
            except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
                raise self._unfit(f"its verifier cannot read the stored entry: {error}") from error
            if stored != generator.score_answer(answer, entry):
                raise self._unfit("its verifier no longer accepts the reference answer with the stored entry")
        solution = None if answer is None else f"<answer>{answer}</answer>"
        return Problem(f"{entry['question'].strip()}\n{INSTRUCTION}", text, solution)

    def _unfit(self, reason: str) -> DataError:
        return DataError(
            f"the entries of reasoning-gym's dataset '{self._name}' change when written as JSON: {reason}",
            why="right answers would be scored as wrong",
            fix="choose another dataset",
        )

    def _parsed(self, options: Sequence[str]) -> dict[str, Any]:
        keys = {field.name for field in dataclasses.fields(self._config)} - {"seed", "size"}
        where = f"reasoning_gym:{self._name}"
        values = json_options(options, task=where, example=did_you_mean("", keys))
        for name in values.keys() - keys:
            raise ConfigError(f"unknown option '{name}'", where=where, fix=did_you_mean(name, keys))
        return values

    def _generator(self, seed: int, size: int) -> Any:
        try:
            return self._create(self._name, seed=seed, size=size, **self._options)
        except (AssertionError, TypeError, ValueError) as error:
            options = ", ".join(f"{name}={value}" for name, value in self._options.items()) or "no options"
            raise ConfigError(
                f"the dataset refuses {options}: {error}",
                where=f"reasoning_gym:{self._name}",
                fix="change the options; the dataset's own configuration documents them",
            ) from error


def _reference(entry: dict[str, Any]) -> str | None:
    """Return a right answer: the entry's answer, or the example of datasets with many right answers."""
    if entry["answer"] is not None:
        return str(entry["answer"])
    examples = (entry["metadata"].get(name) for name in _EXAMPLES)
    example = next((example for example in examples if example is not None), None)
    return example if example is None or isinstance(example, str) else json.dumps(example)


@TASKS.register("reasoning_gym")
def make(options: Sequence[str]) -> ReasoningGym:
    """Build the task; the first option is ``dataset=<name>``, as in ``reasoning_gym:<name>``."""
    name = options[0].partition("dataset=")[2] if options and options[0].startswith("dataset=") else ""
    if not name:
        raise ConfigError("reasoning_gym needs a dataset", fix="hone data make reasoning_gym:gsm_symbolic --out DIR")
    return ReasoningGym(name, options[1:])
