"""Datasets of prompts for RL and evaluation: one tokenized :class:`~hone.data.types.Sample` per row; and the order in which rows are visited."""

from __future__ import annotations

import logging
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.data.chat import strings_to_messages
from hone.data.files import EVERY_COLUMN, NO_SOURCE, Row, RowReader, read_rows
from hone.data.image_processor import ImageProcessor
from hone.data.messages import check_messages, plain
from hone.data.row_images import RowImages, loses_image, no_image_left
from hone.data.seeding import derive_seed
from hone.data.tokenizing import Chats, check_policy, overlong_rows, shortened, tokenize
from hone.data.types import Sample
from hone.errors import CheckpointError, DataError

log = logging.getLogger(__name__)

ShownOf = Callable[[Sample], tuple[Sequence[dict[str, Any]], Sequence[Mapping[str, Any]] | None]]
"""Function from a dataset row of messages to the messages and the function schemas that the template gets."""


class PromptDataset:
    """Prompts of parquet or JSON files, rendered with the tokenizer's chat template.

    Columns: ``prompt_key`` (chat messages; or a string; or token ids, used unchanged), and optionally
    ``reward_fn_key`` (:data:`NO_SOURCE` by default), ``reward_model`` (its ``ground_truth``), ``extra_info`` (a dict) and
    ``agent_name``. The constructor reads and
    tokenizes everything, so that a bad row is reported before the first step.

    Args:
        tokenizer: needs a chat template only when the prompts are messages.
        reward_fn_key: column that names the kind of problem; it may be missing.
        truncation: treatment of longer ones: ``error``, ``drop``, or the side whose tokens are removed: ``left``, ``right`` or
            ``middle``.
        shown_of: what the template gets of a row of messages; None: its messages, and no tools.
        all_columns: add the other columns of a row to its ``extra_info``, for a reward function that takes columns.
        read: reader of the rows, called as :func:`~hone.data.files.read_rows`; None reads files.
        image_key: column of the images, see :mod:`hone.data.row_images`.
        image_processor: of the model; None for a model of text, whose rows have no images.
        answer_key: column of the right answer; None: ``reward_model.ground_truth``.
        strings_as_messages: show strings by the chat template, see :func:`~hone.data.chat.strings_to_messages`.

    Attributes:
        dropped: number of rows left out because they are too long; of truncated ones, those that would lose tokens of an image.
        strings: number of strings shown as messages, and the places of those that are left alone because they were rendered before.

    Raises:
        DataError: a file, column or row is wrong, or a prompt is too long under the policy ``error``.
    """

    def __init__(
        self,
        files: Sequence[str | Path] | str | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_key: str,
        reward_fn_key: str,
        max_prompt_length: int,
        truncation: str,
        max_samples: int = -1,
        chat_template_kwargs: dict[str, Any] | None = None,
        shown_of: ShownOf | None = None,
        all_columns: bool = False,
        read: RowReader | None = None,
        image_key: str = "images",
        image_processor: ImageProcessor | None = None,
        answer_key: str | None = None,
        strings_as_messages: bool = True,
    ) -> None:
        check_policy(truncation)
        images = RowImages(image_key, image_processor)
        truncation = "left" if truncation == "truncate" else truncation
        rows = (read or read_rows)(
            files,
            required=(prompt_key,),
            optional=EVERY_COLUMN if all_columns else ("reward_model", "extra_info", "agent_name", *images.columns),
            defaults={reward_fn_key: NO_SOURCE},
            max_rows=max_samples,
            refused=images.refused,
            answer_key=answer_key,
        )
        if not rows:
            raise DataError(f"max_samples={max_samples} leaves no row", fix="data.max_samples=-1 uses all rows")
        texts = [row.values[prompt_key] if isinstance(row.values[prompt_key], str) else None for row in rows]
        templated = tokenizer if strings_as_messages else None
        self.strings = strings_to_messages(rows, prompt_key, templated, chat_template_kwargs)
        prompts = [plain(row.values[prompt_key]) for row in rows]
        samples = [
            _sample(row, prompt, prompt_key, reward_fn_key, all_columns, images)
            for row, prompt in zip(rows, prompts, strict=True)
        ]
        _tokenize(samples, prompts, tokenizer, chat_template_kwargs or {}, shown_of or _as_they_are)
        for sample, row, sample.text in zip(samples, rows, texts, strict=True):
            sample.prompt_ids = images.expand(sample.prompt_ids, sample.images, row.where)
            if not sample.prompt_ids:
                raise DataError("the prompt has no tokens", where=row.where, fix="remove the row")
        lengths = [len(sample.prompt_ids) for sample in samples]
        long = overlong_rows(lengths, max_prompt_length, truncation, what="prompts", key="data.max_prompt_length")
        dropped = long if truncation == "drop" else set[int]()
        for row in long - dropped:
            kept = shortened(samples[row].prompt_ids, max_prompt_length, truncation)
            if loses_image(samples[row].prompt_ids, kept):
                dropped.add(row)
            samples[row].prompt_ids = kept
        self.dropped, self.truncated = len(dropped), len(long) - len(dropped)
        if long:
            log.warning(
                "%d of %d prompts are longer than %d tokens: %d dropped, %d truncated (%s)",
                len(long),
                len(samples),
                max_prompt_length,
                self.dropped,
                self.truncated,
                truncation,
            )
        if len(dropped) == len(samples):
            raise no_image_left(len(samples), max_prompt_length, "data.max_prompt_length", max(lengths))
        self._samples = [sample for row, sample in enumerate(samples) if row not in dropped]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]

    def data_sources(self) -> Counter[str]:
        return Counter(sample.data_source for sample in self._samples)


