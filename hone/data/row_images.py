"""Images of dataset rows, in the order of their places in the messages.

    column      {"images": [...]}                                    its images take the marks <image> and the parts without content
    messages    {"type": "image_url", "image_url": {"url": "data:..."}}    a part has its image

What remains in the messages is ``{"type": "image"}`` at each place: they are plain JSON, and chat templates render them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.data.files import Row
from hone.data.image_processor import ImageProcessor, load_image_processor
from hone.data.images import IMAGE_MARK, IMAGE_PARTS, ImageData, read_image
from hone.data.media import COLUMNS, KINDS, MediaError, media_error, media_of
from hone.data.messages import unwrapped
from hone.errors import DataError

Messages = list[dict[str, Any]]
PLACE = {"type": "image"}  # part of a message at the place of an image
_MARK = re.compile(f"({IMAGE_MARK})")


class PlaceError(MediaError):
    """A row has another number of places for images than images, or its images in another column."""


@dataclass(frozen=True)
class RowImages:
    """Reader of the images of a dataset's rows."""

    key: str
    processor: ImageProcessor | None  # of the model; None for a model of text, whose rows have no images
    any_model: bool = False  # read images without a processor, of rows for a model that is not known
    reads: bool = True  # see :func:`hone.data.images.read_image`
    _read: dict[bytes, ImageData] = field(default_factory=dict)

    @classmethod
    def for_directory(cls, key: str, path: str | Path, tokenizer: PreTrainedTokenizerBase) -> RowImages:
        """Return the reader for the model in a directory; for any model if it has only a tokenizer. Raises DataError:
        the model's image processor cannot be loaded.
        """
        known = (Path(path) / "config.json").is_file()
        return cls(key, load_image_processor(path, tokenizer) if known else None, any_model=not known)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that are read if they exist: that of the images, and those that they may be in by mistake."""
        return tuple(dict.fromkeys((self.key, *COLUMNS["image"])))

    @property
    def refused(self) -> tuple[str, ...]:
        return KINDS if self._text_only else tuple(kind for kind in KINDS if kind != "image")

    @property
    def _text_only(self) -> bool:
        return self.processor is None and not self.any_model

    def place(self, messages: Messages, row: Row) -> tuple[Messages, tuple[ImageData, ...]]:
        """Return the messages with a part at the place of each image, and the images in order.

        Raises:
            PlaceError: there are not as many places as images.
            DataError: an image cannot be read.
            MediaError: the model is one of text, and the row has images.
        """
        column = self._column(row)
        if self._text_only:
            _refuse(len(column or ()), row)
            return messages, ()
        placed, contents = _placed(messages, marks=column is not None)
        without = sum(content is None for content in contents)
        if without != len(column or ()):
            raise _miscounted(without, len(column or ()), self.key, row.where)
        rest = iter(column or ())
        values = [next(rest) if content is None else content for content in contents]
        return placed, self._images(values, row)

    def of_text(self, row: Row) -> tuple[ImageData, ...]:
        """Return the images of a row whose prompt is text or token ids with the model's placeholders.

        Raises:
            DataError: an image cannot be read.
            MediaError: the model is one of text, and the row has images.
        """
        column = self._column(row) or []
        if self._text_only:
            _refuse(len(column), row)
        return self._images(column, row)

    def expand(self, ids: list[int], images: Sequence[ImageData], where: str) -> list[int]:
        """Replace the placeholders in rendered ids by the tokens of the images.

        Raises DataError: there are not as many placeholders as images.
        """
        return ids if self.processor is None else self.processor.expand(ids, images, where)

    def expand_masked(
        self, ids: list[int], mask: list[int], images: Sequence[ImageData], where: str
    ) -> tuple[list[int], list[int]]:
        """Expand as :meth:`expand`; tokens of images have the mask 0."""
        if self.processor is None or not images:
            return self.expand(ids, images, where), mask
        pieces, placeholder = self.processor.pieces(ids, images, where), self.processor.placeholder
        masked = [
            0 if t == placeholder else bit for t, bit, piece in zip(ids, mask, pieces, strict=True) for _ in piece
        ]
        return [token for piece in pieces for token in piece], masked

    def _images(self, values: Sequence[Any], row: Row) -> tuple[ImageData, ...]:
        """Read images; those with equal content are one object."""
        images = (read_image(value, row.where, row.folder, reads=self.reads) for value in values)
        return tuple(self._read.setdefault(image.content, image) for image in images)

    def _column(self, row: Row) -> list[Any] | None:
        """Return the entries of the row's column; None if the row does not have it."""
        value = unwrapped(row.values.get(self.key))
        if value is None or value == "" or value == []:
            self._check_others(row)
            return [] if self.key in row.values else None
        return list(value) if isinstance(value, list | tuple) else [value]

    def _check_others(self, row: Row) -> None:
        for name in COLUMNS["image"]:
            if name != self.key and media_of({name: row.values.get(name)}):
                raise PlaceError(
                    f"column '{name}' has images, and they are read from column '{self.key}'",
                    where=row.where,
                    why="the model would not see them",
                    fix=f"data.image_key={name}",
                )


