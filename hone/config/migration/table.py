"""The tables of other trainers' keys: those of verl and of TRL by command, and of LLaMA-Factory, from the files next to this one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from hone.config.keys import key_named
from hone.config.migration.entries import (
    OFF,
    Changed,
    Entry,
    Foreign,
    Others,
    Refused,
    Renamed,
    Settled,
    Table,
    Unsupported,
)
from hone.config.offline import PreferenceConfig, RewardModelConfig, SFTConfig
from hone.config.tree import RLConfig
from hone.text import read_yaml

_TRACKERS = ("console", "tensorboard", "wandb", "mlflow", "trackio", "swanlab", "otel")
_MISSING_TRACKERS = ("vemlp_wandb", "clearml")
_ALWAYS_WRITTEN = ("file", "jsonl")  # trackers whose work is always done: every run writes metrics.jsonl
_TRACES = "actor_rollout_ref.rollout.trace"
_AGENT_WORKERS = 8  # verl's default of rollout.agent.num_workers
_TEACHERS = "distillation.teacher_models."
_KEEP: Any = object()
Settings = dict[str, Any]  # keys of Hone, and their values


@dataclass(frozen=True)
class Words:
    """A conversion by rules. The first that applies decides; a value without a rule is kept."""

    path: str  # the key that is set
    words: Mapping[Any, Any] = field(default_factory=dict)  # verl's value to Hone's
    # values that set nothing, or ``rest``: all others
    nothing: list[Any] | Literal["rest"] = field(default_factory=list)
    keep: list[Any] = field(default_factory=list)  # values that are kept
    # values that Hone does not support, or ``rest``: all others
    refuse: list[Any] | Literal["rest"] = field(default_factory=list)
    what: str = ""  # the unsupported value in words; ``{value}`` stands for it
    instead: str = ""  # what to write instead
    nearest: Any = _KEEP  # the value that a translated configuration gets instead
    set: Any = _KEEP  # the value that any other one becomes

    def __call__(self, value: Any, others: Others) -> Settings:
        """Return the keys to set. Raises Refused: the value is not supported."""
        for known, word in self.words.items():
            if _same(value, known):
                return {self.path: word}
        if _among(value, self.nothing):
            return {}
        if _among(value, self.refuse) and not _among(value, self.keep):
            nearest = {} if self.nearest is _KEEP else {self.path: self.nearest}
            raise Refused(self.what.format(value=value), self.instead, nearest)
        return {self.path: value if self.set is _KEEP else self.set}


def _same(left: Any, right: Any) -> bool:
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def _among(value: Any, values: Iterable[Any]) -> bool:
    return values == "rest" or any(_same(value, known) for known in values)


def micro_batch(value: Any, others: Others) -> Settings:
    """A micro-batch over all devices becomes one per device."""
    if value is None:
        return {}
    sizes = (value, others.get("trainer.nnodes", 1), others.get("trainer.n_gpus_per_node", 1))
    if not all(isinstance(size, int) for size in sizes):
        raise Refused(
            "a micro-batch over a number of devices that is not written here", "ppo_micro_batch_size_per_gpu=N"
        )
    key = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    return {key: max(1, value // max(1, sizes[1] * sizes[2]))}


def ratio_cap(value: Any, others: Others) -> Settings:
    """Truncated importance sampling, as it was spelled before rollout correction."""
    if not isinstance(value, int | float) or value <= 0:
        return {}
    block = "algorithm.rollout_correction"
    return {f"{block}.rollout_is": "token", f"{block}.rollout_is_threshold": str(float(value))}


def contents(value: Any, others: Others) -> Settings:
    unknown = set(value or []) - {"model", "optimizer", "extra", "hf_model"}
    if unknown:
        raise Refused(f"checkpoints with {', '.join(sorted(unknown))}", "leave it out")
    return {}


def correction_level(value: Any, others: Others) -> Settings:
    """``rollout_is`` was a switch before it named the level."""
    if value in (None, False):
        return {}
    level = others.get("algorithm.rollout_is_level", "token") if value is True else value
    return {"algorithm.rollout_correction.rollout_is": level}


def threshold(value: Any, others: Others) -> Settings:
    return {} if value is None else {"algorithm.rollout_correction.rollout_is_threshold": str(value)}


def batch(value: Any, others: Others) -> Settings:
    """0 means as many prompts as the mini-batches between two weight syncs take, in asynchronous training."""
    asynchronous = any(key.startswith("async_training.") for key in others)
    return between_syncs(value, others) if value == 0 and asynchronous else {"data.train_batch_size": value}


def between_syncs(value: Any, others: Others) -> Settings:
    """Return the prompts of the mini-batches between two weight syncs, unless the batch has a size of its own."""
    if others.get("data.train_batch_size"):
        return {}
    block = "async_training"
    sizes = (
        others.get("actor_rollout_ref.actor.ppo_mini_batch_size", 256),
        others.get(f"{block}.require_batches", 1),
        others.get(f"{block}.trigger_parameter_sync_step", 1),
    )
    return {"data.train_batch_size": math.prod(sizes) if all(isinstance(size, int) for size in sizes) else 256}


def staleness(value: Any, others: Others) -> Settings:
    """Return the weight updates that a share of a batch may be old."""
    return {"trainer.async_training.max_staleness": math.ceil(value) if isinstance(value, (int, float)) else value}


def distillation(value: Any, others: Others) -> Settings:
    """Distillation with verl's defaults, on devices of its own if it has nodes."""
    block = "distillation.distillation_loss"
    if not value:
        return {}
    defaults = {"loss_mode": "k3", "use_policy_gradient": False}
    keys: dict[str, Any] = {"distillation.enable": True}
    keys |= {f"distillation.{name}": word for name, word in defaults.items() if f"{block}.{name}" not in others}
    if f"{block}.use_task_rewards" not in others:
        keys["distillation.task_weight"] = 1.0
    if others.get(f"{block}.loss_mode") == "forward_kl_topk":
        keys["distillation.tail_bucket"] = False  # verl leaves the other tokens out
    if others.get("distillation.nnodes"):
        keys["distillation.enable_resource_pool"] = True
    return keys


