"""A reward of several terms (``reward.terms``): each scored apart, then normalised, clipped, weighed and added."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from hone.config.reward import CustomRewardConfig
from hone.data.types import Trajectory
from hone.errors import ConfigError, did_you_mean
from hone.rewards.outcome import as_number, failed
from hone.rewards.score import Score

NORMALIZATIONS = ("group", "batch")
"""Over which responses a term is brought to mean 0 and deviation 1: those to the same prompt, or all."""
_LEAST_DEVIATION = 1e-6


@dataclass(frozen=True)
class Term:
    """One term.

    Attributes:
        name: it is logged as ``reward/<name>/mean``.
        scorer: built-in scorer, None for a function.
        function: function of the user's own, None for a scorer.
        weight: factor.
        clip: least and greatest value, after normalisation and before the weight.
        normalize: one of :data:`NORMALIZATIONS`, or None. Validation shows terms as they are.
        options: keyword arguments of the scorer.
    """

    name: str
    scorer: str | None = None
    function: CustomRewardConfig | None = None
    weight: float = 1.0
    clip: tuple[float, float] | None = None
    normalize: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


_KEYS = ("name", "scorer", "function", "weight", "clip", "normalize", "options")


def read_terms(entries: Sequence[Any]) -> list[Term]:
    """Read ``reward.terms``.

    Raises:
        ConfigError: an entry is no mapping, has an unknown key or a wrong value, or two have the same name.
    """
    terms = [_read(entry, f"reward.terms[{number}]") for number, entry in enumerate(entries)]
    names = [term.name for term in terms]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"two terms are called '{twice}'",
            why="they could not be told apart in the metrics",
            fix="give each a name of its own: name: ...",
            where="reward.terms",
        )
    return terms


def combine(
    terms: Sequence[Term], scores: Sequence[Sequence[Score]], trajectories: Sequence[Trajectory], *, normalized: bool
) -> list[Score]:
    """The scores of all terms as one.

    Args:
        terms: what they are.
        scores: of each term, the score of each trajectory.
        trajectories: what was scored.
        normalized: whether terms are normalised where they say so.
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
    bad = next(((term, score) for term, score in zip(terms, scores, strict=True) if score.error is not None), None)
    if bad is not None:
        return failed(_told(bad[0].name, str(bad[1].error)))
    whole = Score(0.0)
    for term, score, value in zip(terms, scores, values, strict=True):
        low, high = term.clip or (value, value)
        whole.total += term.weight * min(max(value, low), high)
        for token, reward in score.placed.items():
            whole.placed[token] = whole.placed.get(token, 0.0) + term.weight * reward
        whole.terms[term.name] = score.total
    for term, score in zip(terms, scores, strict=True):
        for entries, found in ((whole.terms, score.terms), (whole.extra, score.extra)):
            for name, entry in found.items():
                entries[name if name not in whole.terms and name not in whole.extra else f"{term.name}_{name}"] = entry
    return whole


def _told(name: str, error: str) -> str:
    """The error with the name of its term, where its first word (that it was a time-out) stays first."""
    first, sign, rest = error.partition(":")
    return f"{first}: term {name}:{rest}" if sign and first == "timeout" else f"term {name}: {error}"


def _normalised(term: Term, scores: Sequence[Score], trajectories: Sequence[Trajectory]) -> list[float]:
    """Values brought to mean 0 and deviation 1 where there are two or more; failed scores take no part."""
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
        found = [values[row] for row in rows]
        mean, deviation = statistics.fmean(found), statistics.stdev(found)
        for row in rows:
            values[row] = (values[row] - mean) / deviation if deviation > _LEAST_DEVIATION else 0.0
    return values


def _read(entry: Any, where: str) -> Term:
    if not isinstance(entry, Mapping):
        raise _wrong(where, f"{entry!r} is no mapping")
    unknown = next((key for key in entry if key not in _KEYS), None)
    if unknown is not None:
        raise ConfigError(f"a term has no '{unknown}'", fix=did_you_mean(str(unknown), _KEYS), where=where)
    scorer, function = entry.get("scorer"), entry.get("function")
    if (scorer is None) == (function is None):
        raise _wrong(
            where, "it has both a scorer and a function" if scorer else "it has neither a scorer nor a function"
        )
    weight, clip, normalize = entry.get("weight", 1.0), entry.get("clip"), entry.get("normalize")
    options = entry.get("options") or {}
    if as_number(weight) is None or isinstance(weight, bool):
        raise _wrong(where, f"weight={weight!r} is no number")
    if clip is not None and not _is_range(clip):
        raise _wrong(where, f"clip={clip!r} is not [low, high]")
    if normalize not in (None, *NORMALIZATIONS):
        raise _wrong(where, f"normalize={normalize!r} is none of {', '.join(NORMALIZATIONS)}")
    if not isinstance(options, Mapping):
        raise _wrong(where, f"options={options!r} is no mapping")
    custom = None if function is None else _function(str(function), dict(options))
    name = entry.get("name") or scorer or (custom and PurePath(str(custom.path)).stem)
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
    if not sign or text.startswith(("http://", "https://")) or not name.isidentifier():
        path, name = text, "compute_score"
    return CustomRewardConfig(path=path, name=name, reward_kwargs=options)


def _is_range(clip: Any) -> bool:
    return (
        isinstance(clip, list | tuple)
        and len(clip) == 2
        and all(isinstance(bound, int | float) for bound in clip)
        and clip[0] <= clip[1]
    )


def _wrong(where: str, what: str) -> ConfigError:
    return ConfigError(
        what,
        fix="a term is {scorer: NAME} or {function: FILE.py:NAME}, with weight, clip: [low, high], normalize: group or batch, "
        "options: {...} and name as wished",
        where=where,
    )
