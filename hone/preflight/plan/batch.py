"""The batch plan: what a run will do, in one line of numbers."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any

from hone.config.derived import RunSpec
from hone.config.limits import micro_batch_tokens
from hone.config.offline import SFTConfig
from hone.config.run import RunConfig
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig


def batch_plan(config: AnyConfig, rows: int, *, on_cpu: bool) -> str:
    """Return the plan of a run over ``rows`` training rows (those left after too long ones are dropped)."""
    if isinstance(config, RLConfig):
        return _rl_plan(config, rows, on_cpu=on_cpu)
    return _update_plan(config, rows, "conversation" if isinstance(config, SFTConfig) else "preference", on_cpu=on_cpu)


def training_rows(config: AnyConfig, read: Callable[..., Sized] | None = None) -> int:
    """Count the training rows, before any is dropped for its length; ``read``: the run's reader, for rows of a class."""
    from hone.data.files import count_rows, file_list

    files, most = file_list(config.data.train_files), config.data.train_max_samples
    if read is not None and config.data.custom_cls.path is not None:
        return len(read(files, required=(), max_rows=most))
    return count_rows(files, most)


def _rl_plan(config: RLConfig, rows: int, *, on_cpu: bool) -> str:
    actor, n, prompts = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n, config.data.train_batch_size
    mini = actor.ppo_mini_batch_size
    cuts, limit = prompts // mini, actor.ppo_micro_batch_size_per_gpu
    spec = RunSpec(config)
    return "; ".join(
        [
            f"plan: {_count(prompts, 'prompt')} x {n} = {prompts * n} sequences a step",
            f"{_count(cuts, 'mini-batch', 'es')} of {mini} prompts ({mini * n} sequences) x "
            f"{_count(actor.ppo_epochs, 'epoch')} -> {_count(spec.updates_per_batch, 'optimizer update')} a step",
            f"micro-batches of up to {spec.micro_batch_tokens(on_cpu=on_cpu)} tokens"
            + (f" and {_count(limit, 'sequence')}" if limit else ""),
            _steps(config.trainer, rows, prompts, "step"),
        ]
    )


def _update_plan(config: Any, rows: int, noun: str, *, on_cpu: bool) -> str:
    data = config.data
    return "; ".join(
        [
            f"plan: {_count(data.train_batch_size, noun)} an optimizer update",
            f"micro-batches of up to {micro_batch_tokens(data.max_token_len_per_gpu, on_cpu=on_cpu)} tokens",
            _steps(config.trainer, rows, data.train_batch_size, "update"),
        ]
    )


def _steps(trainer: RunConfig, rows: int, batch: int, noun: str) -> str:
    epoch = rows // batch
    total = trainer.total_training_steps or trainer.total_epochs * epoch
    passes = f" ({total * batch / rows:.2g} passes over the data)" if rows else ""
    return f"{_count(rows, 'row')} -> {_count(epoch, noun)} an epoch, {total} in all{passes}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"
