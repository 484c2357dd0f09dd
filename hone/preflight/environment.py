"""Rules about the machine that a run starts on."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from hone.config.trees import TREES, AnyConfig, model_block
from hone.preflight.device import computes_bfloat16
from hone.preflight.evidence import Evidence
from hone.preflight.machine import GIB, free_disk
from hone.preflight.rules import Finding, Stage, error, rule, warning

_BUSY_SHARE = 0.05
_OPEN_FILES = 65535
_SHARED_MEMORY = 2 * GIB
_LITTLE_DISK = 2 * GIB


@rule("R01", *TREES.values(), stage=Stage.ENVIRONMENT)
def packages_can_be_imported(config: AnyConfig) -> Iterator[Finding]:
    """The packages that the run needs can be imported."""
    needed = ["torch", "transformers"]
    if model_block(config)[1].lora_rank > 0 or model_block(config)[1].lora_adapter_path:
        needed.append("peft")
    for package in needed:
        try:
            importlib.import_module(package)
        except (ImportError, OSError) as problem:  # OSError: a shared library is missing or has another version
            yield error(
                f"'{package}' cannot be imported: {str(problem).splitlines()[0]}",
                why="the run needs it",
                fix="install compatible versions: pip install --force-reinstall hone-rl; `hone doctor` shows details",
                where="environment",
            )


@rule("R03", *TREES.values(), stage=Stage.ENVIRONMENT)
def threads_fit_the_cores(config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
    """A run does not start more threads than it has cores."""
    machine = evidence.machine
    threads = config.trainer.num_threads or machine.omp_threads or machine.affinity
    usable = machine.usable_cpus
    if threads > usable:
        limit = (
            f"a quota of {machine.quota:g}" if machine.quota and machine.quota < machine.affinity else "its affinity"
        )
        yield warning(
            f"{threads} threads, but this job may use {usable} of {machine.cpus} CPUs ({limit})",
            why="threads that share cores are slower than fewer threads",
            fix=f"trainer.num_threads={usable}",
            where="trainer.num_threads",
        )


@rule("R04", *TREES.values(), stage=Stage.ENVIRONMENT)
def limits_for_workers(config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
    """Worker processes have enough shared memory and open files."""
    machine = evidence.machine
    if config.trainer.runtime != "ray":
        return
    if machine.shared_memory is not None and machine.shared_memory < _SHARED_MEMORY:
        yield warning(
            f"/dev/shm is {machine.shared_memory / GIB:.2g} GiB",
            why="Ray keeps batches there, and uses the disk when it is full",
            fix="docker run --shm-size=8g (in Kubernetes an emptyDir of medium Memory at /dev/shm)",
            where="environment",
        )
    if machine.open_files < _OPEN_FILES:
        yield warning(
            f"a process may open {machine.open_files} files",
            why="every worker opens dozens of sockets and files; a run with many workers fails with 'too many open files'",
            fix=f"ulimit -n {_OPEN_FILES}",
            where="environment",
        )


@rule("R05", *TREES.values(), stage=Stage.ENVIRONMENT)
def gpus_are_free(config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
    """No other process holds memory of the GPUs."""
    if config.trainer.device == "cpu":
        return
    for gpu in evidence.machine.gpus:
        if gpu.used_gib > _BUSY_SHARE * gpu.total_gib:
            users = [user for user in evidence.machine.gpu_users if user.gpu == gpu.index]
            names = ", ".join(f"PID {user.pid} ({user.name})" for user in users) or "a process that is not shown here"
            yield warning(
                f"GPU {gpu.index}: {gpu.used_gib:.1f} of {gpu.total_gib:.0f} GiB held by {names}",
                why="the run lacks that memory; the process is often a leftover of an earlier run",
                fix=f"kill {' '.join(str(user.pid) for user in users)}" if users else "see nvidia-smi on the host",
                where="trainer.device",
            )


@rule("R06", *TREES.values(), stage=Stage.ENVIRONMENT)
def host_memory_suffices(config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
    """On a CPU, every phase of a step fits into memory."""
    if not _on_gpu(config, evidence) and not _uses_ray(config):
        yield from _memory_findings(config, evidence, evidence.machine.memory, "memory of this machine", on_cpu=True)


@rule("R31", *TREES.values(), stage=Stage.ENVIRONMENT)
def device_memory_suffices(config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
    """On one GPU, every phase of a step fits into its memory."""
    if _on_gpu(config, evidence) and not _uses_ray(config):
        smallest = min(gpu.total_gib for gpu in evidence.machine.gpus) * GIB
        yield from _memory_findings(config, evidence, smallest, "memory of the GPU", on_cpu=False)


@rule("R57", *TREES.values(), stage=Stage.ENVIRONMENT)
def disk_suffices(config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
    """The checkpoints that are kept fit on the disk."""
    from hone.preflight.plan.memory import checkpoint_bytes

    trainer = config.trainer
    place = trainer.checkpoint_dir or trainer.default_local_dir
    if urlsplit(place).scheme not in ("", "file"):
        return
    folder, free = free_disk(Path(urlsplit(place).path if "://" in place else place))
    work = evidence.work(on_cpu=True) if trainer.save_freq else None
    size = None if work is None else checkpoint_bytes(work)
    kept = (
        (trainer.max_ckpt_to_keep or 1) + 1 if trainer.save_freq not in (0, -1) else 1
    )  # one more while the next is written
    if size is not None and size * kept > free:
        yield warning(
            f"{kept} checkpoint{'s' * (kept > 1)} of about {size / GIB:.1f} GiB need{'s' * (kept == 1)} {size * kept / GIB:.0f} GiB, but {folder} has "
            f"{free / GIB:.0f} GiB free",
            why="a checkpoint that cannot be written stops the run",
            fix=("trainer.max_ckpt_to_keep=1, or " if kept > 2 else "")
            + "trainer.default_local_dir=DIR on a larger disk",
            where="trainer.max_ckpt_to_keep" if kept > 2 else "trainer.default_local_dir",
        )
    elif free < _LITTLE_DISK:
        yield warning(
            f"{folder} has {free / GIB:.2g} GiB free",
            why="metrics, rollouts and checkpoints are written there",
            fix="free disk space, or trainer.default_local_dir=DIR on a larger disk",
            where="trainer.default_local_dir",
        )


@rule("R56", *TREES.values(), stage=Stage.ENVIRONMENT)
def trackers_are_logged_in(config: AnyConfig) -> Iterator[Finding]:
    """A configured tracking service has credentials."""
    offline = os.environ.get("WANDB_MODE", "").lower() in ("offline", "disabled", "dryrun")
    if "wandb" not in config.trainer.logger or importlib.util.find_spec("wandb") is None:
        return  # the rule about installed trackers reports it
    if not offline and not wandb_credentials():
        yield error(
            "tracker wandb is not logged in: WANDB_API_KEY is not set, and ~/.netrc has no entry",
            why="the run would prompt for a login, or fail, after loading the model",
            fix="wandb login, or WANDB_MODE=offline in the environment, or remove wandb from trainer.logger",
            where="trainer.logger",
        )


def wandb_credentials() -> bool:
    """Return whether Weights & Biases has a key, in the environment or in ~/.netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    netrc = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        return "wandb" in netrc.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def _on_gpu(config: AnyConfig, evidence: Evidence) -> bool:
    return config.trainer.device != "cpu" and bool(evidence.machine.gpus)


