"""Time of a step by stage, what to change first, and what that can gain at most."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.apps.lab.compare import Run
from hone.errors import HoneError
from hone.insight.run_files import disk_errors, write_atomically
from hone.insight.timeline import DoneSpan, ProcessTimeline


def chrome_trace(processes: Sequence[ProcessTimeline]) -> dict[str, Any]:
    """Return a timeline in the Chrome trace format.

    Times are microseconds since the first span. Spans of a thread that overlap without nesting, as those of tasks of an event loop
    do, are shown on several lines. The beginning of a step is an instant event of all processes.
    """
    origin = min((span.begin for process in processes for span in process.spans), default=0.0)
    events: list[dict[str, Any]] = []
    for pid, process in enumerate(processes, start=1):
        name = f"{process.name} (process {process.pid} on {process.host})"
        events.append(_named("process_name", pid, 0, name))
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        tid = 0
        for number, thread in enumerate(dict.fromkeys(span.thread for span in process.spans), start=1):
            lanes = nested_lanes(span for span in process.spans if span.thread == thread)
            for lane, spans in enumerate(lanes, start=1):
                tid += 1
                events.append(_named("thread_name", pid, tid, f"thread {number}" + f", line {lane}" * (len(lanes) > 1)))
                events += (_complete(span, origin, pid, tid) for span in spans)
        if process.role == "driver":
            events += (
                {"ph": "i", "name": span.what, "ts": _micro(span.begin - origin), "pid": pid, "tid": 1, "s": "g"}
                for span in process.spans
                if span.what.startswith("step ")
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(processes: Sequence[ProcessTimeline], path: Path) -> None:
    with disk_errors(path):
        write_atomically(path, json.dumps(chrome_trace(processes), ensure_ascii=False))


def nested_lanes(spans: Iterable[DoneSpan]) -> list[list[DoneSpan]]:
    """Distribute spans, sorted by begin and then the longest first, over lanes in which any two nest or are disjoint."""
    lanes: list[list[DoneSpan]] = []
    open_ends: list[list[float]] = []  # of each lane, the ends of the spans around the current time, the innermost last
    for span in spans:
        for lane, ends in zip(lanes, open_ends, strict=True):
            while ends and ends[-1] <= span.begin:
                ends.pop()
            if not ends or span.end <= ends[-1]:
                lane.append(span)
                ends.append(span.end)
                break
        else:
            lanes.append([span])
            open_ends.append([span.end])
    return lanes


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)


def _complete(span: DoneSpan, origin: float, pid: int, tid: int) -> dict[str, Any]:
    begin = _micro(span.begin - origin)
    return {
        "ph": "X",
        "name": span.what,
        "cat": "wait" if span.waits else "work",
        "ts": begin,
        "dur": _micro(span.end - origin) - begin,
        "pid": pid,
        "tid": tid,
    }


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


_STAGE, _PARTS = "timing_s/", "timing_s/update_weights_"
OTHER = "other"
"""Time of a step outside of every stage."""
_BETWEEN_STEPS = ("testing", "save_checkpoint")  # an RL step's time does not hold them
MIN_SHARE = 0.05
"""Share of the time below which a stage gets no advice."""


@dataclass(frozen=True)
class Advice:
    """A change that saves time."""

    code: str  # stable identifier, such as ``gen-async``
    stage: str  # stage that it shortens
    change: str  # keys to set
    why: str  # reason in the numbers of the run
    speedup: float  # steps per second after the change over those before, if the change removes all that it can remove
    changes_training: bool = False  # whether the run also computes something else


@dataclass(frozen=True)
class Profile:
    """Mean time of the steps of a run, from ``first`` to ``last``."""

    first: int
    last: int
    steps: int
    seconds: float  # wall time from the beginning of a step to that of the next, checkpoints and validation included
    stages: Mapping[str, float]  # seconds per step by stage, the longest first; they sum to ``seconds``
    parts: Mapping[str, float] = field(default_factory=dict)  # seconds of the parts of ``update_weights``
    concurrent: Mapping[str, float] = field(default_factory=dict)  # seconds of what runs during other stages
    on_gpu: bool = False  # whether the run's machine has a GPU that it may use
    advice: Sequence[Advice] = ()  # changes, the largest possible gain first

    def share(self, stage: str) -> float:
        """Return the share of a stage in the time of a step; 0 if the run has no such stage."""
        return self.stages.get(stage, 0.0) / self.seconds


def profile_run(run: Run, last: int | None = None) -> Profile:
    """Return the mean times of a run's ``last`` steps, or of all but the first, which also compiles and fills caches."""
    rows = [row for row in run.metrics if row.get("timing_s/step", 0.0) > 0]
    if not rows:
        raise HoneError(
            "the run has no step with times yet",
            where=str(run.path),
            why="a profile is the mean over the steps of a run",
            fix="train at least one step, better three",
            code="E-profile",
        )
    rows = rows[1:] or rows
    rows = rows[-last:] if last else rows
    sums: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(_STAGE):
                sums[name] = sums.get(name, 0.0) + value
    means = {name: value / len(rows) for name, value in sums.items()}
    step = means.pop("timing_s/step")
    parts = {name.removeprefix(_PARTS): means.pop(name) for name in sorted(means) if name.startswith(_PARTS)}
    stages = {name.removeprefix(_STAGE): seconds for name, seconds in means.items()}
    concurrent = (
        {"testing": stages.pop("testing")} if "testing" in stages and _validates_concurrently(run.config) else {}
    )
    outside = (
        _BETWEEN_STEPS if "gen" in stages else ("save_checkpoint",)
    )  # in supervised training a step includes testing
    inside = sum(seconds for name, seconds in stages.items() if name not in outside)
    stages[OTHER] = max(0.0, step - inside)
    stages = dict(sorted(stages.items(), key=lambda item: -item[1]))
    steps = [int(row["step"]) for row in rows]
    profile = Profile(steps[0], steps[-1], len(rows), sum(stages.values()), stages, parts, concurrent, _has_gpu(run))
    advice = sorted(_advice(profile, run.config), key=lambda item: (-item.speedup, item.code))
    return Profile(**{**vars(profile), "advice": advice})


