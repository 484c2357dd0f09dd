"""What rules look at besides keys: rows, tokenizer, model configuration, machine. Each is read at most once a check."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.config.model import ModelConfig
from hone.config.sft import SFTConfig
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig
from hone.errors import ConfigError, Finding, HoneError
from hone.preflight import machine
from hone.preflight.machine import Machine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hone.agents.setting import Setting
    from hone.data.checks import PromptLengths
    from hone.data.files import Row
    from hone.preflight.loops import Loops
    from hone.preflight.plan.model import ModelShape
    from hone.preflight.plan.work import Work


class Evidence:
    """Everything that lies outside the configuration, read when a rule first asks for it.

    What cannot be read, or lacks a column that is needed, is empty or None here; the rule that owns the file (R08, R42) says why.

    Args:
        config: the configuration that is checked.
    """

    def __init__(self, config: AnyConfig) -> None:
        self.config = config

    @functools.cached_property
    def machine(self) -> Machine:
        """Facts of this machine."""
        return machine.look()

    @functools.cached_property
    def train_rows(self) -> list[Row]:
        """Training rows with the columns that a run reads."""
        return self._rows(self.config.data.train_files, self.config.data.train_max_samples)

    @functools.cached_property
    def val_rows(self) -> list[Row]:
        """Validation rows."""
        return self._rows(self.config.data.val_files, self.config.data.val_max_samples)

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer of the trained model, with the custom chat template."""
        found = self._tokenizer
        return None if isinstance(found, HoneError) else found

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer of the trained model.

        Raises:
            ModelError: it cannot be loaded.
        """
        found = self._tokenizer
        if isinstance(found, HoneError):
            raise found
        return found

    @functools.cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase | HoneError:
        from hone.data.tokenizer import load_tokenizer

        model = model_block(self.config)[1]
        try:
            return load_tokenizer(
                model.tokenizer_path or model.path,
                trust_remote_code=model.trust_remote_code,
                custom_chat_template=model.custom_chat_template,
            )
        except HoneError as refused:
            return refused

    @functools.cached_property
    def loops(self) -> Loops:
        """The agent loops of an RL run's rows."""
        from hone.preflight.loops import Loops

        assert isinstance(self.config, RLConfig)
        return Loops(self.config)

    @functools.cached_property
    def setting(self) -> Setting | None:
        """Tools, users and template of an RL run's episodes; None without a tokenizer."""
        from hone.agents.setting import Setting

        if not isinstance(self.config, RLConfig) or self.tokenizer is None:
            return None
        return Setting.of(self.config, self.tokenizer)

    def close(self) -> None:
        """End what was started to look: the servers of tools."""
        if vars(self).get("setting") is not None:
            self.setting.close()  # type: ignore[union-attr]

    @functools.cached_property
    def prompt_lengths(self) -> PromptLengths | None:
        """How long the training prompts of an RL run are; None without tokenizer or rows."""
        from hone.data.checks import prompt_lengths

        config, tokenizer = self.config, self.tokenizer
        if not isinstance(config, RLConfig) or tokenizer is None or not self.train_rows:
            return None
        kwargs, limit = config.data.apply_chat_template_kwargs, config.data.max_prompt_length
        rows = [row for row in self.train_rows if row.values.get(config.data.prompt_key)]
        if not tokenizer.chat_template:
            rows = [row for row in rows if not _is_chat(row.values[config.data.prompt_key])]
        return prompt_lengths(rows, config.data.prompt_key, tokenizer, limit, kwargs) if rows else None

    @functools.cached_property
    def reward_findings(self) -> list[Finding]:
        """What came of trying the reward on a few rows, see :mod:`hone.preflight.rewards`."""
        from hone.preflight.rewards import try_reward

        return try_reward(self.config) if isinstance(self.config, RLConfig) else []

    @functools.cached_property
    def model_settings(self) -> dict[str, Any]:
        """config.json of the trained model with ``override_config``; the text part of a multimodal one on top."""
        model = model_block(self.config)[1]
        settings = read_json(Path(model.path or "") / "config.json")
        settings = {**settings, **model.override_config} if settings else {}
        return {**settings.get("text_config", {}), **settings}

    @functools.cached_property
    def parameters(self) -> int | None:
        """Parameters of the trained model, without loading any."""
        from hone.preflight.plan.model import count_parameters

        return count_parameters(model_block(self.config)[1])

    @functools.cached_property
    def shape(self) -> ModelShape | None:
        """The trained model in numbers; None where its files do not tell."""
        from hone.preflight.plan.model import ModelShape

        return ModelShape.of(self.model_settings, self.parameters) if self.parameters else None

    def work(self, *, on_cpu: bool) -> Work | None:
        """What the run asks of its processes; None where the model or the sizes of parallelism (R70) do not tell."""
        from hone.preflight.plan.plan import other_shapes
        from hone.preflight.plan.work import work_of

        if self.shape is None:
            return None
        try:
            return work_of(self.config, self.shape, on_cpu=on_cpu, others=other_shapes(self.config))
        except ConfigError:
            return None

    def _rows(self, files: Any, most: int) -> list[Row]:
        from hone.data.files import read_rows

        paths = file_list(files)
        if not paths:
            return []
        try:
            rows = read_rows(paths, required=(), optional=columns(self.config), max_rows=most)
        except HoneError:
            return []
        return rows if all(column in row.values for row in rows[:1] for column in required(self.config)) else []


def columns(config: AnyConfig) -> tuple[str, ...]:
    """Return the columns of a dataset that a run or a check of it reads."""
    data = config.data
    if isinstance(config, RLConfig):
        return (config.data.prompt_key, config.data.reward_fn_key, "reward_model", "extra_info", "agent_name", "tools")
    if isinstance(config, SFTConfig):
        return (config.data.messages_key,)
    return (
        *(data.prompt_key, data.chosen_key, data.rejected_key),  # type: ignore[union-attr]
        *(data.completion_key, data.label_key, data.tools_key),  # type: ignore[union-attr]
    )


def required(config: AnyConfig) -> tuple[str, ...]:
    """Return the columns without which nothing can be said of a row."""
    if isinstance(config, RLConfig):
        return (config.data.prompt_key, config.data.reward_fn_key)
    return (config.data.messages_key,) if isinstance(config, SFTConfig) else ()


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def file_list(files: Any) -> list[str]:
    """Return none, a path or a list of paths as a list."""
    if files is None:
        return []
    return [files] if isinstance(files, str) else list(files)


def model_block(config: AnyConfig) -> tuple[str, ModelConfig]:
    """Return the block that names the trained model, with its path in the tree."""
    if isinstance(config, RLConfig):
        return "actor_rollout_ref.model", config.actor_rollout_ref.model
    return "model", config.model


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object, empty when the file is missing or holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
