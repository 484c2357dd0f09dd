"""List of the environments with the packages that they need, without importing them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hone.agents.environments.base import ENVIRONMENTS
from hone.errors import ConfigError
from hone.extras import install_command

PACKAGES = {
    "gymnasium": ("gymnasium", "environments"),
    "openenv": ("websockets", "environments"),
    "reasoning_gym": ("reasoning-gym", "tasks"),
    "textarena": ("textarena", None),
    "gem": ("gem-llm", None),
    "verifiers": ("verifiers", None),
}
"""Package of an environment, and the extra of Hone that has it; None if it has a Python environment of its own."""
_SECONDS = 30.0
_ASK = (
    "import json, sys; from importlib import metadata\n"
    "found = {one.metadata['Name'].lower().replace('_', '-'): one.version for one in metadata.distributions()}\n"
    "print(json.dumps({name: found.get(name) for name in sys.argv[1:]}))"
)


@dataclass(frozen=True)
class Listed:
    """One environment, or library of environments."""

    name: str
    rows: str  # task of `hone data make` that writes its rows
    package: str | None  # None: built in
    installed: str | None  # version of the package; None if it is missing, or built in
    install: str | None  # command that installs the package; None if nothing is missing


def environments(python: str | None = None) -> list[Listed]:
    """Return all environments; packages with a Python environment of their own are looked for in that of ``python``, too.

    Raises:
        ConfigError: ``python`` does not run.
    """
    names = [package for package, extra in PACKAGES.values() if extra is None]
    elsewhere = versions_in(python, names) if python is not None else {}
    listed = []
    for name in sorted({*ENVIRONMENTS.names(), "verifiers"}):
        rows = "verifiers:NAME" if name == "verifiers" else f"environment:{name}"
        package, extra = PACKAGES.get(name, (None, None))
        version = package and (elsewhere.get(package) or _version(package))
        install = None
        if package and not version:
            place = f"python -m venv ~/{name} && ~/{name}/bin/pip install {package}"
            install = place if extra is None else install_command(extra)
        listed.append(Listed(name, rows, package, version, install))
    return listed


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions_in(python: str, names: Sequence[str], where: str = "--python") -> dict[str, str | None]:
    """Return the versions of packages in the environment of a Python, None for those that are missing.

    Raises:
        ConfigError: it does not run; ``where`` names the option or key.
    """
    interpreter = str(Path(python).expanduser())
    try:
        answer = subprocess.run(
            [interpreter, "-I", "-c", _ASK, *names], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
        return dict(json.loads(answer.stdout))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(
            f"{interpreter} does not say which packages it has: {error}",
            fix=f"give the path of a Python, such as {sys.executable}",
            where=where,
        ) from error
