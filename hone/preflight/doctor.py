"""Checks of this machine without a configuration: the result of each, and a fix for each problem."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from hone.extras import install_packages
from hone.preflight import machine
from hone.preflight.environment import wandb_credentials
from hone.preflight.machine import GIB, Machine

OK, WARNING, ERROR, ABSENT = "ok", "warning", "error", "absent"
OPTIONAL = {
    "ray": "trainer.runtime=ray",
    "tensorboard": "trainer.logger=[tensorboard]",
    "wandb": "trainer.logger=[wandb]",
    "mlflow": "trainer.logger=[mlflow]",
    "math_verify": "the scorer math",
    "reasoning_gym": "hone data make reasoning_gym:...",
    "fsspec": "checkpoints at a URL",
    "starlette": "hone serve, hone view: the extra serve",
    "gguf": "hone models get: the extra gguf",
    "mcp": "tools of MCP servers: the extra mcp",
    "bm25s": "the tool search: the extra search",
    "gymnasium": "environments of Gymnasium: the extra environments",
    "llguidance": "constrained answers: the extra constraints",
    "flash_attn": "other attention kernels",
    "vllm": "a version here is not used: engines run in separate environments (hone engines list)",
    "sglang": "a version here is not used: engines run in separate environments (hone engines list)",
}
"""Optional packages and their purpose."""
PORTS = {6379: "the head of a Ray cluster", 8265: "Ray's dashboard"}
_DISTRIBUTIONS = {
    "math_verify": "math-verify",
    "reasoning_gym": "reasoning-gym",
    "flash_attn": "flash-attn",
    "mlflow": "mlflow-skinny",
}
_IMPORT_SECONDS = 120
_LEFTOVERS = re.compile(r"raylet|gcs_server|VLLM::|sglang::", re.IGNORECASE)
_LITTLE_MEMORY, _LITTLE_DISK, _LITTLE_SHARED, _FEW_FILES = 4 * GIB, 5 * GIB, GIB, 4096


@dataclass(frozen=True)
class Check:
    """One line of the doctor: name of the check, result, and the fix of a problem, which is a warning or an error."""

    name: str
    result: str
    fix: str = ""
    severity: str = WARNING

    @property
    def status(self) -> str:
        return self.severity if self.fix or self.severity == ABSENT else OK

    def as_json(self) -> dict[str, str]:
        return {"name": self.name, "status": self.status, "found": self.result, "fix": self.fix}


def diagnose(folder: Path = Path()) -> list[Check]:
    """Run all checks; each package is imported in a separate process, in case the import crashes. ``folder``: directory
    where runs would be written.
    """
    here = machine.look()
    return [
        *_python(),
        *_packages(),
        *_device(here),
        *_processor(here),
        *_limits(here),
        *_disk(folder),
        *_ports(),
        *_leftovers(here),
        *_sandbox(),
        *_credentials(),
    ]


# -------------------------------------------------------------------------------------------------------------- software


def _python() -> Iterator[Check]:
    from hone import __version__

    result = f"Python {platform.python_version()}, hone {__version__}, {platform.system()} {platform.machine()}"
    yield Check("python", result, "use Python 3.11 or newer" if sys.version_info < (3, 11) else "", ERROR)


def _packages() -> Iterator[Check]:
    needed, extras = requirements()
    present = [name for name in OPTIONAL if importlib.util.find_spec(name) is not None]
    with ThreadPoolExecutor(2) as pool:
        broken = dict(zip(("torch", "transformers", "peft", *present), pool.map(import_error, ("torch", "transformers", "peft", *present)), strict=True))  # fmt: skip
    for requirement in needed:
        yield _required(requirement, broken.get(requirement.name))
    for name, purpose in OPTIONAL.items():
        if name not in present:
            yield Check(name, f"not installed ({purpose})", severity=ABSENT)
            continue
        distribution = _DISTRIBUTIONS.get(name, name)
        version = _version(distribution) or _version(name) or "unknown version"
        wanted = extras.get(distribution)
        if broken[name]:
            fix = f"{install_packages('--force-reinstall', distribution)}, or uninstall {distribution}"
            yield Check(name, f"{version}, cannot be imported: {broken[name]}", fix)
        elif wanted and version[0].isdigit() and not wanted.specifier.contains(version, prereleases=True):
            yield Check(name, f"{version}, but Hone needs {wanted.specifier}", install_packages(str(wanted)))
        else:
            yield Check(name, version)


def requirements() -> tuple[list[Requirement], dict[str, Requirement]]:
    """Return the requirements of the installed distribution of Hone, and those of its extras by name."""
    try:
        lines = metadata.requires("hone-rl") or []
    except metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return [], {}
    parsed = [Requirement(line) for line in lines]
    return [r for r in parsed if r.marker is None], {r.name: r for r in parsed if r.marker is not None}


def import_error(package: str) -> str:
    """Return why a package cannot be imported; empty when it can."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {package}"],
            capture_output=True,
            text=True,
            timeout=_IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the import took more than {_IMPORT_SECONDS} s"
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"the import ended with exit code {done.returncode}"])[-1][:300]


