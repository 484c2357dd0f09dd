"""The tree of `hone sft`: supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hone.config.distillation import AnswersDistillationConfig
from hone.config.fields import block, choice, dataset_paths
from hone.config.model import SFTModelConfig
from hone.config.offline import OfflineData, OfflineTree
from hone.config.run import RunConfig


@dataclass
class SFTDataConfig(OfflineData):
    """Training conversations."""

    train_files: Any = dataset_paths()
    """Training files (parquet, json or jsonl) with a column of messages, or of conversations in ShareGPT's form: a path or a list.
    Required."""
    messages_key: str = "messages"
    """Column of chat messages; the loss counts assistant tokens only, of every assistant turn."""
    tool_call_errors: str = choice("count", "count", "error", "drop")
    """Action for conversations whose tool calls are unsound (unreadable or unfit arguments, unknown tools, missing or surplus results,
    loops): count warns with their number, error ends the run, drop removes the rows. `hone data check` lists them."""
    truncation: str = choice("error", "error", "drop", "truncate", "left", "right", "middle")
    """Action for a longer one: error ends the run, drop removes the row, right (or truncate) removes its end, left its beginning,
    middle its middle."""


@dataclass
class SFTConfig(OfflineTree):
    """`hone sft`: supervised fine-tuning."""

    data: SFTDataConfig = block(SFTDataConfig)
    """Conversations."""
    model: SFTModelConfig = block(SFTModelConfig)  # pyright: ignore[reportIncompatibleVariableOverride]
    """The model."""
    trainer: RunConfig = block(RunConfig, experiment_name="sft")
    """Life cycle."""
    distillation: AnswersDistillationConfig = block(AnswersDistillationConfig)
    """Learning from a teacher on the stored answers."""
