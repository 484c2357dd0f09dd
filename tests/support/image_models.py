"""Tiny models that read images, and images for them."""

from __future__ import annotations

import io
from pathlib import Path

from hone.data.images import ImageData
from hone.data.train_tokenizer import train_tokenizer
from hone.models.init import init_model

ARCHITECTURES = ("qwen2_5_vl", "qwen3_vl", "smolvlm")
_TEXT = "what colour is the shape? red green blue circle square user assistant system\n"


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
