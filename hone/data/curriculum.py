"""Samplers other than the plain epoch: mixtures of data sources, easy rows first, rows of medium pass rate first.

A curriculum of stages is in :mod:`hone.data.curriculum`. All have the interface of :class:`~hone.data.prompts.EpochSampler`. ``epoch``
is the number of drawn rows divided by the size of the dataset.

Staged curriculum: named sets of rows, each with a gate that the policy's measured success opens.

    stage 1 ──gate──▶ stage 2 ──gate──▶ ... ──▶ last stage
       │                 │
       └── keep_earlier ─┴── share of later batches that still comes from these stages

A gate reads the pass rates of rows that were drawn for its own stage. Rows of earlier stages that are drawn again do not count.
"""

from __future__ import annotations

import logging
import math
import random
import re
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.config.data import DataConfig
from hone.data.custom import custom_sampler
from hone.data.prompts import EpochSampler, PromptDataset
from hone.data.seeding import derive_seed
from hone.errors import CheckpointError, ConfigError, DataError, did_you_mean

log = logging.getLogger(__name__)

KEY = "data.sampler.stages"
DEFAULT_GROUPS = 32
_ENTRY_KEYS = ("name", "rows", "success", "groups", "max_batches")
_COLUMNS = ("data_source", "agent_name")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class StageSpec:
    """Stage of a curriculum, as configured."""

    name: str  # name of the stage; its success is logged as ``curriculum/success/<name>``
    # allowed values by selector: ``data_source``, ``agent_name``, or an entry of ``extra_info`` (dots select
    # nested ones). A row belongs to the stage if it has an allowed value for every selector; empty selects all
    # rows
    rows: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    success: float | None = None  # mean pass rate (0 to 1) that opens the next stage; None for the last stage
    # number of latest groups over which success is measured; the gate stays closed before that many
    groups: int = DEFAULT_GROUPS
    max_batches: int | None = None  # batches after which the next stage begins without success; None: never

    def has(self, row: RowFacts) -> bool:
        return all(row.value(selector) in allowed for selector, allowed in self.rows.items())


@dataclass(frozen=True)
class RowFacts:
    """Values of a row that stages select by."""

    data_source: Any
    agent_name: Any
    extra_info: Mapping[str, Any]

    def value(self, selector: str) -> Any:
        return getattr(self, selector) if selector in _COLUMNS else nested_entry(self.extra_info, selector)


def nested_entry(entries: Any, path: str) -> Any:
    """Return the entry at a dotted path of nested mappings, or None.

    >>> nested_entry({"environment": {"level": 2}}, "environment.level")
    2
    """
    for part in path.split("."):
        entries = entries.get(part) if isinstance(entries, Mapping) else None
    return entries


def read_stages(entries: Sequence[Any]) -> list[StageSpec]:
    """Parse ``data.sampler.stages``.

    Raises ConfigError: there is no stage, an entry has an unknown key or an invalid value, two have the same name, a stage
    before the last has no gate, or the last one has one.
    """
    if not entries:
        raise _invalid(KEY, "the curriculum has 0 stages")
    stages = [_parse_stage(entry, f"{KEY}[{number}]") for number, entry in enumerate(entries)]
    names = [stage.name for stage in stages]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise _invalid(KEY, f"two stages have the name '{duplicate}'")
    for number, stage in enumerate(stages[:-1]):
        if stage.success is None and stage.max_batches is None:
            raise _invalid(
                f"{KEY}[{number}]", f"stage '{stage.name}' has no gate, so '{names[number + 1]}' never begins"
            )
    if stages[-1].success is not None or stages[-1].max_batches is not None:
        raise ConfigError(
            f"the last stage '{names[-1]}' has a gate, and no stage follows",
            fix="leave success and max_batches of the last stage out",
            where=f"{KEY}[{len(stages) - 1}]",
        )
    return stages


