"""List of the environments with the packages that they need, without importing them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from hone.agents.environments.base import ENVIRONMENTS
from hone.agents.program.process import versions_in
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
