"""Rows and order by the user's code (``data.custom_cls``, ``data.row_fn``, ``data.sampler.class_path``)."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hone.config.data import DataConfig
from hone.data.files import EVERY_COLUMN, Row, RowReader, answer_columns, read_rows, with_answer
from hone.data.media import refuse_media
from hone.data.messages import plain
from hone.data.prompts import EpochSampler
from hone.data.sharegpt import to_messages
from hone.errors import CheckpointError, ConfigError, DataError
from hone.user_code import UserCodeError, build, call, load_class, load_function

PROMPT, VERL_PROMPT = "prompt", "raw_prompt"  # column of the messages, and its name in rows of verl's dataset classes


def row_reader(data: Any, tokenizer: Any) -> RowReader:
    """Return the reader of a run's rows, called as :func:`~hone.data.files.read_rows`: the user's class, their function, or that one.

    Args:
        data: the block ``data``, which the class receives as ``config``.
        tokenizer: what the class receives; None where there is none yet.
    """
    if data.custom_cls.path is None and data.row_fn is None:
        return read_rows
    records = _records_of_class if data.custom_cls.path is not None else _records_of_function

    def read(
        files: Sequence[str],
        *,
        required: Sequence[str],
        optional: Sequence[str] = (),
        defaults: Mapping[str, Any] | None = None,
        max_rows: int = -1,
        refused: Collection[str] = (),
        answer_key: str | None = None,
    ) -> list[Row]:
        named = {*required, *optional, *(defaults or {}), *answer_columns(answer_key)}
        wanted = None if tuple(optional) == EVERY_COLUMN else named
        rows = []
        for row, make in records(data, files, tokenizer, max_rows):
            values = plain(make())
            if isinstance(values, Mapping) and VERL_PROMPT in values:
                values = {PROMPT: values[VERL_PROMPT], **values}
            columns = values if isinstance(values, Mapping) else {}
            missing = [column for column in required if column not in columns]
            if missing or not columns:
                raise DataError(
                    f"the row has no column '{', '.join(missing)}': {values!r:.100}",
                    where=row.where,
                    fix="return a dict with the columns that a dataset file has",
                )
            if refused:
                refuse_media(columns, row.where, refused)
            chosen = {name: value for name, value in values.items() if wanted is None or name in wanted}
            chosen = with_answer({**(defaults or {}), **to_messages(chosen, row.where)}, answer_key)
            rows.append(replace(row, values=chosen))
        return rows

    return read


_Records = Iterator[tuple[Row, Callable[[], Any]]]  # rows without columns, and what makes the columns of each


def _records_of_class(data: Any, files: Sequence[str], tokenizer: Any, max_rows: int) -> _Records:
    custom, key = data.custom_cls, "data.custom_cls"
    name = custom.name or str(custom.path)
    arguments = {"data_files": files, "tokenizer": tokenizer, "config": data, "max_samples": max_rows}
    dataset = _loaded(lambda: build(load_class(str(custom.path), custom.name), arguments), key)
    length = _guarded(key, name, lambda: len(dataset))
    for number in range(length if max_rows < 0 else min(length, max_rows)):
        row = Row(f"row:{number}", f"{name}, row {number}", {})
        yield row, functools.partial(_guarded, key, name, functools.partial(dataset.__getitem__, number))


def _records_of_function(data: Any, files: Sequence[str], tokenizer: Any, max_rows: int) -> _Records:
    function = _loaded(lambda: load_function(data.row_fn), "data.row_fn")
    for row in read_rows(files, required=(), optional=EVERY_COLUMN, max_rows=max_rows, as_stored=True):
        name = f"{data.row_fn} ({row.where})"
        yield row, functools.partial(_guarded, "data.row_fn", name, functools.partial(function, plain(row.values)))


class CustomSampler(EpochSampler):
    """Batches from a sampler of the user, whose ``__iter__`` yields the row numbers of one epoch.

    A resumed run begins the epoch of the checkpoint again, from the sampler's state at its beginning, and draws up to the position of
    the checkpoint; the rows must be the same. A sampler without a state begins at the first epoch. One that observes pass rates
    continues from its newest state instead, so its ``__iter__`` must continue within the epoch.
    """

    def __init__(self, inner: Any, size: int, batch_size: int, *, seed: int, shuffle: bool) -> None:
        super().__init__(size, batch_size, shuffle=shuffle, seed=seed)
        self.inner, self.name = inner, type(inner).__name__
        self.learns = hasattr(inner, "observe")  # type: ignore[misc]
        self._has_state = hasattr(inner, "state_dict") and hasattr(inner, "load_state_dict")
        if self.learns and not self._has_state:
            raise ConfigError(
                f"sampler '{self.name}' has observe, but not state_dict and load_state_dict",
                why="its order depends on what it observed, so a resumed run could not continue it",
                fix="add state_dict() and load_state_dict(state)",
                where=_KEY,
            )
        self._since: Any = None  # the sampler's state at the beginning of this epoch
        self._iterator = self._begin(0)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of batches per epoch, by the sampler's length if it has one."""
        return max(1, (len(self.inner) if hasattr(self.inner, "__len__") else self.size) // self.batch_size)

    def observe(self, rates: Mapping[int, float]) -> None:
        if self.learns:
            _guarded(_KEY, self.name, lambda: self.inner.observe(dict(rates)))

    def next_batch(self) -> list[int]:
        """Return the row numbers of the next batch, in a new epoch where this one does not fill it."""
        rows = self._draw()
        if len(rows) < self.batch_size:
            self._iterator = self._begin(self.epoch + 1)
            rows = self._draw()
        if len(rows) < self.batch_size:
            raise DataError(
                f"sampler '{self.name}' gave {len(rows)} rows in an epoch, one batch needs {self.batch_size}",
                fix=f"yield more rows, or data.train_batch_size={max(1, len(rows))}",
                where=_KEY,
            )
        self._position += 1
        if not self.learns:
            self._digest.update(json.dumps(rows).encode())
        return rows

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict() | {"digest": self._digest.hexdigest()}
        if self._has_state:
            state["sampler"] = self._inner_state() if self.learns else self._since
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._check_run(state)
        if self._has_state:
            self._iterator = self._begin(state["epoch"], lambda: self.inner.load_state_dict(state["sampler"]))
        if self.learns:
            self._position = state["batches"]
            return
        while (self.epoch, self._position) < (state["epoch"], state["batches"]):
            self.next_batch()
        if (self.epoch, self._position, self._digest.hexdigest()) != (
            state["epoch"],
            state["batches"],
            state["digest"],
        ):
            raise CheckpointError(
                f"sampler '{self.name}' gives other rows than before the checkpoint",
                why="some rows would be visited twice and others never",
                fix="draw by the argument seed and set_epoch(epoch) alone, or add state_dict() and load_state_dict(state)",
                where=_KEY,
            )

    def _inner_state(self) -> Any:
        state = _guarded(_KEY, self.name, self.inner.state_dict)
        try:
            return json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the state of sampler '{self.name}' cannot be saved: {error}",
                why="checkpoints store it as JSON",
                fix="return numbers, strings, lists and dicts from state_dict()",
                where=_KEY,
            ) from error

    def _begin(self, epoch: int, restore: Callable[[], object] = lambda: None) -> Iterator[Any]:
        self.epoch, self._position, self._digest = epoch, 0, hashlib.sha256()

        def start() -> None:
            if hasattr(self.inner, "set_epoch"):
                self.inner.set_epoch(epoch)
            restore()

        _guarded(_KEY, self.name, start)
        if self._has_state and not self.learns:
            self._since = self._inner_state()
        return _guarded(_KEY, self.name, lambda: iter(self.inner))

    def _draw(self) -> list[int]:
        drawn = _guarded(_KEY, self.name, lambda: list(itertools.islice(self._iterator, self.batch_size)))
        try:
            rows = [operator.index(row) for row in drawn]
        except TypeError:
            rows = [-1]
        if any(not 0 <= row < self.size for row in rows):
            raise DataError(
                f"sampler '{self.name}' gave {drawn!r:.80}",
                fix=f"yield row numbers from 0 to {self.size - 1}",
                where=_KEY,
            )
        return rows


def custom_sampler(config: DataConfig, dataset: Any, seed: int) -> CustomSampler:
    """Build the sampler that ``data.sampler.class_path`` names.

    Raises:
        ConfigError: the class cannot be loaded or built.
        DataError: the dataset does not fill a batch.
    """
    size, batch_size = len(dataset), config.train_batch_size
    arguments = {"data_source": dataset, "data_config": config, "batch_size": batch_size, "seed": seed}
    path, name = str(config.sampler.class_path), config.sampler.class_name
    inner = _loaded(lambda: build(load_class(path, name), arguments), _KEY)
    return CustomSampler(inner, size, batch_size, seed=seed, shuffle=config.shuffle)


_KEY = "data.sampler.class_path"


def _loaded(load: Callable[[], Any], key: str) -> Any:
    try:
        return load()
    except UserCodeError as error:
        raise ConfigError(error.what, fix=error.fix, where=key) from error


def _guarded(key: str, name: str, function: Callable[[], Any]) -> Any:
    """Call the user's code; an error of it is one message."""
    try:
        return call(name, function)
    except UserCodeError as error:
        raise DataError(error.what, fix=error.fix, where=key) from error