def _sample(row: Row, prompt: Any, prompt_key: str, reward_fn_key: str, all_columns: bool, images: RowImages) -> Sample:
    source = row.values[reward_fn_key]
    if not isinstance(source, str):
        raise DataError(
            f"column '{reward_fn_key}' is {source!r}, not a name",
            where=row.where,
            fix="write the kind of problem as a string",
        )
    reward = plain(row.values.get("reward_model")) or {}
    extra = plain(row.values.get("extra_info")) or {}
    for name, value in (("reward_model", reward), ("extra_info", extra)):
        if not isinstance(value, dict):
            raise DataError(
                f"column '{name}' is a {type(value).__name__}, not an object",
                where=row.where,
                fix='write it as an object, for example {"style": "rule", "ground_truth": "42"}',
            )
    if all_columns:
        extra = {**row.others(prompt_key, reward_fn_key, images.key), **extra}
    ready = isinstance(prompt, str) or _is_token_ids(prompt)
    messages = None if ready else check_messages(prompt, where=row.where, column=prompt_key)
    if messages is None:
        contents = images.of_text(row)
    else:
        messages, contents = images.place(messages, row)
    return Sample(
        uid=row.uid,
        prompt_ids=[],
        messages=messages,
        data_source=source,
        ground_truth=reward.get("ground_truth"),
        extra_info=extra,
        agent_name=row.values.get("agent_name"),
        images=contents,
    )


def _as_they_are(sample: Sample) -> tuple[Sequence[dict[str, Any]], None]:
    return sample.messages or (), None


def _is_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(item) is int and item >= 0 for item in prompt)


def _tokenize(
    samples: list[Sample],
    prompts: list[Any],
    tokenizer: PreTrainedTokenizerBase,
    kwargs: dict[str, Any],
    shown_of: ShownOf,
) -> None:
    """Set ``prompt_ids``: of messages by the template, of strings by one call, of token ids unchanged."""
    chats = [sample for sample in samples if sample.messages is not None]
    shown = [shown_of(sample) for sample in chats]
    messages: list[Any] = [list(one) for one, _ in shown]
    tools: list[Any] = [list(schemas or ()) or None for _, schemas in shown]
    names = [sample.uid for sample in chats]
    tokens = tokenize(tokenizer, Chats("prompt", messages, tools, names, kwargs))
    for sample, (ids, _) in zip(chats, tokens, strict=True):
        sample.prompt_ids = ids
    texts = [(sample, prompt) for sample, prompt in zip(samples, prompts, strict=True) if isinstance(prompt, str)]
    if texts:
        encoded = tokenizer([text for _, text in texts], return_attention_mask=False)["input_ids"]
        for (sample, _), ids in zip(texts, encoded, strict=True):  # type: ignore[arg-type]
            sample.prompt_ids = ids  # type: ignore[assignment]
    for sample, prompt in zip(samples, prompts, strict=True):
        if sample.messages is None and not isinstance(prompt, str):
            sample.prompt_ids = prompt


