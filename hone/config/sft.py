"""The tree of `hone sft`: supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hone.config.data import CustomDatasetConfig
from hone.config.distillation import AnswersDistillationConfig
from hone.config.fields import block, choice, dataset_paths, number
from hone.config.insight import InsightConfig
from hone.config.model import ModelConfig, OptimConfig
from hone.config.parallel import ParallelConfig
from hone.config.preflight import PreflightConfig
from hone.config.ray import RayConfig
from hone.config.run import RunConfig


@dataclass
class SFTDataConfig:
    """Training conversations."""

    train_files: Any = dataset_paths()
    """Training files (parquet, json or jsonl) with a column of messages, or of conversations in ShareGPT's form: a path or a list.
    Required."""
    val_files: Any = dataset_paths()
    """Held-out files; null means no validation loss."""
    messages_key: str = "messages"
    """Column of chat messages; the loss counts assistant tokens only, of every assistant turn."""
    tools_key: str = "tools"
    """Column of the function schemas of a conversation, a list or its JSON text; optional."""
    image_key: str = "images"
    """Column of the images of a row, one or a list: content of a file, a path, a data: URL, or an object with one of them (bytes,
    path, url). Each takes the place of a mark <image>, or of a part {"type": "image"}, in the messages. Models for images only."""
    tool_call_errors: str = choice("count", "count", "error", "drop")
    """Action for conversations whose tool calls are unsound (unreadable or unfit arguments, unknown tools, missing or surplus results,
    loops): count warns with their number, error ends the run, drop removes the rows. `hone data check` lists them."""
    max_length: int = number(1024, low=1)
    """Longest conversation in tokens."""
    truncation: str = choice("error", "error", "drop", "truncate", "left", "right", "middle")
    """Action for a longer one: error ends the run, drop removes the row, right (or truncate) removes its end, left its beginning,
    middle its middle."""
    train_batch_size: int = number(64, low=1)
    """Conversations per optimizer update."""
    max_token_len_per_gpu: int = number(16384, low=1)
    """Token budget of a packed micro-batch; at most 4608 on a CPU. Changes memory and speed, never the result."""
    train_max_samples: int = number(-1, low=-1)
    """Use at most this many training rows; -1 means all."""
    val_max_samples: int = number(-1, low=-1)
    """Use at most this many validation rows; -1 means all."""
    shuffle: bool = True
    """Visit the rows in a new random order every epoch."""
    custom_cls: CustomDatasetConfig = block(CustomDatasetConfig)
    """A dataset class of the user."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template."""


@dataclass
class SFTConfig(ParallelConfig):
    """`hone sft`: supervised fine-tuning."""

    data: SFTDataConfig = block(SFTDataConfig)
    """Conversations."""
    model: ModelConfig = block(ModelConfig)
    """The model."""
    optim: OptimConfig = block(OptimConfig, lr=1e-5)
    """Optimizer; the schedule advances once per update."""
    dtype: str = choice("auto", "auto", "float32", "bfloat16", "float16")
    """Compute dtype of forward and backward; parameters and optimizer state stay float32. auto is bfloat16 on a GPU that computes in
    it (compute capability 8.0), else float32, and float32 on a CPU. float32 matmuls are exact: TF32 is never used. float16 rounds
    eight times finer than bfloat16; the loss is scaled, and an update whose scaled gradient overflows is skipped."""
    trainer: RunConfig = block(RunConfig, experiment_name="sft")
    """Life cycle."""
    ray: RayConfig = block(RayConfig)
    """Worker processes."""
    preflight: PreflightConfig = block(PreflightConfig)
    """Checks before the run."""
    insight: InsightConfig = block(InsightConfig)
    """Detectors that watch the run."""
    distillation: AnswersDistillationConfig = block(AnswersDistillationConfig)
    """Learning from a teacher on the stored answers."""
