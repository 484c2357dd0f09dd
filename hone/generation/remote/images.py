"""Images of requests on a connection: the content of each is sent once, later requests name it.

    client  {images: [{name, content}]}     an image that the server was not sent yet
    client  {images: [{name}]}              one that it was
    server  {missing: true}                 it has dropped one of them: the client sends the request again with all contents

A name is the SHA-256 of the content, so that clients of one server share images.
"""

from __future__ import annotations

import base64
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from hone.data.images import ImageData

KEPT_BYTES = 512 * 2**20
"""Bytes of images that a server keeps; the oldest are dropped."""
MISSING = {"missing": True}
"""Answer of a server that lacks an image."""

Entries = list[dict[str, Any]]


class SentImages:
    """Client's side: what a server was sent."""

    def __init__(self) -> None:
        self._sent: set[str] = set()

    def entries(self, images: Sequence[ImageData], *, again: bool = False) -> Entries:
        """Return the entries of a request, with contents where the server has not been sent them, or with all (``again``)."""
        entries: Entries = []
        for image in images:
            name = name_of(image)
            entries.append({"name": name})
            if again or name not in self._sent:
                entries[-1]["content"] = base64.b64encode(image.content).decode()
            self._sent.add(name)
        return entries


class ReceivedImages:
    """Server's side: the images that its clients sent last."""

    def __init__(self, most: int = KEPT_BYTES) -> None:
        self._most, self._bytes = most, 0
        self._kept: OrderedDict[str, ImageData] = OrderedDict()

    def take(self, entries: Entries) -> tuple[ImageData, ...] | None:
        """Return the images of a request; None if one is not here.

        Raises:
            ValueError: a content does not belong to its name.
        """
        images = [self._image(entry) for entry in entries]
        while self._bytes > self._most and len(self._kept) > 1:
            self._bytes -= len(self._kept.popitem(last=False)[1].content)
        return None if any(image is None for image in images) else tuple(image for image in images if image is not None)

    def _image(self, entry: dict[str, Any]) -> ImageData | None:
        name = entry["name"]
        if name in self._kept:
            self._kept.move_to_end(name)
            return self._kept[name]
        if entry.get("content") is None:
            return None
        image = ImageData(base64.b64decode(entry["content"]))
        if name_of(image) != name:
            raise ValueError(f"the content of image {name} is another one")
        self._kept[name] = image
        self._bytes += len(image.content)
        return image


def name_of(image: ImageData) -> str:
    return hashlib.sha256(image.content).hexdigest()