REFERENCES = ("solution", "answer", "response", "completion", "output")
"""Columns, or entries of extra_info, that may contain a worked answer."""
_LOOKED_AT = 2000


@dataclass(frozen=True)
class ScoredRow:
    """One row of a dataset."""

    sample: Sample  # input of the reward, without prompt tokens
    worked: tuple[str, ...] = ()  # worked answers in the file
    # messages after the prompt of a worked episode with tool calls; empty without one
    demonstration: tuple[dict[str, Any], ...] = ()


def scored_rows(
    files: Sequence[str | Path] | str | Path,
    *,
    reward_fn_key: str,
    limit: int,
    messages_key: str = "messages",
    prompt_key: str = "prompt",
    answer_key: str | None = None,
    read: RowReader | None = None,
) -> list[ScoredRow]:
    """Read up to ``limit`` rows among the first 2000, taking the data sources in turn. ``read``: reader of the rows; None reads files.

    Raises DataError: a file cannot be read.
    """
    rows = (read or read_rows)(
        files,
        required=(),
        optional=EVERY_COLUMN,
        defaults={reward_fn_key: NO_SOURCE},
        max_rows=_LOOKED_AT,
        answer_key=answer_key,
    )
    by_source: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_source[str(row.values[reward_fn_key])].append(row)
    turns = max(map(len, by_source.values()), default=0)
    chosen = [group[turn] for turn in range(turns) for group in by_source.values() if turn < len(group)][:limit]
    return [_scored(row, reward_fn_key, messages_key, prompt_key) for row in chosen]


def samples_by_uid(files: Sequence[str | Path], *, reward_fn_key: str, prompt_key: str = "prompt") -> dict[str, Sample]:
    """Return every row of the files as a reward receives it, by its uid, without prompt tokens."""
    rows = read_rows(files, required=(), optional=EVERY_COLUMN, defaults={reward_fn_key: NO_SOURCE})
    return {row.uid: _scored(row, reward_fn_key, "messages", prompt_key).sample for row in rows}


def _scored(row: Row, reward_fn_key: str, messages_key: str, prompt_key: str) -> ScoredRow:
    reward, extra = plain(row.values.get("reward_model")), plain(row.values.get("extra_info"))
    extra = extra if isinstance(extra, dict) else {}
    prompt = plain(row.values.get(prompt_key))
    sample = Sample(
        uid=row.uid,
        prompt_ids=[],
        messages=prompt if isinstance(prompt, list) and all(isinstance(part, dict) for part in prompt) else None,
        data_source=str(row.values[reward_fn_key]),
        ground_truth=reward.get("ground_truth") if isinstance(reward, dict) else None,
        extra_info={**row.others(prompt_key, reward_fn_key), **extra},
        agent_name=row.values.get("agent_name"),
        text=prompt if isinstance(prompt, str) else None,
    )
    messages = plain(row.values.get(messages_key))
    answers = [_last_answer(messages)]
    answers += [place.get(name) for place in (row.values, extra) for name in REFERENCES]
    worked = tuple(dict.fromkeys(text for text in answers if isinstance(text, str) and text.strip()))
    return ScoredRow(sample, worked, _demonstration(messages, sample.messages or []))