def teacher(value: Any, others: Others) -> Settings:
    """The only teacher."""
    teachers = {others[key] for key in others if key.startswith(_TEACHERS) and key.endswith(".model_path")}
    if teachers - {value}:
        raise Refused("several teachers by name", "distillation.teachers={SOURCE: DIRECTORY, ...}")
    return {} if value is None else {"distillation.path": value}


def transport(value: Any, others: Others) -> Settings:
    block = "actor_rollout_ref.rollout.checkpoint_engine"
    if value == "delta_sharded":
        return {f"{block}.backend": "auto", f"{block}.delta": True}
    if value == "nccl":
        return {f"{block}.between_workers": "broadcast"}
    if value in ("hccl", "nixl", "kimi_ckpt_engine", "mooncake"):
        raise Refused(f"weights sent by {value}", f"{block}.backend=auto", {f"{block}.backend": "auto"})
    return {f"{block}.backend": "auto" if value == "naive" else value}


def trackers(value: Any, others: Others) -> Settings:
    """The trackers, without those that are always at work or do not exist here, and with the one that gets traces."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list):
        return {"trainer.logger": value}
    wanted = [name for name in names if name not in _ALWAYS_WRITTEN]
    if others.get(f"{_TRACES}.backend") == "mlflow" and "mlflow" not in wanted:
        wanted.append("mlflow")
    missing = [name for name in wanted if name in _MISSING_TRACKERS]
    if missing:
        kept = [name for name in wanted if name in _TRACKERS] or ["console"]
        shown = ",".join(kept)
        raise Refused(f"the tracker {', '.join(missing)}", f"trainer.logger=[{shown}]", {"trainer.logger": kept})
    return {"trainer.logger": wanted}


def traces(value: Any, others: Others) -> Settings:
    """The service of the traces is one of the trackers."""
    if value is None:
        return {}
    if value == "mlflow":
        named = others.get("trainer.logger", ["console"])
        return trackers([named] if isinstance(named, str) else named, {f"{_TRACES}.backend": "mlflow", **others})
    raise Refused(
        f"traces in {value}",
        "trainer.logger=[console,wandb] for tables of rollouts, or trainer.logger=[console,otel] for traces by OpenTelemetry",
    )


def traced_samples(value: Any, others: Others) -> Settings:
    """verl counts prompts of one worker; Hone counts the sequences of a step."""
    if others.get(f"{_TRACES}.backend") is None:
        return {}
    if value is None:
        return {"trainer.log_rollout_samples": None}
    workers = others.get("actor_rollout_ref.rollout.agent.num_workers", _AGENT_WORKERS)
    sizes = (value, workers, others.get("actor_rollout_ref.rollout.n", 1))
    if not all(isinstance(size, int) for size in sizes):
        raise Refused("a number of traces that is not written here", "trainer.log_rollout_samples=N")
    return {"trainer.log_rollout_samples": math.prod(sizes)}


def manager(value: Any, others: Others) -> Settings:
    """``dapo`` penalizes length here; in verl it does so only with the overlong buffer enabled."""
    if value in ("naive", "batch", "prime"):
        return {"reward.reward_manager": value}
    if value == "dapo":
        punished = any(
            setting and "overlong_buffer" in key and key.endswith(".enable") for key, setting in others.items()
        )
        return {"reward.reward_manager": "dapo" if punished else "naive"}
    if value in ("gdpo", "remote", "rate_limited", None):
        return {}
    raise Refused(
        f"the reward manager {value}",
        "reward.custom_reward_function.path=FILE.py, called for each response in worker processes",
    )


def same_length(value: Any, others: Others) -> Settings:
    limit = others.get("data.max_response_length")
    if value is None or limit is None or value == limit:
        return {}
    raise Refused(
        f"an overlong penalty up to {value} tokens, where responses may have {limit}",
        "data.max_response_length for both",
    )


def resumed(value: Any, others: Others) -> Settings:
    return {} if value is None else {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": value}


_OPTIMIZERS = {"adam": "AdamW", "adamw": "AdamW", "muon": "Muon", "dist_muon": "Muon", None: "AdamW"}
_OWN_OPTIMIZERS = ("torchao.optim:AdamW8bit",)  # import paths that are names of Hone


def _optimizer(value: Any, others: Others, *, block: str) -> Settings:
    """A class of another module than torch.optim has its import path."""
    name, module = _OPTIMIZERS.get(value, value), others.get(f"{block}.optimizer_impl") or "torch.optim"
    path = f"{module}:{name}"
    return {f"{block}.optimizer": name if module == "torch.optim" or path in _OWN_OPTIMIZERS else path}


def _optimizer_module(value: Any, others: Others, *, block: str) -> Settings:
    """The module belongs to the optimizer; verl's default is AdamW."""
    if value in (None, "torch.optim") or f"{block}.optimizer" in others:
        return {}
    return _optimizer("AdamW", others, block=block)


