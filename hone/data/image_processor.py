"""Image processor of a model: the tokens that replace an image's placeholder, and the pixels that the model reads.

Two families of models are known: grids (Qwen-VL), where an image of any size takes one token for each square of patches, and tiles
(SmolVLM, Idefics3), where it is divided into tiles of one size with a fixed number of tokens each.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hone.data.images import ImageData, token_ids
from hone.data.model_settings import read_settings
from hone.errors import DataError
from hone.extras import install_command

_MOST_KEPT = 256  # images whose pixels a processor keeps


@dataclass(frozen=True)
class Pixels:
    """An image as its model reads it."""

    values: dict[str, Tensor]  # inputs of the model's vision tower, by name of its parameter
    ids: list[int]  # token ids that replace one placeholder: those of the image, and of text around its parts
    grid: tuple[int, int] | None = None  # rows and columns of the image's tokens; None for tiles

    @property
    def count(self) -> int:
        """Number of tokens with features of the image."""
        return sum(token < 0 for token in self.ids)


class ImageProcessor(ABC):
    """Processor of one model's images.

    ``prepare``: transformers' image processor, by Pillow. ``placeholder``: token id that the chat template writes for
    an image.
    """

    in_grid: bool  # whether the tokens of an image have rotary positions in rows and columns
    _options: dict[str, Any] = {}

    def __init__(
        self, settings: dict[str, Any], prepare: Any, tokenizer: PreTrainedTokenizerBase, directory: Path
    ) -> None:
        self.directory = directory
        self.placeholder = int(settings["image_token_id"])
        self._settings, self._prepare, self._tokenizer = settings, prepare, tokenizer
        self._kept: OrderedDict[bytes, Pixels] = OrderedDict()

    def pixels(self, image: ImageData) -> Pixels:
        """Return the image as the vision tower reads it; those of the last images are kept."""
        pixels = self._kept.pop(image.content, None)
        if pixels is None:
            pixels = self._convert(image, self._prepare(images=[image.open()], return_tensors="np", **self._options))
        self._kept[image.content] = pixels
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return pixels

    def tokens(self, image: ImageData) -> list[int]:
        return self.pixels(image).ids

    def expand(self, ids: Sequence[int], images: Sequence[ImageData], where: str = "") -> list[int]:
        """Replace each placeholder by the tokens of its image, in order.

        Raises DataError: there are not as many placeholders as images.
        """
        places = sum(token == self.placeholder for token in ids)
        if places != len(images):
            raise DataError(
                f"the rendered text has {places} places for images, and there are {len(images)} images",
                why="each image belongs to one place in the text",
                fix="write <image> in the text once for each image of the row, and use a chat template that renders image parts",
                where=where,
            )
        rest = iter(images)
        expanded: list[int] = []
        for token in ids:
            expanded += self.tokens(next(rest)) if token == self.placeholder else [token]
        return expanded

    @abstractmethod
    def blank(self) -> Pixels:
        """Return the smallest input of the vision tower; no token refers to it."""

    @abstractmethod
    def _convert(self, image: ImageData, encoded: Any) -> Pixels:
        """Return the pixels of an image that transformers' processor has prepared."""


class GridProcessor(ImageProcessor):
    """Processor of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

    in_grid = True

    def tokens(self, image: ImageData) -> list[int]:
        """Return the token ids that replace one placeholder, from the size of the image alone."""
        if not self._prepare.do_resize:
            return super().tokens(image)
        width, height = image.size
        try:
            patches = self._prepare.get_number_of_image_patches(height, width)
        except ValueError as error:
            raise DataError(
                f"an image of {width} x {height} pixels is not read: {error}", fix="crop it, or leave the row out"
            ) from error
        return token_ids(image.key, int(patches) // int(self._prepare.merge_size) ** 2)

    def blank(self) -> Pixels:
        merge, patch = int(self._prepare.merge_size), int(self._prepare.patch_size)
        numbers = 3 * int(self._prepare.temporal_patch_size) * patch**2
        grid = torch.tensor([[1, merge, merge]])
        return Pixels({"pixel_values": torch.ones(merge**2, numbers), "image_grid_thw": grid}, [])

    def _convert(self, image: ImageData, encoded: Any) -> Pixels:
        frames, *sides = (int(size) for size in encoded["image_grid_thw"][0])
        rows, columns = (side // int(self._prepare.merge_size) for side in sides)
        ids = token_ids(image.key, frames * rows * columns)
        return Pixels(_tensors(encoded, "pixel_values", "image_grid_thw"), ids, (rows, columns))


class TileProcessor(ImageProcessor):
    """Processor of SmolVLM and Idefics3: tiles in rows, and the whole image after them, each between marks."""

    in_grid = False
    _options: dict[str, Any] = {"return_row_col_info": True}

    def blank(self) -> Pixels:
        side = int(self._settings["vision_config"]["image_size"])
        mask = torch.ones(1, 1, side, side, dtype=torch.int64)
        return Pixels({"pixel_values": torch.ones(1, 1, 3, side, side), "pixel_attention_mask": mask}, [])

    def _convert(self, image: ImageData, encoded: Any) -> Pixels:
        vision, scale = self._settings["vision_config"], self._settings.get("scale_factor", 2)
        length = int((vision["image_size"] // vision["patch_size"]) ** 2 / scale**2)
        around = str(getattr(self._tokenizer, "fake_image_token", "<fake_token_around_image>"))
        whole = str(getattr(self._tokenizer, "global_image_token", "<global-img>"))
        tile = str(self._tokenizer.convert_ids_to_tokens(self.placeholder)) * length
        rows, columns = (int(encoded[name][0][0]) for name in ("rows", "cols"))
        lines = [
            "".join(f"{around}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        text = "".join(lines) + ("\n" if lines else "") + f"{around}{whole}{tile}{around}"
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        parts = iter(token_ids(image.key, ids.count(self.placeholder)))
        ids = [next(parts) if token == self.placeholder else token for token in ids]
        return Pixels(_tensors(encoded, "pixel_values", "pixel_attention_mask"), ids)


PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of a model directory that say how its images and videos are processed."""


def copy_processor(source: str | Path, target: str | Path) -> None:
    for name in PROCESSOR_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, Path(target) / name)


PROCESSORS: dict[str, type[ImageProcessor]] = {
    "qwen2_vl": GridProcessor,
    "qwen2_5_vl": GridProcessor,
    "qwen3_vl": GridProcessor,
    "smolvlm": TileProcessor,
    "idefics3": TileProcessor,
}
"""Processor of each ``model_type`` whose images are read."""


def reads_images(settings: Mapping[str, Any]) -> bool:
    """Return whether Hone reads images with the model of a ``config.json``; with another one it reads text alone."""
    return settings.get("model_type") in PROCESSORS


def load_image_processor(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> ImageProcessor | None:
    """Return the processor of the model in a directory; None if its images are not read.

    Raises DataError: the processor of the model cannot be loaded.
    """
    settings = read_settings(path)
    if not reads_images(settings):
        return None
    from transformers import AutoImageProcessor

    try:
        prepare = AutoImageProcessor.from_pretrained(path, backend="pil", local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise DataError(
            f"cannot load the image processor of '{path}': {str(error).splitlines()[0]}",
            why="it makes the model's input of an image",
            fix=f"copy preprocessor_config.json of the model into the directory, and install Pillow: {install_command('images')}",
            where="model.path",
        ) from error
    return PROCESSORS[settings["model_type"]](settings, prepare, tokenizer, Path(path))


def _tensors(encoded: Any, *names: str) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.asarray(encoded[name])) for name in names if name in encoded}