def part_image(part: Mapping[str, Any]) -> Any:
    """Return the image that a part of a message has; None if the row's column has it."""
    names = ("image", "image_url", "url", "path", "bytes")
    return next((part[name] for name in names if part.get(name) is not None), None)


def parts_of(text: str) -> list[dict[str, Any]]:
    """Return the parts of a text with marks.

    >>> parts_of("What is <image>?")
    [{'type': 'text', 'text': 'What is '}, {'type': 'image'}, {'type': 'text', 'text': '?'}]
    """
    pieces = [piece for piece in _MARK.split(text) if piece]
    return [dict(PLACE) if piece == IMAGE_MARK else {"type": "text", "text": piece} for piece in pieces]


def loses_image(before: Sequence[int], after: Sequence[int]) -> bool:
    """Return whether tokens of images are missing after a truncation."""
    return sum(token < 0 for token in after) != sum(token < 0 for token in before)


def no_image_left(rows: int, limit: int, key: str, longest: int) -> DataError:
    """Return the error where every row would lose tokens of an image."""
    return DataError(
        f"none of {rows} rows keeps its images within {key}={limit} tokens",
        why="an image that is cut is not what the text is about",
        fix=f"{key}={longest}, or smaller images",
    )


def _refuse(count: int, row: Row) -> None:
    if count:
        raise media_error({"image": count}, row.where)


def _placed(messages: Messages, marks: bool) -> tuple[Messages, list[Any]]:
    """Return the messages with places, and the content of each place; None where the column has it."""
    contents: list[Any] = []
    placed = []
    for message in messages:
        content = message.get("content")
        parts = [content] if isinstance(content, str) else content
        if not isinstance(parts, list):
            placed.append(message)
            continue
        split = [piece for part in parts for piece in _pieces(part, marks, contents)]
        changed = split if isinstance(content, list) or len(split) > 1 or split[:1] == [PLACE] else content
        placed.append({**message, "content": changed})
    return placed, contents


def _pieces(part: Any, marks: bool, contents: list[Any]) -> list[Any]:
    """Split a part at its marks; append the content of each place."""
    text = part if isinstance(part, str) else part.get("text") if part.get("type") == "text" else None
    if isinstance(text, str):
        if not marks or IMAGE_MARK not in text:
            return [part]
        contents += [None] * text.count(IMAGE_MARK)
        return parts_of(text)
    if isinstance(part, dict) and part.get("type") in IMAGE_PARTS:
        contents.append(part_image(part))
        return [dict(PLACE)]
    return [part]


def _miscounted(places: int, images: int, key: str, where: str) -> PlaceError:
    return PlaceError(
        f"the messages have {places} places for the images of column '{key}', which has {images}",
        where=where,
        why="each image belongs to one place in the text",
        fix=f"write <image> in the messages once for each image, or name another column: data.image_key={key}",
    )
