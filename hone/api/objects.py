"""Functions and classes given to a call: rewards, tools, environments, agent loops, and values of keys that take import paths."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.config.reward import reward_keys as reward_keys_of
from hone.config.reward import reward_term
from hone.errors import ConfigError, DataError
from hone.user_objects import PREFIX, UserObject, is_user_object, register_object

if TYPE_CHECKING:
    from hone.agents.base import AgentLoop
    from hone.agents.environments import Environment
    from hone.agents.interactions import Interaction


OneReward = Callable[..., Any] | str  # a function, ``FILE.py:NAME``, the URL of a server, or the name of a scorer
Reward = OneReward | Sequence[OneReward]  # several are added

_MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
_USER = f"{_MULTI_TURN}.interaction_config_path"
_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"


class GivenObjects:
    """Objects of one call, by their names in its configuration."""

    def __init__(self) -> None:
        self._entries: dict[str, UserObject] = {}

    def __iter__(self) -> Iterator[UserObject]:
        return iter(self._entries.values())

    def path(self, value: Any, name: str | None = None) -> str:
        """Make an object available under its name, and return the name for a configuration.

        Raises:
            ConfigError: another object of this call has the name.
        """
        called = name or getattr(value, "__name__", type(value).__name__)
        if called == "<lambda>":  # has no name to change: the first is `lambda`, the next `lambda_2`
            others = [entry.value for key, entry in self._entries.items() if key.startswith(f"{PREFIX}lambda")]
            number = next((n for n, other in enumerate(others, 1) if other is value), len(others) + 1)
            called = "lambda" if number == 1 else f"lambda_{number}"
        path = PREFIX + called
        known = self._entries.get(path)
        if known is not None and known.value is not value:
            raise ConfigError(
                f"two objects are called '{path.removeprefix(PREFIX)}'",
                why="the configuration names an object by its name",
                fix="rename one",
            )
        if known is None:
            self._entries[path] = register_object(path, value)
        return path

    def named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values with the names of functions and classes in place of the objects."""
        return {key: self.path(value) if _is_code(value) else value for key, value in values.items()}


@dataclass(frozen=True)
class Episodes:
    """Episodes of a call.

    Attributes:
        tools: functions with type hints and docstring, objects derived from Tool, names of built-in tools; or a YAML or Python file.
        environment: class derived from Environment, or its name; the datasets are then seeds.
        agent_loop: class derived from AgentLoop, or its name.
        interaction: class derived from Interaction, or the YAML file of simulated users.
    """

    tools: Tools = None
    environment: type[Environment] | str | None = None
    agent_loop: type[AgentLoop] | str | None = None
    interaction: type[Interaction] | str | None = None

    def keys(self, objects: GivenObjects) -> dict[str, Any]:
        """Return the configuration keys of tools, loop and user.

        Raises:
            ConfigError: an object cannot be used in its place.
        """
        if self.tools and self.environment is not None:
            raise ConfigError(
                "tools= and environment= are given together",
                why="an environment offers its own tools, so the others would not be used",
                fix="give the environment an attribute tools, or leave out one of the two",
            )
        keys: dict[str, Any] = {}
        if isinstance(self.tools, str | Path):
            file = "function_tool_path" if str(self.tools).endswith(".py") else "tool_config_path"
            keys[f"{_MULTI_TURN}.{file}"] = str(self.tools)
        elif self.tools:
            keys[f"{_MULTI_TURN}.function_tool_path"] = [_tool_path(tool, objects) for tool in self.tools]
        for key, value in ((_LOOP, self.agent_loop), (_USER, self.interaction)):
            if value is not None:
                keys[key] = str(value) if isinstance(value, str | Path) else objects.path(value)
        _check(keys)
        return keys

    @property
    def implied(self) -> dict[str, Any]:
        """Keys that the given objects need, unless the configuration sets them."""
        several = self.tools or self.environment is not None or self.interaction is not None
        if several or getattr(self.agent_loop, "several_turns", False) is True:
            return {f"{_MULTI_TURN}.enable": True}
        return {}

    def rows(self, data: Any, objects: GivenObjects) -> Any:
        """Return the dataset; with an environment, one row for each seed.

        Args:
            data: dataset; with an environment, numbers, or mappings with ``seed`` and ``options``.

        Raises:
            HoneError: the environment cannot be made, or the dataset holds something else than seeds.
        """
        if self.environment is None or data is None:
            return data
        environment = self.environment if isinstance(self.environment, str) else objects.path(self.environment)
        return environment_rows(environment, data, own_loop=self.agent_loop is not None)


