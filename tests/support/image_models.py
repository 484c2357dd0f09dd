"""Tiny models that read images, and images for them."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hone.apps.lab.data.inspection import train_tokenizer
from hone.config.model import ModelConfig
from hone.data.batch import Batch
from hone.data.image_processor import ImageProcessor, load_image_processor
from hone.data.images import IMAGES, ImageData, key_of
from hone.data.ragged import Ragged
from hone.data.tokenizer import load_tokenizer
from hone.models.init import init_model
from hone.models.loading import load_policy
from hone.models.routing import attention_of

ARCHITECTURES = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "qwen3_5_vl", "qwen3_5_moe_vl", "gemma3", "gemma4")
ABOUT = pytest.mark.application("hone/models", "hone/generation/native", "hone/data/image_processor.py")
CASES = [
    pytest.param(name, marks=ABOUT) if name.startswith("qwen3_5") or name == "gemma4" else name
    for name in ARCHITECTURES
]
"""The architectures as parameters of a test; some of them run when a model, the engine or a processor changed."""
RED, BLUE = (220, 20, 20), (20, 20, 220)
_TEXT = "what colour is the shape? red green blue circle square user assistant system\n"


def keys_in(ids: Iterable[int]) -> list[int]:
    """Return the keys of the images in a row of token ids, each once, in order."""
    return list(dict.fromkeys(key_of(token) for token in ids if token < 0))


def as_text_ids(ids: Sequence[int], placeholder: int) -> list[int]:
    """Return ids of the vocabulary: each token of an image becomes the ``placeholder``."""
    return [placeholder if token < 0 else token for token in ids]


def image_model(folder: Path, arch: str, size: str = "1m") -> Path:
    """Make a model directory with random weights below a folder and return it."""
    text = folder / "text.txt"
    text.write_text(_TEXT * 4)
    train_tokenizer([text], folder / "tokenizer", vocab_size=290)
    init_model(arch, size, folder / "tokenizer", folder / arch)
    return folder / arch


def drawn(colour: tuple[int, int, int], size: tuple[int, int] = (70, 60), at: int = 10) -> ImageData:
    """Return an image with one square."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", size, (240, 240, 240))
    ImageDraw.Draw(image).rectangle([at, at, at + 20, at + 20], fill=colour)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return ImageData(buffer.getvalue())


def lively_policy(directory: Path) -> Any:
    """Load a policy and make its weights larger: small random ones give nearly uniform attention."""
    policy = load_policy(ModelConfig(path=str(directory)), device=torch.device("cpu"), seed=0)
    enliven(policy)
    return policy


def make_lively(directory: Path) -> Path:
    """Make the weights of a directory larger, in place, and return it."""
    from safetensors.torch import load_file, save_file

    weights, generator = load_file(directory / "model.safetensors"), torch.Generator().manual_seed(0)
    for name, value in weights.items():
        if value.dim() > 1:
            weights[name] = value + 0.05 * torch.randn(value.shape, generator=generator)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def enliven(policy: Any) -> None:
    """Make the weights larger."""
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)


@functools.cache
def processor_in(directory: Path) -> ImageProcessor:
    """Return the image processor of a model directory."""
    processor = load_image_processor(directory, load_tokenizer(directory))
    assert processor is not None
    return processor


@functools.cache
def rows_of(directory: Path) -> list[tuple[list[int], list[int], tuple[ImageData, ...]]]:
    """Return prompts with no, one and two images, responses, and their images."""
    tokenizer, processor = load_tokenizer(directory), processor_in(directory)

    def row(parts: list[dict[str, str]], images: tuple[ImageData, ...], answer: str) -> tuple:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        ids = processor.expand(tokenizer.encode(text, add_special_tokens=False), images)
        return ids, tokenizer.encode(answer, add_special_tokens=False), images

    image, ask = {"type": "image"}, {"type": "text", "text": "what colour?"}
    red, blue, wide = drawn(RED), drawn(BLUE), drawn(RED, (150, 64))
    return [
        row([image, ask], (red,), "red square"),
        row([image, ask], (red,), "red circle"),
        row([image, ask], (blue,), "blue"),
        row([image, ask, image, ask], (red, wide), "red red"),
        row([ask], (), "green"),
        row([ask, image, image], (wide, wide), "blue"),
    ]


def batch_of(rows: list) -> Batch:
    """Return a batch of such rows."""
    prompts, responses, images = zip(*rows, strict=True)
    ones = [[1] * len(response) for response in responses]
    return Batch(
        {
            "prompt_ids": Ragged.from_rows(list(prompts), torch.int64),
            "response_ids": Ragged.from_rows(list(responses), torch.int64),
            "response_mask": Ragged.from_rows(ones, torch.int64),
            IMAGES: list(images),
        }
    )


def random_rows(directory: Path, rows: int, seed: int) -> Batch:
    """Return random rows, some of them without images, with the columns of :func:`support.models.random_batch`.

    The first row is one of text.
    """
    some = rows_of(directory)
    generator = torch.Generator().manual_seed(seed)
    chosen = [4, *torch.randint(0, len(some), (rows - 1,), generator=generator).tolist()][:rows]
    batch = batch_of([some[number] for number in chosen])
    column = batch.ragged("response_ids")
    noise = {
        name: column.with_values(torch.randn(len(column.values), generator=generator))
        for name in ("advantages", "returns", "values", "noise")
    }
    return batch.with_columns(uid=[f"p{number}" for number in chosen], **noise)


def oracle(
    model: Any, directory: Path, prompt: list[int], response: list[int], images: tuple[ImageData, ...]
) -> torch.Tensor:
    """Log-probs of the response by transformers' forward pass over one sequence."""
    with attention_of(model, "eager"), torch.no_grad():
        logits = plain_logits(model, directory, [*prompt, *response], images)
    scores = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return scores.gather(1, torch.tensor(response)[:, None])[:, 0]


def plain_logits(model: Any, directory: Path, tokens: list[int], images: tuple[ImageData, ...]) -> torch.Tensor:
    """Logits ``[N, V]`` by transformers' forward pass over one sequence."""
    processor = processor_in(directory)
    ids = torch.tensor([as_text_ids(tokens, processor.filler)])
    values: dict[str, Any] = {}
    if images:
        pixels = [processor.pixels(image).values for image in images]
        values = {name: torch.cat([each[name] for each in pixels], processor.along) for name in pixels[0]}
        types = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}.get(model.config.model_type)
        if processor.in_grid or types:
            values[types or "mm_token_type_ids"] = (ids == processor.filler).int()
    if processor.in_grid:
        model.model.rope_deltas = None
    return model(input_ids=ids, **values, use_cache=False).logits[0]


def data_url(image: ImageData) -> str:
    """Return an image as a data: URL."""
    return "data:image/png;base64," + base64.b64encode(image.content).decode()
