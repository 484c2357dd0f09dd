"""Images of requests: what a forward pass over their prompts needs, and where their responses continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hone.data.image_processor import ImageProcessor
from hone.data.images import ImageData
from hone.data.ragged import Ragged
from hone.generation.protocol import GenerationRequest
from hone.models.images import images_by_key, rope_positions


@dataclass(frozen=True)
class PromptImages:
    """Images of the prompts of one forward pass."""

    by_key: Mapping[int, ImageData]  # the images
    positions: Tensor | None  # ``[3, 1, N]`` rotary positions of the new tokens; None where a token has one position


def prompt_images(
    processor: ImageProcessor, requests: Sequence[GenerationRequest], past: Sequence[int]
) -> PromptImages | None:
    """Return the images of prompts, of which the first ``past`` tokens are cached and the last comes later; None without images."""
    by_key = images_by_key(request.images for request in requests)
    if not by_key:
        return None
    if not processor.in_grid:
        return PromptImages(by_key, None)
    prompts = Ragged.from_rows([request.prompt_ids for request in requests], torch.int64)
    positions, _ = rope_positions(prompts, processor, by_key)
    parts = [
        positions[:, start + kept : end - 1]
        for start, end, kept in zip(prompts.offsets[:-1].tolist(), prompts.offsets[1:].tolist(), past, strict=True)
    ]
    return PromptImages(by_key, torch.cat(parts, 1)[:, None])


def rope_offsets(processor: ImageProcessor | None, requests: Sequence[GenerationRequest]) -> list[int]:
    """Return for each request how far the rotary positions of its response are from the numbers of its tokens."""
    by_key: dict[int, Any] = images_by_key(request.images for request in requests)
    if processor is None or not processor.in_grid or not by_key:
        return [0] * len(requests)
    prompts = Ragged.from_rows([request.prompt_ids for request in requests], torch.int64)
    return rope_positions(prompts, processor, by_key)[1].tolist()
