"""The page of a run: curves, alerts, timeline of stages, ledger of fates, config with sources, environment."""

from __future__ import annotations

import base64
import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.apps.lab.compare import headline_metrics
from hone.apps.lab.diagram import svg
from hone.apps.lab.profile import nested_lanes
from hone.apps.lab.viewer.run import ViewedRun, number, numbers, plain
from hone.apps.lab.viewer.tokens import prepare
from hone.config.environment import flatten
from hone.config.reward import CustomRewardConfig, RewardConfig
from hone.config.trees import PRESET_KINDS, TREES
from hone.data.files import EVERY_COLUMN, Row, read_rows
from hone.data.types import row_of
from hone.errors import HoneError
from hone.insight.coverage import Fate, Stage, read_coverage
from hone.insight.metrics import find_metric, is_declared
from hone.insight.run_directory import data_hashes
from hone.insight.run_files import read_alerts
from hone.insight.timeline import DoneSpan, ProcessTimeline, read_timeline

_STEP = re.compile(r"step (\d+)")
MOST_SPANS = 3000
"""Spans that are shown of a step; beyond it the longest ones are kept."""


def step_timeline(run: Path, step: int | None) -> dict[str, Any]:
    """Return what every process did during a step, the newest without one.

    ``steps`` (all recorded ones), ``step``, ``seconds`` (length of the step), ``left_out`` (spans that are too many to show) and
    ``processes``: ``name`` and ``rows``, each a list of spans ``[what, begin, end, waits]`` in seconds since the step began. Each
    span of a row was begun within the one above it.
    """
    processes = read_timeline(run)
    spans_of_steps = {
        int(match[1]): span
        for process in processes
        if process.role == "driver"
        for span in process.spans
        if (match := _STEP.fullmatch(span.what))
    }
    if not spans_of_steps:
        return {"steps": [], "step": None, "seconds": 0.0, "left_out": 0, "processes": []}
    step = step if step in spans_of_steps else max(spans_of_steps)
    window = spans_of_steps[step]
    shown = [[span for span in process.spans if _overlaps(span, window)] for process in processes]
    lengths = sorted((span.end - span.begin for spans in shown for span in spans), reverse=True)
    shortest = lengths[MOST_SPANS] if len(lengths) > MOST_SPANS else -1.0
    kept = [[span for span in spans if span.end - span.begin > shortest] for spans in shown]
    return {
        "steps": sorted(spans_of_steps),
        "step": step,
        "seconds": window.end - window.begin,
        "left_out": sum(map(len, shown)) - sum(map(len, kept)),
        "processes": [
            {"name": process.name, "rows": _rows(process, spans, window)}
            for process, spans in zip(processes, kept, strict=True)
            if spans
        ],
    }


def _overlaps(span: DoneSpan, window: DoneSpan) -> bool:
    return span.begin < window.end and span.end > window.begin


def _rows(process: ProcessTimeline, spans: Sequence[DoneSpan], window: DoneSpan) -> list[list[list[Any]]]:
    rows: list[list[list[Any]]] = []
    for thread in dict.fromkeys(span.thread for span in process.spans):
        for lane in nested_lanes(span for span in spans if span.thread == thread):
            below: list[list[list[Any]]] = []
            ends: list[float] = []  # of the spans around the current one
            for span in lane:
                while ends and ends[-1] <= span.begin:
                    ends.pop()
                if len(ends) == len(below):
                    below.append([])
                begin, end = max(span.begin, window.begin), min(span.end, window.end)
                below[len(ends)].append([span.what, begin - window.begin, end - window.begin, span.waits])
                ends.append(span.end)
            rows += below
    return rows


SHOWN = 200


def reward_config(named: str) -> RewardConfig:
    """Return the configuration of a reward ``FILE:NAME`` that `hone view --reward` names."""
    file, _, name = named.strip().rpartition(":")
    path = Path(file).expanduser()
    if not file or not path.is_file():
        raise HoneError(f"no file '{file}'", fix="--reward FILE:NAME of a function", code="E-view-reward")
    return RewardConfig(custom_reward_function=CustomRewardConfig(path=str(path.resolve()), name=name))