def rows_of_stages(stages: Sequence[StageSpec], rows: Sequence[RowFacts]) -> list[list[int]]:
    """Return the row numbers of each stage; a row may belong to several.

    Raises DataError: a stage has no rows; the message names the values that the rows have.
    """
    members = [[number for number, row in enumerate(rows) if stage.has(row)] for stage in stages]
    for number, (stage, numbers) in enumerate(zip(stages, members, strict=True)):
        if not numbers:
            raise DataError(
                f"stage '{stage.name}' has 0 of {len(rows)} rows",
                why="the curriculum could not draw from it; the rows have " + _values_of(stage, rows),
                fix="correct rows of this stage, add the data, or leave the stage out",
                where=f"{KEY}[{number}].rows",
            )
    return members


class StagedSampler(EpochSampler):
    """Rows of one stage at a time, in random order; the next stage begins when the policy succeeds in the present one.

    >>> easy, hard = StageSpec("easy", success=0.5, groups=2), StageSpec("hard")
    >>> sampler = StagedSampler([easy, hard], [[0, 1], [2, 3]], 4, 2, seed=0)
    >>> sorted(sampler.next_batch()), sampler.observe({0: 1.0, 1: 0.0}), sorted(sampler.next_batch())
    ([0, 1], None, [2, 3])

    Args:
        keep_earlier: share of the rows of later stages that is drawn from earlier ones, from each of them equally.
    """

    learns = True

    def __init__(
        self,
        stages: Sequence[StageSpec],
        rows: Sequence[Sequence[int]],
        size: int,
        batch_size: int,
        *,
        seed: int,
        keep_earlier: float = 0.0,
    ) -> None:
        super().__init__(size, batch_size, shuffle=True, seed=seed)
        self.stages, self.keep_earlier = list(stages), keep_earlier
        self._rows = [list(numbers) for numbers in rows]
        self._inner = [
            EpochSampler(len(numbers), 1, shuffle=True, seed=derive_seed(seed, "stage", stage.name))
            for stage, numbers in zip(self.stages, self._rows, strict=True)
        ]
        self.stage = 0
        """Number of the stage of the last drawn batch, from 0."""
        self.forced = 0
        """Stages that began by ``max_batches`` and not by success."""
        self._batches = self._drawn = self._kept = 0  # of the present stage
        self._stage_of: dict[int, int] = {}  # of the rows that were drawn and not observed since
        self._rates = [deque[float](maxlen=stage.groups) for stage in self.stages]
        counts = ", ".join(
            f"{stage.name}: {len(numbers)}" for stage, numbers in zip(self.stages, self._rows, strict=True)
        )
        unused = size - len(set().union(*self._rows))
        log.info("curriculum of %d stages, rows of each: %s; in no stage: %d", len(self.stages), counts, unused)

    def observe(self, rates: Mapping[int, float]) -> None:
        """Add the measured pass rate (0 to 1) of rows to the stages for which they were drawn."""
        for row, rate in rates.items():
            stage = self._stage_of.pop(row, None)
            if stage is not None:
                self._rates[stage].append(min(1.0, max(0.0, rate)))

    def next_batch(self) -> list[int]:
        """Return the row numbers of the next batch, of the next stage if the gate of the present one is open."""
        self._count_batch()
        self._pass_gate()
        self._batches += 1
        return [self._next_row() for _ in range(self.batch_size)]

    def success(self, stage: int) -> float | None:
        rates = self._rates[stage]
        return math.fsum(rates) / len(rates) if rates else None

    def metrics(self) -> dict[str, float]:
        """Return the present stage (from 1), the number of forced ones, and the success in each measured stage."""
        success = {stage.name: self.success(number) for number, stage in enumerate(self.stages)}
        measured = {f"curriculum/success/{name}": value for name, value in success.items() if value is not None}
        return {"curriculum/stage": self.stage + 1.0, "curriculum/forced": float(self.forced), **measured}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "stages": self._identity(),
            "stage": self.stage,
            "forced": self.forced,
            "position_in_stage": [self._batches, self._drawn, self._kept],
            "pending": sorted(self._stage_of.items()),
            "rates": [list(rates) for rates in self._rates],
            "orders": [sampler.state_dict() for sampler in self._inner],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state.get("stages") != self._identity():
            raise CheckpointError(
                f"the checkpoint's data position is for the stages {state.get('stages')}, this run has {self._identity()}",
                why="a stage would have the measurements and the order of another",
                fix="resume with the same data.sampler, or start again with trainer.resume_mode=disable",
            )
        self.stage, self.forced = state["stage"], state["forced"]
        self._batches, self._drawn, self._kept = state["position_in_stage"]
        self._stage_of = dict(state["pending"])
        for rates, saved in zip(self._rates, state["rates"], strict=True):
            rates.clear()
            rates.extend(saved)
        for sampler, saved in zip(self._inner, state["orders"], strict=True):
            sampler.load_state_dict(saved)

    def _identity(self) -> list[list[Any]]:
        return [[stage.name, len(rows)] for stage, rows in zip(self.stages, self._rows, strict=True)]

    def _pass_gate(self) -> None:
        stage, rates = self.stages[self.stage], self._rates[self.stage]
        if self.stage == len(self.stages) - 1:
            return
        success, least, name = self.success(self.stage), stage.success, self.stages[self.stage + 1].name
        if least is not None and success is not None and len(rates) == stage.groups and success >= least:
            log.info("curriculum: stage '%s' begins, success in '%s' is %.3g", name, stage.name, success)
        elif stage.max_batches is not None and self._batches >= stage.max_batches:
            self.forced += 1
            log.warning(
                "curriculum: stage '%s' begins after %d batches of '%s' without success: %s over %d of %d groups, the gate is %s",
                *(name, self._batches, stage.name, "none" if success is None else f"{success:.3g}"),
                *(len(rates), stage.groups, least),
            )
        else:
            return
        self.stage += 1
        self._batches = self._drawn = self._kept = 0

    def _next_row(self) -> int:
        stage = self.stage
        self._drawn += 1
        if stage and math.floor(self.keep_earlier * self._drawn) > self._kept:
            stage = self._kept % self.stage
            self._kept += 1
        row = self._rows[stage][self._inner[stage].next_batch()[0]]
        self._stage_of[row] = stage
        return row


