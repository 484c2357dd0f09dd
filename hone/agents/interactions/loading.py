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
from hone.user_objects import PREFIX, is_user_object

PATH_KEY = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"
INTERACTIONS: Registry[type[Interaction]] = Registry("built-in interaction", key=PATH_KEY)
"""Built-in simulated users."""
_ = INTERACTIONS.register("teacher")(Teacher)


def load_interactions(path: str | None) -> dict[str, Interaction]:
    """Return the simulated users of a file, or the one of a class of this process, by name.

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
    if is_user_object(path):
        name = path.removeprefix(PREFIX)
        return {name: _user(_imported_class(path, PATH_KEY), name, {}, PATH_KEY)}
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
        users[entry["name"]] = _user(_class(entry, where), entry["name"], dict(entry.get("config") or {}), where)
    return users


def _class(entry: dict, where: str) -> type[Interaction]:
    if "class_name" not in entry:
        return INTERACTIONS.get(entry["name"])
    module, _, name = str(entry["class_name"]).rpartition(".")
    return _imported_class(f"{module}:{name}", where)


def _imported_class(path: str, where: str) -> type[Interaction]:
    cls = imported(path, where)
    if not (inspect.isclass(cls) and issubclass(cls, Interaction)):
        raise ConfigError(
            f"{path} is not a subclass of Interaction",
            where=where,
            fix="derive it from hone.agents.interactions.Interaction",
        )
    return cls


def _user(cls: type[Interaction], name: str, config: dict, where: str) -> Interaction:
    try:
        user = cls(config)
    except HoneError:
        raise
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"the user cannot be made: {error}", where=where, fix="correct its config") from error
    user.name = name
    return user
