"""The block ``data``: datasets and batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hone.config.fields import block, choice, dataset_paths, number, texts


@dataclass
class SamplerConfig:
    """The order of the training prompts."""

    class_path: str | None = None
    """Python file, or module as `package.module`, of a sampler class of the user; null uses name. The class takes the arguments
    data_source (the dataset), data_config (the block data), batch_size and seed, or some of them, and has `__iter__`, which yields
    the row numbers of an epoch. It may have `set_epoch(epoch)`, `state_dict()` with `load_state_dict(state)`, and `observe(rates)`
    for the measured pass rate of each row, after which `__iter__` continues within the epoch. A resumed run draws the rows of its epoch
    again up to the checkpoint (without state_dict, those of all epochs), and ends with an error if they differ."""
    class_name: str | None = None
    """Name of the class; null takes the only class that the file defines."""
    name: str = choice("epoch", "epoch", "mixture", "difficulty", "pass_rate", "stages")
    """epoch visits every row once per epoch; mixture samples the data sources in the proportions of weights; difficulty visits
    easy rows first; pass_rate prefers rows that the policy answers correctly about half the time, as measured in this run; stages
    draws from one set of rows after the other, each opened by measured success. All resume exactly from a checkpoint."""
    weights: dict[str, float] = field(default_factory=dict)
    """mixture: share of each data source in a batch, for example {gsm8k: 3, math: 1}; other sources are not sampled."""
    difficulty_key: str = "difficulty"
    """difficulty: entry of extra_info with the difficulty of a row, a number; small is easy. Dots select nested entries, such as
    environment.options.max_number."""
    pass_rate_of: str = choice("row", "row", "difficulty", "data_source")
    """pass_rate: unit that a pass rate is measured for. Rows of the same difficulty (difficulty_key) or data source can share one
    pass rate, for data whose rows occur only once, such as seeds of environments."""
    stages: list[Any] = field(default_factory=list)
    """stages: the stages in order, each {name, rows, success, groups, max_batches}. rows selects by data_source, agent_name or an entry
    of extra_info, to one value or a list; without it, all rows. The next stage begins when the mean pass rate of the latest groups
    of the stage (32 by default) reaches success (0 to 1), or after max_batches batches, which is logged. The last has no gate."""
    keep_earlier: float = number(0.0, low=0, high=0.9)
    """stages: share of the rows of a later stage's batches that comes from earlier stages, from each equally."""


@dataclass
class CustomDatasetConfig:
    """A dataset class of the user, in place of the reader of files."""

    path: str | None = None
    """Python file, or module as `package.module`, with the class; null reads the files. The class takes the arguments data_files,
    tokenizer, config (the block data) and max_samples, or some of them. It has `__len__` and `__getitem__(number)`, which returns a
    row: a mapping with the columns that a file would have. An exact resume needs the same row under the same number."""
    name: str | None = None
    """Name of the class; null takes the only class that the file defines."""


@dataclass
class DataConfig:
    """Prompt datasets and the size of a batch."""

    train_files: Any = dataset_paths()
    """Training files (parquet, json, jsonl, csv or tsv), or datasets of the hub, ORG/NAME[:SUBSET[:SPLIT]][@REVISION]: one or a list.
    Required for training."""
    val_files: Any = dataset_paths()
    """Held-out files, a path or a list of paths; null means no validation."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: a list of chat messages, a plain string, or a list of token ids (used unchanged)."""
    answer_key: str | None = None
    """Column of the right answer, which scorers and reward functions get as ground_truth; a field of a column as COLUMN.FIELD.
    null takes ground_truth of the column reward_model, and no other column."""
    strings_as_messages: bool = True
    """Show a prompt that is a plain string as the user's message, where the tokenizer has a chat template. A string with special
    tokens of the template was rendered already and stays as it is. false tokenizes every string unchanged."""
    image_key: str = "images"
    """Column of the images of a row, one or a list: content of a file, a path, a data: URL, or an object with one of them (bytes,
    path, url). Each takes the place of a mark <image>, or of a part {"type": "image"}, in the messages. Models for images only."""
    reward_fn_key: str = "data_source"
    """Column of the data source; it selects the built-in scorer and groups validation metrics. It may be missing where a reward
    function, a term or a reward model scores all rows."""
    max_prompt_length: int = number(512, low=1)
    """Longest prompt in tokens, chat template included."""
    max_response_length: int = number(512, low=1)
    """Most tokens sampled for one response."""
    truncation: str = choice("error", "error", "drop", "truncate", "left", "right", "middle")
    """Action for a prompt longer than max_prompt_length: error ends the run, drop removes the row, left (or truncate) removes the
    beginning of the prompt, right its end, the generation prompt included, and middle its middle. The log counts such prompts."""
    filter_overlong_prompts: bool = False
    """Drop rows whose prompt is longer than max_prompt_length, whatever truncation says."""
    train_batch_size: int = number(64, low=1)
    """Prompts per step (the batch size); sequences per step = train_batch_size x rollout.n."""
    val_batch_size: int | None = number(None, low=1)
    """Validation prompts answered at a time; null means all. Limits the memory of long validations, and does not change
    results."""
    train_max_samples: int = number(-1, low=-1)
    """Use at most this many training rows (the first ones); -1 means all."""
    val_max_samples: int = number(-1, low=-1)
    """Use at most this many validation rows (the first ones), and samples of each task of trainer.val_suites; -1 means all."""
    shuffle: bool = True
    """Visit the training rows in a new random order every epoch; the order depends on data.seed and the epoch only."""
    seed: int | None = number(None, low=0)
    """Seed of the order of rows; null means trainer.seed. Set it to use the same order in runs with several seeds."""
    sampler: SamplerConfig = block(SamplerConfig)
    """Order of the prompts."""
    row_fn: str | None = None
    """Function of the user, as FILE.py:NAME, that takes a record of a file (a dict of all its columns) and returns the row: a dict with
    the columns that these keys name. null takes the record as it is."""
    custom_cls: CustomDatasetConfig = block(CustomDatasetConfig)
    """A dataset class of the user."""
    quarantine: str | None = texts(None, "path")
    """File with rows to leave out, as JSON lines with a uid, such as the quarantine.jsonl that the environment doctor proposes; the
    sampler skips them, and the coverage counts them as filtered."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template, for example {enable_thinking: false}."""

    @property
    def overlong_policy(self) -> str:
        """Action for a prompt that is too long, as truncation."""
        return "drop" if self.filter_overlong_prompts else self.truncation
