"""Images of archived samples: their names in token ids and messages, and their files.

Files are in the folder ``images`` of the archive, under the key that the token ids have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.apps.lab.viewer.run import Archived
from hone.data.images import IMAGE_PARTS, content_text, key_of, place_of
from hone.errors import HoneError
from hone.insight.archive.images import find_image, keys_in, name_of

TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".webp": "image/webp", ".gif": "image/gif"}
"""Content type of the files that a browser shows, by ending."""
_NAME = re.compile(r"[0-9a-f]{11}")


@dataclass(frozen=True)
class Picture:
    """Content of an image, with its content type."""

    content: bytes
    media_type: str


def picture(archived: Archived, name: str) -> Picture:
    image = find_image(archived.index.archive.folder, int(name, 16)) if _NAME.fullmatch(name) else None
    if image is not None and image.suffix in TYPES:  # by its content: other files are never shown as images
        return Picture(image.content, TYPES[image.suffix])
    raise HoneError(f"the run has no image '{name}'", fix="open a sample of the list", code="E-view-address")


def names_in(ids: Sequence[int]) -> list[str]:
    """Return the names of the images in a row of token ids, in order."""
    return [name_of(key) for key in keys_in(ids)]


def pictures_by_place(ids: Sequence[int]) -> dict[int, str]:
    """Return the names of images by the place of their first token in a row of ids."""
    return {place: name_of(key_of(token)) for place, token in enumerate(ids) if token < 0 and place_of(token) == 0}


def shown_message(message: Mapping[str, Any], of_prompt: Iterator[str]) -> tuple[dict[str, Any], list[str]]:
    """Return a message with a text, in which an image is a mark, and the names of its images.

    Parts of later messages name their image; ``of_prompt`` are the names for parts without one, in order.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message), []
    parts = [part for part in content if isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS]
    names = [str(part.get("key") or next(of_prompt, "")) for part in parts]
    return {**message, "content": content_text(content)}, names
