"""Data that rules read besides keys: rows, tokenizer, model configuration, machine; each is read at most once per check."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hone.config.derived import RunSpec
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig, model_block
from hone.data.files import file_list
from hone.data.messages import plain
from hone.data.model_settings import decoder_settings
from hone.errors import ConfigError, DataError, Finding, HoneError, RewardError
from hone.preflight import machine
from hone.preflight.machine import Machine
from hone.preflight.reading import answer_key, columns, defaults, read_model, required

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hone.agents.base import AgentLoop, EpisodeContext
    from hone.agents.rendering import Renderer
    from hone.data.checks import PromptLengths
    from hone.data.files import Row, RowReader
    from hone.data.row_images import RowImages
    from hone.preflight.plan.model import ModelShape
    from hone.preflight.plan.work import Work


_DECODED = 64  # images that are decoded


class Evidence:
    """Data outside the configuration, read when a rule first needs it.

    A file that cannot be read, or lacks a needed column, gives an empty value or None; the rules R08 and R42 report
    why. ``config``: the checked configuration.
    """

    def __init__(self, config: AnyConfig) -> None:
        self.config = config
        self._media: list[DataError] = []

    @functools.cached_property
    def machine(self) -> Machine:
        return machine.look()

    @functools.cached_property
    def read_rows(self) -> RowReader:
        """Reader of the run's rows: a class or function of the user, or that of files."""
        from hone.data.custom import row_reader

        return row_reader(self.config.data, self.tokenizer if self.config.data.custom_cls.path else None)

    def first_rows(self, **wanted: Any) -> Iterator[tuple[str, Row | HoneError]]:
        """Yield the name and the first row of every file, or of the user's class; the error in its place where there is none.

        Args:
            wanted: arguments of :attr:`read_rows`.
        """
        data = self.config.data
        train, val = file_list(data.train_files), file_list(data.val_files)
        by_class = data.custom_cls.path is not None
        for files in [train, *([val] if val else [])] if by_class else [[file] for file in (*train, *val)]:
            name = data.custom_cls.name or str(data.custom_cls.path) if by_class else files[0]
            try:
                rows = self.read_rows(files, max_rows=1, **wanted)
                yield name, rows[0] if rows else DataError("there is no row", where=name)
            except HoneError as problem:
                yield name, problem

    @functools.cached_property
    def train_rows(self) -> list[Row]:
        """Training rows, with the columns that a run reads."""
        return self._read_rows("train", self.config.data.train_files, self.config.data.train_max_samples)

    @functools.cached_property
    def val_rows(self) -> list[Row]:
        return self._read_rows("val", self.config.data.val_files, self.config.data.val_max_samples)

    @functools.cached_property
    def media(self) -> list[DataError]:
        """Errors of training and validation rows with images, video or sound that the model does not read."""
        _ = self.train_rows, self.val_rows
        loaded = self._row_images
        return [*self._media, *([loaded] if isinstance(loaded, DataError) else [])]

    @functools.cached_property
    def has_images(self) -> bool:
        """Return whether a training or validation row has images, and the model reads them."""
        from hone.data.media import media_of

        return self._reads_images and any(media_of(row.values)["image"] for row in (*self.train_rows, *self.val_rows))

    @functools.cached_property
    def _reads_images(self) -> bool:
        from hone.data.image_processor import reads_images

        return reads_images(self.model_settings)

    @functools.cached_property
    def _row_images(self) -> RowImages | DataError | None:
        """The reader of the rows' images, or the reason why there is none; None without a tokenizer."""
        from hone.data.image_processor import load_image_processor
        from hone.data.row_images import RowImages

        path, tokenizer = model_block(self.config)[1].path, self.tokenizer
        if path is None or tokenizer is None:
            return None
        try:
            return RowImages(self.config.data.image_key, load_image_processor(path, tokenizer))
        except DataError as problem:
            return problem

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer of the trained model, with the custom chat template."""
        loaded = self._tokenizer
        return None if isinstance(loaded, HoneError) else loaded

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer of the trained model. Raises ModelError: it cannot be loaded."""
        loaded = self._tokenizer
        if isinstance(loaded, HoneError):
            raise loaded
        return loaded

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
        except HoneError as problem:
            return problem

    @functools.cached_property
    def loops(self) -> Loops:
        assert isinstance(self.config, RLConfig)
        return Loops(self.config)

    @functools.cached_property
    def setting(self) -> EpisodeContext | None:
        """Tools, users and template of an RL run's episodes; None without a tokenizer."""
        from hone.agents.base import EpisodeContext

        if not isinstance(self.config, RLConfig) or self.tokenizer is None:
            return None
        return EpisodeContext.from_config(self.config, self.tokenizer)

    def close(self) -> None:
        """Stop the tool servers that the rules started."""
        if vars(self).get("setting") is not None:
            self.setting.close()  # type: ignore[union-attr]

    @functools.cached_property
    def prompt_lengths(self) -> PromptLengths | None:
        """Lengths of the training prompts of an RL run; None without tokenizer or rows."""
        from hone.data.checks import prompt_lengths

        config, tokenizer = self.config, self.tokenizer
        if not isinstance(config, RLConfig) or tokenizer is None or not self.train_rows:
            return None
        kwargs, limit = config.data.apply_chat_template_kwargs, config.data.max_prompt_length
        key = config.data.prompt_key
        rows = [row for row in self.train_rows if row.values.get(key)]
        if not tokenizer.chat_template:
            rows = [row for row in rows if not _is_chat(row.values[key])]
        if self._writes_tools is not None:
            rows = [replace(row, values={**row.values, key: self.as_shown(row.values[key])}) for row in rows]
        return prompt_lengths(rows, key, tokenizer, limit, kwargs) if rows else None

    def as_shown(self, prompt: Any) -> Any:
        """Return a prompt of an RL run as the template gets it: calls and results may be text."""
        if self._writes_tools is None or not _is_chat(messages := plain(prompt)):
            return prompt
        try:
            return self._writes_tools.as_shown(messages)[0]
        except (KeyError, TypeError):  # malformed messages: R42
            return prompt

    @functools.cached_property
    def _writes_tools(self) -> Renderer | None:
        """The renderer of the run's episodes if it writes calls and results into the messages as text."""
        if self.setting is None or not self.setting.multi_turn.enable:
            return None
        try:
            return self.setting.renderer if self.setting.renderer.tools_as_text else None
        except HoneError:  # R35
            return None

    @functools.cached_property
    def reward_findings(self) -> list[Finding]:
        """Findings of trying the reward on a few rows, see :func:`try_reward`."""
        template = str(self.tokenizer.chat_template or "") if self.tokenizer is not None else ""
        thinks = any(mark in template for mark in ("<think>", "</think>", "[THINK]"))
        return try_reward(self.config, self.read_rows, thinks=thinks) if isinstance(self.config, RLConfig) else []

    @functools.cached_property
    def model_settings(self) -> dict[str, Any]:
        """config.json of the trained model with ``override_config``; ``text_config`` of a multimodal model is merged in."""
        model = model_block(self.config)[1]
        settings = read_model(model.path)
        return decoder_settings({**settings, **model.override_config}) if settings else {}

    @functools.cached_property
    def parameters(self) -> int | None:
        from hone.preflight.plan.model import count_parameters

        return count_parameters(model_block(self.config)[1])

    @functools.cached_property
    def shape(self) -> ModelShape | None:
        """Shape of the trained model; None when its files cannot be read."""
        from hone.preflight.plan.model import ModelShape

        return ModelShape.from_settings(self.model_settings, self.parameters) if self.parameters else None

    def work(self, *, on_cpu: bool) -> Work | None:
        """Return the work of the run in numbers; None without a model shape or with invalid parallel sizes (R70)."""
        from hone.models.devices import computes_bfloat16, run_device
        from hone.preflight.plan.work import other_shapes, work_of

        if self.shape is None:
            return None
        try:
            bfloat16 = not on_cpu and computes_bfloat16(run_device(self.config.trainer.device))
            return work_of(self.config, self.shape, on_cpu=on_cpu, bfloat16=bfloat16, others=other_shapes(self.config))
        except ConfigError:
            return None

    def _read_rows(self, split: str, files: Any, most: int) -> list[Row]:
        from hone.data.chat import strings_to_messages
        from hone.data.media import COLUMNS, KINDS, MediaError

        paths, data = file_list(files), self.config.data
        others = tuple(kind for kind in KINDS if kind != "image")
        unknown = not self.model_settings  # R08 reports it
        refused = others if self._reads_images or unknown else KINDS
        if not paths and (split == "val" or data.custom_cls.path is None):
            return []
        try:
            rows = self.read_rows(
                paths,
                required=(),
                optional=(*columns(self.config), data.image_key, *(COLUMNS["image"] if self._reads_images else ())),
                defaults=defaults(self.config),
                max_rows=most,
                refused=refused,
                answer_key=answer_key(self.config),
            )
        except MediaError as problem:
            self._media.append(problem.with_model(self.model_settings.get("model_type")))
            return []
        except HoneError:
            return []
        if not all(column in row.values for row in rows[:1] for column in required(self.config)):
            return []
        if isinstance(self.config, RLConfig) and self.config.data.strings_as_messages:
            key, kwargs = self.config.data.prompt_key, self.config.data.apply_chat_template_kwargs
            if any(isinstance(row.values.get(key), str) for row in rows):
                strings_to_messages(rows, key, self.tokenizer, kwargs)
        loaded = self._row_images if self._reads_images else None
        if loaded is not None and not isinstance(loaded, DataError):
            self._media += _image_problems(loaded, rows, required(self.config))
        return rows