def _has_gpu(run: Run) -> bool:
    return run.config.get("trainer.device") != "cpu" and bool((run.record.get("hardware") or {}).get("gpus"))


def _validates_concurrently(config: Mapping[str, Any]) -> bool:
    """Return whether validation is a task that runs during the next steps."""
    share = config.get("trainer.async_training.validation_share", 0.5)
    return bool(config.get("trainer.async_training.max_staleness", 0)) and bool(share)


# advice --------------------------------------------------------------------------------------------------------------


def _advice(profile: Profile, config: Mapping[str, Any]) -> Iterator[Advice]:
    advisers = {
        "gen": _generation,
        "reward": _reward,
        "old_log_prob": _old_log_probs,
        "ref": _reference,
        "update_actor": _update,
        "update_weights": _weights,
        "testing": _validation,
        "save_checkpoint": _checkpoint,
        OTHER: _other,
    }
    for stage, adviser in advisers.items():
        if profile.share(stage) >= MIN_SHARE:
            yield from adviser(profile, config)


def _speedup(profile: Profile, saved: float) -> float:
    """Return Amdahl's bound on the speed when ``saved`` seconds of a step disappear."""
    return profile.seconds / max(profile.seconds - saved, 1e-9)


def _time_of(stage: str, profile: Profile) -> str:
    return f"{stage} takes {profile.share(stage):.0%} of the time"


def _generation(profile: Profile, config: Mapping[str, Any]) -> Iterator[Advice]:
    gen, staleness = profile.stages["gen"], int(config.get("trainer.async_training.max_staleness", 0) or 0)
    if staleness:
        yield Advice(
            "gen-engines",
            "gen",
            "more engines: `hone runs engines RUN N`, or more processes of the pool `rollout`",
            f"training waits for groups in {profile.share('gen'):.0%} of the time, although generation has "
            f"{staleness} update{'s' * (staleness > 1)} of lead",
            _speedup(profile, gen),
        )
        return
    rest = sum(
        profile.stages.get(name, 0.0)
        for name in ("reward", "old_log_prob", "ref", "values", "update_critic", "update_actor")
    )
    yield Advice(
        "gen-async",
        "gen",
        "trainer.async_training.max_staleness=1, with separate devices for the pools `actor` and `rollout`",
        f"{_time_of('gen', profile)}, and generation and training take turns; together they need no longer than the longer of them",
        _speedup(profile, min(gen, rest)),
        changes_training=True,
    )
    yield Advice(
        "gen-engines",
        "gen",
        "more generation per second: twice the processes of the pool `rollout`, or an external engine (docs/engines.md)",
        f"{_time_of('gen', profile)}; twice the engines halve it",
        _speedup(profile, gen / 2),
    )