def rescore(run: ViewedRun, reward: str, named: Mapping[str, RewardConfig]) -> dict[str, Any]:
    """Score all stored answers again, as `hone reward diff stored REWARD` does, by one of ``named`` or a built-in scorer.

    ``episodes``, ``groups``, shares of what would be different, and ``differences``, the largest change first.
    """
    prepare().join()
    from hone.apps.lab.rewards.comparison import compare, rescore_run
    from hone.rewards.scorers import SCORERS

    config = RewardConfig(scorer=reward) if reward in SCORERS else named.get(reward)
    if config is None:
        raise HoneError(
            f"'{reward}' is not a built-in scorer, and the viewer was not started with it",
            why="a caller that has the link could run any file of this machine",
            fix="start it with hone view --reward FILE:NAME",
            code="E-view-reward",
        )
    comparison = compare(rescore_run(str(run.path), run.path.parent, None, config))
    differences = [difference.as_json() for difference in comparison.differences[:SHOWN]]
    counts = {"episodes": comparison.episodes, "groups": comparison.groups}
    return plain({**counts, **comparison.shares(), "changed": len(comparison.differences), "differences": differences})


_SLOW = ("pid", "plan", "downloads", "agent_contract", "flow")
"""Entries of ``run.json`` that the page does not show as facts."""


def metrics(run: ViewedRun) -> dict[str, Any]:
    """Return the curves of a run: ``steps``, ``columns`` (name to one value per step, None where missing), ``about`` (meanings of
    declared names), and ``headline`` names.
    """
    read = run.read()
    names = read.names()
    return {
        "steps": [int(row["step"]) for row in read.metrics],
        "columns": {name: numbers(row.get(name) for row in read.metrics) for name in names},
        "about": {name: find_metric(name).meaning for name in names if is_declared(name)},
        "headline": headline_metrics([read]),
    }


def overview(run: ViewedRun) -> dict[str, Any]:
    """Return the facts of a run: record, and the ledger of fates."""
    read = run.read()
    return {
        "name": run.name,
        "path": str(run.path),
        "status": read.status,
        "seconds": number(read.seconds) if read.seconds is not None else None,
        "record": plain({name: value for name, value in read.record.items() if name not in _SLOW}),
        "ledger": ledger(run.path),
        "flow": picture(read.record.get("flow")),
    }


def picture(flow: Any) -> str:
    """Return the diagram of a step as an address with its data; empty for a record without one, or with one that is damaged."""
    try:
        return "data:image/svg+xml;base64," + base64.b64encode(svg(flow).encode()).decode() if flow else ""
    except (KeyError, TypeError, ValueError, AttributeError):
        return ""


def summary(run: ViewedRun) -> dict[str, Any]:
    """Return one line of the list of runs; ``result`` is the last value of ``metric``, its most important one."""
    read = run.read()
    metric = next(iter(headline_metrics([read])), "")
    result, seconds = numbers([read.last(metric), read.seconds])
    return {
        "name": run.name,
        "status": read.status,
        "step": read.steps,
        "metric": metric,
        "result": result,
        "seconds": seconds,
        "started": read.record.get("started"),
    }


_MOST_BYTES, _MOST_CHARACTERS = 2**26, 80
"""Size of a dataset file that is read for the columns of a row, and length of a value that is shown."""


def row_columns(run: ViewedRun, kind: str, uid: str) -> dict[str, Any]:
    """Return the numbers and short texts of a prompt's row besides the prompt; empty without the files that the run trained on."""
    read, key = run.read(), "train_files" if kind == "rollouts" else "val_files"
    files, recorded = read.config.get(f"data.{key}") or (), read.record.get("data")
    names = [str(name) for name in (files if isinstance(files, list) else [files])] if files else []
    paths = tuple(map(Path, names))
    here = names and all(path.is_file() and path.stat().st_size < _MOST_BYTES for path in paths)
    hashes = data_hashes({"data": {key: names}}) if here else {}
    if not hashes or not isinstance(recorded, dict) or not hashes.items() <= recorded.items():
        return {}  # a received run can name any file of this machine, but not its hash
    source, prompt = (
        str(read.config.get(f"data.{name}") or default)
        for name, default in (("reward_fn_key", "data_source"), ("prompt_key", "prompt"))
    )
    row = _dataset(paths, max(path.stat().st_mtime_ns for path in paths)).get(row_of(uid))
    if row is None:
        return {}
    extra = row.values.get("extra_info")
    shown = {**row.others(source, prompt), **(extra if isinstance(extra, dict) else {})}
    return {
        name: plain(value)
        for name, value in shown.items()
        if isinstance(value, str | int | float) and len(str(value)) <= _MOST_CHARACTERS
    }


@functools.lru_cache(maxsize=2)
def _dataset(paths: tuple[Path, ...], modified: int) -> Mapping[str, Row]:
    """Return the rows of a dataset by uid; ``modified`` names the version of its files."""
    try:
        return {row.uid: row for row in read_rows(paths, required=(), optional=EVERY_COLUMN)}
    except HoneError:
        return {}


def config(run: ViewedRun) -> list[dict[str, Any]]:
    """Return every key of a run's config, see :func:`config_sources`."""
    read = run.read()
    return config_sources(read.config, [str(word) for word in read.record.get("command", [])])


