"""Readers that rules and the memory plan share: lists of files, the columns of a run, JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hone.config.derived import RunSpec
from hone.config.offline import SFTConfig
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig
from hone.data.files import NO_SOURCE
from hone.data.model_settings import read_settings
from hone.errors import ModelError


def columns(config: AnyConfig) -> tuple[str, ...]:
    """Return the columns of a dataset that a run or its checks read."""
    data = config.data
    if isinstance(config, RLConfig):
        return (config.data.prompt_key, config.data.reward_fn_key, "reward_model", "extra_info", "agent_name", "tools")
    if isinstance(config, SFTConfig):
        return (config.data.messages_key, config.data.tools_key)
    return (
        *(data.prompt_key, data.chosen_key, data.rejected_key),  # type: ignore[union-attr]
        *(data.completion_key, data.label_key, data.tools_key),  # type: ignore[union-attr]
    )


def answer_key(config: AnyConfig) -> str | None:
    """Return the column of the right answer, which only RL reads."""
    return config.data.answer_key if isinstance(config, RLConfig) else None


def required(config: AnyConfig) -> tuple[str, ...]:
    """Return the columns that a row needs to be checked at all."""
    if isinstance(config, RLConfig):
        return (config.data.prompt_key,)
    return (config.data.messages_key,) if isinstance(config, SFTConfig) else ()


def defaults(config: AnyConfig) -> dict[str, Any]:
    """Return the values of columns that a row may lack."""
    return {config.data.reward_fn_key: NO_SOURCE} if isinstance(config, RLConfig) else {}


def mini_batches(config: RLConfig) -> dict[str, int]:
    sizes = {"actor_rollout_ref.actor.ppo_mini_batch_size": config.actor_rollout_ref.actor.ppo_mini_batch_size}
    if RunSpec(config).critic.value and config.critic.ppo_mini_batch_size is not None:
        sizes["critic.ppo_mini_batch_size"] = config.critic.ppo_mini_batch_size
    return sizes


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty when the file is missing or holds no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_model(path: str | None) -> dict[str, Any]:
    """Return the content of a model's ``config.json``; empty when it is missing or refused, which R08 reports."""
    try:
        return read_settings(path)
    except ModelError:
        return {}
