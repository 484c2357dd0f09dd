"""Environments that engines live in, apart from Hone's: where they are, and how `hone engines install` makes them.

What goes into them is in :mod:`hone.generation.recipes`.
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
"""File in an environment that says what Hone installed."""
PLACE_VARIABLE = "HONE_ENGINES"
"""Environment variable with the folder of all engines' environments."""


def engines_folder() -> Path:
    """Where environments of engines are put: ``$HONE_ENGINES``, or ``~/.cache/hone/engines``."""
    set_by_user = os.environ.get(PLACE_VARIABLE)
    return Path(set_by_user) if set_by_user else Path.home() / ".cache" / "hone" / "engines"


def environment_of(name: str, given: str | None = None) -> Path:
    """The environment of an engine: the one that is given, or the place where it is installed."""
    return Path(given).expanduser() if given else engines_folder() / name


def interpreter_of(name: str, given: str | None = None) -> Path:
    """The Python of an engine's environment; an engine of Hone's own runs in Hone's.

    Raises:
        ConfigError: there is none.
    """
    if name not in RECIPES and given is None:
        return Path(sys.executable)
    environment = environment_of(name, given)
    python = environment / "bin" / "python"
    if not python.is_file():
        where = "rollout.engine_env points at" if given else "it is looked for at"
        raise ConfigError(
            f"engine '{name}' is not installed: {where} {environment}, and there is no {python}",
            why="external engines live in an environment of their own, so that their versions do not bind the trainer's",
            fix=f"{_install_command(name)}, or actor_rollout_ref.rollout.name=native",
            where="actor_rollout_ref.rollout.name",
        )
    return python


def recorded(environment: Path) -> dict[str, str] | None:
    """What Hone installed in an environment, or None."""
    path = environment / RECORD
    return json.loads(path.read_text()) if path.is_file() else None


def install(
    name: str, *, cpu: bool, environment: Path, force: bool = False, say: Callable[[str], None]
) -> dict[str, str]:
    """Make an engine's environment; one that is there already is left as it is.

    Args:
        name: of the engine.
        cpu: the build for CPUs.
        environment: folder to make.
        force: make it anew.
        say: takes lines that tell of progress.

    Raises:
        ConfigError: no such engine, it cannot run here, or something else is in the folder.
        GenerationError: packages cannot be installed.
    """
    if name not in RECIPES:
        raise ConfigError(f"'{name}' cannot be installed", fix=did_you_mean(name, RECIPES))
    recipe, found = RECIPES[name], recorded(environment)
    if found is not None and not force:
        say(f"{name} {found['version']} is installed in {environment}")
        return found
    if (
        environment.exists()
        and found is None
        and any(environment.iterdir())
        and not (environment / "pyvenv.cfg").is_file()
    ):
        raise ConfigError(
            f"{environment} is not empty and no virtual environment", fix="hone engines install --env DIR"
        )
    python = _check_machine(recipe, cpu)
    _check_disk(recipe, environment)
    begun = time.monotonic()
    shutil.rmtree(environment, ignore_errors=True)
    say(f"making {environment} (about {recipe.megabytes / 1000:.1f} GB)")
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
    say(f"{name} {record['version']} installed in {time.monotonic() - begun:.0f} s")
    return record


def _check_disk(recipe: Recipe, environment: Path) -> None:
    there = next(folder for folder in (environment, *environment.parents) if folder.exists())
    free = shutil.disk_usage(there).free / 1e6
    if free < 2 * recipe.megabytes:  # what is downloaded, and what is unpacked
        raise ConfigError(
            f"{there} has {free / 1000:.1f} GB left, engine {recipe.name} takes {recipe.megabytes / 1000:.1f} GB and as much while it is "
            "installed",
            fix=f"hone engines install {recipe.name} --env DIR on another disk, or {PLACE_VARIABLE}=DIR",
        )


def _check_machine(recipe: Recipe, cpu: bool) -> str:
    """The Python that the environment is made with.

    Raises:
        ConfigError: the engine cannot run on this machine, or there is no such Python.
    """
    if recipe.only_gpu and (cpu or not _has_gpu()):
        raise ConfigError(
            f"engine {recipe.name} has no build for CPUs"
            if cpu
            else f"engine {recipe.name} needs an NVIDIA GPU, and here is none",
            why="its packages load CUDA when they are imported",
            fix=f"hone engines install {recipe.name} on a machine with an NVIDIA GPU, or hone engines install vllm --cpu here",
        )
    if recipe.python is None or recipe.python == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    found = shutil.which(f"python{recipe.python}")
    if found is None:
        raise ConfigError(
            f"engine {recipe.name} is built for Python {recipe.python}, and there is no python{recipe.python} on PATH",
            why=f"its environment is made with that Python; Hone itself may go on with {sys.version_info.major}.{sys.version_info.minor}",
            fix=f"install Python {recipe.python}, then: hone engines install {recipe.name}",
        )
    return found


def _install_command(name: str) -> str:
    """How an engine is installed on this machine."""
    recipe = RECIPES.get(name)
    place = " on a machine with an NVIDIA GPU" if recipe is not None and recipe.only_gpu and not _has_gpu() else ""
    return f"hone engines install {name}{'' if place or _has_gpu() else ' --cpu'}{place}"


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia").exists()


@dataclass(frozen=True)
class Row:
    """An engine in the list of all.

    Attributes:
        name: as in ``rollout.name``.
        place: where it runs.
        installed: its version here, or how to install it.
        verified: what the conformance suite was passed with.
    """

    name: str
    place: str
    installed: str
    verified: str


def engine_table() -> list[Row]:
    """All engines, with what is known of them."""
    rows = [
        Row("native", "Hone's process", "yes", "with every change of Hone"),
        Row("hf", "Hone's process", "yes", "with every change of Hone"),
    ]
    for recipe in RECIPES.values():
        found = recorded(environment_of(recipe.name))
        installed = f"{found['version']} ({found['build']})" if found else _install_command(recipe.name)
        passed = "; ".join(f"{v.version}, {v.date}, {v.machine}" for v in recipe.verified)
        never = f"never run: {recipe.remark}" if recipe.remark else "never run"
        rows.append(Row(recipe.name, "a process of its own", installed, passed or never))
    return rows