def _uses_ray(config: AnyConfig) -> bool:
    """Return whether several devices, possibly of other machines, share the work."""
    return config.trainer.runtime == "ray"


def _memory_findings(
    config: AnyConfig, evidence: Evidence, limit: float, what: str, *, on_cpu: bool
) -> Iterator[Finding]:
    """Compare the peak phase with the memory: too much is an error on a GPU and a warning on a CPU, which can swap."""
    from hone.preflight.plan.fit import TIGHT, Fitter
    from hone.preflight.plan.local import bare_device
    from hone.preflight.plan.render import describe_phase
    from hone.preflight.plan.work import other_shapes

    work = evidence.work(on_cpu=on_cpu)
    if work is None or evidence.shape is None:
        return
    bfloat16 = not on_cpu and computes_bfloat16(config)
    fitter = Fitter(bare_device(limit, on_cpu=on_cpu, bfloat16=bfloat16), evidence.shape, other_shapes(config))
    peak = max((memory.peak for memory in fitter.memories(work)), key=lambda phase: phase.total)
    if peak.total <= TIGHT * limit:
        return
    fitting = fitter.fit(config)
    knobs = " ".join(knob.setting for knob in fitting.knobs) or "a smaller model"
    yield (error if not on_cpu and peak.total > limit else warning)(
        f"{describe_phase(peak)}; {what} {limit / GIB:.1f} GiB",
        why="the run would run out of memory" if peak.total > limit else "memory fragmentation may exceed the limit",
        fix=knobs if fitting.fits else f"{knobs}; this is not enough, so also use a smaller model or more devices",
        where=f"{model_block(config)[0]}.path",
    )
