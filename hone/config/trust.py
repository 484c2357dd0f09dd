"""Code that the configuration of a run names, and which runs may run it.

Whoever looks at a run runs none of its code (:func:`hone.user_code.looking`). What plays a run again needs its reward functions, tools
and losses: they run if the run was trained here, or after `--trust`. A trusted run is the name of an empty file in the user's own
folder: the hash of its configuration and of the files it names. A configuration that is composed of others needs `--trust` each time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hone.config.load import load_config
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig
from hone.errors import HoneError
from hone.text import read_yaml
from hone.user_code import admit
from hone.user_objects import is_user_object

_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_FILE = re.compile(r"(.+\.(?:py|pyc|so|ya?ml))(?::\w*)?")
_CLASS = r"(?:custom_\w+\.path|class_path|class_name)"  # keys that also take a module or a class with dots
_MAX_FILE = 2**22


def trust_folder() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "hone" / "trusted"


def named_code(tree: Any, key: str = "") -> Iterator[tuple[str, Path | None]]:
    """Yield what a configuration names that runs code, and its file; files of tools are read, nothing is imported."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name == "trust_remote_code" and value is True:
                yield f"{key}.{name}=true", None
            yield from named_code(value, f"{key}.{name}".lstrip("."))
    elif isinstance(tree, list):
        for value in tree:
            yield from named_code(value, key)
    elif isinstance(tree, str) and not is_user_object(tree):
        if match := _FILE.fullmatch(tree):
            file = Path(match[1]).expanduser()
            yield tree, file
            if file.suffix != ".py" and file.is_file() and file.stat().st_size <= _MAX_FILE:
                yield from named_code(read_yaml(file.read_text(encoding="utf-8")), str(file))
        elif _IMPORT_PATH.fullmatch(tree) or tree.startswith("pkg://"):
            yield tree, _module_file(tree.removeprefix("pkg://").partition(":")[0])
        elif re.search(rf"(^|\.){_CLASS}$", key) and ("." in tree or not key.endswith("class_name")):
            yield tree, _module_file(tree) or _module_file(tree.rpartition(".")[0])


def _module_file(module: str) -> Path | None:
    """Return the file of a module in the current folder or of an installed one, without importing its packages."""
    path = Path(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin and Path(spec.origin).is_file() else None


def remember(file: Path, config: AnyConfig) -> None:
    _, digest = _examined(file, config)
    with contextlib.suppress(OSError):  # without a folder of the user's own, `--trust` is needed again
        trust_folder().mkdir(parents=True, exist_ok=True)
        (trust_folder() / digest).touch()


def run_config(folder: Path, overrides: Sequence[str] = ()) -> RLConfig:
    """Read the configuration of a run that will be played again, with some keys changed.

    Raises HoneError: it names code, and is not trusted (code E-trust).
    """
    require_trust(folder / "config.yaml", config := load_config(RLConfig, config_path=folder, config_name="config"))
    return load_config(RLConfig, overrides, config_path=folder, config_name="config") if overrides else config


def require_trust(file: Path, config: AnyConfig) -> None:
    """Let the code that a configuration names be run, if its file is trusted.

    Raises HoneError: it names code, and is not trusted (code E-trust).
    """
    code, digest = _examined(file, config)
    if _all_trusted:
        remember(file, config)
    elif code and ("defaults" in read_yaml(file.read_text("utf-8")) or not (trust_folder() / digest).is_file()):
        listed = ", ".join(name if path is None else f"{name} ({path})" for name, path in code.items())
        raise HoneError(
            f"the run names code that was not run here before: {listed}",
            why="a run that somebody sent would run a program of theirs with your rights",
            fix="read these files, then add --trust once",
            where=str(file),
            code="E-trust",
        )
    admit(None if _all_trusted else code)


_all_trusted = False


@contextlib.contextmanager
def trusting(trusted: bool) -> Iterator[None]:
    """Trust every run that is opened inside."""
    global _all_trusted
    before, _all_trusted = _all_trusted, trusted
    try:
        yield
    finally:
        _all_trusted = before


def _examined(file: Path, config: AnyConfig) -> tuple[dict[str, Path | None], str]:
    """Return the code that the values name, which interpolations may hide in the file, and the hash of all files."""
    code = dict(named_code(dataclasses.asdict(config)))
    digest = hashlib.sha256(file.read_bytes())
    for name, path in sorted(code.items()):
        digest.update(f"\0{name}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest() if path is not None and path.is_file() else b"")
    return code, digest.hexdigest()