def trained_models(config: AnyConfig, evidence: Evidence) -> list[tuple[str | None, dict[str, Any]]]:
    """Return path and ``config.json`` of the policy and of a critic with a model of its own, those that can be read."""
    models = {model_block(config)[1].path: evidence.model_settings}
    if isinstance(config, RLConfig) and RunSpec(config).critic.value and (path := config.critic.model.path):
        models[path] = read_model(path)
    return [(path, settings) for path, settings in models.items() if settings]


def _image_problems(images: RowImages, rows: list[Row], keys: Iterable[str]) -> list[DataError]:
    """Return the first error of the rows' images, at most one; the first images are decoded, the files of the others exist."""
    from hone.data.messages import check_messages, plain

    decoded = 0
    for key in keys:
        for row in rows:
            prompt = plain(row.values.get(key))
            try:
                messages = check_messages(prompt, where=row.where, column=key) if _is_chat(prompt) else None
            except DataError:
                continue  # R42 reports it
            try:
                reader = images if decoded < _DECODED else replace(images, reads=False)
                shown = reader.of_text(row) if messages is None else reader.place(messages, row)[1]
                for image in shown[: max(0, _DECODED - decoded)]:
                    image.open()
                decoded += len(shown)
            except DataError as problem:
                return [problem]
    return []


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


