"""Rules about the machine that a run starts on, its device, and the dtype."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from urllib.parse import urlsplit

from hone.config.derived import dtype_line
from hone.config.dtypes import dtype_keys
from hone.config.trees import AnyConfig, model_block
from hone.extras import install_command
from hone.preflight import machine
from hone.preflight.evidence import Evidence
from hone.preflight.machine import GIB, free_disk
from hone.preflight.rules import Findings, Stage, error, rule, warning

_BUSY_SHARE = 0.05
_OPEN_FILES = 65535
_SHARED_MEMORY = 2 * GIB
_LITTLE_DISK = 2 * GIB
_SLOWER = 1.5  # ratio of the times of a bfloat16 and a float32 matmul above which the rule warns


@rule("R02", Stage.ENVIRONMENT)
def cuda_present(config: AnyConfig) -> Findings:
    """The configured device exists."""
    if config.trainer.device == "cuda" and not _cuda():
        yield error(
            "trainer.device=cuda, but torch finds no CUDA GPU",
            fix="trainer.device=auto (uses a GPU when there is one) or trainer.device=cpu",
        )


@rule("R07", Stage.ENVIRONMENT)
def dtype_supported(config: AnyConfig) -> Findings:
    """The GPU supports the configured dtypes."""
    if config.trainer.device == "cpu" or not _cuda():
        return
    import torch

    keys = _bfloat16_keys(config)
    if keys and not computes_bfloat16(config):
        yield error(
            f"{torch.cuda.get_device_name()} does not support bfloat16",
            fix=" ".join(f"{key}=float32" for key in keys),
            where=keys[0],
        )


@rule("R07", Stage.ENVIRONMENT)
def bfloat16_is_fast_here(config: AnyConfig) -> Findings:
    """A CPU that computes in bfloat16 has instructions for it; without them float32 is several times faster."""
    keys = _bfloat16_keys(config)
    elsewhere = config.trainer.device != "cpu" and config.trainer.runtime == "ray" and config.ray.address is not None
    if not keys or elsewhere or not on_cpu(config):
        return
    cost = machine.bfloat16_cost()
    if cost > _SLOWER:
        yield warning(
            f"{' and '.join(f'{key}=bfloat16' for key in keys)}, but on this CPU a bfloat16 matmul takes {cost:.1f} times as long as "
            "in float32 (measured)",
            why="the CPU has no bfloat16 instructions, or slow ones; the update is slower, and its numbers less exact",
            fix=" ".join(f"{key}=float32" for key in keys),
            where=keys[0],
        )


def computes_bfloat16(config: AnyConfig) -> bool:
    """Return whether the run's device is a GPU of this machine with instructions for bfloat16."""
    from hone.models.devices import computes_bfloat16, run_device

    return computes_bfloat16(run_device(config.trainer.device))


def describe_dtype(config: AnyConfig) -> str:
    """Return the compute dtype of the trained model and where it comes from; on a cluster each worker's device decides."""
    if config.trainer.runtime == "ray" and config.ray.address is not None:
        line = dtype_line(config)
        return f"{line.value} ({line.reason})"
    key, bfloat16 = dtype_keys(config)[0], computes_bfloat16(config)
    return f"{key.resolved(bfloat16=bfloat16)} ({key.source(bfloat16=bfloat16)})"


def _bfloat16_keys(config: AnyConfig) -> list[str]:
    return [entry.key for entry in dtype_keys(config) if entry.value == "bfloat16"]


def on_cpu(config: AnyConfig) -> bool:
    return config.trainer.device == "cpu" or (config.trainer.device == "auto" and not _cuda())


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@rule("R01", Stage.ENVIRONMENT)
def packages_can_be_imported(config: AnyConfig) -> Findings:
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
                fix=f"install compatible versions: {install_command('', '--force-reinstall')}; `hone doctor` shows details",
                where="environment",
            )


@rule("R03", Stage.ENVIRONMENT)
def threads_fit_the_cores(config: AnyConfig, evidence: Evidence) -> Findings:
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
        )


@rule("R04", Stage.ENVIRONMENT)
def limits_for_workers(config: AnyConfig, evidence: Evidence) -> Findings:
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


@rule("R05", Stage.ENVIRONMENT)
def gpus_are_free(config: AnyConfig, evidence: Evidence) -> Findings:
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


@rule("R06", Stage.ENVIRONMENT)
def host_memory_suffices(config: AnyConfig, evidence: Evidence) -> Findings:
    """On a CPU, every phase of a step fits into memory."""
    if not _on_gpu(config, evidence) and not _uses_ray(config):
        yield from _memory_findings(config, evidence, evidence.machine.memory, "memory of this machine", on_cpu=True)


@rule("R31", Stage.ENVIRONMENT)
def device_memory_suffices(config: AnyConfig, evidence: Evidence) -> Findings:
    """On one GPU, every phase of a step fits into its memory."""
    if _on_gpu(config, evidence) and not _uses_ray(config):
        smallest = min(gpu.total_gib for gpu in evidence.machine.gpus) * GIB
        yield from _memory_findings(config, evidence, smallest, "memory of the GPU", on_cpu=False)


@rule("R57", Stage.ENVIRONMENT)
def disk_suffices(config: AnyConfig, evidence: Evidence) -> Findings:
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


@rule("R56", Stage.ENVIRONMENT)
def trackers_are_logged_in(config: AnyConfig) -> Findings:
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


def _memory_findings(config: AnyConfig, evidence: Evidence, limit: float, what: str, *, on_cpu: bool) -> Findings:
    """Compare the peak phase with the memory: too much is an error on a GPU and a warning on a CPU, which can swap."""
    from hone.preflight.plan.devices import bare_device
    from hone.preflight.plan.fit import TIGHT, Fitter
    from hone.preflight.plan.plan import describe_phase
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
