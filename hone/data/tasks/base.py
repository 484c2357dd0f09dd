"""What a task is, and how its rows become files."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.data.files import Row, write_parquet
from hone.data.seeding import derive_seed
from hone.errors import ConfigError, DataError, did_you_mean
from hone.registry import Registry


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        question: what the user says.
        solution: a worked solution, as SFT imitates it.
        ground_truth: what the scorer compares with.
        extra: further facts, kept in ``extra_info``.
    """

    question: str
    solution: str
    ground_truth: str
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskMaker:
    """A task with its options filled in.

    Attributes:
        data_source: names the scorer.
        problem: draws one problem.
    """

    data_source: str
    problem: Callable[[random.Random], Problem]


TASKS: Registry[type] = Registry("task")
"""Dataclasses of options with a method ``maker() -> TaskMaker``."""


def task_maker(name: str, options: Mapping[str, str]) -> TaskMaker:
    """The task called ``name``, with options given as text.

    Raises:
        ConfigError: unknown task or option, or a value of the wrong type.
    """
    if name.startswith("reasoning_gym:"):
        from hone.data.tasks.reasoning_gym import reasoning_gym_task

        return reasoning_gym_task(name.partition(":")[2], options)
    task = TASKS.get(name)
    fields = {f.name: f for f in dataclasses.fields(task)}
    values: dict[str, int] = {}
    for key, text in options.items():
        if key not in fields:
            raise ConfigError(f"task '{name}' has no option '{key}'", fix=did_you_mean(key, fields))
        try:
            values[key] = int(text)
        except ValueError:
            raise ConfigError(f"option {key}={text} of task '{name}' is not a whole number", fix=f"{key}=10") from None
    return task(**values).maker()


def make_rows(maker: TaskMaker, size: int, seed: int, *, split: str, avoid: set[str] | None = None) -> list[Row]:
    """``size`` rows of distinct problems, none of which asks a question in ``avoid``."""
    return [
        _row(maker, problem, split, index)
        for index, problem in enumerate(_distinct(maker, size, seed, split, avoid or set()))
    ]


def make_files(maker: TaskMaker, out: Path, *, size: int, val_size: int, seed: int) -> tuple[Path, Path]:
    """Write ``train.parquet`` and ``val.parquet``; no held-out question stands in the training file.

    Raises:
        DataError: the task has fewer distinct problems than asked for.
    """
    held_out = make_rows(maker, val_size, seed, split="val")
    training = make_rows(maker, size, seed, split="train", avoid={row["extra_info"]["question"] for row in held_out})
    paths = out / "train.parquet", out / "val.parquet"
    for rows, path in zip((training, held_out), paths, strict=True):
        write_parquet(rows, path)
    return paths


def _distinct(maker: TaskMaker, size: int, seed: int, split: str, avoid: set[str]) -> Iterator[Problem]:
    draw = random.Random(derive_seed(seed, "task", maker.data_source, split))
    seen, misses = set(avoid), 0
    while size > 0:
        problem = maker.problem(draw)
        if problem.question in seen:
            misses += 1
            if misses > 1000 + 100 * len(seen):
                raise DataError(
                    f"the task has too few distinct problems: {len(seen)} found, {size} more asked for",
                    fix="--size with a smaller number, or task options that allow more problems (a larger max_number)",
                )
            continue
        seen.add(problem.question)
        size -= 1
        yield problem


def _row(maker: TaskMaker, problem: Problem, split: str, index: int) -> Row:
    user = {"role": "user", "content": problem.question}
    return {
        "data_source": maker.data_source,
        "prompt": [user],
        "reward_model": {"style": "rule", "ground_truth": problem.ground_truth},
        "messages": [user, {"role": "assistant", "content": problem.solution}],
        "extra_info": {
            "split": split,
            "index": index,
            "question": problem.question,
            "answer": problem.solution,
            **problem.extra,
        },
    }
