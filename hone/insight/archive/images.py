"""Images of archived samples: files in the folder ``images`` of the archive, under the key that their token ids have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hone.data.images import ImageData, key_of, place_of
from hone.errors import HoneError
from hone.insight.run_files import atomic_file

FOLDER = "images"
SUFFIXES = (".png", ".jpg", ".webp", ".gif", ".image")


def name_of(key: int) -> str:
    return f"{key:011x}"


def keys_in(ids: Sequence[int]) -> list[int]:
    """Return the keys of the images in a row of token ids, one for each place, in order."""
    return [key_of(token) for token in ids if token < 0 and place_of(token) == 0]


def write_image(archive: Path, image: ImageData) -> None:
    """Write an image to an archive, unless it is there."""
    path = archive / FOLDER / f"{name_of(image.key)}{image.suffix}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write(image.content)


def find_image(archive: Path, key: int) -> ImageData | None:
    """Return the image of a key; None if the archive does not have it."""
    files = (archive / FOLDER / f"{name_of(key)}{suffix}" for suffix in SUFFIXES)
    file = next((file for file in files if file.is_file()), None)
    return None if file is None else ImageData(file.read_bytes())


def images_of(archive: Path, ids: Sequence[int]) -> tuple[ImageData, ...]:
    """Return the images of a row of token ids, one for each place, in order.

    Raises HoneError: the archive does not have one (code E-runs).
    """
    by_key: dict[int, ImageData] = {}
    for key in keys_in(ids):
        image = by_key.get(key) or find_image(archive, key)
        if image is None or image.key != key:
            raise HoneError(
                f"the image {name_of(key)} of a stored sample is missing",
                why="the model would not see what it saw in the run",
                where=str(archive / FOLDER),
                fix=f"copy the folder {FOLDER} of the run with its samples",
                code="E-runs",
            )
        by_key[key] = image
    return tuple(by_key[key] for key in keys_in(ids))