_OPTIMS = {"actor_": "actor_rollout_ref.actor.optim", "critic_": "critic.optim", "": "optim"}


def accumulated_batch(value: Any, others: Others) -> Settings:
    """Return the rows of an update: those of one device and pass, times the passes and the devices."""
    sizes = [others.get("per_device_train_batch_size", 8), others.get("gradient_accumulation_steps", 1)]
    sizes += [others.get(name, 1) for name in ("n_gpus_per_node", "nnodes")]
    if not all(isinstance(size, int) for size in sizes):
        raise Refused("a batch size that is not a number", "data.train_batch_size=N")
    return {"data.train_batch_size": math.prod(sizes)}


def prompts(value: Any, others: Others) -> Settings:
    """Return the prompts of an update; TRL counts the completions."""
    (completions,) = accumulated_batch(value, others).values()
    answers = others.get("num_generations", others.get("n"))
    if not isinstance(answers, int) or answers < 1 or completions % answers:
        what = "without num_generations" if answers is None else f"that num_generations={answers} does not divide"
        raise Refused(
            f"a batch of {completions} completions {what}", "train_batch_size=PROMPTS, ppo_mini_batch_size=PROMPTS"
        )
    sizes = {"data.train_batch_size": completions // answers, "actor.ppo_mini_batch_size": completions // answers}
    return {key: size for key, size in sizes.items() if key.rpartition(".")[2] not in others}


def whole_epochs(value: Any, others: Others) -> Settings:
    if not isinstance(value, int | float) or value != int(value):
        raise Refused(f"{value} passes over the data", "trainer.total_training_steps=N", {"trainer.total_epochs": 1})
    return {"trainer.total_epochs": int(value)}


def lora_targets(value: Any, others: Others) -> Settings:
    names = value if isinstance(value, list) else [name.strip() for name in str(value).split(",")]
    return {"model.target_modules": "all-linear" if names == ["all"] else names}


def warm_up(value: Any, others: Others) -> Settings:
    """A number below 1 is a share of the steps."""
    share = isinstance(value, float) and value < 1
    return warm_up_share(value, others) if share else {"optim.lr_warmup_steps": value}


def warm_up_share(value: Any, others: Others) -> Settings:
    return {"optim.lr_warmup_steps": -1, "optim.lr_warmup_steps_ratio": value}


def clip_range(value: Any, others: Others) -> Settings:
    sides = ["actor.clip_ratio_low"] + ["actor.clip_ratio_high"] * (others.get("epsilon_high") is None)
    return {"actor.clip_ratio": value, **dict.fromkeys(sides)}


_AVERAGES = {
    "dapo": "token-mean", "grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm",
    "sapo": "seq-mean-token-mean", "vespo": "token-mean",
}  # fmt: skip


def grpo_loss(value: Any, others: Others) -> Settings:
    if value in ("ppo_clip", "reinforce"):  # of Hone's own key with this end
        return {"rollout_correction.loss_type": value}
    if value not in _AVERAGES:
        raise Refused(f"the loss {value}", "policy_loss.loss_mode, see `hone algorithms list`, and loss_agg_mode")
    form = {"actor.policy_loss.loss_mode": value} if value in ("sapo", "vespo") else {}
    return {"actor.loss_agg_mode": _AVERAGES[value], **form}


def kl_weight(value: Any, others: Others) -> Settings:
    """TRL multiplies the ratio into the KL term, unless it is configured otherwise."""
    if others.get("preset") == "online_dpo" or "loss_mode" in others:
        return {"actor.preference_loss.beta": value}
    if value and others.get("use_bias_correction_kl") is not False:
        raise Refused("a KL term times the ratio", f"use_kl_loss=true kl_loss_coef={value}, without the ratio")
    return {"actor.use_kl_loss": bool(value), **({"actor.kl_loss_coef": value} if value else {})}


def adaptive_entropy(value: Any, others: Others) -> Settings:
    """TRL's bonus follows a target where use_adaptive_entropy is set; its own target is 0.2."""
    return {"actor.entropy_target": others.get("entropy_target", 0.2)} if value else {}


def preference_loss(value: Any, others: Others) -> Settings:
    names = [value] if isinstance(value, str) else list(value or [])
    if len(names) != 1:
        raise Refused("a sum of several losses", "loss.name=NAME of one")
    return {"loss.name": names[0]}


def adapters(value: Any, others: Others) -> Settings:
    """Read an object of peft by its attributes."""
    wanted = {name: getattr(value, name, None) for name in ("r", "lora_alpha", "target_modules")}
    others_of_it = ("lora_dropout", "use_rslora", "use_dora", "modules_to_save", "rank_pattern", "alpha_pattern")
    more = [name for name in others_of_it if getattr(value, name, None)]
    if more or None in wanted.values():
        what = f"its {', '.join(more)}" if more else "target_modules=None, the usual layers of peft"
        without = f"an object without {', '.join(more)}, or " if more else ""
        raise Refused(what, f"{without}lora_rank=16, lora_alpha=32, target_modules=all-linear or a list")
    targets: Any = wanted["target_modules"]
    return {
        "model.lora_rank": wanted["r"],
        "model.lora_alpha": wanted["lora_alpha"],
        "model.target_modules": targets if isinstance(targets, str) else sorted(targets),
    }


def reported(value: Any, others: Others) -> Settings:
    names = value if isinstance(value, list) else [value]
    if "all" in names:
        raise Refused(
            "all trackers that are installed", "trainer.logger=[console, NAME]", {"trainer.logger": ["console"]}
        )
    return trackers(["console", *(name for name in names if name not in (None, "none"))], others)


def longest_sequence(value: Any, others: Others) -> Settings:
    """The longest sequence is a prompt and a response, so a shorter one contradicts them."""
    parts = [others.get(f"data.max_{part}_length") for part in ("prompt", "response")]
    whole = sum(part for part in parts if isinstance(part, int))
    if isinstance(value, int) and None not in parts and value < whole:
        raise Refused(
            f"sequences shorter than a prompt and a response, {whole} tokens", "smaller data.max_response_length"
        )
    return {}


def gradient_checkpointing(value: Any, others: Others) -> Settings:
    return {
        "model.enable_gradient_checkpointing": value is not True
        if "disable_gradient_checkpointing" in others
        else bool(value)
    }


BY_NAME: dict[str, Callable[[Any, Others], Settings]] = {
    **{
        conversion.__name__: conversion
        for conversion in (
            micro_batch,
            ratio_cap,
            contents,
            correction_level,
            threshold,
            batch,
            between_syncs,
            staleness,
            distillation,
            teacher,
            transport,
            trackers,
            traces,
            traced_samples,
            manager,
            same_length,
            resumed,
            accumulated_batch,
            prompts,
            warm_up,
            warm_up_share,
            clip_range,
            grpo_loss,
            kl_weight,
            adaptive_entropy,
            preference_loss,
            adapters,
            whole_epochs,
            lora_targets,
            reported,
            longest_sequence,
            gradient_checkpointing,
        )
    },
    **{f"{role}optimizer": partial(_optimizer, block=block) for role, block in _OPTIMS.items()},
    **{f"{role}optimizer_module": partial(_optimizer_module, block=block) for role, block in _OPTIMS.items()},
}
"""Conversions that the tables refer to."""


def _read(name: str) -> dict[str, Any]:
    """Read a file of tables, with each ``$word`` replaced by what ``names`` says it stands for."""
    data = read_yaml(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return _named(data, data["names"])


def _named(value: Any, names: Mapping[str, str]) -> Any:
    match value:
        case str():
            return re.sub(r"\$(\w+)", lambda m: names.get(m[1], m[0]), value)
        case list():
            return [_named(item, names) for item in value]
        case dict():
            return {_named(key, names): _named(item, names) for key, item in value.items()}
    return value


def _entry(kind: str, row: Mapping[str, Any]) -> Entry:
    match kind:
        case "settled":
            return Settled(row["says"], tuple(row["only"]) if "only" in row else None, row.get("instead", ""))
        case "unsupported":
            return Unsupported(row["what"], row["instead"], tuple(row["unset"]) if "unset" in row else OFF)
        case "foreign":
            return Foreign(row["reason"])
    to = tuple(row["to"]) if isinstance(row.get("to"), list) else (row["to"],) if "to" in row else ()
    return Changed(row["says"], _conversion(row, to[0] if to else ""), to)


def _conversion(row: Mapping[str, Any], path: str) -> Callable[[Any, Others], Settings]:
    if "by" in row:
        return BY_NAME[row["by"]]
    rules = {name: value for name, value in row.items() if name not in ("keys", "says", "to")}
    return Words(path, **rules)


def _table(tables: Mapping[str, Any]) -> Table:
    entries: dict[str, Entry] = {key: Renamed(to) for key, to in tables.get("renamed", {}).items()}
    for kind in ("settled", "unsupported", "foreign", "changed"):
        for row in tables.get(kind, []):
            keys = row["keys"] if isinstance(row["keys"], list) else [row["keys"]]
            entries.update((key, _entry(kind, row)) for key in keys)
    return Table(entries)


def _values(tables: Mapping[str, Any]) -> dict[str, Changed]:
    return {key: Changed(row["says"], _conversion(row, key)) for key, row in tables["values"].items()}


_VERL = _read("verl.yaml")

TABLES: dict[type, Table] = {RLConfig: _table(_VERL["train"]), SFTConfig: _table(_VERL["sft"])}
"""What becomes of keys of verl that the tree does not have."""

VALUES: dict[type, Mapping[str, Changed]] = {RLConfig: _values(_VERL["train"]), SFTConfig: _values(_VERL["sft"])}
"""What becomes of values that a key of the tree takes only in verl."""

DEFAULTS: dict[str, dict[str, Any]] = _VERL["defaults"]
"""Where verl's defaults differ from Hone's, by its programs: ``train``, ``sft`` and the older ``fsdp_sft``."""

LLAMA_FACTORY: Table = _table(_read("llamafactory.yaml")["sft"])
"""What becomes of the keys of LLaMA-Factory's supervised fine-tuning."""


_PARTS = {
    RLConfig: ("all", "train"),
    SFTConfig: ("all", "rows", "sft"),
    PreferenceConfig: ("all", "rows", "prefer"),
    RewardModelConfig: ("all", "rows", "reward-model"),
}


@cache
def trl_table(schema: type) -> Table:
    """Return what becomes of names of TRL and of transformers' trainer in a tree, with whole keys."""
    data, entries = _read("trl.yaml"), dict[str, Entry]()
    for part in (data[name] for name in _PARTS[schema]):
        same = {name: Renamed(name) for name in part.get("same", [])}
        for name, entry in {**same, **_table(part).paths()}.items():
            ends = (entry.to,) if isinstance(entry, Renamed) else entry.to if isinstance(entry, Changed) else ()
            keys = tuple(key for end in ends if (key := key_named(end, schema)))
            if keys and isinstance(entry, Renamed):
                entry = replace(entry, to=keys[0])
            elif keys and isinstance(entry, Changed):
                entry = replace(entry, to=keys)
            if keys or not ends:
                entries[name] = entry
    return Table(entries)