def _required(requirement: Requirement, broken: str | None) -> Check:
    version = _version(requirement.name)
    if version is None:
        return Check(requirement.name, "not installed", install_packages(str(requirement)), ERROR)
    if broken:
        fix = install_packages("--force-reinstall", str(requirement))
        return Check(requirement.name, f"{version}, cannot be imported: {broken}", fix, ERROR)
    if not requirement.specifier.contains(Version(version), prereleases=True):
        result = f"{version}, but Hone needs {requirement.specifier}"
        return Check(requirement.name, result, install_packages(str(requirement)), ERROR)
    return Check(requirement.name, version)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


# --------------------------------------------------------------------------------------------------------------- machine


def _device(here: Machine) -> Iterator[Check]:
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            memory = torch.cuda.get_device_properties(index).total_memory / GIB
            half = torch.cuda.is_bf16_supported(including_emulation=False)
            result = f"{torch.cuda.get_device_name(index)}, {memory:.0f} GiB, float32{', bfloat16' if half else ''}"
            yield Check(f"gpu {index}", result, "" if half else "dtype=float32 everywhere")
    elif here.gpus:
        result = f"{len(here.gpus)} GPUs in this machine, but torch {torch.__version__} sees none"
        fix = "install a CUDA build of torch that the driver supports, or trainer.device=cpu"
        yield Check("device", result, fix, ERROR)
    else:
        result = f"CPU only: float32, bfloat16 (a matmul takes {machine.bfloat16_cost():.1f} times as long)"
        yield Check("device", result)


def _processor(here: Machine) -> Iterator[Check]:
    quota = f", quota {here.quota:g}" if here.quota else ""
    result = f"{here.cpus} CPUs, {here.affinity} usable by this process{quota}"
    limited = here.usable_cpus < here.affinity
    fix = f"trainer.num_threads={here.usable_cpus}: more threads than the quota allows are slower" if limited else ""
    yield Check("cpu", result, fix)
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads and threads.isdigit() and int(threads) > here.usable_cpus:
        fix = f"OMP_NUM_THREADS={here.usable_cpus}, or unset it"
        yield Check("OMP_NUM_THREADS", f"{threads}, with {here.usable_cpus} usable CPUs", fix)
    fix = "models of more than about 50M parameters will not fit: `hone plan` predicts the memory of a run"
    yield Check("memory", f"{here.memory / GIB:.1f} GiB", fix if here.memory < _LITTLE_MEMORY else "")


