"""Environments of the library verifiers as a task: ``verifiers:wordle python=~/vf/bin/python``. Every row of theirs is a problem."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from hone.agents.program.bridge import verifiers_bridge
from hone.agents.program.process import ProgramFailed
from hone.data.seeding import derive_seed
from hone.data.tasks.base import TASKS, Problem
from hone.errors import ConfigError

_FIRST = 2000
"""Rows that are fetched at first; all of them only when more are wanted."""


class VerifiersTask:
    """The rows of an environment's dataset.

    Args:
        name: of the environment, as ``verifiers.load_environment`` knows it.
        arguments: of its ``load_environment``.
        python: of the virtual environment in which it is installed; None is the present one.
    """

    def __init__(self, name: str, arguments: dict[str, Any], python: str | None) -> None:
        self.name, self.arguments, self.python = name, arguments, python
        self.data_source = f"verifiers/{name}"

    def problems(self, seed: int) -> Iterator[Problem]:
        """The rows in an order that depends on the seed, once each."""
        bridge = verifiers_bridge(self.python, "python")
        try:
            given = 0
            for count in (_FIRST, -1):
                found = self._rows(bridge, count, derive_seed(seed, "verifiers", self.name) % 2**31)
                yield from (self._problem(row) for row in found[given:])
                given = len(found)
                if given < _FIRST:
                    return
        finally:
            bridge.close()

    def _rows(self, bridge: Any, count: int, seed: int) -> list[dict[str, Any]]:
        asked = bridge.ask("rows", environment=self.name, arguments=self.arguments, count=count, seed=seed)
        try:
            return asked.result()["rows"]
        except ProgramFailed as failed:
            raise ConfigError(
                f"verifiers gives no rows of the environment '{self.name}': {str(failed).splitlines()[0]}",
                why="its rows come from the package in which it is defined",
                fix="install it, and name the Python where it is installed: python=/path/to/venv/bin/python",
                where=self.data_source,
            ) from failed

    def _problem(self, row: dict[str, Any]) -> Problem:
        prompt = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": str(row["prompt"])}]
        prompt = [{key: value for key, value in message.items() if value is not None} for message in prompt]
        spec = {"environment": self.name, "arguments": json.dumps(self.arguments), "row": json.dumps(row)}
        return Problem(
            str(prompt[-1].get("content", "")),
            str(row.get("answer") or ""),
            None,
            {"verifiers": spec},
            prompt=prompt,
            agent_name="verifiers",
            key=str(row.get("example_id", json.dumps(row, sort_keys=True))),
        )


@TASKS.register("verifiers")
def make(options: Sequence[str]) -> VerifiersTask:
    """Build the task from ``dataset=NAME`` (from ``verifiers:NAME``), ``python=...``, and arguments of the environment in JSON."""
    values: dict[str, Any] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals:
            raise ConfigError(f"'{option}' is not key=value", where="verifiers", fix="python=/path/to/venv/bin/python")
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
    environment, python = values.pop("dataset", None), values.pop("python", None)
    if environment is None:
        raise ConfigError("no environment is named", where="verifiers", fix="verifiers:NAME, as verifiers knows it")
    return VerifiersTask(str(environment), values, None if python is None else str(python))
