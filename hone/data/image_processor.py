"""Image processor of a model: the tokens that replace an image's placeholder, and the pixels that the model reads.

Three families of models are known: grids (Qwen-VL), where an image of any size takes one token for each square of patches, tiles
(SmolVLM, Idefics3), where it is divided into tiles of one size with a fixed number of tokens each, and blocks between two marks
(Gemma), whose tokens see each other.
"""

from __future__ import annotations

import itertools
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
from hone.errors import DataError, HoneError, ModelError
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
    an image. ``filler``: token id in the place of each token of an image, where ids of the vocabulary are needed.
    """

    in_grid: bool = False  # whether the tokens of an image have rotary positions in rows and columns
    sees_ahead: bool = False  # whether the tokens of an image see its later ones, too
    only_in_windows: bool = False  # whether they do so in layers with a window alone
    along: int = 0  # dimension of the pixels along which images follow one another
    _options: dict[str, Any] = {}

    def __init__(
        self, settings: dict[str, Any], prepare: Any, tokenizer: PreTrainedTokenizerBase, directory: Path
    ) -> None:
        self.directory = directory
        self.placeholder = self.filler = _id(settings, "image")
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
        return [token for piece in self.pieces(ids, images, where) for token in piece]

    def pieces(self, ids: Sequence[int], images: Sequence[ImageData], where: str = "") -> list[list[int]]:
        """Return for each id what :meth:`expand` puts in its place."""
        places = sum(token == self.placeholder for token in ids)
        if places != len(images):
            raise DataError(
                f"the rendered text has {places} places for images, and there are {len(images)} images",
                why="each image belongs to one place in the text",
                fix="write <image> in the text once for each image of the row, and use a chat template that renders image parts",
                where=where,
            )
        rest = iter(images)
        return [list(self.tokens(next(rest))) if token == self.placeholder else [token] for token in ids]

    def count_more(self, messages: list[dict[str, Any]], images: Sequence[ImageData]) -> int:
        """Return how many tokens the images add to rendered messages besides their placeholders."""
        del messages
        return sum(len(self.tokens(image)) - 1 for image in images)

    def fold(self, ids: Sequence[int], images: Sequence[ImageData]) -> list[int]:
        """Return ids with one placeholder for each image, as they were before :meth:`expand`."""
        runs = [self.tokens(image) for image in images]
        folded, place = list[int](), 0
        while place < len(ids):
            run = next((run for run in runs if list(ids[place : place + len(run)]) == run), None)
            folded.append(ids[place] if run is None else self.placeholder)
            place += 1 if run is None else len(run)
        return folded

    @abstractmethod
    def blank(self) -> Pixels:
        """Return the smallest input of the vision tower; no token refers to it."""

    @abstractmethod
    def _convert(self, image: ImageData, encoded: Any) -> Pixels:
        """Return the pixels of an image that transformers' processor has prepared."""


class GridProcessor(ImageProcessor):
    """Processor of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5."""

    in_grid = True

    def tokens(self, image: ImageData) -> list[int]:
        """Return the token ids that replace one placeholder, from the size of the image alone."""
        if not self._prepare.do_resize:
            return super().tokens(image)
        width, height = image.size
        try:
            patches = self._prepare.get_number_of_image_patches(height, width)
        except ValueError as error:
            raise _not_read(width, height, error) from error
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

    along = 1  # tiles of all images are those of one sample
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