def _reward(profile: Profile, config: Mapping[str, Any]) -> Iterator[Advice]:
    workers = int(config.get("reward.num_workers", 2) or 2)
    yield Advice(
        "reward-workers",
        "reward",
        f"reward.num_workers={2 * workers}",
        f"{_time_of('reward', profile)}; twice the workers halve it where a reward function has its own process",
        _speedup(profile, profile.stages["reward"] / 2),
    )


def _old_log_probs(profile: Profile, config: Mapping[str, Any]) -> Iterator[Advice]:
    forced = config.get("actor_rollout_ref.actor.recompute_old_log_probs", False)
    keys, batch = "actor_rollout_ref.actor.", config.get("data.train_batch_size")
    if not forced and config.get(f"{keys}ppo_mini_batch_size") == batch and config.get(f"{keys}ppo_epochs", 1) == 1:
        return  # the algorithm needs them before the update
    one_update = f"{keys}ppo_mini_batch_size={batch} {keys}ppo_epochs=1"
    yield Advice(
        "old-log-prob-pass",
        "old_log_prob",
        f"{keys}recompute_old_log_probs=false" if forced else one_update,
        f"{_time_of('old_log_prob', profile)}; with one update per batch the update's own forward pass gives the old log-probs",
        _speedup(profile, profile.stages["old_log_prob"]),
        changes_training=not forced,
    )


def _reference(profile: Profile, config: Mapping[str, Any]) -> Iterator[Advice]:
    yield Advice(
        "ref-kl",
        "ref",
        "actor_rollout_ref.actor.use_kl_loss=false algorithm.use_kl_in_reward=false",
        f"{_time_of('ref', profile)}; without a KL penalty there is no reference policy",
        _speedup(profile, profile.stages["ref"]),
        changes_training=True,
    )


def _update(profile: Profile, config: Mapping[str, Any]) -> Iterator[Advice]:
    update = profile.stages["update_actor"]
    model = "actor_rollout_ref.model." if "actor_rollout_ref.model.path" in config else "model."
    budget = (
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu" if "gen" in profile.stages else "data.max_token_len_per_gpu"
    )
    if config.get(f"{model}enable_gradient_checkpointing"):
        yield Advice(
            "update-checkpointing",
            "update_actor",
            f"{model}enable_gradient_checkpointing=false, if memory suffices (`hone plan` predicts it)",
            f"{_time_of('update_actor', profile)}; a quarter of it computes activations again (one forward pass of four)",
            _speedup(profile, update / 4),
        )
    if config.get(f"{model}compile_layers") == "never" and profile.on_gpu:
        yield Advice(
            "update-compile",
            "update_actor",
            f"{model}compile_layers=auto",
            f"{_time_of('update_actor', profile)}, and its layers are not compiled; compiled ones may take half",
            _speedup(profile, update / 2),
        )
    if budget in config and profile.on_gpu:
        yield Advice(
            "update-budget",
            "update_actor",
            f"{budget}={2 * int(config[budget])}, if memory suffices (`hone plan` predicts it)",
            f"{_time_of('update_actor', profile)}; half as many micro-batches have half of the fixed costs",
            _speedup(profile, update / 2),
        )


