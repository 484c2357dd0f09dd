"""Task for environments of the library verifiers: ``verifiers:wordle python=~/vf/bin/python``. Every row is a problem."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from hone.agents.program.bridge import verifiers_bridge
from hone.agents.program.process import ProgramFailed
from hone.data.seeding import derive_seed
from hone.data.tasks.base import TASKS, Problem, json_options
from hone.errors import ConfigError

_FIRST_ROWS = 2000
"""Rows of the first request; all rows are fetched only if more are needed."""


class VerifiersTask:
    """Task whose problems are the rows of an environment's dataset.

    With ``python`` None the environment is installed for the current interpreter.
    """

    def __init__(self, name: str, arguments: dict[str, Any], python: str | None) -> None:
        self.name, self.arguments, self.python = name, arguments, python
        self.data_source = f"verifiers/{name}"

    def problems(self, seed: int) -> Iterator[Problem]:
        """Yield each row once, in an order that depends on the seed."""
        bridge = verifiers_bridge(self.python, "python")
        try:
            yielded = 0
            for count in (_FIRST_ROWS, -1):
                rows = self._rows(bridge, count, derive_seed(seed, "verifiers", self.name) % 2**31)
                yield from (self._problem(row) for row in rows[yielded:])
                yielded = len(rows)
                if yielded < _FIRST_ROWS:
                    return
        finally:
            bridge.close()

    def _rows(self, bridge: Any, count: int, seed: int) -> list[dict[str, Any]]:
        future = bridge.ask("rows", environment=self.name, arguments=self.arguments, count=count, seed=seed)
        try:
            return future.result()["rows"]
        except ProgramFailed as failed:
            raise ConfigError(
                f"verifiers returned no rows for the environment '{self.name}': {str(failed).splitlines()[0]}",
                why="the rows come from the package that defines the environment",
                fix="install that package and give its Python interpreter: python=/path/to/venv/bin/python",
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
    values = json_options(options, task="verifiers", example="python=/path/to/venv/bin/python")
    environment, python = values.pop("dataset", None), values.pop("python", None)
    if environment is None:
        raise ConfigError("the task has no environment", where="verifiers", fix="verifiers:NAME")
    return VerifiersTask(str(environment), values, None if python is None else str(python))