def _limits(here: Machine) -> Iterator[Check]:
    shared = here.shared_memory
    small = shared is None or shared < _LITTLE_SHARED
    fix = "only Ray needs it: docker run --shm-size=8g, in Kubernetes an emptyDir of medium Memory at /dev/shm"
    result = "/dev/shm does not exist" if shared is None else f"{shared / GIB:.2g} GiB"
    yield Check("shared memory", result, fix if small else "")
    fix = "ulimit -n 65535 before a run with many workers" if here.open_files < _FEW_FILES else ""
    yield Check("open files", f"{here.open_files} per process", fix)


def _disk(folder: Path) -> Iterator[Check]:
    for name, path in (("disk", folder), ("disk for temporary files", Path(tempfile.gettempdir()))):
        existing, free = machine.free_disk(path)
        if problem := machine.write_problem(path):
            yield Check(name, problem, "trainer.default_local_dir=DIR, or TMPDIR=DIR", ERROR)
        else:
            fix = "free disk space, or trainer.default_local_dir=DIR on a larger disk" if free < _LITTLE_DISK else ""
            yield Check(name, f"{free / GIB:.1f} GiB free in {existing}", fix)


def _ports() -> Iterator[Check]:
    for port, purpose in PORTS.items():
        free = machine.port_is_free(port)
        result = f"{purpose}: {'free' if free else 'in use'}"
        fix = "" if free else "a Ray cluster may already run here: ray.address=auto uses it, `ray stop` ends it"
        yield Check(f"port {port}", result, fix)


def _leftovers(here: Machine) -> Iterator[Check]:
    import psutil

    for user in here.gpu_users:
        result = f"GPU {user.gpu}: {user.gib:.1f} GiB held by PID {user.pid} ({user.name})"
        yield Check("gpu process", result, f"if it is yours and no longer needed: kill {user.pid}")
    left = [p for p in psutil.process_iter(["pid", "name"]) if _LEFTOVERS.search(p.info["name"] or "")]
    if left:
        shown = ", ".join(f"{p.info['name']} ({p.info['pid']})" for p in left[:5])
        fix = f"if no run needs them: kill {' '.join(str(p.info['pid']) for p in left[:5])}"
        yield Check("other runs", f"{len(left)} processes of Ray or an engine: {shown}", fix)
    if not left and not here.gpu_users:
        yield Check("other runs", "no process of Ray or an engine, no process on a GPU")


def _sandbox() -> Iterator[Check]:
    from hone.rewards.sandbox.backends import PROTECTIONS
    from hone.rewards.sandbox.runner import available

    working, missing = available()
    name = "sandbox for code"
    if not working:
        yield Check(name, f"none: {missing.get('process', '')}", "reward.sandbox_fusion.url=URL of a server")
        return
    best = next(iter(working.values()))
    if not best.unprotected:
        yield Check(name, f"{best.name} protects {', '.join(PROTECTIONS)}; memory is bounded by {best.memory_bound}")
        return
    result = f"{best.name} (bubblewrap: {missing.get('bubblewrap')}); not protected: "
    result += "; ".join(f"{name} ({PROTECTIONS[name]})" for name in best.unprotected)
    yield Check(name, result, "apt-get install bubblewrap, if runs score or call model-written code")


def _credentials() -> Iterator[Check]:
    if importlib.util.find_spec("wandb") is not None:
        offline = os.environ.get("WANDB_MODE", "").lower() in ("offline", "disabled", "dryrun")
        ready = offline or wandb_credentials()
        result = "offline" if offline else "logged in" if ready else "not logged in"
        fix = "" if ready else "wandb login, or WANDB_MODE=offline, if you want trainer.logger=[wandb]"
        yield Check("wandb account", result, fix)
    if importlib.util.find_spec("mlflow") is not None:
        place = os.environ.get("MLFLOW_TRACKING_URI")
        yield Check("mlflow server", "set by MLFLOW_TRACKING_URI" if place else "files in the run directory")


def worst(checks: Sequence[Check]) -> str:
    statuses = {check.status for check in checks}
    return next((status for status in (ERROR, WARNING) if status in statuses), OK)