def _weights(profile: Profile, config: Mapping[str, Any]) -> Iterator[Advice]:
    drain, key = (
        profile.parts.get("drain", 0.0),
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
    )
    if drain / profile.seconds >= MIN_SHARE:
        yield Advice(
            "weights-drain",
            "update_weights",
            "trainer.async_training.partial_rollouts=true",
            f"new weights wait for responses under way in {drain / profile.seconds:.0%} of the time",
            _speedup(profile, drain),
            changes_training=True,
        )
    rest = profile.stages["update_weights"] - drain
    if rest / profile.seconds >= MIN_SHARE:
        yield Advice(
            "weights-buckets",
            "update_weights",
            f"{key}={2 * int(config.get(key, 512))}",
            f"sending weights takes {rest / profile.seconds:.0%} of the time; larger buckets need fewer calls",
            _speedup(profile, rest),
        )


def _validation(profile: Profile, config: Mapping[str, Any]) -> Iterator[Advice]:
    every = config.get("trainer.test_freq")
    yield Advice(
        "validate-less",
        "testing",
        f"trainer.test_freq={2 * every}" if isinstance(every, int) and every > 0 else "a smaller data.val_max_samples",
        f"{_time_of('testing', profile)}; half as many answers halve it",
        _speedup(profile, profile.stages["testing"] / 2),
    )


def _checkpoint(profile: Profile, config: Mapping[str, Any]) -> Iterator[Advice]:
    blocking, every, seconds = (
        config.get("trainer.async_save") is False,
        config.get("trainer.save_freq"),
        profile.stages["save_checkpoint"],
    )
    if blocking:
        yield Advice(
            "save-async",
            "save_checkpoint",
            "trainer.async_save=true",
            f"{_time_of('save_checkpoint', profile)}, and training waits for the files",
            _speedup(profile, seconds),
        )
    elif isinstance(every, int) and every > 0:
        yield Advice(
            "save-less",
            "save_checkpoint",
            f"trainer.save_freq={2 * every}",
            f"{_time_of('save_checkpoint', profile)}; half as many checkpoints halve it",
            _speedup(profile, seconds / 2),
        )


def _other(profile: Profile, config: Mapping[str, Any]) -> Iterator[Advice]:
    dumps = config.get("trainer.rollout_dump_freq")
    if isinstance(dumps, int) and 0 < dumps < 10:
        yield Advice(
            "other-dumps",
            OTHER,
            "trainer.rollout_dump_freq=10",
            f"{profile.share(OTHER):.0%} of the time is outside of every stage, and all samples are written every {dumps} steps",
            _speedup(profile, profile.stages[OTHER] * (1 - dumps / 10)),
        )


# processes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessShares:
    """Shares of the wall time of the measured steps in one process; they sum to 1."""

    name: str  # ``role`` or ``role[rank]``
    work: float  # in an activity, and not in a wait
    wait: float  # in a wait for something outside the process
    idle: float  # in neither
    longest_wait: str = ""  # wait with the most seconds; "" without any


def process_shares(processes: Sequence[ProcessTimeline], first: int, last: int) -> list[ProcessShares]:
    """Return the shares of every process during the steps ``first`` to ``last``; empty if the timeline does not hold them."""
    names = {f"step {step}" for step in range(first, last + 1)}
    steps = [span for process in processes if process.role == "driver" for span in process.spans if span.what in names]
    if not steps:
        return []
    begin, end = min(span.begin for span in steps), max(span.end for span in steps)
    shares = []
    for process in processes:
        spans = [_clipped(span, begin, end) for span in process.spans if span.begin < end and span.end > begin]
        waits = [span for span in spans if span.waits]
        waited, occupied = covered(waits) / (end - begin), covered(spans) / (end - begin)
        by_name: dict[str, float] = {}
        for span in waits:
            by_name[span.what] = by_name.get(span.what, 0.0) + span.end - span.begin
        longest = max(by_name, key=lambda name: by_name[name], default="")
        shares.append(ProcessShares(process.name, occupied - waited, waited, 1 - occupied, longest))
    return shares


def covered(spans: Sequence[DoneSpan]) -> float:
    """Return the seconds in which at least one of the spans, sorted by begin, was open."""
    seconds, until = 0.0, float("-inf")
    for span in spans:
        seconds += max(0.0, span.end - max(span.begin, until))
        until = max(until, span.end)
    return seconds


def _clipped(span: DoneSpan, begin: float, end: float) -> DoneSpan:
    return span._replace(begin=max(span.begin, begin), end=min(span.end, end))