class BlockProcessor(ImageProcessor):
    """Processor of Gemma: the tokens of an image between two marks."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._begin, self._end = _id(self._settings, "boi"), _id(self._settings, "eoi")

    def tokens(self, image: ImageData) -> list[int]:
        """Return the token ids that replace one placeholder, from the size of the image alone."""
        return [self._begin, *token_ids(image.key, self._count(*image.size)), self._end]

    @abstractmethod
    def _count(self, width: int, height: int) -> int:
        """Return how many tokens an image of this size takes."""


class Gemma3Processor(BlockProcessor):
    """Processor of Gemma 3: images of one size, with an empty line before and after each.

    The placeholder is the mark before an image. Ends of lines next to one another are one token, as the tokenizer writes them.
    """

    sees_ahead = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.placeholder = self._begin
        self._ends_of_lines: dict[int, int] = {}
        if self._prepare.do_pan_and_scan:
            raise DataError(
                f"preprocessor_config.json of '{self.directory}' has do_pan_and_scan=true",
                why="parts of an image would follow it, which Hone does not cut out",
                fix="do_pan_and_scan=false there",
                where="model.path",
            )

    def pieces(self, ids: Sequence[int], images: Sequence[ImageData], where: str = "") -> list[list[int]]:
        return self._with_lines(ids, super().pieces(ids, images, where), 2)

    def count_more(self, messages: list[dict[str, Any]], images: Sequence[ImageData]) -> int:
        from hone.data.chat import render_prompt  # it reads rows, which an engine's environment cannot

        try:
            ids = render_prompt(self._tokenizer, messages)
        except HoneError:  # the check of templates reports it
            return super().count_more(messages, images)
        return len(self.expand(ids, images)) - len(ids)

    def fold(self, ids: Sequence[int], images: Sequence[ImageData]) -> list[int]:
        ids = super().fold(ids, images)
        return [token for piece in self._with_lines(ids, [[token] for token in ids], -2) for token in piece]

    def _with_lines(self, ids: Sequence[int], pieces: list[list[int]], more: int) -> list[list[int]]:
        """Move the ends of lines that touch an image into its piece, ``more`` of them on each side."""
        for touches, places in itertools.groupby(range(len(ids)), key=lambda place: self._may_touch(ids[place])):
            group, lines, last = list(places), more, -1
            if not touches or all(ids[place] != self.placeholder for place in group):
                continue
            for place in group:
                if ids[place] == self.placeholder:
                    pieces[place] = [*self._lines(lines), *pieces[place]]
                    lines, last = 2 * more, place
                else:
                    lines, pieces[place] = lines + self._count_lines(ids[place]), []
            pieces[last] += self._lines(lines - more)
        return pieces

    def blank(self) -> Pixels:
        side = int(self._settings["vision_config"]["image_size"])
        return Pixels({"pixel_values": torch.ones(1, 3, side, side)}, [])

    def _may_touch(self, token: int) -> bool:
        return token == self.placeholder or self._count_lines(token) > 0

    def _count_lines(self, token: int) -> int:
        """Return how many lines a token ends; 0 if it is anything else."""
        if token not in self._ends_of_lines:
            text = str(self._tokenizer.decode([token])) if token >= 0 else "-"
            self._ends_of_lines[token] = 0 if text.strip("\n") else len(text)
        return self._ends_of_lines[token]

    def _lines(self, count: int) -> list[int]:
        return self._tokenizer.encode("\n" * count, add_special_tokens=False)

    def _count(self, width: int, height: int) -> int:
        return int(self._settings["mm_tokens_per_image"])

    def _convert(self, image: ImageData, encoded: Any) -> Pixels:
        return Pixels(_tensors(encoded, "pixel_values"), self.tokens(image))


class Gemma4Processor(BlockProcessor):
    """Processor of Gemma 4: images of any size, of which larger models see each whole in the layers with a window."""

    only_in_windows = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.sees_ahead = self._settings["text_config"].get("use_bidirectional_attention") == "vision"

    def blank(self) -> Pixels:
        patches, numbers = self._prepare.pooling_kernel_size**2, 3 * self._prepare.patch_size**2
        places = torch.cartesian_prod(*[torch.arange(self._prepare.pooling_kernel_size)] * 2)
        return Pixels({"pixel_values": torch.ones(1, patches, numbers), "image_position_ids": places[None]}, [])

    def _count(self, width: int, height: int) -> int:
        from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

        patch, pool = int(self._prepare.patch_size), int(self._prepare.pooling_kernel_size)
        if self._prepare.do_resize:
            most = int(self._prepare.max_soft_tokens) * pool**2
            try:
                height, width = get_aspect_ratio_preserving_size(height, width, patch, most, pool)
            except ValueError as error:
                raise _not_read(width, height, error) from error
        return (height // patch) * (width // patch) // pool**2

    def _convert(self, image: ImageData, encoded: Any) -> Pixels:
        return Pixels(_tensors(encoded, "pixel_values", "image_position_ids"), self.tokens(image))


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
    "qwen3_5": GridProcessor,
    "qwen3_5_moe": GridProcessor,
    "smolvlm": TileProcessor,
    "idefics3": TileProcessor,
    "gemma3": Gemma3Processor,
    "gemma4": Gemma4Processor,
}
"""Processor of each ``model_type`` whose images are read."""


def reads_images(settings: Mapping[str, Any]) -> bool:
    """Return whether Hone reads images with the model of a ``config.json``; with another one it reads text alone."""
    return settings.get("model_type") in PROCESSORS


def refuse_unread(settings: Mapping[str, Any]) -> None:
    """Raise ModelError for a model that transformers has for images alone, if Hone does not read them."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    kind, others = settings.get("model_type"), {*PROCESSORS, *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and kind not in others:
        raise ModelError(
            f"Hone does not read images with a model of type {kind}",
            why="where the tokens of its images are, and which tokens see each other, is not known for it",
            fix=f"a model of one of the types {', '.join(PROCESSORS)}, or of text alone (docs/images.md)",
            where="model.path",
            code="R86",
        )


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


def _id(settings: Mapping[str, Any], name: str) -> int:
    """Return the id of a special token, under either of its keys in a ``config.json``."""
    return int(settings[f"{name}_token_id" if f"{name}_token_id" in settings else f"{name}_token_index"])


def _not_read(width: int, height: int, error: ValueError) -> DataError:
    return DataError(f"an image of {width} x {height} pixels is not read: {error}", fix="crop it, or leave the row out")
