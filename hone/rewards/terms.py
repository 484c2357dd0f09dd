"""Reward of several terms (``reward.terms``): each is scored, normalised, clipped, weighted and added."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from hone.config.reward import CustomRewardConfig
from hone.data.types import Trajectory
from hone.errors import ConfigError, did_you_mean
from hone.rewards.score import Cause, Score
from hone.rewards.worker import as_number
from hone.user_objects import is_user_object

NORMALIZATIONS = ("group", "batch")
"""Sets of responses over which a term is normalised to mean 0 and deviation 1: one prompt's, or all."""
_MIN_DEVIATION = 1e-6


@dataclass(frozen=True)
class Term:
    """Term of a reward."""

    name: str  # name of the term, logged as ``reward/<name>/mean``
    scorer: str | None = None  # built-in scorer, None for a function
    function: CustomRewardConfig | None = None  # custom function, None for a scorer
    weight: float = 1.0  # factor of the term in the sum
    clip: tuple[float, float] | None = None  # minimum and maximum, after normalisation and before the weight
    normalize: str | None = None  # one of :data:`NORMALIZATIONS`, or None. Validation does not normalise
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the scorer


_KEYS = ("name", "scorer", "function", "weight", "clip", "normalize", "options")


def read_terms(entries: Sequence[Any]) -> list[Term]:
    """Parse ``reward.terms``.

    Raises ConfigError: an entry is not a mapping, has an unknown key or an invalid value, or two have the same name.
    """
    terms = [_parse_term(entry, f"reward.terms[{number}]") for number, entry in enumerate(entries)]
    names = [term.name for term in terms]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise ConfigError(
            f"two terms have the name '{duplicate}'",
            why="their metrics would have the same name",
            fix="give each term a unique name: name: ...",
            where="reward.terms",
        )
    return terms


def combine(
    terms: Sequence[Term], scores: Sequence[Sequence[Score]], trajectories: Sequence[Trajectory], *, normalized: bool
) -> list[Score]:
    """Combine the scores of all terms into one score per trajectory. ``normalized``: True to normalise terms as
    configured.
    """
    values = [
        _normalised(term, column, trajectories) if normalized else [score.total for score in column]
        for term, column in zip(terms, scores, strict=True)
    ]
    return [
        _combined(terms, [column[row] for column in scores], [column[row] for column in values])
        for row in range(len(trajectories))
    ]


def _combined(terms: Sequence[Term], scores: Sequence[Score], values: Sequence[float]) -> Score:
    said = [number for number, score in enumerate(scores) if score.cause != Cause.DECLINED]
    if 0 < len(said) < len(scores):  # a term that returned None is left out, as in TRL
        return _combined([terms[n] for n in said], [scores[n] for n in said], [values[n] for n in said])
    bad = next(((term, score) for term, score in zip(terms, scores, strict=True) if score.error is not None), None)
    if bad is not None:
        return replace(bad[1], error=_with_term(bad[0].name, str(bad[1].error)))
    combined = Score(0.0)
    for term, score, value in zip(terms, scores, values, strict=True):
        low, high = term.clip or (value, value)
        combined.total += term.weight * min(max(value, low), high)
        for token, reward in score.placed.items():
            combined.placed[token] = combined.placed.get(token, 0.0) + term.weight * reward
        combined.terms[term.name] = score.total
    for term, score in zip(terms, scores, strict=True):
        for entries, added in ((combined.terms, score.terms), (combined.extra, score.extra)):
            for name, entry in added.items():
                entries[
                    name if name not in combined.terms and name not in combined.extra else f"{term.name}_{name}"
                ] = entry
    return combined


def _with_term(name: str, error: str) -> str:
    """Add a term's name to an error; the word ``timeout`` stays first."""
    first, sign, rest = error.partition(":")
    return f"{first}: term {name}:{rest}" if sign and first == "timeout" else f"term {name}: {error}"


def _normalised(term: Term, scores: Sequence[Score], trajectories: Sequence[Trajectory]) -> list[float]:
    """Normalise values to mean 0 and deviation 1 in sets of two or more; ignore failed scores."""
    if term.normalize is None:
        return [score.total for score in scores]
    groups: dict[str, list[int]] = defaultdict(list)
    for row, (score, trajectory) in enumerate(zip(scores, trajectories, strict=True)):
        if score.error is None:
            groups[trajectory.uid if term.normalize == "group" else ""].append(row)
    values = [score.total for score in scores]
    for rows in groups.values():
        if len(rows) < 2:
            continue
        group_values = [values[row] for row in rows]
        mean, deviation = statistics.fmean(group_values), statistics.stdev(group_values)
        for row in rows:
            values[row] = (values[row] - mean) / deviation if deviation > _MIN_DEVIATION else 0.0
    return values


def _parse_term(entry: Any, where: str) -> Term:
    if not isinstance(entry, Mapping):
        raise _invalid_term(where, f"{entry!r} is not a mapping")
    unknown = next((key for key in entry if key not in _KEYS), None)
    if unknown is not None:
        raise ConfigError(f"unknown key '{unknown}' of a term", fix=did_you_mean(str(unknown), _KEYS), where=where)
    scorer, function = entry.get("scorer"), entry.get("function")
    if (scorer is None) == (function is None):
        raise _invalid_term(
            where,
            "the term has both a scorer and a function" if scorer else "the term has neither a scorer nor a function",
        )
    weight, clip, normalize = entry.get("weight", 1.0), entry.get("clip"), entry.get("normalize")
    options = entry.get("options") or {}
    if as_number(weight) is None or isinstance(weight, bool):
        raise _invalid_term(where, f"weight={weight!r} is not a number")
    if clip is not None and not _is_range(clip):
        raise _invalid_term(where, f"clip={clip!r} is not [low, high]")
    if normalize not in (None, *NORMALIZATIONS):
        raise _invalid_term(where, f"normalize={normalize!r} is not one of {', '.join(NORMALIZATIONS)}")
    if not isinstance(options, Mapping):
        raise _invalid_term(where, f"options={options!r} is not a mapping")
    custom = None if function is None else _function(str(function), dict(options))
    name = entry.get("name") or scorer or (custom and _function_name(custom))
    return Term(
        name=str(name),
        scorer=scorer,
        function=custom,
        weight=float(weight),
        clip=None if clip is None else (float(clip[0]), float(clip[1])),
        normalize=normalize,
        options=dict(options),
    )


def _function(text: str, options: dict[str, Any]) -> CustomRewardConfig:
    path, sign, name = text.rpartition(":")
    if is_user_object(text):
        return CustomRewardConfig(path=text, name=name, reward_kwargs=options)
    if not sign or text.startswith(("http://", "https://")) or not name.isidentifier():
        path, name = text, "compute_score"
    return CustomRewardConfig(path=path, name=name, reward_kwargs=options)


def _function_name(custom: CustomRewardConfig) -> str:
    """Return the name of a function, or of its file where it has the name that such functions have by default."""
    return PurePath(str(custom.path)).stem if custom.name == CustomRewardConfig().name else custom.name


def _is_range(clip: Any) -> bool:
    return (
        isinstance(clip, list | tuple)
        and len(clip) == 2
        and all(isinstance(bound, int | float) for bound in clip)
        and clip[0] <= clip[1]
    )


def _invalid_term(where: str, problem: str) -> ConfigError:
    return ConfigError(
        problem,
        fix="write {scorer: NAME} or {function: FILE.py:NAME}, with weight, clip: [low, high], normalize: group or batch, "
        "options: {...} and name as needed",
        where=where,
    )
