"""Questions about an image with coloured shapes in its corners, for models that read images.

    name       <image>What is top left?                  red circle
    colour     <image>What colour is top left?           red
    shape      <image>What shape is top left?            circle
    count      <image>How many are red?                  2
    describe   <image>What is there?                     red circle top left, blue cross bottom right

Size and place of the shapes, and the grey of the background, vary. Answers are a word or two, so that a small model learns the
task in minutes.
"""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from hone.data.images import IMAGE_MARK, pillow
from hone.data.tasks.base import Problem, require, task
from hone.errors import did_you_mean

COLOURS = {
    "red": (210, 30, 30), "green": (20, 150, 40), "blue": (30, 50, 210), "yellow": (235, 205, 20), "black": (20, 20, 20),
    "pink": (245, 120, 190),
}  # fmt: skip
CORNERS = ("top left", "top right", "bottom left", "bottom right")

Box = tuple[float, float, float, float]


def _triangle(draw: Any, box: Box, colour: Any) -> None:
    left, top, right, bottom = box
    draw.polygon([(left, bottom), (right, bottom), ((left + right) / 2, top)], fill=colour)


def _cross(draw: Any, box: Box, colour: Any) -> None:
    left, top, right, bottom = box
    third = (right - left) / 3
    draw.rectangle((left + third, top, right - third, bottom), fill=colour)
    draw.rectangle((left, top + third, right, bottom - third), fill=colour)


SHAPES: dict[str, Callable[[Any, Box, Any], object]] = {
    "circle": lambda draw, box, colour: draw.ellipse(box, fill=colour),
    "square": lambda draw, box, colour: draw.rectangle(box, fill=colour),
    "triangle": _triangle,
    "cross": _cross,
}
KINDS = ("name", "colour", "shape", "count", "describe")


@dataclass(frozen=True)
class ShapesOptions:
    """Options of the task."""

    kind: str = "name"  # question: ``name``, ``colour``, ``shape``, ``count`` or ``describe``
    colours: int = 3  # number of colours, 2 to 6
    shapes: int = 3  # number of shapes, 1 to 4
    side: int = 64  # width and height of the image in pixels
    drawn: int = 4  # number of corners with a shape, 1 to 4


@task("shapes", ShapesOptions)
class Shapes:
    data_source = "shapes"

    def __init__(self, options: ShapesOptions) -> None:
        check = partial(require, "shapes")
        check(options.kind in KINDS, f"unknown kind '{options.kind}'", did_you_mean(options.kind, KINDS))
        check(2 <= options.colours <= len(COLOURS), f"colours={options.colours} is not in 2..6", "colours=3")
        check(1 <= options.shapes <= len(SHAPES), f"shapes={options.shapes} is not in 1..4", "shapes=3")
        check(16 <= options.side <= 1024, f"side={options.side} is not in 16..1024", "side=64")
        check(1 <= options.drawn <= len(CORNERS), f"drawn={options.drawn} is not in 1..4", "drawn=4")
        self.options = options

    def problems(self, seed: int) -> Iterator[Problem]:
        generator, options = random.Random(seed), self.options
        colours, shapes = list(COLOURS)[: options.colours], list(SHAPES)[: options.shapes]
        while True:
            corners = sorted(generator.sample(range(len(CORNERS)), options.drawn))
            scene = {corner: (generator.choice(colours), generator.choice(shapes)) for corner in corners}
            content = _drawn(scene, options.side, generator)
            question, answer = _question(options.kind, scene, generator.choice(corners), generator.choice(colours))
            question = f"{IMAGE_MARK}{question}"
            key = f"{question} {hashlib.sha256(content).hexdigest()}"
            yield Problem(question, answer, answer, {"kind": options.kind}, key=key, images=(content,))


def _question(kind: str, scene: Mapping[int, tuple[str, str]], place: int, counted: str) -> tuple[str, str]:
    """Return question and answer."""
    corner, (colour, shape) = CORNERS[place], scene[place]
    named = (f"{colour} {shape} {CORNERS[place]}" for place, (colour, shape) in scene.items())
    return {
        "name": (f"What is {corner}?", f"{colour} {shape}"),
        "colour": (f"What colour is {corner}?", colour),
        "shape": (f"What shape is {corner}?", shape),
        "count": (f"How many are {counted}?", str(sum(other == counted for other, _ in scene.values()))),
        "describe": ("What is there?", ", ".join(named)),
    }[kind]


def _drawn(scene: Mapping[int, tuple[str, str]], side: int, generator: random.Random) -> bytes:
    """Return a PNG file with the shapes of a scene, by the number of their corner."""
    from PIL import ImageDraw

    grey = generator.randint(200, 255)
    image = pillow().new("RGB", (side, side), (grey, grey, grey))
    draw, half = ImageDraw.Draw(image), side / 2
    for corner, (colour, shape) in scene.items():
        size = (half - 2) * generator.uniform(0.5, 0.9)
        left, top = (half * number + generator.uniform(0, half - size - 2) for number in (corner % 2, corner // 2))
        SHAPES[shape](draw, (left, top, left + size, top + size), COLOURS[colour])
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
