"""A gate: a suite of checks in YAML (docs/gates.md has the format); a model answers their data, and its scores are compared
with what the suite demands.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

from hone import __version__
from hone.agents.tools.loading import read_yaml
from hone.apps.lab.paired import bootstrap_interval
from hone.config.reward import CustomRewardConfig, RewardConfig
from hone.errors import ConfigError, did_you_mean
from hone.trainers.episode_keys import episode_keys
from hone.trainers.evaluation import EvaluationRequest, run_evaluation
from hone.trainers.validation import Evaluation, score_columns
from hone.training.export import find_actor
from hone.training.releases import model_digest

KEY = "--suite"


@dataclass(frozen=True)
class Bounds:
    """Limits of a metric, both inclusive."""

    at_least: float | None = None  # smallest value, or None
    at_most: float | None = None  # largest value, or None


@dataclass(frozen=True)
class Check:
    """One check: a dataset that the model answers, and what its scores must be."""

    name: str
    data: tuple[str, ...]  # dataset files with held-out rows
    # the mean score must be above it with confidence: the lower end of the interval of 95 %
    at_least: float | None = None
    # the mean score may be below the released model's by at most this, with the same confidence
    no_worse_by: float | None = None
    every: bool = False  # whether every answer must have the full score 1; for canaries
    metrics: Mapping[str, Bounds] = field(default_factory=dict)  # bounds of metrics that `hone eval` prints, by name
    reward: str | None = None  # reward function as FILE:NAME; None for the scorer of the data
    n: int = 1  # answers to each prompt
    temperature: float = 0.0  # of sampling; 0 is greedy
    max_prompt_length: int = 512  # in tokens
    max_response_length: int = 512  # in tokens
    max_samples: int = -1  # rows that are used; -1 for all
    seed: int = 1  # of the draws
    episodes: tuple[str, ...] = ()  # settings of multi-turn episodes, as for `hone eval`


def read_suite(path: Path) -> list[Check]:
    """Return the checks of a suite. Paths of data and rewards start at the folder of the suite."""
    content = read_yaml(path, KEY)
    checks = content.get("checks") if isinstance(content, Mapping) else None
    if not isinstance(checks, Mapping) or not checks:
        raise ConfigError(
            f"'{path}' has no checks",
            why="a gate without checks would let every model pass",
            where=KEY,
            fix="checks: {accuracy: {data: val.parquet, at_least: 0.8}}",
        )
    return [_check(str(name), settings, path) for name, settings in checks.items()]


_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("at_least", "no_worse_by", "temperature"), (float, int)),
    **dict.fromkeys(("n", "max_prompt_length", "max_response_length", "max_samples", "seed"), (int,)),
    "every": (bool,),
    "reward": (str,),
}


def _check(name: str, settings: Any, path: Path) -> Check:
    where = f"checks.{name}"
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{where} of '{path}' is {settings!r}, not a block of settings", where=where)
    known = [entry.name for entry in dataclasses.fields(Check) if entry.name != "name"]
    for key, value in settings.items():
        if key not in known:
            raise ConfigError(f"'{key}' is not a setting of a check", where=where, fix=did_you_mean(str(key), known))
        if key in _TYPES and (not isinstance(value, _TYPES[key]) or (isinstance(value, bool) and key != "every")):
            raise ConfigError(f"{where}.{key} is {value!r}", where=where, fix=f"{key}: <{_TYPES[key][0].__name__}>")
    data = settings.get("data")
    files = [data] if isinstance(data, str) else data
    if not isinstance(files, list) or not files or not all(isinstance(file, str) for file in files):
        raise ConfigError(f"{where} has no data", where=where, fix="data: val.parquet")
    bounds = {
        str(metric): _bounds(limits, f"{where}.metrics.{metric}")
        for metric, limits in dict(settings.get("metrics") or {}).items()
    }
    reward = settings.get("reward")
    check = Check(
        **{
            **dict(settings),
            "name": name,
            "data": tuple(_beside(path, file) for file in files),
            "metrics": bounds,
            "episodes": tuple(settings.get("episodes") or ()),
            "reward": None if reward is None else _beside(path, reward),
        }
    )
    if check.at_least is None and check.no_worse_by is None and not check.every and not bounds:
        raise ConfigError(
            f"{where} has no condition, so every model passes it",
            where=where,
            fix="at_least: 0.8, no_worse_by: 0.02, every: true, or metrics",
        )
    return check


def _bounds(limits: Any, where: str) -> Bounds:
    known = [entry.name for entry in dataclasses.fields(Bounds)]
    numbers = isinstance(limits, Mapping) and all(isinstance(value, float | int) for value in limits.values())
    if not isinstance(limits, Mapping) or not limits or not numbers or set(limits) - set(known):
        raise ConfigError(f"{where} is {limits!r}, not bounds", where=where, fix="{at_least: 0.9} or {at_most: 0.01}")
    return Bounds(**limits)


def _beside(path: Path, file: str) -> str:
    """Return a path of the suite as one from the current folder; names of the hub stay."""
    local = path.parent / file
    return str(local) if (path.parent / file.partition(":")[0]).exists() else file


LEVEL = 0.95
"""Level of the intervals; a condition on their lower end is one-sided at 97.5 %."""


@dataclass(frozen=True)
class Condition:
    """A condition with what was measured."""

    check: str
    name: str  # ``at_least``, ``no_worse_by``, ``every``, ``verdicts`` or a metric
    measured: float  # number that is compared; NaN if the model did not report it
    bound: float  # number that it is compared with
    passed: bool  # whether the condition holds
    about: str  # what was measured, in words


@dataclass(frozen=True)
class Verdict:
    model: str  # that was checked
    against: str | None  # released model, or None
    conditions: tuple[Condition, ...]
    data: dict[str, str]  # SHA-256 of each dataset file
    model_digest: str  # SHA-256 of the model's files (:func:`hone.training.releases.model_digest`)
    against_digest: str | None  # of the released model's files, or None

    @property
    def passed(self) -> bool:
        return all(condition.passed for condition in self.conditions)

    def record(self) -> dict[str, Any]:
        conditions = [
            asdict(one) | {"measured": None} if math.isnan(one.measured) else asdict(one) for one in self.conditions
        ]
        return {
            "passed": self.passed,
            "model": self.model,
            "model_digest": self.model_digest,
            "against": self.against,
            "against_digest": self.against_digest,
            "hone": __version__,
            "data": self.data,
            "conditions": conditions,
        }


def run_gate(
    model: str,  # model directory, adapter directory or checkpoint
    checks: Sequence[Check],
    *,
    against: str | None = None,  # model that was released last, for ``no_worse_by``
    dtype: str = "auto",  # compute dtype
    on_check: Callable[[Check], None] = lambda check: None,  # called before each check
) -> Verdict:
    """Let a model answer the data of every check."""
    compared = [check.name for check in checks if check.no_worse_by is not None]
    if compared and against is None:
        raise ConfigError(
            f"the check '{compared[0]}' has no_worse_by, but there is no released model to compare with",
            where=KEY,
            fix="--against MODEL, or remove no_worse_by",
        )
    conditions: list[Condition] = []
    for check in checks:
        on_check(check)
        evaluation = _evaluate(model, check, dtype)
        released = _evaluate(str(against), check, dtype) if check.no_worse_by is not None else None
        conditions += _conditions(check, evaluation, released)
    files = sorted({file for check in checks for file in check.data if Path(file).is_file()})
    hashes = {file: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files}
    digests = [None if path is None else model_digest(find_actor(path)) for path in (model, against)]
    return Verdict(model, against, tuple(conditions), hashes, str(digests[0]), digests[1])


def _evaluate(model: str, check: Check, dtype: str) -> Evaluation:
    return run_evaluation(
        EvaluationRequest(
            model=model,
            files=list(check.data),
            n=check.n,
            temperature=check.temperature,
            max_prompt_length=check.max_prompt_length,
            max_response_length=check.max_response_length,
            max_samples=check.max_samples,
            reward=RewardConfig(custom_reward_function=CustomRewardConfig.named(check.reward)),
            seed=check.seed,
            dtype=dtype,
            episodes=episode_keys(find_actor(model), list(check.episodes)),
        )
    )


def _conditions(check: Check, evaluation: Evaluation, released: Evaluation | None) -> Iterator[Condition]:
    missing = evaluation.metrics["val-aux/no_verdict_rate"]
    if missing:  # a scorer that failed says nothing about the model
        yield Condition(check.name, "verdicts", 1 - missing, 1.0, False, "share of answers that were scored")
    by_prompt = prompt_scores(evaluation)
    scores = list(by_prompt.values())
    if check.at_least is not None:
        low = lower_end(scores)
        about = f"mean of {len(scores)} prompts {fmean(scores):.4f}" if scores else "no prompt has a score"
        yield Condition(check.name, "at_least", low, check.at_least, low >= check.at_least, f"lower end; {about}")
    if check.every:
        full = sum(score >= 1 for score in scores)
        share = full / len(scores) if scores else math.nan
        yield Condition(check.name, "every", share, 1.0, share == 1.0, f"{full} of {len(scores)} prompts")
    if check.no_worse_by is not None and released is not None:
        other = prompt_scores(released)
        differences = [score - other[prompt] for prompt, score in by_prompt.items() if prompt in other]
        low = lower_end_of_difference(differences)
        mean = fmean(differences) if differences else math.nan
        about = f"lower end of the difference; mean {mean:+.4f} over {len(differences)} prompts"
        yield Condition(check.name, "no_worse_by", low, -check.no_worse_by, low >= -check.no_worse_by, about)
    for name, bounds in check.metrics.items():
        value = evaluation.metrics.get(name, math.nan)
        for bound, holds in (
            (bounds.at_least, bounds.at_least is None or value >= bounds.at_least),
            (bounds.at_most, bounds.at_most is None or value <= bounds.at_most),
        ):
            if bound is not None:
                about = "metric of the evaluation" if name in evaluation.metrics else "not reported by this evaluation"
                yield Condition(check.name, name, value, bound, holds, about)


def prompt_scores(evaluation: Evaluation) -> dict[str, float]:
    """Return the mean score of each prompt's answers that have a verdict: ``acc`` where a scorer gives it, else the reward."""
    answers = [
        (trajectory.uid, score)
        for trajectory, score in zip(evaluation.trajectories, evaluation.scores, strict=True)
        if trajectory.part == 0
    ]
    columns = score_columns([score for _, score in answers])
    column = columns.get("acc", columns["reward"])
    values: dict[str, list[float]] = {}
    for (uid, score), value in zip(answers, column, strict=True):
        if score.error is None and value is not None:
            values.setdefault(uid, []).append(float(value))
    return {uid: fmean(scores) for uid, scores in values.items()}


def lower_end(scores: Sequence[float]) -> float:
    """Return the lower end of the interval of a mean score.

    Shares of right answers have Wilson's interval (Wilson 1927), which is below 1 even where all answers are right. Other scores have a
    bootstrap interval over prompts.
    """
    if not scores:
        return math.nan
    if set(scores) <= {0.0, 1.0}:
        count, share = len(scores), fmean(scores)
        z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
        middle = share + z * z / (2 * count)
        spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
        return (middle - spread) / (1 + z * z / count)
    return bootstrap_interval(np.asarray([scores]), LEVEL)[0]


def lower_end_of_difference(differences: Sequence[float]) -> float:
    """Return the lower end of the interval of a mean difference, by the bootstrap over prompts; NaN for fewer than two prompts."""
    return bootstrap_interval(np.asarray([differences]), LEVEL)[0] if len(differences) > 1 else math.nan
