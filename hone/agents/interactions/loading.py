"""Simulated users from a YAML file (``multi_turn.interaction_config_path``).

interaction:
  - name: teacher                       # built in: checks answers, lets the model try again
    config: {tries: 3}
  - name: customer                      # your class: Customer(config)
    class_name: my_users.Customer
    config: {patience: 5}
"""

from __future__ import annotations

import inspect
from pathlib import Path

from hone.agents.interactions.base import Interaction
from hone.agents.interactions.teacher import Teacher
from hone.agents.yaml_files import read_yaml
from hone.errors import ConfigError, HoneError
from hone.registry import Registry, imported

PATH_KEY = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"
INTERACTIONS: Registry[type[Interaction]] = Registry("built-in interaction", key=PATH_KEY)
"""Built-in simulated users."""
_ = INTERACTIONS.register("teacher")(Teacher)


def load_interactions(path: str | None) -> dict[str, Interaction]:
    """Return the simulated users of a file, by name.

    Raises:
        ConfigError: no file is given, it is missing or invalid, or a user cannot be made.
    """
    if path is None:
        raise ConfigError(
            "the loop 'interaction' needs a file of simulated users, and none is given",
            why="no user would answer the model",
            fix=f"{PATH_KEY}=FILE.yaml",
            code="R33",
        )
    content = read_yaml(Path(path), PATH_KEY)
    entries = content.get("interaction") if isinstance(content, dict) else content
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"'{path}' lists no users", fix="add interaction:\n    - name: teacher", where=PATH_KEY)
    users: dict[str, Interaction] = {}
    for number, entry in enumerate(entries):
        where = f"{path}, user {number + 1}"
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or entry["name"] in users:
            raise ConfigError(
                f"{entry!r} has no name, or the name of an earlier user",
                where=where,
                fix="give it a unique name: - name: teacher",
            )
        users[entry["name"]] = _user(entry, where)
    return users


def _user(entry: dict, where: str) -> Interaction:
    if "class_name" in entry:
        module, _, name = str(entry["class_name"]).rpartition(".")
        cls = imported(f"{module}:{name}", where)
        if not (inspect.isclass(cls) and issubclass(cls, Interaction)):
            raise ConfigError(
                f"{entry['class_name']} is not a subclass of Interaction",
                where=where,
                fix="derive it from hone.agents.interactions.Interaction",
            )
    else:
        cls = INTERACTIONS.get(entry["name"])
    try:
        user = cls(dict(entry.get("config") or {}))
    except HoneError:
        raise
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"the user cannot be made: {error}", where=where, fix="correct its config") from error
    user.name = entry["name"]
    return user
