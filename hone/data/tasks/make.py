"""Write a task's problems as training and validation files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hone.data.seeding import derive_seed
from hone.data.tasks import arithmetic, programs, reasoning_gym, shapes
from hone.data.tasks.base import TASKS, Problem, Task, TaskWithFiles
from hone.errors import DataError
from hone.progress import progress

__all__ = [
    "arithmetic",
    "make_task",
    "programs",
    "reasoning_gym",
    "shapes",
    "write_task",
]

PATIENCE = 2000  # a task counts as exhausted after this many draws in a row without a new problem


def make_task(name: str, options: Sequence[str]) -> Task:
    """Build the task called ``name``, for example ``arithmetic`` or ``reasoning_gym:gsm_symbolic``. Raises ConfigError:
    unknown task or option.
    """
    family, colon, rest = name.partition(":")
    return TASKS.get(family)([f"dataset={rest}", *options] if colon else options)


def write_task(task: Task, out: Path, *, size: int, val_size: int, seed: int) -> tuple[Path, Path]:
    """Write ``out/train.parquet`` and ``out/val.parquet``; no question occurs twice, in one file or both.

    The validation problems are drawn first, so that they do not depend on ``size``.

    Columns: ``data_source``, ``prompt`` (messages), ``reward_model`` {style, ground_truth}, ``extra_info`` {index, split,
    question, answer, ...} and ``messages`` (the prompt and the worked solution, for supervised fine-tuning); tasks of several
    turns add ``agent_name`` and ``tools`` (schemas as JSON text), tasks with images ``images``. Additional files of the task are
    written to the same folder.

    Returns:
        The two paths.

    Raises:
        DataError: a size is below 1, there are fewer different problems than requested, or the folder cannot be written.
    """
    if size < 1 or val_size < 1:
        raise DataError(f"--size {size} and --val-size {val_size} must be at least 1", fix="--size 1000 --val-size 128")
    problems = _distinct(task, size + val_size, derive_seed(seed, "task", task.data_source))
    splits = {"val": problems[:val_size], "train": problems[val_size:]}
    paths = {split: out / f"{split}.parquet" for split in splits}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for split, part in splits.items():
            rows = [task_row(task.data_source, problem, split, index) for index, problem in enumerate(part)]
            pq.write_table(pa.Table.from_pylist(rows), paths[split])
        for name, rows in task.files().items() if isinstance(task, TaskWithFiles) else ():
            (out / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"the dataset cannot be written: {error}", where=str(out), fix="choose another folder with --out"
        ) from error
    return paths["train"], paths["val"]


def _distinct(task: Task, count: int, seed: int) -> list[Problem]:
    problems: dict[str, Problem] = {}
    misses = 0
    with progress("problems", count) as bar:
        for problem in task.problems(seed):
            name = problem.key or problem.question
            is_new = name not in problems
            misses = 0 if is_new else misses + 1
            problems.setdefault(name, problem)
            bar.advance(int(is_new))
            if len(problems) == count or misses == PATIENCE:
                break
    if len(problems) < count:
        raise DataError(
            f"{count} different problems are requested, and the task has about {len(problems)}",
            where=task.data_source,
            why="training and validation problems must all differ",
            fix="lower --size and --val-size, or widen the task's options",
        )
    return list(itertools.islice(problems.values(), count))


def task_row(source: str, problem: Problem, split: str, index: int) -> dict[str, Any]:
    """Return the row of a problem; see :func:`write_task` for its columns."""
    prompt = problem.prompt or [{"role": "user", "content": problem.question}]
    answer = [] if problem.solution is None else [{"role": "assistant", "content": problem.solution}]
    more: dict[str, Any] = {} if problem.agent_name is None else {"agent_name": problem.agent_name}
    if problem.images:
        more["images"] = [{"bytes": content, "path": None} for content in problem.images]
    if problem.tools is not None:
        more["tools"] = json.dumps(problem.tools)
    return {
        **more,
        "data_source": source,
        "prompt": prompt,
        "reward_model": {"style": "rule", "ground_truth": problem.ground_truth},
        "extra_info": {
            "index": index,
            "split": split,
            "question": problem.question,
            "answer": problem.solution,
            **problem.extra,
        },
        "messages": prompt + (problem.answer or answer),
    }
