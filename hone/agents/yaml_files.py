"""Reading of YAML files of tools and simulated users, with errors that name the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from hone.errors import ConfigError, did_you_mean


def read_yaml(path: Path, key: str) -> Any:
    """Return the content of a YAML file."""
    if not path.is_file():
        raise missing_file(path, key)
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        reason = getattr(error, "problem", None) or error
        raise ConfigError(f"'{path}'{line} is not valid YAML: {reason}", where=key, fix="correct the line") from error


def missing_file(path: Path, key: str) -> ConfigError:
    """Return the error for a file that does not exist, with the closest name in its folder."""
    near = [file.name for file in path.parent.glob(f"*{path.suffix}")] if path.parent.is_dir() else []
    fix = did_you_mean(path.name, near) if near else f"put it there: {path.parent} has no file *{path.suffix}"
    return ConfigError(
        f"file '{path}' does not exist", why="its tools would be missing", fix=fix, where=key, code="R33"
    )
