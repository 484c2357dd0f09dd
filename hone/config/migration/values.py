"""Keys that both configurations have, and that take some values only here or only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hone.config.migration.entries import Changed, Others, Refused

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_TRACKERS = ("console", "tensorboard", "wandb", "mlflow")
_OWN_FILE = ("file", "jsonl")
"""Trackers whose work is always done: every run writes metrics.jsonl."""


def plain(path: str, meanings: dict[Any, Any]) -> Callable[[Any, Others], dict[str, Any]]:
    """Values that have another word here."""

    def sets(value: Any, others: Others) -> dict[str, Any]:
        hashable = isinstance(value, str | int | float | bool) or value is None
        return {path: meanings[value] if hashable and value in meanings else value}

    return sets


def _truncation(value: Any, others: Others) -> dict[str, Any]:
    if value in ("right", "middle"):
        raise Refused(
            f"cutting prompts on the {value}" if value == "right" else "cutting prompts in the middle",
            "data.truncation=truncate cuts their beginning, data.filter_overlong_prompts=true leaves them out",
            {"data.truncation": "truncate"},
        )
    return {"data.truncation": "truncate" if value == "left" else value}


def _batch(value: Any, others: Others) -> dict[str, Any]:
    """0 stands for whatever so many mini-batches take, where training does not wait for generation."""
    if value != 0:
        return {"data.train_batch_size": value}
    sizes = (others.get(f"{_ACTOR}.ppo_mini_batch_size", 256), others.get("async_training.require_batches", 1))
    wanted = sizes[0] * sizes[1] if all(isinstance(size, int) for size in sizes) else 256
    return {"data.train_batch_size": wanted}


def _transport(value: Any, others: Others) -> dict[str, Any]:
    path = f"{_ROLLOUT}.checkpoint_engine.backend"
    if value == "delta_sharded":
        return {path: "auto", f"{_ROLLOUT}.checkpoint_engine.delta": True}
    if value in ("nccl", "hccl", "nixl", "kimi_ckpt_engine", "mooncake"):
        raise Refused(f"weights sent by {value}", f"{path}=auto", {path: "auto"})
    return {path: "auto" if value == "naive" else value}


def trackers(value: Any, others: Others) -> dict[str, Any]:
    """``trainer.logger``, without the trackers that are always at work or that do not exist here."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list):
        return {"trainer.logger": value}
    wanted = [name for name in names if name not in _OWN_FILE]
    missing = [name for name in wanted if name in ("swanlab", "vemlp_wandb", "clearml", "trackio")]
    if missing:
        kept = [name for name in wanted if name in _TRACKERS] or ["console"]
        shown = ",".join(kept)
        raise Refused(f"the tracker {', '.join(missing)}", f"trainer.logger=[{shown}]", {"trainer.logger": kept})
    return {"trainer.logger": wanted}


def device(value: Any, others: Others) -> dict[str, Any]:
    """``trainer.device``."""
    if value in ("npu", "xpu", "musa"):
        raise Refused(f"training on {value} devices", "trainer.device=auto", {"trainer.device": "auto"})
    return {"trainer.device": value}


def _strategy(value: Any, others: Others) -> dict[str, Any]:
    if value in ("megatron", "torchtitan", "veomni", "automodel"):
        raise Refused(f"the training backend {value}", f"{_ACTOR}.strategy=fsdp2", {f"{_ACTOR}.strategy": None})
    return {f"{_ACTOR}.strategy": value}


def _generation_dtype(value: Any, others: Others) -> dict[str, Any]:
    path = f"{_ROLLOUT}.dtype"
    if value in ("float16", "fp16", "half"):
        raise Refused("generation in float16", f"{path}=auto or bfloat16", {path: "auto"})
    return plain(path, {"bf16": "bfloat16", "fp32": "float32", "float": "float32"})(value, others)


def _own_nodes(block: str) -> Changed:
    """A number of nodes for a role alone; 0 is none."""

    def sets(value: Any, others: Others) -> dict[str, Any]:
        return {} if value in (0, None) else {f"{block}.nnodes": value}

    return Changed("0 is no pool of its own, enable_resource_pool=false", sets)


VALUES: dict[str, Changed] = {
    "data.truncation": Changed("left is called truncate", _truncation),
    "data.train_batch_size": Changed("0 is what async_training.require_batches mini-batches take", _batch),
    f"{_ROLLOUT}.name": Changed(
        "naive is called hf, sglang_async is sglang",
        plain(f"{_ROLLOUT}.name", {"naive": "hf", "sglang_async": "sglang"}),
    ),
    f"{_ROLLOUT}.dtype": Changed("float16 is not supported yet", _generation_dtype),
    f"{_ROLLOUT}.checkpoint_engine.backend": Changed(
        "naive is auto; delta_sharded is checkpoint_engine.delta; by nccl and the like not yet", _transport
    ),
    f"{_ROLLOUT}.top_k": Changed("0 is -1: all tokens", plain(f"{_ROLLOUT}.top_k", {0: -1})),
    f"{_ROLLOUT}.val_kwargs.top_k": Changed("0 is -1: all tokens", plain(f"{_ROLLOUT}.val_kwargs.top_k", {0: -1})),
    "algorithm.filter_groups.max_num_gen_batches": Changed(
        "0, no limit, is a limit that is never met",
        plain("algorithm.filter_groups.max_num_gen_batches", {0: 1_000_000, -1: 1_000_000}),
    ),
    "algorithm.filter_groups.metric": Changed(
        "the reward itself is null",
        plain("algorithm.filter_groups.metric", dict.fromkeys(("seq_reward", "seq_final_reward", "score", "reward"))),
    ),
    f"{_ACTOR}.strategy": Changed("megatron, torchtitan and veomni are not supported yet", _strategy),
    **{
        f"{_ACTOR}.fsdp_config.mixed_precision.{name}": Changed(
            "bf16 is bfloat16, fp32 is float32",
            plain(f"{_ACTOR}.fsdp_config.mixed_precision.{name}", {"bf16": "bfloat16", "fp32": "float32"}),
        )
        for name in ("param_dtype", "reduce_dtype")
    },
    **{
        f"{block}.optim.optimizer": Changed(
            "adam is AdamW", plain(f"{block}.optim.optimizer", {"adam": "AdamW", "adamw": "AdamW", None: "AdamW"})
        )
        for block in (_ACTOR, "critic")
    },
    f"{_ROLLOUT}.nnodes": _own_nodes(_ROLLOUT),
    "reward.reward_model.nnodes": _own_nodes("reward.reward_model"),
    "trainer.logger": Changed("a name is a list of one; metrics.jsonl is always written", trackers),
    "trainer.device": Changed("npu is not supported yet", device),
    "trainer.save_freq": Changed("after_each_epoch is -1", plain("trainer.save_freq", {"after_each_epoch": -1})),
    "trainer.test_freq": Changed("after_each_epoch is -1", plain("trainer.test_freq", {"after_each_epoch": -1})),
}
"""What becomes of such values; every other value is left as it is."""
