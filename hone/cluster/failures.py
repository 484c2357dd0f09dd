"""Errors for lost processes of a run: name, last activity, end of the log, and the key to change."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from hone.config.derived import longest_sequence
from hone.config.limits import micro_batch_tokens
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig
from hone.errors import HoneError, ProcessError
from hone.insight import activity
from hone.insight.activity import Record

LOG_LINES = 15
"""Number of lines of a dead process's log in the message."""
_BROKEN_COLLECTIVE = re.compile(
    r"connection (closed|reset|refused)|closed by peer|broken pipe|gloo|nccl|DistBackendError|DistNetworkError",
    re.IGNORECASE,
)
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "low on memory",
    "OutOfMemoryError",
)


class BroadcastError(RuntimeError):
    """The process group could not be made, or a broadcast failed: a member died or is unreachable. Weights can go another way."""


class PeersUnreachable(ProcessError):
    """The process group of a pool could not be made: often the consequence of a member's death, which explains it better."""


class WorkerLost(ProcessError):
    """A worker process died, or was killed because it hung; its models are lost.

    Attributes:
        names: names of the processes, such as ``main[1]``.
    """

    code = "E-worker-lost"

    def __init__(self, what: str, *, names: Sequence[str], why: str = "", fix: str = "") -> None:
        super().__init__(what, why=why, fix=fix)
        self.names = tuple(names)


class OutOfMemory(ProcessError):
    """A process requested more memory than available."""

    code = "E-memory"


def worker_lost(
    name: str,
    record: Record | None,
    cause: str,
    *,
    config: AnyConfig,
    run_stage: str = "",
    out_of_memory: bool = False,
    log: str = "",
) -> WorkerLost:
    """Return the error for one lost worker.

    Args:
        name: name of the process.
        record: its last published record; None without one.
        cause: how it ended, if known.
        run_stage: current stage of the run.
        out_of_memory: whether memory was the reason.
        log: end of its log.
    """
    where = f"{name} (pid {record.pid} on {record.host})" if record else name
    activity_text = (
        f", in '{record.stage}'"
        if record and record.spans
        else ", between two calls"
        if record
        else ", before its first activity"
    )
    what = f"{where} {cause}{activity_text}" + (f"; the run was in '{run_stage}'" if run_stage else "")
    if out_of_memory:
        what += f"\n  {memory_numbers(config)}"
    if log:
        what += "\n  The end of its log:\n" + "\n".join(f"    {line}" for line in log.splitlines())
    rerun = "run the same command again to resume from the last checkpoint"
    used_up = config.trainer.max_restarts
    restarts = f"trainer.max_restarts={max(1, 2 * used_up)} makes the run resume automatically"
    if config.trainer.runtime == "torchrun":
        restarts = "torchrun --max-restarts=1 makes it resume automatically"
    fix = f"{rerun}; {restarts}"
    if out_of_memory:
        stage = f"{run_stage} > {record.stage if record else name}"
        fix = f"{memory_knob(config, stage)}; then {rerun}"
    return WorkerLost(what, names=[name], why="its part of the weights and of the optimizer's state is lost", fix=fix)


def rank_lost(run: Path, config: AnyConfig) -> WorkerLost:
    """Return the error for a launched rank that is gone: the first whose process no longer exists here."""
    records = activity.read_records(run / activity.FOLDER)
    gone = next((record for record in records if record.rank is not None and not record.is_alive()), None)
    return worker_lost("another rank" if gone is None else gone.name, gone, "is gone", config=config)