Tools = Sequence[Any] | str | Path | None  # see :class:`Episodes`


def environment_rows(environment: str, data: Any, *, own_loop: bool) -> list[dict[str, Any]]:
    """Return dataset rows for seeds of an environment, with the prompt that it shows after its reset.

    Args:
        environment: name of the environment.
        data: seeds: numbers, or mappings with ``seed`` and ``options``.
        own_loop: leave out the column ``agent_name``, because another loop plays the environment.
    """
    from hone.agents.tasks.environment import EnvironmentTask
    from hone.data.tasks.make import task_row

    rows = []
    for index, (seed, options) in enumerate(_seeds(data)):
        task = EnvironmentTask(environment, options)
        row = task_row(
            f"environment/{environment.removeprefix(PREFIX)}", asyncio.run(task.problem(seed)), "train", index
        )
        if own_loop:
            del row["agent_name"]
        rows.append(row)
    return rows


def reward_keys(reward: Reward | None, objects: GivenObjects, weights: Sequence[float] | None = None) -> dict[str, Any]:
    """Return the configuration keys of a reward, or of several with their weights.

    Raises:
        ConfigError: a reward is neither a function nor a text, or there are more or fewer weights than rewards.
    """
    several: list[Any] = [*reward] if isinstance(reward, list | tuple) else [reward]
    if weights is not None and len(weights) != len(several):
        raise ConfigError(
            f"{len(weights)} weights for {len(several)} rewards",
            where="reward_weights",
            fix="one number for each reward",
        )
    if isinstance(reward, list | tuple) or weights is not None:
        shares = weights or [1.0] * len(several)
        return {"reward.terms": [_term(one, weight, objects) for one, weight in zip(several, shares, strict=True)]}
    if reward is None:
        return {}
    if isinstance(reward, str):
        return reward_keys_of(reward)
    path, name = "reward.custom_reward_function.path", "reward.custom_reward_function.name"
    registered = _function(reward, objects)
    return {path: registered, name: registered.removeprefix(PREFIX)}


def _function(reward: Any, objects: GivenObjects) -> str:
    if not callable(reward):
        raise ConfigError(
            f"reward is a {type(reward).__name__}, not a function",
            fix="reward=FUNCTION, FILE.py:NAME, the name of a scorer, or a list of these with reward_weights",
        )
    return objects.path(reward)


def _term(reward: OneReward | None, weight: float, objects: GivenObjects) -> dict[str, Any]:
    """Return the entry of ``reward.terms`` for one of several rewards."""
    if isinstance(reward, str):
        return reward_term(reward) | {"weight": weight}
    path = _function(reward, objects)
    return {"function": path, "name": path.rpartition(":")[2], "weight": weight}


def _tool_path(value: Any, objects: GivenObjects) -> str:
    from hone.agents.tools.loading import tool_from_object

    tool = tool_from_object(value)
    return objects.path(tool, tool.name)


def _check(keys: Mapping[str, Any]) -> None:
    """Check that loop and user are classes derived from the right ones, before other checks wonder about them."""
    from hone.agents.interactions.loading import load_interactions
    from hone.agents.tool_agent import AGENT_LOOPS

    if is_user_object(keys.get(_LOOP)):
        AGENT_LOOPS.get(keys[_LOOP])
    if is_user_object(keys.get(_USER)):
        load_interactions(keys[_USER])


def _seeds(data: Any) -> list[tuple[int, dict[str, Any]]]:
    entries = data if isinstance(data, Iterable) and not isinstance(data, str | Mapping) else [data]
    seeds: list[tuple[int, dict[str, Any]]] = []
    for entry in entries:
        row: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {"seed": entry}
        seed = row.get("seed")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise DataError(
                "with environment=, a dataset is a list of seeds",
                where="dataset",
                why="the environment shows the prompt, and a seed determines it",
                fix="dataset=range(256), or rows {'seed': 1, 'options': {...}}; files of `hone data make environment:NAME` "
                "name their environment themselves",
            )
        seeds.append((seed, dict(row.get("options") or {})))
    return seeds


