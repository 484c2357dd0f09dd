"""Images in prompts: their content, and the token ids that represent them.

An image takes as many tokens as its model computes for it. Each of them has an id below 0, made of the image's content and the
number of the token within the image:

    text                    12  845  7                        ids of the vocabulary
    image                   token_ids(image.key, 4)           four ids, equal only for the same place in the same image

Tokens that are equal stay equal inputs of the model. So prefix sharing, the session cache and every comparison of token ids are right
for images without knowing them, and a row of ids says where its pixels belong. Only the model's input layer and text decoding treat
such ids differently.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hone.errors import DataError
from hone.extras import install_command

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

Tokens = TypeVar("Tokens", "int", "Tensor")
PLACE_BITS = 18  # bits of the number of a token within its image
KEY_BITS = 44  # bits of an image's key
IMAGES = "images"  # column of a batch: a tuple of images for each row
IMAGE_MARK = "<image>"  # text of an image
REST_OF_IMAGE = "▪"  # text of a token of an image after its first, where each token has a text
IMAGE_PARTS = ("image", "image_url", "input_image")
"""Types of a message's parts that are images, of transformers and of OpenAI's two APIs."""
MAX_PIXELS = 64_000_000  # largest image that is opened, in pixels
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats that are read: others start programs (EPS: Ghostscript) or decoders that few files need."""
_ORIENTATION, _ON_ITS_SIDE = 0x0112, 5
"""EXIF's key of the orientation, and the first of its values for an image on its side."""
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""Pillow's ``Transpose`` that makes an image of each orientation upright."""
_END_OF_JPEG = b"\xff\xd9"


@dataclass(frozen=True)
class ImageData:
    """One image, as an encoded file."""

    content: bytes  # content of a file that Pillow reads (PNG, JPEG, WebP, ...)

    @cached_property
    def key(self) -> int:
        """Number of :data:`KEY_BITS` bits from the content; images with equal content have the same."""
        digest = hashlib.sha256(self.content).digest()
        return int.from_bytes(digest[:8], "big") >> (64 - KEY_BITS)

    @property
    def suffix(self) -> str:
        """Return the ending of a file with the content, by its first bytes: ``.png``, ``.jpg``, ``.webp``, ``.gif`` or ``.image``."""
        if self.content[:4] == b"RIFF" and self.content[8:12] == b"WEBP":
            return ".webp"
        heads = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif"}
        return next((name for head, name in heads.items() if self.content.startswith(head)), ".image")

    @cached_property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, from the head of the file if the rest of it is whole.

        A PNG is whole if its checksums are right, a JPEG if it has an end. Other files are decoded. Raises DataError:
        the content is not an image, or has more than :data:`MAX_PIXELS` pixels.
        """
        if self.suffix == ".png" or (self.suffix == ".jpg" and _END_OF_JPEG in self.content[-64:]):
            turned, size, _ = self._opened(lambda image: (_orientation(image), image.size, image.verify()))
            return size[::-1] if turned >= _ON_ITS_SIDE else size
        return self.open().size

    def open(self) -> Image:
        """Return the decoded image in RGB, upright by its EXIF data.

        Raises DataError: the content is not an image, or has more than :data:`MAX_PIXELS` pixels.
        """
        return self._opened(lambda image: upright(image).convert("RGB"))

    def _opened(self, use: Callable[[Any], Any]) -> Any:
        image_module = pillow()
        try:
            with image_module.open(io.BytesIO(self.content), formats=_FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise DataError(
                        f"an image has {image.width} x {image.height} pixels, the limit is {MAX_PIXELS}",
                        why="decoding it could exhaust the memory",
                        fix="store it smaller: models scale it down anyway",
                    )
                return use(image)
        except (OSError, SyntaxError, ValueError, struct.error, image_module.DecompressionBombError) as error:
            raise DataError(
                f"an image cannot be decoded: {error}",
                why="the model would not see what the text is about",
                fix="store the content of a PNG, JPEG, WebP or GIF file",
            ) from error


def read_image(value: Any, where: str, folder: Path | None = None, *, reads: bool = True) -> ImageData:
    """Return the image of a dataset's value.

    Args:
        value: content of a file (bytes), a path, a ``data:`` URL, a Pillow image, or a dict with one of them under ``bytes``,
            ``path``, ``image``, ``image_url`` or ``url`` (Hugging Face's feature, a message's part).
        where: file and row, for messages.
        folder: of relative paths; None: the current one.
        reads: whether files are read and URLs decoded; otherwise a file must only exist, and the image has no content.

    Raises:
        DataError: it is none of these, or the file does not exist.
    """
    if isinstance(value, ImageData):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return ImageData(bytes(value))
    if isinstance(value, Mapping):
        for name in ("bytes", "image", "image_url", "url", "path"):
            if value.get(name) is not None:
                return read_image(value[name], where, folder, reads=reads)
    if isinstance(value, str | Path) and value:
        return _from_text(str(value), where, folder, reads)
    if hasattr(value, "save") and hasattr(value, "convert"):
        picture: Any = value
        buffer = io.BytesIO()
        upright(picture).convert("RGB").save(buffer, "PNG")
        return ImageData(buffer.getvalue())
    raise DataError(
        f"an image is a {type(value).__name__}",
        where=where,
        why="the model would not see it",
        fix="store the content of the file as bytes, its path, or a data: URL",
    )


def _from_text(text: str, where: str, folder: Path | None, reads: bool) -> ImageData:
    if text.startswith("data:"):
        if not reads:
            return ImageData(b"")
        head, _, body = text.partition(",")
        try:
            return ImageData(base64.b64decode(body, validate=True) if head.endswith(";base64") else body.encode())
        except binascii.Error as error:
            raise DataError(f"a data: URL is not base64: {error}", where=where, fix="encode the file again") from error
    if text.startswith(("http://", "https://")):
        raise DataError(
            f"an image is at {text[:80]}",
            where=where,
            why="training reads no images from the network, where they may change or fail",
            fix="download it, and store its path or content",
        )
    path = Path(text.removeprefix("file://")).expanduser()
    path = path if path.is_absolute() or folder is None else folder / path
    try:
        if not reads:
            path.stat()
        return ImageData(path.read_bytes() if reads else b"")
    except OSError as error:
        raise DataError(
            f"cannot read the image '{path}': {error.strerror or error}",
            where=where,
            fix="check the path; relative paths start at the folder of the dataset's file",
        ) from error


def content_text(content: Any) -> str:
    """Return the text of a message's content (a string, parts or nothing), with :data:`IMAGE_MARK` at the place of each image.

    >>> content_text([{"type": "image"}, {"type": "text", "text": "What is it?"}])
    '<image>What is it?'
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(map(_part_text, content)) if isinstance(content, Sequence) else str(content)


