"""Random ragged batches for the tests of the algorithms."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor


@dataclass
class Case:
    """A batch ``[B, T]``, NaN wherever the mask is 0."""

    mask: Tensor
    rewards: Tensor
    values: Tensor
    old: Tensor
    new: Tensor
    advantages: Tensor
    group_ids: list[str]

    def floats(self) -> list[str]:
        return ["rewards", "values", "old", "new", "advantages"]

    def select(self, rows: list[int]) -> Case:
        tensors = {name: getattr(self, name)[rows] for name in ["mask", *self.floats()]}
        return Case(**tensors, group_ids=[self.group_ids[row] for row in rows])

    def padded(self, columns: int, rows: int) -> Case:
        """With columns and empty rows of NaN added."""

        def pad(x: Tensor, fill: float) -> Tensor:
            return torch.nn.functional.pad(x, (0, columns, 0, rows), value=fill)

        tensors = {name: pad(getattr(self, name), math.nan) for name in self.floats()}
        return Case(pad(self.mask, 0), **tensors, group_ids=[*self.group_ids, *self.group_ids[:1] * rows])


def build(seed: int, rows: int, columns: int, *, holes: bool, equal: bool, gap: float, dtype: torch.dtype) -> Case:
    """Groups of one to four, empty rows, masks with holes, rewards on any token, log-ratios up to ``gap``."""
    draw = random.Random(seed)
    mask, groups = [], []
    while len(groups) < rows:
        groups += [f"g{len(groups)}"] * draw.choice([1, 2, 4])
    for _ in range(rows):
        length = draw.choice([0, 1, columns, draw.randint(0, columns)])
        mask.append([int(t < length and not (holes and draw.random() < 0.3)) for t in range(columns)])

    def matrix(value) -> Tensor:  # noqa: ANN001
        return torch.tensor([[value() if m else math.nan for m in row] for row in mask], dtype=dtype)

    old = matrix(lambda: -draw.expovariate(1.0))
    return Case(
        torch.tensor(mask, dtype=torch.int64),
        matrix(lambda: 0.0 if equal or draw.random() < 0.5 else draw.choice([1.0, -0.5, draw.gauss(0, 1)])),
        matrix(lambda: draw.gauss(0, 1)),
        old,
        old + matrix(lambda: draw.choice([1e-7, 1.0]) * draw.uniform(-gap, gap)),
        matrix(lambda: draw.choice([0.0, draw.gauss(0, 1)])),
        groups[:rows],
    )


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> Case:
    """A random :class:`Case`."""
    return build(
        draw(st.integers(0, 2**32)),
        draw(st.integers(1, 7)),
        draw(st.integers(1, 8)),
        holes=draw(st.booleans()),
        equal=draw(st.booleans()),
        gap=draw(st.sampled_from([0.01, 1.0, 30.0])),
        dtype=dtype,
    )


def rows_of(x: Tensor) -> list[list[float]]:
    """As the oracle wants it."""
    return x.double().tolist()
