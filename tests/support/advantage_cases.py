"""Random ragged batches with every input that an advantage estimator may take."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from support.ragged_cases import build, rows_of
from torch import Tensor

from hone.algorithms import AdvantageEstimator
from hone.algorithms.advantages import INPUTS

COMPONENTS = ("right", "form")


@dataclass
class Call:
    """``estimator(rewards, mask, **inputs)``; NaN stands wherever the mask is 0."""

    rewards: Tensor
    mask: Tensor
    inputs: dict[str, Any]

    def run(self, estimator: AdvantageEstimator, **options: Any) -> tuple[Tensor, Tensor]:
        return estimator(self.rewards, self.mask, **self.inputs, **options)

    def for_oracle(self, estimator: AdvantageEstimator) -> tuple[list, list, dict]:
        """Lists, and only the inputs that the estimator takes."""
        wanted = [INPUTS[name][0] for name in estimator.needs | estimator.uses]
        return rows_of(self.rewards), self.mask.tolist(), {name: plain(self.inputs[name]) for name in wanted}

    def change(self, tensor: Callable[[Tensor], Tensor], rows: Callable[[Sequence], list], **inputs: Any) -> Call:
        """With ``tensor`` applied to what is ``[B, T]``, and ``rows`` to what has one entry a row."""

        def changed(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: changed(item) for key, item in value.items()}
            if isinstance(value, Tensor):
                return tensor(value) if value.dim() == 2 else torch.stack(rows(value))
            return value if value is None else rows(value)

        return Call(tensor(self.rewards), tensor(self.mask), changed(self.inputs) | inputs)

    def select(self, order: Sequence[int]) -> Call:
        return self.change(lambda x: x[list(order)], lambda x: [x[i] for i in order])

    def padded(self, columns: int, rows: int) -> Call:
        """With columns and empty rows of NaN added, the rows to the group and in the state of the first one."""

        def pad(x: Tensor) -> Tensor:
            return torch.nn.functional.pad(x, (0, columns, 0, rows), value=math.nan if x.is_floating_point() else 0)

        def more(x: Sequence) -> list:
            nothing = torch.full_like(x[0], math.nan) if isinstance(x, Tensor) else x[0]
            return [*x, *[nothing] * rows]

        return self.change(pad, more)

    def stretched(self, where: Sequence[int]) -> Call:
        """With columns of mask 0 put in front of the columns ``where``."""
        width = self.mask.shape[1]
        source = [c for t in range(width + 1) for c in [-1] * where.count(t) + [t] * (t < width)]

        def stretch(x: Tensor) -> Tensor:
            fill = torch.full((len(x), 1), math.nan if x.is_floating_point() else 0).to(x.dtype)
            return torch.cat([x, fill], dim=1)[:, source]

        return self.change(stretch, list)

    def kept_columns(self, where: Sequence[int]) -> list[int]:
        """Where the columns went in :meth:`stretched`."""
        return [t + sum(w <= t for w in where) for t in range(self.mask.shape[1])]

    def to(self, dtype: torch.dtype) -> Call:
        return self.change(lambda x: x.to(dtype) if x.is_floating_point() else x, list)

    def parts(self) -> list[list[int]]:
        """Rows cut in two, along the groups."""
        ids = self.inputs["group_ids"]
        names = sorted(set(ids))
        first = set(names[: len(names) // 2])
        return [[i for i, g in enumerate(ids) if (g in first) == side] for side in (True, False)]


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value.double().tolist() if isinstance(value, Tensor) else value


def call(seed: int, rows: int, columns: int, *, least_group: int = 1, **how: Any) -> Call:
    """Groups of one to four (at least ``least_group``), empty rows, holes; states that recur; sometimes no weights."""
    case = build(seed, rows, columns, gap=1.0, dtype=torch.float64, **how)
    draw = random.Random(seed)
    ids = case.group_ids
    home = next((g for g in ids if ids.count(g) >= least_group), ids[0])
    ids = [g if ids.count(g) >= least_group else home for g in ids]

    def matrix(value: Callable[[], float]) -> Tensor:
        cells = [[value() if m else math.nan for m in row] for row in case.mask.tolist()]
        return torch.tensor(cells, dtype=torch.float64)

    turns = [[sum(draw.random() < 0.3 for _ in range(t)) for t in range(columns)] for _ in range(rows)]
    turn_ids = torch.tensor([sorted(row) for row in turns])
    states = [[draw.choice("xyz") for _ in range(columns + 1)] for _ in range(rows)]
    old = case.old
    inputs = {
        "group_ids": ids,
        "values": case.values,
        "process_rewards": case.values * 0.3,
        "reward_baselines": torch.tensor([draw.gauss(0, 1) for _ in range(rows)], dtype=torch.float64),
        "old_log_probs": old,
        "sum_pi_squared": (2 * old).exp() + matrix(draw.random) * (1 - old.exp()).square(),
        "rollout_is_weights": draw.choice([None, matrix(lambda: draw.uniform(0, 2))]),
        "reward_components": {
            name: torch.tensor([draw.choice([0.0, 1.0, draw.gauss(0, 1)]) for _ in range(rows)], dtype=torch.float64)
            for name in COMPONENTS
        },
        "turn_ids": torch.where(case.mask.bool(), turn_ids, -7),
        "turn_values": [{k: draw.gauss(0, 1) for k in range(columns) if draw.random() < 0.3} for _ in range(rows)],
        "turn_group_ids": draw.choice([None, states]),
        "turn_roles": [[draw.choice(("a", "b", "s#0", "s#1", "s#2")) for _ in range(columns + 1)] for _ in range(rows)],
        "turn_baselines": [[(draw.choice("ab"), draw.gauss(0, 1)) for _ in range(columns + 1)] for _ in range(rows)],
    }
    return Call(case.rewards, case.mask, inputs)


@st.composite
def calls(draw: st.DrawFn, estimator: AdvantageEstimator) -> Call:
    """A random :class:`Call` that the estimator accepts: at least one token, groups as large as it asks for."""
    least = estimator.min_group
    made = call(
        draw(st.integers(0, 2**32)),
        draw(st.integers(max(least, 1), 7)),
        draw(st.integers(1, 8)),
        least_group=least,
        holes=draw(st.booleans()),
        equal=draw(st.booleans()),
    )
    made.mask[0, 0] |= not made.mask.any()
    for name in ("values", "process_rewards", "old_log_probs", "sum_pi_squared", "rollout_is_weights"):
        if made.inputs[name] is not None:
            made.inputs[name] = torch.where(made.mask.bool() & made.inputs[name].isnan(), -0.5, made.inputs[name])
    made.rewards = torch.where(made.mask.bool() & made.rewards.isnan(), 1.0, made.rewards)
    made.inputs["turn_ids"] = torch.where(made.mask.bool(), made.inputs["turn_ids"].clamp(min=0), -7)
    return made