class Loops:
    """Agent loops of an RL run."""

    def __init__(self, config: RLConfig) -> None:
        from hone.agents.tool_agent import default_loop

        rollout = config.actor_rollout_ref.rollout
        self._default = default_loop(rollout.multi_turn, rollout.agent)
        self._classes: dict[str, type[AgentLoop] | None] = {}

    def name(self, row: Row) -> str:
        return str(row.values.get("agent_name") or self._default)

    def loop_class(self, row: Row) -> type[AgentLoop] | None:
        """Return the class of the loop that plays a row; None for an unknown name, which R48 reports."""
        name = self.name(row)
        if name not in self._classes:
            self._classes[name] = self._class(name)
        return self._classes[name]

    def _class(self, name: str) -> type[AgentLoop] | None:
        from hone.agents.tool_agent import AGENT_LOOPS

        try:
            return AGENT_LOOPS.get(name)
        except HoneError:
            return None


CALL_SECONDS = 10.0  # time limit of one call, chosen to keep preflight short
ALL_SECONDS = 5.0  # time after which no further row is tried


def try_reward(config: RLConfig, read: RowReader | None = None, *, thinks: bool = False) -> list[Finding]:
    """Return the findings about the reward of a run; none when a reward model alone gives the reward.

    Args:
        config: of the run.
        read: what reads its rows; None reads files.
        thinks: True if the policy writes thoughts, as its chat template says.
    """
    from hone.data.checks.rows import is_missing
    from hone.data.prompts import scored_rows
    from hone.rewards.bench import bench_findings, needs_truths, run_bench

    model = config.reward.reward_model
    if not config.preflight.reward_rows or (model.enable and model.combine == "replace"):
        return []
    try:
        rows = scored_rows(
            file_list(config.data.train_files),
            reward_fn_key=config.data.reward_fn_key,
            prompt_key=config.data.prompt_key,
            answer_key=config.data.answer_key,
            limit=config.preflight.reward_rows,
            read=read,
        )
    except HoneError:
        return []  # R42 reports it
    if needs_truths(config.reward):  # R44 reports rows without one
        rows = [row for row in rows if not is_missing(row.sample.ground_truth)]
    if not rows:
        return []
    settings = replace(config.reward, timeout=min(config.reward.timeout, CALL_SECONDS))
    try:
        bench = run_bench(settings, rows, seconds=ALL_SECONDS, agentic=_plays_tools(config))
    except RewardError as problem:
        return [] if problem.code == "R43" else [_coded(problem, "R50")]
    except HoneError:
        return []  # an unknown scorer: R11 reports it
    sequences = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    outcomes = RunSpec(config).rewards_process
    return list(bench_findings(bench, settings, sequences, thinks=thinks, probabilities=outcomes))


def _plays_tools(config: RLConfig) -> bool:
    rollout = config.actor_rollout_ref.rollout
    return rollout.multi_turn.enable and rollout.agent.default_agent_loop not in (None, "single_turn")


def _coded(e: HoneError, code: str) -> Finding:
    return Finding(type(e)(e.what, why=e.why, fix=e.fix, where=e.where, code=code), stops=True)
