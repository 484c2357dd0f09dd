"""The trees of `hone sft`, `hone prefer` and `hone reward-model`, and the keys that they share: training over a fixed dataset."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hone.config.data import CustomDatasetConfig
from hone.config.distillation import AnswersDistillationConfig
from hone.config.fields import block, choice, dataset_paths, model_path, named, number
from hone.config.model import ModelConfig, OptimConfig, SFTModelConfig
from hone.config.parallel import ParallelConfig
from hone.config.run import InsightConfig, PreflightConfig, RayConfig, RunConfig


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


@dataclass
class PreferenceDataConfig(OfflineData):
    """Preference data: pairs of responses to one prompt, or single responses with a label."""

    train_files: Any = dataset_paths()
    """Training files (parquet, json or jsonl): a path or a list. Required. A row holds chosen and rejected (messages,
    strings or token ids; with a prompt, or as whole conversations whose common beginning is the prompt), or a prompt,
    a completion and a label."""
    prompt_key: str = "prompt"
    """Column of the prompt: chat messages, a string, or token ids."""
    chosen_key: str = "chosen"
    """Column of the better response."""
    rejected_key: str = "rejected"
    """Column of the worse response."""
    completion_key: str = "completion"
    """Column of the response, in rows with a label."""
    label_key: str = "label"
    """Column of the label: true for a desirable response."""
    truncation: str = choice("error", "error", "drop", "truncate")
    """Action for a longer one: error ends the run, drop removes the row (both sides of a pair), truncate removes the end of the
    response."""


@dataclass
class PreferenceRefConfig:
    """The frozen reference policy of the implicit reward; created only for losses that need one."""

    mode: str = choice("auto", "auto", "copy", "adapter_off", "precompute")
    """copy holds a second model; adapter_off computes with the LoRA adapter switched off (no memory); precompute runs the
    reference over all data before training and keeps only log-probs. auto: with LoRA the model at the start, which is
    adapter_off, or with lora_adapter_path that adapter (which copy and precompute use then too); else copy."""
    model_path: str | None = model_path()
    """Model directory of the reference, or a name of the hub; null means the weights that training starts from (with LoRA: with the adapter of lora_adapter_path, or none)."""
    log_prob_max_token_len_per_gpu: int | None = number(None, low=1)
    """Token budget of a micro-batch of the reference; null means data.max_token_len_per_gpu."""


@dataclass
class PreferenceLossConfig:
    """The preference loss. A key that the chosen loss does not have is an error."""

    name: str = named("dpo", "preference loss", instead="loss.beta")
    """Name in the registry: dpo, ipo, hinge, robust, sppo (with a reference), orpo, simpo, cpo (without), kto (labels)."""
    beta: float | None = number(None, above=0)
    """Strength of the constraint; null means the loss's default (0.1 for dpo, ipo, kto, cpo and orpo, where it weights the odds
    ratio, 2.0 for simpo, 0.001 for sppo)."""
    label_smoothing: float | None = number(None, low=0, high=0.5)
    """Assumed share of swapped pairs (dpo, robust, simpo, cpo); null means the loss's default."""
    average_log_prob: bool | None = None
    """Average log-probs over tokens instead of summing them (ipo); null means the loss's default, sums."""
    simpo_gamma: float | None = number(None, low=0)
    """Target margin of the chosen response (simpo); null means 1.0."""
    cpo_alpha: float | None = number(None, low=0)
    """Weight of the likelihood of the chosen response (cpo); null means 1.0."""
    desirable_weight: float | None = number(None, low=0)
    """Weight of desirable responses (kto); null means 1.0."""
    undesirable_weight: float | None = number(None, low=0)
    """Weight of undesirable responses (kto); null means 1.0."""


@dataclass
class PreferenceConfig(OfflineTree):
    """`hone prefer`: preference optimisation of a policy."""

    data: PreferenceDataConfig = block(PreferenceDataConfig)
    """Preference data."""
    ref: PreferenceRefConfig = block(PreferenceRefConfig)
    """The reference policy."""
    loss: PreferenceLossConfig = block(PreferenceLossConfig)
    """The loss."""
    optim: OptimConfig = block(OptimConfig, lr=1e-6)
    """Optimizer; the schedule advances once per update."""
    trainer: RunConfig = block(RunConfig, experiment_name="prefer")
    """Life cycle."""


@dataclass
class RewardModelLossConfig:
    """The Bradley-Terry loss."""

    centering_coeff: float = number(0.01, low=0)
    """Weight of (score of chosen + score of rejected)^2, which keeps scores near 0; 0 switches it off."""
    margin_key: str | None = None
    """Column of the margin by which the chosen response should score higher; null means no margin."""


@dataclass
class RewardModelConfig(OfflineTree):
    """`hone reward-model`: a scalar reward model from preference pairs."""

    data: PreferenceDataConfig = block(PreferenceDataConfig)
    """Preference pairs."""
    loss: RewardModelLossConfig = block(RewardModelLossConfig)
    """The loss."""
    trainer: RunConfig = block(RunConfig, experiment_name="reward_model")
    """Life cycle."""
