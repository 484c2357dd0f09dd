"""Images of an episode: those of its row's prompt, and those of messages since, such as tool results.

The conversation holds places without contents. A place of the prompt is ``{"type": "image"}``; one of a later message names its image
by key, so that a conversation whose history was rewritten still has the right images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hone.agents.messages import Message
from hone.data.image_processor import ImageProcessor
from hone.data.images import IMAGE_PARTS, ImageData, read_image
from hone.data.row_images import PLACE, part_image
from hone.errors import DataError

KEY = "key"
"""Key of an image in its place."""


class EpisodeImages:
    """Images of one episode, ``all`` in order: those of the prompt, then those of messages since."""

    def __init__(self, shown: Sequence[ImageData], processor: ImageProcessor | None) -> None:
        self.all, self.processor = tuple(shown), processor
        self._of_prompt = tuple(shown)

    def add(self, images: Sequence[ImageData]) -> None:
        self.all += tuple(images)

    def placed(self, messages: Sequence[Message], who: str) -> tuple[list[Message], list[ImageData]]:
        """Return the messages with places, and the images that their parts have.

        Raises:
            DataError: an image cannot be read, or a part has none.
        """
        images: list[ImageData] = []

        def place(part: Any) -> Any:
            if not _is_image(part):
                return part
            content = part_image(part)
            if content is None:
                raise DataError(f"{who} has a part of an image without its content", fix="give the part an image")
            images.append(read_image(content, who))
            return {**PLACE, KEY: _name(images[-1])}

        return [_with_parts(message, place) for message in messages], images

    def expand(self, ids: list[int], messages: Sequence[Message], more: Sequence[ImageData] = ()) -> list[int]:
        """Replace the placeholders in the rendering ``ids`` of messages by the tokens of their images.

        ``messages`` are all of the rendered ones that have places; ``more`` are images of them that are not added yet.
        """
        if self.processor is None:
            return ids
        return self.processor.expand(ids, list(self._images_in(messages, more)))

    def fold(self, ids: Sequence[int]) -> list[int]:
        """Return ids with one placeholder for each image, as they were before :meth:`expand`."""
        if self.processor is None or not self.all:
            return list(ids)
        runs = [self.processor.tokens(image) for image in self.all]
        folded, place = list[int](), 0
        while place < len(ids):
            run = next((run for run in runs if list(ids[place : place + len(run)]) == run), None)
            folded.append(ids[place] if run is None else self.processor.placeholder)
            place += 1 if run is None else len(run)
        return folded

    def _images_in(self, messages: Sequence[Message], more: Sequence[ImageData]) -> Iterator[ImageData]:
        by_name = {_name(image): image for image in (*self.all, *more)}
        of_prompt = iter(self._of_prompt)
        for message in messages:
            content = message.get("content")
            for part in content if isinstance(content, list) else ():
                if _is_image(part):
                    yield by_name[part[KEY]] if KEY in part else next(of_prompt)


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in IMAGE_PARTS


def _name(image: ImageData) -> str:
    return f"{image.key:011x}"


def _with_parts(message: Message, place: Any) -> Message:
    content = message.get("content")
    return {**message, "content": [place(part) for part in content]} if isinstance(content, list) else message
