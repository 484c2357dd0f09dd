"""Keys that the trees of `hone sft`, `hone prefer` and `hone reward-model` share: training over a fixed dataset."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hone.config.data import CustomDatasetConfig
from hone.config.fields import block, choice, dataset_paths, number
from hone.config.model import ModelConfig, OptimConfig
from hone.config.parallel import ParallelConfig
from hone.config.run import InsightConfig, PreflightConfig, RayConfig


@dataclass
class OfflineData:
    """Rows of a dataset."""

    train_files: Any = dataset_paths()
    """Training files (parquet, json or jsonl): a path or a list. Required."""
    val_files: Any = dataset_paths()
    """Held-out files; null means no validation."""
    tools_key: str = "tools"
    """Column of the function schemas for the chat template, a list or its JSON text; optional."""
    image_key: str = "images"
    """Column of the images of a row, one or a list: content of a file, a path, a data: URL, or an object with one of them (bytes,
    path, url). Each takes the place of a mark <image>, or of a part {"type": "image"}, in the messages. Models for images only."""
    max_length: int = number(1024, low=1)
    """Longest row in tokens, prompt and response together."""
    train_batch_size: int = number(64, low=1)
    """Rows (conversations, pairs, or labelled responses) per optimizer update."""
    max_token_len_per_gpu: int = number(16384, low=1)
    """Token budget of a packed micro-batch, at most 4608 on a CPU; a pair stays together and shares its prompt. Changes memory
    and speed, never the result."""
    train_max_samples: int = number(-1, low=-1)
    """Use at most this many training rows; -1 means all."""
    val_max_samples: int = number(-1, low=-1)
    """Use at most this many validation rows; -1 means all."""
    shuffle: bool = True
    """Visit the rows in a new random order every epoch."""
    row_fn: str | None = None
    """Function of the user, as FILE.py:NAME, that takes a record of a file (a dict of all its columns) and returns the row: a dict with
    the columns that these keys name. null takes the record as it is."""
    custom_cls: CustomDatasetConfig = block(CustomDatasetConfig)
    """A dataset class of the user."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template."""


@dataclass
class OfflineTree(ParallelConfig):
    """A run over a fixed dataset."""

    model: ModelConfig = block(ModelConfig)
    """The model."""
    optim: OptimConfig = block(OptimConfig, lr=1e-5)
    """Optimizer; the schedule advances once per update."""
    dtype: str = choice("auto", "auto", "float32", "bfloat16", "float16")
    """Compute dtype of forward and backward; parameters and optimizer state stay float32. auto is bfloat16 on a GPU that computes in
    it (compute capability 8.0), else float32, and float32 on a CPU. float32 matmuls are exact: TF32 is never used. float16 rounds
    eight times finer than bfloat16; the loss is scaled, and an update whose scaled gradient overflows is skipped."""
    ray: RayConfig = block(RayConfig)
    """Worker processes."""
    preflight: PreflightConfig = block(PreflightConfig)
    """Checks before the run."""
    insight: InsightConfig = block(InsightConfig)
    """Detectors that watch the run."""
