"""Samplers other than the plain epoch: mixtures of data sources, easy rows first, rows of medium pass rate first.

A curriculum of stages is in :mod:`hone.data.stages`. All have the interface of :class:`~hone.data.sampler.EpochSampler`. ``epoch``
is the number of drawn rows divided by the size of the dataset.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from hone.config.data import DataConfig
from hone.data.custom import custom_sampler
from hone.data.prompts import PromptDataset
from hone.data.sampler import EpochSampler
from hone.data.seeding import derive_seed
from hone.data.stages import RowFacts, StagedSampler, nested_entry, read_stages, rows_of_stages
from hone.errors import CheckpointError, DataError, did_you_mean

FLOOR = 0.02
"""Added to the weight of every row, so that rows that always pass or fail are drawn too; a pass rate of 0.5 gives 0.25."""
MEMORY = 0.5  # weight of the previous estimate in a new one


def make_sampler(config: DataConfig, dataset: PromptDataset, seed: int) -> EpochSampler:
    """Return the sampler that ``data.sampler`` selects.

    Raises:
        ConfigError: the user's sampler class cannot be loaded, or the stages of a curriculum are invalid.
        DataError: the dataset does not fill a batch, a weight's source or a stage has no rows, or a row has no difficulty.
    """
    if config.sampler.class_path is not None:
        return custom_sampler(config, dataset, seed)
    size, batch_size, name = len(dataset), config.train_batch_size, config.sampler.name
    if name == "stages":
        stages, samples = read_stages(config.sampler.stages), [dataset[row] for row in range(size)]
        facts = [RowFacts(sample.data_source, sample.agent_name, sample.extra_info) for sample in samples]
        rows, keep_earlier = rows_of_stages(stages, facts), config.sampler.keep_earlier
        return StagedSampler(stages, rows, size, batch_size, seed=seed, keep_earlier=keep_earlier)
    weights, key, kind = config.sampler.weights, config.sampler.difficulty_key, config.sampler.pass_rate_of
    if name == "mixture":
        return MixtureSampler([dataset[row].data_source for row in range(size)], weights, batch_size, seed=seed)
    if name == "difficulty":
        levels = difficulties([(dataset[row].uid, dataset[row].extra_info) for row in range(size)], key)
        return DifficultySampler(levels, batch_size, seed=seed)
    if name == "pass_rate":
        kinds: list[Any] | None = None
        if kind == "data_source":
            kinds = [dataset[row].data_source for row in range(size)]
        elif kind == "difficulty":
            kinds = difficulties([(dataset[row].uid, dataset[row].extra_info) for row in range(size)], key)
        return PassRateSampler(size, batch_size, seed=seed, kinds=kinds)
    return EpochSampler(size, batch_size, shuffle=config.shuffle, seed=seed)


class MixtureSampler(EpochSampler):
    """Data sources in fixed proportions; the rows of each source in random order, shuffled again after each pass over it.

    Each row comes from the source that lags its share the most. Any run of rows therefore has every source in its
    proportion to within one row per source. ``weights``: share of each source, in any unit; sources without one are not
    drawn.

    Raises DataError: a weight is not positive or its source has no rows, or the rows do not fill a batch.
    """

    def __init__(self, sources: Sequence[str], weights: Mapping[str, float], batch_size: int, *, seed: int) -> None:
        super().__init__(len(sources), batch_size, shuffle=True, seed=seed)
        check_weights(weights, set(sources))
        total = sum(weights.values())
        self.shares = {name: weight / total for name, weight in sorted(weights.items())}
        self._rows = {name: [row for row, source in enumerate(sources) if source == name] for name in self.shares}
        self._inner = {
            name: EpochSampler(len(rows), 1, shuffle=True, seed=derive_seed(seed, "mixture", name))
            for name, rows in self._rows.items()
        }
        self._drawn = dict.fromkeys(self.shares, 0)

    def next_batch(self) -> list[int]:
        self._count_batch()
        return [self._next_row() for _ in range(self.batch_size)]

    def state_dict(self) -> dict[str, Any]:
        inner = {name: sampler.state_dict() for name, sampler in self._inner.items()}
        return super().state_dict() | {"drawn": dict(self._drawn), "shares": self.shares, "sources": inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state.get("shares") != self.shares:
            raise CheckpointError(
                f"the checkpoint's data position is for the mixture {state.get('shares')}, this run has {self.shares}",
                why="the proportions drawn before the checkpoint would be wrong in this run",
                fix="resume with the same data.sampler, or start again with trainer.resume_mode=disable",
            )
        self._drawn = dict(state["drawn"])
        for name, sampler in self._inner.items():
            sampler.load_state_dict(state["sources"][name])

    def _next_row(self) -> int:
        total = sum(self._drawn.values()) + 1
        name = max(self.shares, key=lambda source: (self.shares[source] * total - self._drawn[source], source))
        self._drawn[name] += 1
        return self._rows[name][self._inner[name].next_batch()[0]]


class DifficultySampler(EpochSampler):
    """Easy rows first, in every epoch; rows of the same difficulty in random order. ``levels``: difficulty of each row,
    small is easy.
    """

    def __init__(self, levels: Sequence[float], batch_size: int, *, seed: int) -> None:
        self.levels = list(levels)
        super().__init__(len(levels), batch_size, shuffle=True, seed=seed)

    def _permutation(self, epoch: int) -> list[int]:
        return sorted(super()._permutation(epoch), key=self.levels.__getitem__)


class PassRateSampler(EpochSampler):
    """Rows drawn without replacement within a batch, weighted by how much their rewards vary.

    A row whose answers pass with probability p has weight ``p (1 - p) + 0.02``: the variance of its rewards, plus a
    floor so that every row is drawn at times. ``p`` is a running mean of the measured rates; an unseen row counts as
    one half. ``kinds``: kind of each row; rows of one kind share a pass rate. None: each row has its own.
    """

    def __init__(self, size: int, batch_size: int, *, seed: int, kinds: Sequence[Hashable] | None = None) -> None:
        super().__init__(size, batch_size, shuffle=True, seed=seed)
        numbers: dict[Hashable, int] = {}
        self.kind_of = range(size) if kinds is None else [numbers.setdefault(kind, len(numbers)) for kind in kinds]
        """Kind number of each row; without kinds, the row number."""
        self.rates: dict[int, float] = {}
        """Estimated pass rate of each kind seen."""
        self._batches = 0

    learns = True

    def observe(self, rates: Mapping[int, float]) -> None:
        rates_by_kind: dict[int, list[float]] = {}
        for row, rate in rates.items():
            rates_by_kind.setdefault(self.kind_of[row], []).append(min(1.0, max(0.0, rate)))
        for kind, seen in rates_by_kind.items():
            new = sum(seen) / len(seen)
            self.rates[kind] = MEMORY * self.rates[kind] + (1 - MEMORY) * new if kind in self.rates else new

    def next_batch(self) -> list[int]:
        self._count_batch()
        generator = random.Random(derive_seed(self.seed, "pass_rate", self._batches))
        self._batches += 1
        # the smallest of exponential variables with these rates give a weighted draw without replacement
        keys = [-math.log(1.0 - generator.random()) / self.weight(row) for row in range(self.size)]
        return sorted(range(self.size), key=keys.__getitem__)[: self.batch_size]

    def weight(self, row: int) -> float:
        rate = self.rates.get(self.kind_of[row], 0.5)
        return rate * (1 - rate) + FLOOR

    def state_dict(self) -> dict[str, Any]:
        rates = {str(kind): rate for kind, rate in sorted(self.rates.items())}
        return super().state_dict() | {"rates": rates, "drawn_batches": self._batches, "kinds": len(set(self.kind_of))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["kinds"] != len(set(self.kind_of)):
            raise CheckpointError(
                f"the checkpoint has pass rates of {state['kinds']} kinds of rows; this run has {len(set(self.kind_of))}",
                why="pass rates of one kind would be applied to another",
                fix="resume with the same data.sampler, or start again with trainer.resume_mode=disable",
            )
        self.rates = {int(kind): rate for kind, rate in state.get("rates", {}).items()}
        self._batches = state.get("drawn_batches", 0)


def check_weights(weights: Mapping[str, float], sources: set[str]) -> None:
    """Raise DataError if there is no weight, one is not positive, or its source has no rows."""
    key = "data.sampler.weights"
    if not weights:
        example = ",".join(f"{source}:1" for source in sorted(sources)[:3])
        raise DataError("the mixture has 0 weights", where=key, fix=f"{key}={{{example}}}")
    for name, weight in weights.items():
        if not (isinstance(weight, int | float) and math.isfinite(weight) and weight > 0):
            raise DataError(f"weight {weight} of '{name}' is not a positive number", where=key, fix=f"leave {name} out")
        if name not in sources:
            raise DataError(f"no row has the data source '{name}'", where=key, fix=did_you_mean(name, sources))


def difficulties(rows: Sequence[tuple[str, Mapping[str, Any]]], key: str) -> list[float]:
    """Return the difficulty of each row, given as ``(name, extra_info)``. Raises DataError: a row has no difficulty."""
    levels = []
    for name, extra in rows:
        level = nested_entry(extra, key)
        if not isinstance(level, int | float) or isinstance(level, bool) or not math.isfinite(level):
            raise DataError(
                f"row {name}: extra_info.{key} is {level!r}, not a number",
                why="data.sampler.name=difficulty orders the rows by it",
                fix=f"data.sampler.difficulty_key=NAME; extra_info holds {', '.join(sorted(extra)) or 'nothing'}",
                where="data.sampler.difficulty_key",
            )
        levels.append(float(level))
    return levels