def _part_text(part: Any) -> str:
    if not isinstance(part, Mapping):
        return part if isinstance(part, str) else ""
    return IMAGE_MARK if part.get("type") in IMAGE_PARTS else str(part.get("text", ""))


def images_column(
    images: Sequence[tuple[ImageData, ...]], *, always: bool = False
) -> dict[str, list[tuple[ImageData, ...]]]:
    """Return the column :data:`IMAGES` of a batch, given those of its rows; no column if no row has one, unless ``always``."""
    return {IMAGES: list(images)} if always or any(images) else {}


def token_ids(key: int, count: int) -> list[int]:
    """Return the ids of the ``count`` tokens of an image.

    >>> [place_of(token) for token in token_ids(5, 3)], {key_of(token) for token in token_ids(5, 3)}
    ([0, 1, 2], {5})
    """
    if count > 1 << PLACE_BITS:
        raise DataError(
            f"an image takes {count} tokens, the limit is {1 << PLACE_BITS}", fix="lower the processor's largest size"
        )
    first = -(key << PLACE_BITS) - 1
    return list(range(first, first - count, -1))


def is_image(token: int) -> bool:
    return token < 0


def key_of(token: Tokens) -> Tokens:
    """Return the key of the image of a token; of tensors of tokens too."""
    return (-token - 1) >> PLACE_BITS


def place_of(token: Tokens) -> Tokens:
    """Return the number of a token within its image; of tensors of tokens too."""
    return (-token - 1) & ((1 << PLACE_BITS) - 1)


def image_runs(ids: Sequence[int]) -> int:
    """Return how many runs of consecutive tokens of one image there are.

    >>> image_runs([5, *token_ids(1, 3), *token_ids(1, 3), 7, *token_ids(2, 2)])
    3
    """
    before = itertools.chain([0], ids)
    pairs = zip(before, ids, strict=False)
    return sum(token < 0 and not (previous < 0 and token == previous - 1) for previous, token in pairs)


def upright(picture: Any) -> Any:
    turned = _orientation(picture)
    return picture if turned == 1 else picture.transpose(_TURNS[turned])


def _orientation(picture: Any) -> int:
    """Return the orientation, 1 to 8, without decoding the image."""
    exif = pillow().Exif()
    exif.load(getattr(picture, "info", {}).get("exif") or b"")
    turned = exif.get(_ORIENTATION)
    return turned if turned in _TURNS else 1


def pillow() -> Any:
    """Return the module ``PIL.Image``. Raises DataError: Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            "the rows have images, and Pillow is not installed",
            why="it decodes them",
            fix=install_command("images"),
        ) from error
    return Image
