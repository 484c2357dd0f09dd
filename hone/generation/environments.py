"""Virtual environments of engines: their location, and their creation by `hone engines install`.

Their packages are listed in :mod:`hone.generation.recipes`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hone.errors import ConfigError, did_you_mean
from hone.generation.recipes import RECIPES, Installer, Recipe

RECORD = "hone-engine.json"
"""File in an environment with a record of what Hone installed."""
PLACE_VARIABLE = "HONE_ENGINES"
"""Environment variable with the folder of all engines' environments."""


def engines_folder() -> Path:
    """Return the folder of engine environments: ``$HONE_ENGINES``, or ``~/.cache/hone/engines``."""
    set_by_user = os.environ.get(PLACE_VARIABLE)
    return Path(set_by_user) if set_by_user else Path.home() / ".cache" / "hone" / "engines"


def environment_of(name: str, given: str | None = None) -> Path:
    """Return the environment of an engine: the given one, or the default folder."""
    return Path(given).expanduser() if given else engines_folder() / name


def interpreter_of(name: str, given: str | None = None) -> Path:
    """Return the Python interpreter of an engine's environment; Hone's engines use Hone's."""
    if name not in RECIPES and given is None:
        return Path(sys.executable)
    environment = environment_of(name, given)
    python = environment / "bin" / "python"
    if not python.is_file():
        where = "rollout.engine_env is" if given else "the default environment is"
        raise ConfigError(
            f"engine '{name}' is not installed: {where} {environment}, but {python} does not exist",
            why="external engines have a separate environment, because they pin other versions than the trainer",
            fix=f"{_install_command(name)}, or actor_rollout_ref.rollout.name=native",
            where="actor_rollout_ref.rollout.name",
        )
    return python


def recorded(environment: Path) -> dict[str, str] | None:
    """Return the record of what Hone installed in an environment, or None."""
    path = environment / RECORD
    return json.loads(path.read_text()) if path.is_file() else None


def install(
    name: str, *, cpu: bool, environment: Path, force: bool = False, say: Callable[[str], None]
) -> dict[str, str]:
    """Create an engine's environment, unless it exists.

    Args:
        name: of the engine.
        cpu: whether to install the build for CPUs.
        environment: folder to create.
        force: whether to replace an existing environment.
        say: called with lines about the progress.

    Raises:
        GenerationError: packages cannot be installed.
    """
    if name not in RECIPES:
        raise ConfigError(f"'{name}' cannot be installed", fix=did_you_mean(name, RECIPES))
    recipe, installed = RECIPES[name], recorded(environment)
    if installed is not None and not force:
        say(f"{name} {installed['version']} is installed in {environment}")
        return installed
    if (
        environment.exists()
        and installed is None
        and any(environment.iterdir())
        and not (environment / "pyvenv.cfg").is_file()
    ):
        raise ConfigError(
            f"{environment} is not empty and not a virtual environment", fix="hone engines install --env DIR"
        )
    python = _check_machine(recipe, cpu)
    _check_disk(recipe, environment)
    start = time.monotonic()
    shutil.rmtree(environment, ignore_errors=True)
    say(f"creating {environment} (about {recipe.megabytes / 1000:.1f} GB)")
    subprocess.run([python, "-m", "venv", str(environment)], check=True)
    installer = Installer(name, environment / "bin" / "python", say)
    recipe.install(installer, cpu)
    package = recipe.cpu_package if cpu else recipe.package
    record = {
        "engine": name,
        "version": installer.version_of(package),
        "build": "cpu" if cpu else "gpu",
        "date": time.strftime("%Y-%m-%d"),
    }
    (environment / RECORD).write_text(json.dumps(record) + "\n")
    say(f"{name} {record['version']} installed in {time.monotonic() - start:.0f} s")
    return record


def _check_disk(recipe: Recipe, environment: Path) -> None:
    existing = next(folder for folder in (environment, *environment.parents) if folder.exists())
    free = shutil.disk_usage(existing).free / 1e6
    if free < 2 * recipe.megabytes:  # downloaded and unpacked packages
        raise ConfigError(
            f"{existing} has {free / 1000:.1f} GB free; engine {recipe.name} takes {recipe.megabytes / 1000:.1f} GB, and twice that during "
            "the installation",
            fix=f"hone engines install {recipe.name} --env DIR on another disk, or {PLACE_VARIABLE}=DIR",
        )


def _check_machine(recipe: Recipe, cpu: bool) -> str:
    """Return the Python interpreter that creates the environment."""
    if recipe.only_gpu and (cpu or not _has_gpu()):
        raise ConfigError(
            f"engine {recipe.name} has no build for CPUs"
            if cpu
            else f"engine {recipe.name} needs an NVIDIA GPU, and this machine has none",
            why="its packages load CUDA when they are imported",
            fix=f"hone engines install {recipe.name} on a machine with an NVIDIA GPU, or hone engines install vllm --cpu here",
        )
    if recipe.python is None or recipe.python == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    python = shutil.which(f"python{recipe.python}")
    if python is None:
        raise ConfigError(
            f"engine {recipe.name} needs Python {recipe.python}, and python{recipe.python} is not on PATH",
            why=f"its packages are built for that version; Hone itself can stay on {sys.version_info.major}.{sys.version_info.minor}",
            fix=f"install Python {recipe.python}, then: hone engines install {recipe.name}",
        )
    return python


def _install_command(name: str) -> str:
    recipe = RECIPES.get(name)
    place = " on a machine with an NVIDIA GPU" if recipe is not None and recipe.only_gpu and not _has_gpu() else ""
    return f"hone engines install {name}{'' if place or _has_gpu() else ' --cpu'}{place}"


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia").exists()


@dataclass(frozen=True)
class EngineRow:
    """One engine of the engine table."""

    name: str  # as in ``rollout.name``
    place: str  # where it runs
    installed: str  # its version here, or the command that installs it
    verified: str  # versions and machines that passed the conformance suite


def engine_table() -> list[EngineRow]:
    rows = [
        EngineRow("native", "Hone's process", "yes", "with every change of Hone"),
        EngineRow("hf", "Hone's process", "yes", "with every change of Hone"),
    ]
    for recipe in RECIPES.values():
        record = recorded(environment_of(recipe.name))
        installed = f"{record['version']} ({record['build']})" if record else _install_command(recipe.name)
        passed = "; ".join(f"{v.version}, {v.date}, {v.machine}" for v in recipe.verified)
        never = f"never run: {recipe.remark}" if recipe.remark else "never run"
        rows.append(EngineRow(recipe.name, "a separate process", installed, passed or never))
    return rows
