"""Image processor of a model: the tokens that replace an image's placeholder, and the pixels that the model reads.

Two families of models are known: grids (Qwen-VL), where an image of any size takes one token a merged patch, and tiles (SmolVLM,
Idefics3), where it is divided into tiles of one size with a fixed number of tokens each.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hone.data.images import ImageData, token_ids
from hone.errors import DataError

GRID_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
TILE_MODELS = ("smolvlm", "idefics3")
IMAGE_MODELS = (*GRID_MODELS, *TILE_MODELS)
"""Model types whose images are read."""
_MOST_KEPT = 256


@dataclass(frozen=True)
class Pixels:
    """An image as its model reads it.

    Attributes:
        values: inputs of the model's vision tower, by name of its parameter.
        count: number of tokens with features of the image.
        grid: rows and columns of these tokens; None for tiles.
    """

    values: dict[str, Tensor]
    count: int
    grid: tuple[int, int] | None = None


@dataclass
class ImageProcessor:
    """Processor of one model's images.

    Attributes:
        placeholder: token id that the chat template writes for an image.
        prepare: transformers' image processor, by Pillow.
        tokens_of: returns the ids that replace one placeholder.
    """

    placeholder: int
    prepare: Any
    convert: Callable[[Any], Pixels]
    tokens_of: Callable[[ImageData, Any], list[int]]
    _kept: OrderedDict[int, tuple[ImageData, Pixels, list[int]]] = field(default_factory=OrderedDict)

    def pixels(self, image: ImageData) -> Pixels:
        """Return the image as the vision tower reads it; the last ones are kept."""
        return self._entry(image)[1]

    def tokens(self, image: ImageData) -> list[int]:
        """Return the token ids of an image, with the text tokens around its parts."""
        return self._entry(image)[2]

    def expand(self, ids: Sequence[int], images: Sequence[ImageData], where: str = "") -> list[int]:
        """Replace each placeholder by the tokens of its image, in order.

        Raises:
            DataError: there are not as many placeholders as images.
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

    def _entry(self, image: ImageData) -> tuple[ImageData, Pixels, list[int]]:
        entry = self._kept.get(image.key)
        if entry is None or entry[0].content != image.content:
            encoded = self.prepare(images=[image.open()], return_tensors="np")
            entry = (image, self.convert(encoded), self.tokens_of(image, encoded))
            self._kept[image.key] = entry
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(image.key)
        return entry


def load_image_processor(path: str, tokenizer: PreTrainedTokenizerBase) -> ImageProcessor | None:
    """Return the processor of the model in a directory; None for a model of text.

    Raises:
        DataError: it is a model for images whose processor is missing or unknown.
    """
    settings = json.loads((Path(path) / "config.json").read_text()) if (Path(path) / "config.json").is_file() else {}
    kind = settings.get("model_type")
    if "vision_config" not in settings:
        return None
    if kind not in IMAGE_MODELS:
        raise DataError(
            f"images of a '{kind}' model are not read",
            where="model.path",
            fix=f"use one of {', '.join(IMAGE_MODELS)}",
            code="R86",
        )
    from transformers import AutoImageProcessor

    try:
        prepare = AutoImageProcessor.from_pretrained(path, backend="pil", local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise DataError(
            f"cannot load the image processor of '{path}': {str(error).splitlines()[0]}",
            why="it makes the model's input of an image",
            fix="copy preprocessor_config.json of the model into the directory, and install Pillow: pip install 'hone-rl[images]'",
            where="model.path",
        ) from error
    placeholder = int(settings["image_token_id"])
    if kind in GRID_MODELS:
        merge = int(prepare.merge_size)

        def grid_pixels(encoded: Any) -> Pixels:
            frames, rows, columns = (int(size) for size in encoded["image_grid_thw"][0])
            grid = (rows // merge, columns // merge)
            return Pixels(_tensors(encoded, "pixel_values", "image_grid_thw"), frames * grid[0] * grid[1], grid)

        def grid_tokens(image: ImageData, encoded: Any) -> list[int]:
            return token_ids(image.key, grid_pixels(encoded).count)

        return ImageProcessor(placeholder, prepare, grid_pixels, grid_tokens)
    return _tiles(settings, prepare, placeholder, tokenizer)


def _tiles(
    settings: dict[str, Any], prepare: Any, placeholder: int, tokenizer: PreTrainedTokenizerBase
) -> ImageProcessor:
    vision = settings["vision_config"]
    length = int((vision["image_size"] // vision["patch_size"]) ** 2 / settings.get("scale_factor", 2) ** 2)
    names = {"around": "<fake_token_around_image>", "whole": "<global-img>"}
    around, whole = (
        str(getattr(tokenizer, f"{name}_image_token", text))
        for name, text in zip(("fake", "global"), names.values(), strict=True)
    )
    image_token = str(tokenizer.convert_ids_to_tokens(placeholder))

    def pixels(encoded: Any) -> Pixels:
        values = _tensors(encoded, "pixel_values", "pixel_attention_mask")
        return Pixels(values, length * values["pixel_values"].shape[1])

    def tokens(image: ImageData, encoded: Any) -> list[int]:
        rows, columns = (int(encoded[name][0][0]) for name in ("rows", "cols"))
        tile = image_token * length
        lines = [
            "".join(f"{around}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        text = "".join(lines) + ("\n" if lines else "") + f"{around}{whole}{tile}{around}"
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        parts = iter(token_ids(image.key, ids.count(placeholder)))
        return [next(parts) if token == placeholder else token for token in ids]

    return ImageProcessor(placeholder, prepare, pixels, tokens)


def _tensors(encoded: Any, *names: str) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.asarray(encoded[name])) for name in names if name in encoded}
