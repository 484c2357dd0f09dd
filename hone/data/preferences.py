"""Datasets of preferences: pairs of responses to one prompt, or single responses with a label, already tokenized."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hone.config.offline import PreferenceDataConfig
from hone.data.batch import Batch
from hone.data.files import Row, RowReader, read_rows
from hone.data.image_processor import ImageProcessor
from hone.data.images import images_column
from hone.data.messages import plain, schemas_of
from hone.data.ragged import Ragged
from hone.data.responses import Response, Side, render_sides, side_with_label, sides_of_pair
from hone.data.row_images import RowImages, loses_image
from hone.data.tokenizing import check_policy, overlong_rows
from hone.errors import DataError

log = logging.getLogger(__name__)


@dataclass
class Preference:
    """One row: a chosen and a rejected response to one prompt, or a single labelled one."""

    # each with its label, true for chosen or desirable; a chosen one precedes its rejected one
    responses: list[tuple[bool, Response]]
    margin: float  # required advantage of the chosen response; 0 if the data has none
    uid: str


@dataclass(frozen=True)
class PreferenceColumns:
    """Names of the columns; see the configuration block ``data`` of `hone prefer`.

    Masks of responses given as token ids are in columns of the same name with the suffix ``_mask``.
    """

    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"
    completion: str = "completion"
    label: str = "label"
    tools: str = "tools"
    margin: str | None = None

    @property
    def all(self) -> list[str]:
        responses = (self.chosen, self.rejected, self.completion)
        masks = [f"{name}_mask" for name in responses]
        return [self.prompt, *responses, *masks, self.label, self.tools, *([self.margin] if self.margin else [])]


def preference_columns(data: PreferenceDataConfig, margin: str | None = None) -> PreferenceColumns:
    """Return the column names of a configuration."""
    return PreferenceColumns(
        prompt=data.prompt_key,
        chosen=data.chosen_key,
        rejected=data.rejected_key,
        completion=data.completion_key,
        label=data.label_key,
        tools=data.tools_key,
        margin=margin,
    )


class PreferenceDataset:
    """Preferences of parquet or JSON files.

    A row has either ``chosen`` and ``rejected`` or ``completion`` and ``label``. Responses are chat messages (the assistant
    turns count), strings or token ids; :mod:`hone.data.responses` lists the allowed combinations with prompts.

    Args:
        tokenizer: needs a chat template only where rows hold messages.
        truncation: treatment of longer ones: ``error``, ``drop`` (the whole row), or ``truncate`` (cut the response's
            end; a row with a side that has no token left counts as dropped).
        read: reader of the rows, called as :func:`~hone.data.files.read_rows`; None reads files.
        image_key: column of the images, see :mod:`hone.data.row_images`; both sides of a pair show all of them.
        image_processor: of the model; None for a model of text, whose rows have no images.

    Attributes:
        dropped: number of rows left out for their length, those included that a truncation would deprive of tokens of an image.
        equal: number of pairs left out because both sides are equal.

    Raises:
        DataError: a file, column or row is wrong, or a row is too long under the policy ``error``.
    """

    def __init__(
        self,
        files: Sequence[str | Path] | str | Path,
        tokenizer: PreTrainedTokenizerBase,
        columns: PreferenceColumns | None = None,
        *,
        max_length: int,
        truncation: str,
        max_samples: int = -1,
        chat_template_kwargs: dict[str, Any] | None = None,
        read: RowReader | None = None,
        image_key: str = "images",
        image_processor: ImageProcessor | None = None,
    ) -> None:
        check_policy(truncation)
        columns = columns or PreferenceColumns()
        images = RowImages(image_key, image_processor)
        rows = (read or read_rows)(
            files, required=(), optional=(*columns.all, *images.columns), max_rows=max_samples, refused=images.refused
        )
        if not rows:
            raise DataError(f"max_samples={max_samples} leaves no row", fix="data.max_samples=-1 uses all rows")
        self.paired = holds_pairs(rows[0], columns)
        sides = [[side.placed(images, row) for side in sides_of_row(row, columns, self.paired)] for row in rows]
        if tokenizer.chat_template and (strings := sum(isinstance(row_sides[0].prompt, str) for row_sides in sides)):
            log.info(
                "%d prompts are plain strings: they and their responses are raw text, without the chat template",
                strings,
            )
        rendered = iter(render_sides([s for row in sides for s in row], tokenizer, chat_template_kwargs, images))
        preferences = [
            Preference([(side.label, next(rendered)) for side in row_sides], _margin(row, columns), row.uid)
            for row, row_sides in zip(rows, sides, strict=True)
        ]
        for preference, row in zip(preferences, rows, strict=True):
            check_prompts([response for _, response in preference.responses], row.where)
        kept = _within(preferences, max_length, truncation)
        different = [row for row in kept if not self.paired or _differ(row)]
        self.dropped, self.equal = len(preferences) - len(kept), len(kept) - len(different)
        self._rows = different
        if self.dropped or self.equal:
            log.warning(
                "of %d rows, %d are dropped for their length and %d because both sides are equal",
                len(preferences),
                self.dropped,
                self.equal,
            )
        if not different:
            raise DataError(
                f"0 of {len(preferences)} rows are left: {self.dropped} are too long, {self.equal} have two equal sides",
                fix=f"data.max_length={2 * max_length}" if self.dropped else "make chosen and rejected differ",
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Preference:
        return self._rows[index]

    def labels(self) -> tuple[int, int]:
        desirable = sum(label for row in self._rows for label, _ in row.responses)
        return desirable, sum(len(row.responses) for row in self._rows) - desirable


def preference_batch(rows: Sequence[Preference]) -> Batch:
    """Build a batch with one row per response; the two sides of a pair are neighbours.

    Columns: ``uid``, equal on the sides of a pair; ragged ``prompt_ids``, ``response_ids``, ``response_mask`` and, if precomputed, ``ref_log_probs``;
    tensors ``[B]``: ``label`` (bool), ``unit`` (equal on the sides of a pair), ``margin``; objects ``images`` if a row has some.
    """
    flat = [(unit, row, label, response) for unit, row in enumerate(rows) for label, response in row.responses]
    batch = Batch(
        {
            "uid": [str(unit) for unit, *_ in flat],
            "prompt_ids": Ragged.from_rows([r.prompt_ids for *_, r in flat], torch.int64),
            "response_ids": Ragged.from_rows([r.response_ids for *_, r in flat], torch.int64),
            "response_mask": Ragged.from_rows([r.response_mask for *_, r in flat], torch.int64),
            "label": torch.tensor([label for _, _, label, _ in flat], dtype=torch.bool),
            "unit": torch.tensor([unit for unit, *_ in flat], dtype=torch.int64),
            "margin": torch.tensor([row.margin for _, row, _, _ in flat], dtype=torch.float32),
            **images_column([response.images for *_, response in flat]),
        }
    )
    ref_log_probs = [response.ref_log_probs for *_, response in flat if response.ref_log_probs is not None]
    if len(ref_log_probs) == len(flat):
        batch = batch.with_columns(ref_log_probs=Ragged.from_rows(ref_log_probs, torch.float32))
    return batch


def holds_pairs(row: Row, columns: PreferenceColumns) -> bool:
    """Return whether a row is a pair; false for a labelled response. Raises DataError: the row is neither."""
    if {columns.chosen, columns.rejected} <= row.values.keys():
        return True
    if {columns.completion, columns.label} <= row.values.keys():
        return False
    raise DataError(
        f"the file has neither columns '{columns.chosen}' and '{columns.rejected}' nor '{columns.completion}' and "
        f"'{columns.label}'; of these it has {', '.join(row.values) or 'none'}",
        where=row.where,
        why="preferences are pairs of responses, or responses with a label",
        fix="name the columns with data.chosen_key and data.rejected_key, or data.completion_key and data.label_key; "
        "`hone data pairs RUN --out DIR` makes pairs from a run",
        code="R42",
    )


def sides_of_row(row: Row, columns: PreferenceColumns, paired: bool | None = None) -> list[Side]:
    """Return the two sides of a pair, or the one response with its label.

    ``paired``: what the other rows are; None allows both.

    Raises DataError: the row is neither, or not what the others are.
    """
    if paired is None:
        paired = holds_pairs(row, columns)
    if holds_pairs(row, columns) != paired:
        raise DataError(
            f"this row {'has a label' if paired else 'is a pair'}, the first one {'is a pair' if paired else 'has a label'}",
            where=row.where,
            fix="keep pairs and labelled responses in separate files",
        )
    values = {name: plain(value) for name, value in row.values.items()}
    prompt, tools = values.get(columns.prompt), schemas_of(values.get(columns.tools), row.where)
    if paired:
        sides = sides_of_pair(prompt, values[columns.chosen], values[columns.rejected], tools, row.where)
        for side, name in zip(sides, (columns.chosen, columns.rejected), strict=True):
            side.mask = values.get(f"{name}_mask")
        return sides
    label = values[columns.label]
    if label not in (True, False, 0, 1):
        raise DataError(
            f"column '{columns.label}' is {label!r}, not true or false",
            where=row.where,
            fix="write true for a desirable response, false for an undesirable one",
        )
    side = side_with_label(prompt, values[columns.completion], bool(label), tools, row.where)
    side.mask = values.get(f"{columns.completion}_mask")
    return [side]


def _margin(row: Row, columns: PreferenceColumns) -> float:
    if columns.margin is None:
        return 0.0
    value = row.values.get(columns.margin)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise DataError(
            f"column '{columns.margin}' is {value!r}, not a number",
            where=row.where,
            fix="write the advantage of the chosen response as a number, or set loss.margin_key=null",
        )
    return float(value)


def _within(rows: list[Preference], max_length: int, truncation: str) -> list[Preference]:
    """Return the rows that fit, truncated if the policy allows it."""
    lengths = [max(len(r.prompt_ids) + len(r.response_ids) for _, r in row.responses) for row in rows]
    long = overlong_rows(lengths, max_length, truncation, what="rows", key="data.max_length")
    kept = []
    for number, row in enumerate(rows):
        if number in long:
            if truncation == "drop":
                continue
            shorter = [(label, response.cut(max_length)) for label, response in row.responses]
            pairs = zip(row.responses, shorter, strict=True)
            if any(loses_image(before.response_ids, after.response_ids) for (_, before), (_, after) in pairs):
                continue
            row.responses = shorter
        if all(any(response.response_mask) for _, response in row.responses):
            kept.append(row)
    return kept


def check_prompts(responses: Sequence[Response], where: str) -> None:
    """Raise DataError unless the sides of a pair answer the same tokens: a template may open a thought for one of them
    only.
    """
    prompts = [response.prompt_ids for response in responses]
    if prompts and prompts[0] != prompts[-1]:
        shared = next((n for n, (a, b) in enumerate(zip(*prompts, strict=False)) if a != b), min(map(len, prompts)))
        raise DataError(
            f"the chat template shows the prompt differently before the two responses, from token {shared} of {len(prompts[0])}",
            where=where,
            why="the loss would compare answers to two prompts",
            fix="give both responses reasoning, or neither, or set model.custom_chat_template",
        )


def _differ(row: Preference) -> bool:
    (_, chosen), (_, rejected) = row.responses
    return chosen.response_ids != rejected.response_ids
