"""Images, video and sound in dataset rows: where they are, and the error where the model does not read them.

A row has them in columns of their own (``images``, with marks ``<image>`` in the text), or as parts of messages
(``{"type": "image_url", "image_url": ...}``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from hone.data.messages import KINDS, PARTS, unwrapped
from hone.errors import DataError

COLUMNS = {"image": ("images", "image"), "video": ("videos", "video"), "audio": ("audios", "audio")}
"""Columns of each kind. The second of them is read as media only where its value is not text: it also names containers."""
EVERY_COLUMN = tuple(column for names in COLUMNS.values() for column in names)  # all columns that may hold media
CODE = "R86"


class MediaError(DataError):
    """A row has images, video or sound that its model does not read."""

    code = CODE

    def with_model(self, kind: str | None) -> MediaError:
        """Return the error with the ``model_type`` of the model."""
        what = f"{self.what} (model_type={kind})" if kind else self.what
        return MediaError(what, why=self.why, fix=self.fix, where=self.where)


def media_of(values: Mapping[str, Any]) -> Counter[str]:
    """Return the numbers of images, videos and sounds of a row by kind, those of columns and those of messages.

    Marks and parts without content are places for the media of the columns, so the larger number of both counts.

    >>> media_of({"prompt": [{"role": "user", "content": "<image> what is it?"}], "images": [{"bytes": b"..."}]})
    Counter({'image': 1})
    """
    in_columns = {kind: count for kind, names in COLUMNS.items() if (count := _count(values, names))}
    in_messages = [PARTS[part] for value in values.values() for part in _part_types(value) if part in PARTS]
    return Counter(in_columns) | Counter(in_messages) if in_columns or in_messages else Counter()


def refuse_media(values: Mapping[str, Any], where: str, kinds: Collection[str] = KINDS) -> None:
    if media := {kind: count for kind, count in media_of(values).items() if kind in kinds}:
        raise media_error(media, where)


def media_error(media: Mapping[str, int], where: str, rows: str = "the row has") -> MediaError:
    """Return the error for media that would be dropped. ``rows``: subject and verb of the sentence."""
    listed = " and ".join(f"{count} {_plural(kind, count)}" for kind, count in media.items())
    others = set(media) - {"image"}
    return MediaError(
        f"{rows} {listed}, but {'no model reads video or sound' if others else 'the images of this model are not read'}",
        why="the model would see the text without them, and learn to answer what it cannot see",
        fix="leave such rows out, or describe in the text what the model must know"
        + ("" if others else "; or use a model for images, see docs/images.md"),
        where=where,
    )


def _plural(kind: str, count: int) -> str:
    return kind if count == 1 else {"audio": "sounds"}.get(kind, f"{kind}s")


def _count(values: Mapping[str, Any], names: tuple[str, str]) -> int:
    several, single = (values.get(name) for name in names)
    count = 0
    if several is not None:
        several = unwrapped(several)
        count = len(several) if isinstance(several, list | tuple) else int(several is not None and several != "")
    return count + int(single is not None and not isinstance(single, str | list | int | float))


def _part_types(value: Any) -> Iterator[str]:
    """Yield the types of the parts of a value that is a list of messages."""
    if value is None or isinstance(value, str):
        return
    value = unwrapped(value)
    if not isinstance(value, list | tuple) or not value or not isinstance(value[0], dict):
        return
    for message in value:
        content = message.get("content") if isinstance(message, dict) else None
        if content is not None and not isinstance(content, str | bytes) and isinstance(content, Iterable):
            yield from (str(part.get("type")) for part in content if isinstance(part, dict))