def _demonstration(messages: Any, prompt: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    """Return the turns after the prompt if some of them call tools, and the last one answers."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return ()
    turns = messages[len(prompt) :]
    answered = isinstance(_last_answer(turns), str)
    return tuple(turns) if answered and any(turn.get("tool_calls") for turn in turns) else ()


def _last_answer(messages: Any) -> Any:
    last = messages[-1] if isinstance(messages, list) and messages else None
    return last.get("content") if isinstance(last, dict) and last.get("role") == "assistant" else None


class EpochSampler:
    """Endless batches of row numbers.

    Each epoch's order depends only on the seed and the epoch. The last rows that do not fill a batch are left out (other rows
    each epoch when shuffled).

    >>> sampler = EpochSampler(5, 2, shuffle=False, seed=0)
    >>> [sampler.next_batch() for _ in range(3)], sampler.epoch
    ([[0, 1], [2, 3], [0, 1]], 1)

    Raises:
        DataError: the dataset does not fill one batch.
    """

    def __init__(self, size: int, batch_size: int, *, shuffle: bool, seed: int) -> None:
        if batch_size < 1:
            raise DataError(f"the batch size is {batch_size}", fix="data.train_batch_size=1 or more")
        if size < batch_size:
            raise DataError(
                f"the dataset has {size} rows, one batch needs {batch_size}",
                why="an incomplete batch is skipped, so an epoch would have 0 steps",
                fix=f"data.train_batch_size={size}, or more data" if size else "name a dataset with rows",
                code="R46",
            )
        self.size, self.batch_size, self.shuffle, self.seed = size, batch_size, shuffle, seed
        self.epoch = 0
        """Epoch of the last returned batch (0 before the first)."""
        self._position = 0  # batches of this epoch already returned
        self._order = self._permutation(0)

    learns = False  # whether the order depends on the rates given to :meth:`observe`

    def observe(self, rates: Mapping[int, float]) -> None:
        """Receive the measured pass rate (0 to 1) of rows; this sampler ignores it."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of the order at this step; a plain epoch has none."""
        return {}

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of batches per epoch; the last ``size % batch_size`` rows are left out."""
        return self.size // self.batch_size

    def next_batch(self) -> list[int]:
        """Return the row numbers of the next batch, in a new epoch after the last batch of one."""
        start = self._count_batch() * self.batch_size
        return self._order[start : start + self.batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's position as JSON-able numbers."""
        return {
            "epoch": self.epoch,
            "batches": self._position,
            "size": self.size,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state`` with the batch that follows it.

        Raises CheckpointError: the state belongs to another dataset, batch size, order or seed.
        """
        self._check_run(state)
        if not 0 <= state["batches"] <= self.steps_per_epoch or state["epoch"] < 0:
            raise CheckpointError(f"the data position is not valid: epoch {state['epoch']}, batch {state['batches']}")
        self.epoch, self._position = state["epoch"], state["batches"]
        self._order = self._permutation(self.epoch)

    def _check_run(self, state: dict[str, Any]) -> None:
        """Raise CheckpointError if a state belongs to another dataset, batch size, order or seed."""
        for name, key in (
            ("size", "data.train_files"),
            ("batch_size", "data.train_batch_size"),
            ("shuffle", "data.shuffle"),
            ("seed", "data.seed (else trainer.seed)"),
        ):
            saved, present = state[name], getattr(self, name)
            if saved != present:
                raise CheckpointError(
                    f"the checkpoint's data position is for {name}={saved}, this run has {name}={present}",
                    why="some rows would be visited twice and others never",
                    fix=f"resume with the same {key}, or start again with trainer.resume_mode=disable",
                )

    def _count_batch(self) -> int:
        """Count a batch and return its number within the epoch; begin a new epoch after the last batch of one."""
        if self._position == self.steps_per_epoch:
            self.epoch, self._position = self.epoch + 1, 0
            self._order = self._permutation(self.epoch)
        self._position += 1
        return self._position - 1

    def _permutation(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.size))
        # sorted by random(), the only method whose stream Python guarantees never to change
        generator = random.Random(derive_seed(self.seed, "data", epoch))
        keys = [generator.random() for _ in range(self.size)]
        return sorted(range(self.size), key=keys.__getitem__)
