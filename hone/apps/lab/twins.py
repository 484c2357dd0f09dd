"""Twins: pairs of runs of two configurations with common random numbers, and the record of their comparison.

<out>/
  twins.json          both configurations, settings, scores of each pair, outcome
  seed_<N>/first/     run directory of the first configuration
  seed_<N>/second/    run directory of the second one
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.apps.lab.compare import SEED, read_whole_run, training_differences, training_keys
from hone.apps.lab.confidence import require_scores
from hone.apps.lab.paired import Decision, Outcome, decide, forecast_pairs, pair_scores
from hone.config.load import differences
from hone.errors import HoneError
from hone.insight.run_files import jsonable, write_atomically

RECORD = "twins.json"
ARMS = ("first", "second")


@dataclass(frozen=True)
class TwinPair:
    """Scores of one pair of runs."""

    seed: int  # common seed
    score: str  # what was measured
    first: float  # mean score of the first run over the common prompts
    second: float  # mean score of the second run
    prompts: int  # number of common prompts
    identical: bool  # True if every prompt has the same score in both runs
    more_is_better: bool  # False for losses

    @property
    def difference(self) -> float:
        """Second minus first."""
        return self.second - self.first


def pair_directory(out: Path, seed: int, arm: str) -> Path:
    return out / f"seed_{seed}" / arm


def read_pair(out: Path, seed: int, metric: str | None = None) -> TwinPair:
    """Read the scores of a finished pair."""
    runs = [read_whole_run(pair_directory(out, seed, arm), f"seed_{seed}/{arm}") for arm in ARMS]
    scores = require_scores(runs, metric)
    try:
        paired = pair_scores({"": scores.values[0]}, {"": scores.values[1]})
    except ValueError:
        raise HoneError(
            f"the runs of seed {seed} have no prompt in common",
            fix="give both configurations the same data.val_files",
            where=str(out),
            code="E-runs",
        ) from None
    means = [math.fsum(side[0]) / len(paired.prompts) for side in (paired.first, paired.second)]
    if not all(map(math.isfinite, means)):
        raise HoneError(
            f"{scores.name} of seed {seed} is {means[0]:g} in the first run and {means[1]:g} in the second",
            where=str(out),
            why="a score that is not a number cannot be compared",
            fix="--metric with another score, or correct the configuration that diverged and use another --out DIR",
            code="E-runs",
        )
    same = bool((paired.differences == 0).all())
    return TwinPair(seed, scores.name, means[0], means[1], len(paired.prompts), same, scores.more_is_better)


@dataclass(frozen=True)
class TwinsSettings:
    """Settings of a comparison."""

    margin: float  # smallest difference that matters
    level: float  # 1 minus the error rate of each outcome
    most_pairs: int  # number of pairs after which it ends without a decision
    metric: str | None = None  # what is compared, as for :func:`hone.apps.lab.confidence.scores_in_common`


def twins_decision(pairs: Sequence[TwinPair], settings: TwinsSettings, equal: bool) -> Decision:
    """Return the decision after some pairs, in their order.

    If ``equal`` configurations have identical runs too, one pair suffices: the others would be.
    """
    if equal and pairs and all(pair.identical for pair in pairs):
        return Decision(Outcome.NO_DIFFERENCE, 1.0, len(pairs), 0.0)
    more_is_better = all(pair.more_is_better for pair in pairs)
    return decide(
        [pair.difference for pair in pairs], margin=settings.margin, level=settings.level, more_is_better=more_is_better
    )


def verdict_text(decision: Decision, pairs: Sequence[TwinPair], settings: TwinsSettings) -> str:
    """Return the outcome in one line, such as ``B better, 97 %``."""
    score = pairs[-1].score.partition(",")[0] if pairs else "score"
    detail = f"{decision.difference:+.4g} in {score}, {decision.pairs} pair{'s' * (decision.pairs != 1)}"
    confidence = f"{math.floor(decision.confidence * 1000) / 10:g} %"
    match decision.outcome:
        case Outcome.SECOND_BETTER:
            return f"B better, {confidence}: {detail}"
        case Outcome.FIRST_BETTER:
            return f"A better, {confidence}: {detail}"
        case Outcome.NO_DIFFERENCE if decision.confidence == 1.0:
            return f"no difference: equal configurations, identical scores ({detail})"
        case Outcome.NO_DIFFERENCE:
            return f"no difference of {settings.margin:g} or more, {confidence}: {detail}"
        case Outcome.STILL_NOISE:
            more = forecast_pairs([pair.difference for pair in pairs], margin=settings.margin, level=settings.level)
            forecast = (
                "the number of further seeds cannot be estimated"
                if more is None
                else f"{more} more seed{'s' * (more != 1)}"
            )
            return f"still noise, {forecast}: {detail}"


def open_record(out: Path, configs: Sequence[Mapping[str, Any]]) -> None:
    """Store both configurations in ``twins.json``, or check that they are those of an earlier start."""
    current = {arm: jsonable(_without_seed(config)) for arm, config in zip(ARMS, configs, strict=True)}
    stored = _read(out).get("configs")
    if stored is None:
        _write(out, {"configs": current})
        return
    changed = [f"{arm} {key}" for arm in ARMS for key in differences(stored[arm], current[arm])]
    if changed:
        raise HoneError(
            f"the folder holds twins of other configurations: {', '.join(changed[:5])}",
            where=str(out),
            why="its finished pairs would be counted as pairs of these configurations",
            fix="--out DIR with another folder, or remove this one",
            code="E-runs",
        )


def write_outcome(
    out: Path, pairs: Sequence[TwinPair], decision: Decision, settings: TwinsSettings, verdict: str
) -> dict[str, Any]:
    """Store pairs and outcome in ``twins.json``, and return them."""
    result = {
        "settings": vars(settings),
        "pairs": [vars(pair) | {"difference": pair.difference} for pair in pairs],
        "decision": vars(decision),
        "verdict": verdict,
    }
    _write(out, _read(out) | jsonable(result))
    return result


def equal_configs(configs: Sequence[Mapping[str, Any]]) -> bool:
    return not training_differences(*map(_without_seed, configs))


def _without_seed(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in training_keys(config).items() if key != SEED}


def _read(out: Path) -> dict[str, Any]:
    file = out / RECORD
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _write(out: Path, record: Mapping[str, Any]) -> None:
    write_atomically(out / RECORD, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