# alerts --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Alert:
    """Something about a run that a person should look at."""

    step: int | None  # step that shows it; None for the run
    what: str  # the problem, with numbers
    why: str = ""  # why it matters
    causes: Sequence[str] = ()  # likely causes with their fixes
    detector: str = ""  # name of the detector that reported it; empty for the state of the run
    samples: Sequence[Mapping[str, Any]] = ()  # step, uid and index of samples that show it


def alerts(run: ViewedRun) -> list[Alert]:
    """Return the alerts of a run, the newest first."""
    read = run.read()
    result = []
    if read.status in ("failed", "dead", "interrupted", "damaged"):
        reason = str(read.record.get("exit_reason") or "its process does not exist any more")
        result.append(Alert(read.steps, f"the run is {read.status}: {reason}"))
    for step, why in run.archived("rollouts").index.progress()["broken"].items():
        result.append(Alert(step, f"the rollouts of step {step} cannot be read: {why}"))
    names = [field.name for field in dataclasses.fields(Alert)]
    reported = [Alert(**{name: plain(alert[name]) for name in names}) for alert in read_alerts(run.path)]
    return result + reported[::-1]


# ledger --------------------------------------------------------------------------------------------------------------


def ledger(path: Path) -> dict[str, Any] | None:
    """Return the fates of prompts by step; None without a ``coverage.jsonl``.

    ``steps`` and ``fates`` (cumulative numbers by fate) are curves, ``counts`` the last totals, ``reasons`` the number of draws by fate
    and reason, and ``problem`` a violated invariant or a damaged line.
    """
    try:
        coverage = read_coverage(path)
    except HoneError as error:
        return {"problem": error.what} if (path / "coverage.jsonl").is_file() else None
    reasons: dict[str, int] = {}
    for draw in coverage.draws:
        if draw.reason:
            name = f"{draw.fate}: {draw.reason}"
            reasons[name] = reasons.get(name, 0) + 1
    return {
        "steps": list(coverage.steps),
        "fates": {fate.value: [counts[fate] for counts in coverage.steps.values()] for fate in Fate},
        "open": {stage.value: coverage.counts[stage] for stage in Stage},
        "counts": coverage.counts,
        "reasons": reasons,
        "problem": coverage.problem,
    }


# config --------------------------------------------------------------------------------------------------------------


def config_sources(config: Mapping[str, Any], command: Sequence[str]) -> list[dict[str, Any]]:
    """Return every key with its value and its source: ``command line``, ``preset NAME``, ``default``, or one of all others.

    A value that equals the default counts as the default. All others are of the ``file`` that the command names, else of the ``script``
    that started the run, else ``derived`` from other keys.
    """
    defaults, preset, preset_name = _layers(config, command)
    overrides = _overrides(command)
    named = any(word.startswith(("--config-name", "--config-path")) for word in command)
    other = "file" if named else "derived" if TREES.keys() & command[:2] else "script"
    entries = []
    for key, value in config.items():
        default = defaults.get(key)
        if any(key == name or key.endswith(f".{name}") for name in overrides):
            source = "command line"
        elif key in preset and preset[key] == value:
            source = f"preset {preset_name}"
        else:
            source = "default" if key in defaults and _same(default, value) else other
        entries.append({"key": key, "value": plain(value), "default": plain(default), "source": source})
    return entries


def _same(default: Any, value: Any) -> bool:
    return default == value or str(default) == str(value) or (default in ({}, [], ()) and value in (None, "", [], {}))


def _overrides(command: Sequence[str]) -> set[str]:
    words = (word.lstrip("+~") for word in command if not word.startswith("-"))
    return {word.partition("=")[0] for word in words if "=" in word}


def _layers(config: Mapping[str, Any], command: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return the defaults and the preset of a command, flat, and the name of the preset."""
    import yaml

    from hone.config.load import PRESETS

    trees = {schema: dict(flatten(dataclasses.asdict(schema()))) for schema in TREES.values()}
    fitting = max(trees, key=lambda schema: len(trees[schema].keys() & config.keys()))  # of a run that a script started
    schema = next((TREES[word] for word in command[:2] if word in TREES), fitting)
    defaults = trees[schema]
    name = ""
    for word, following in zip(command, [*command, ""][1:], strict=True):
        if word == "--preset":
            name = following
        elif word.startswith("--preset="):
            name = word.removeprefix("--preset=")
    file = PRESETS / PRESET_KINDS[schema] / f"{name}.yaml"
    preset = dict(flatten(yaml.safe_load(file.read_text()) or {})) if name and file.is_file() else {}
    return defaults, preset, name
