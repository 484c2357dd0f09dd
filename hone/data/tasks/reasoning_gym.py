"""Any dataset of the reasoning-gym package as a task; its own verifier scores the answers."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from hone.data.tasks.base import Problem, TaskMaker
from hone.errors import ConfigError, did_you_mean


def reasoning_gym_task(dataset: str, options: Mapping[str, str]) -> TaskMaker:
    """The task ``reasoning_gym:<dataset>``; options are those of the dataset's own configuration.

    Raises:
        ConfigError: the package is missing, or the dataset or an option is unknown.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ConfigError(
            f"task 'reasoning_gym:{dataset}' needs the package reasoning-gym", fix="pip install 'hone-rl[tasks]'"
        ) from None
    if dataset not in DATASETS:
        raise ConfigError(f"reasoning-gym has no dataset '{dataset}'", fix=did_you_mean(dataset, DATASETS))

    def problem(draw: random.Random) -> Problem:
        settings = {name: _value(text) for name, text in options.items()}
        try:
            entry = reasoning_gym.create_dataset(dataset, size=1, seed=draw.randrange(2**31), **settings)[0]
        except (TypeError, AssertionError, ValueError) as error:
            raise ConfigError(
                f"reasoning-gym's '{dataset}' rejects the options: {error}", fix="see its documentation"
            ) from error
        truth = json.dumps(entry, default=str)
        question = f"{entry['question']}\nGive the final answer in <answer></answer>."
        return Problem(question, f"<answer>{entry['answer']}</answer>", truth)

    return TaskMaker(f"reasoning_gym/{dataset}", problem)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