def _parse_stage(entry: Any, where: str) -> StageSpec:
    if not isinstance(entry, Mapping):
        raise _invalid(where, f"{entry!r} is not a mapping")
    unknown = next((key for key in entry if key not in _ENTRY_KEYS), None)
    if unknown is not None:
        fix = did_you_mean(str(unknown), _ENTRY_KEYS)
        raise ConfigError(f"unknown key '{unknown}' of a stage", fix=fix, where=where)
    name, rows = entry.get("name"), entry.get("rows") or {}
    success, groups, most = entry.get("success"), entry.get("groups", DEFAULT_GROUPS), entry.get("max_batches")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _invalid(where, f"name={name!r} is not a name of letters, digits, '_', '.' and '-'")
    if not isinstance(rows, Mapping):
        raise _invalid(where, f"rows={rows!r} is not a mapping of selectors to values")
    if success is not None and (
        isinstance(success, bool) or not isinstance(success, int | float) or not 0 < success <= 1
    ):
        raise _invalid(where, f"success={success!r} is not a share above 0 and at most 1")
    for key, value in (("groups", groups), ("max_batches", most)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise _invalid(where, f"{key}={value!r} is not a whole number of at least 1")
    return StageSpec(
        name=name,
        rows={str(key): list(value) if isinstance(value, list | tuple) else [value] for key, value in rows.items()},
        success=None if success is None else float(success),
        groups=DEFAULT_GROUPS if groups is None else groups,
        max_batches=most,
    )


def _values_of(stage: StageSpec, rows: Sequence[RowFacts]) -> str:
    """Describe the values that rows have for a stage's selectors."""
    parts = []
    for selector in stage.rows:
        values = sorted({repr(row.value(selector)) for row in rows})
        parts.append(f"{selector} {', '.join(values[:5])}{', ...' if len(values) > 5 else ''}")
    return "; ".join(parts)


def _invalid(where: str, problem: str) -> ConfigError:
    return ConfigError(
        problem,
        fix="write {name: NAME, rows: {data_source: VALUE}, success: 0.8, groups: 32, max_batches: 100} for each stage; "
        "the last has name and rows only",
        where=where,
    )


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