def out_of_memory(error: BaseException, config: AnyConfig, stage: str) -> OutOfMemory:
    """Return the error for a refused allocation."""
    return OutOfMemory(
        f"out of memory in '{stage}': {str(error).splitlines()[0] if str(error) else type(error).__name__}\n"
        f"  {memory_numbers(config)}",
        why="the step cannot be computed at this size; every saved checkpoint is intact",
        fix=f"{memory_knob(config, stage)}; then run the same command again to resume from the last checkpoint",
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception, or one of its causes, says that memory ran out."""
    link: BaseException | None = error
    while link is not None:
        text = f"{type(link).__name__}: {link}"
        if isinstance(link, MemoryError) or any(words.lower() in text.lower() for words in _OUT_OF_MEMORY):
            return True
        link = link.__cause__
    return False


def is_broken_collective(error: BaseException) -> bool:
    """Return whether an exception may be the consequence of another rank's end."""
    return not isinstance(error, HoneError) and _BROKEN_COLLECTIVE.search(f"{type(error)} {error}") is not None


def log_tail(path: Path | None, lines: int = LOG_LINES, *, without: tuple[str, ...] = ()) -> str:
    """Return the last lines of a log, without blank ones and those that begin with ``without``; "" if there is no log."""
    if path is None or not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64 * 1024))
        text = file.read().decode(errors="replace")
    return "\n".join([line for line in text.splitlines() if line.strip() and not line.startswith(without)][-lines:])


# memory ------------------------------------------------------------------------------------------------------------------


def memory_numbers(config: AnyConfig) -> str:
    """Return the sizes of the batch plan that memory depends on."""
    if not isinstance(config, RLConfig):
        return (
            f"The plan: micro-batches of up to {_micro_batch_tokens(config.data.max_token_len_per_gpu, config)} tokens"
        )
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    return (
        f"The plan: {config.data.train_batch_size} prompts x {rollout.n} samples of up to {longest_sequence(config)} tokens; updates in micro-batches of up "
        f"to {_micro_batch_tokens(actor.ppo_max_token_len_per_gpu, config)} tokens; generation of {rollout.max_num_seqs} concurrent sequences with a KV cache of "
        f"{cache_tokens(config)} tokens"
    )


def memory_knob(config: AnyConfig, stage: str) -> str:
    """Return the first key to change after running out of memory in a stage, as ``key=value``."""
    if not isinstance(config, RLConfig):
        tokens, longest = config.data.max_token_len_per_gpu, config.data.max_length
        return (
            _halved("data.max_token_len_per_gpu", _micro_batch_tokens(tokens, config), longest)
            or "model.enable_gradient_checkpointing=true"
        )
    shared, data = config.actor_rollout_ref, config.data
    longest = longest_sequence(config)
    if any(part.strip().startswith(("gen", "validate")) for part in stage.split(">")):
        knob = _halved("actor_rollout_ref.rollout.max_cache_tokens", cache_tokens(config), longest)
        if knob:
            return knob
    prefix, budget = "actor_rollout_ref.actor", shared.actor.ppo_max_token_len_per_gpu
    if "critic" in stage and config.critic.ppo_max_token_len_per_gpu:
        prefix, budget = "critic", config.critic.ppo_max_token_len_per_gpu
    knob = _halved(f"{prefix}.ppo_max_token_len_per_gpu", _micro_batch_tokens(budget, config), longest)
    if knob:
        return knob
    if not shared.model.enable_gradient_checkpointing:
        return "actor_rollout_ref.model.enable_gradient_checkpointing=true"
    return f"data.max_response_length={data.max_response_length // 2}"


def cache_tokens(config: RLConfig) -> int:
    """Return the number of tokens in the KV cache."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.max_cache_tokens or rollout.max_num_seqs * longest_sequence(config)


def _micro_batch_tokens(budget: int, config: AnyConfig) -> int:
    """Return the largest number of tokens of a micro-batch."""
    return micro_batch_tokens(budget, on_cpu=config.trainer.device == "cpu" or not torch.cuda.is_available())


def _halved(key: str, value: int, least: int) -> str | None:
    """Return ``key=<half of value>``, at least what the longest sequence needs; None if it cannot be halved."""
    half = max(value // 2, least)
    return f"{key}={half}" if half < value else None