def _is_code(value: Any) -> bool:
    return inspect.isroutine(value) or inspect.isclass(value)


def dataset_files(data: Any, folder: Path, name: str) -> str | list[str] | None:
    """Return the files of a dataset; rows in memory are written to ``folder``.

    Args:
        data: a path or a name of the hub, several, rows (mappings), a pyarrow table, a pandas frame, or a
            `datasets.Dataset`, whose arrow files are used without a copy.
        folder: directory for the file of rows in memory.
        name: stem of that file.

    Raises:
        DataError: the object is none of these, or has no rows.
    """
    if data is None or isinstance(data, str):
        return data
    if isinstance(data, Path):
        return str(data)
    if isinstance(data, list | tuple) and data and all(isinstance(entry, str | Path) for entry in data):
        return [str(entry) for entry in data]
    files = _arrow_files(data)
    if files:
        return files
    table = _table(data)
    if table.num_rows == 0:
        raise DataError("the dataset has no rows", where=name, fix="give at least one row")
    return str(_write(table, folder / f"{name}.parquet"))


def _arrow_files(data: Any) -> list[str]:
    """Return the arrow files that hold exactly the rows of a `datasets.Dataset`; empty if there are none."""
    if getattr(data, "_indices", None) is not None:  # rows were chosen or shuffled
        return []
    files = [str(file["filename"]) for file in getattr(data, "cache_files", None) or []]
    return files if files and all(Path(file).is_file() for file in files) else []


def _table(data: Any) -> Any:
    import pyarrow as pa

    if isinstance(data, pa.Table):
        return data
    if hasattr(data, "to_list") and hasattr(data, "features"):  # datasets.Dataset
        return pa.Table.from_pylist(data.to_list())
    if hasattr(data, "to_arrow"):  # polars
        return data.to_arrow()
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas
        names = [str(name) for name in data.columns]
        if len({*names}) < len(names):
            raise DataError(f"two columns have one name: {', '.join(names)}", where="dataset", fix="rename one")
        return _columns_table({str(name): data[name] for name in data.columns})
    if isinstance(data, Iterable) and not isinstance(data, Mapping):
        rows = list(data)
        if all(isinstance(row, Mapping) for row in rows):
            names = dict.fromkeys(name for row in rows for name in row)
            return _columns_table({name: [row.get(name) for row in rows] for name in names})
        if all(isinstance(row, str) for row in rows):
            return pa.Table.from_pylist([{"prompt": [{"role": "user", "content": row}]} for row in rows])
    raise DataError(
        f"a dataset cannot be a {type(data).__name__}",
        fix="give a path, a name of the hub, a list of rows (dicts with a column prompt), or a table",
    )


def _columns_table(columns: Mapping[str, Any]) -> Any:
    """Return a table of columns, in which NaN is null. Raises DataError: a column has values of several types."""
    import pyarrow as pa

    arrays = {}
    for name, values in columns.items():
        try:
            arrays[name] = pa.array(values, from_pandas=True)
        except (pa.ArrowException, TypeError, ValueError) as error:
            cells = [(row, cell) for row, cell in enumerate(values) if cell is not None and cell == cell]
            row, cell = next((one for one in cells if type(one[1]) is not type(cells[0][1])), cells[0])
            raise DataError(
                f"column '{name}' has values of several types: row {row} is {cell!r:.60}, row {cells[0][0]} {cells[0][1]!r:.60}",
                where="dataset",
                why=f"a column has one type ({error})",
                fix="make it one type, for example frame[name] = frame[name].astype(str)",
            ) from error
    return pa.table(arrays)


def _write(table: Any, file: Path) -> Path:
    import pyarrow.parquet as pq

    from hone.insight.run_files import disk_errors

    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_name(f".{file.name}.tmp")
        pq.write_table(table, scratch)
        scratch.replace(file)
    return file
