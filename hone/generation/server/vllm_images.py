"""Images in prompts for vLLM: pixels and tokens as the trainer computes them.

vLLM's processor of a model would prepare the pixels with other kernels, and expand a placeholder by itself. Here both come from Hone's
processor, so that engine and trainer compute the same inputs. vLLM gets the prompt with a placeholder for each token of an image, the
pixels, and where they belong.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hone.data.image_processor import ImageProcessor
from hone.data.images import ImageData, key_of, place_of
from hone.generation.protocol import GenerationRequest
from hone.generation.remote.images import name_of

OPTIONS: dict[str, Any] = {
    "limit_mm_per_prompt": {"video": 0},
    "mm_device_do_normalize": False,
    "mm_processor_cache_gb": 0,
}
"""Arguments of vLLM for a model that reads images: pixels arrive normalised, and videos have no place in its memory."""


class ImagePrompts:
    """Maker of prompts with images, for models of a grid (Qwen-VL)."""

    def __init__(self, processor: ImageProcessor, renderer: Any) -> None:
        self._processor, self._renderer = processor, renderer

    def prompt(self, request: GenerationRequest) -> Any:
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import PlaceholderRange

        by_key = {image.key: image for image in request.images}
        starts = [index for index, token in enumerate(request.prompt_ids) if token < 0 and place_of(token) == 0]
        shown = [by_key[key_of(request.prompt_ids[start])] for start in starts]
        ranges = [
            PlaceholderRange(start, self._processor.pixels(image).count)
            for start, image in zip(starts, shown, strict=True)
        ]
        return mm_input(
            [self._processor.placeholder if token < 0 else token for token in request.prompt_ids],
            self._items(shown),
            {"image": [name_of(image) for image in shown]},
            {"image": ranges},
        )

    def _items(self, images: Sequence[ImageData]) -> Any:
        """Return vLLM's arguments for the vision tower."""
        from transformers import BatchFeature
        from vllm.multimodal.inputs import MultiModalKwargsItems

        pixels = [self._processor.pixels(image).values for image in images]
        features = BatchFeature({name: torch.cat([one[name] for one in pixels]) for name in pixels[0]})
        fields = self._renderer.get_mm_processor()._get_mm_fields_config(features, {})
        return MultiModalKwargsItems.from_hf_inputs(features, fields)
