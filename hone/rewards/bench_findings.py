"""What the trials of a reward say about it: rules R49 to R54."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.reward import RewardConfig
from hone.data.checks.rewards import is_missing
from hone.errors import Finding, RewardError
from hone.rewards.bench import Bench, Trial
from hone.rewards.manager import is_timeout
from hone.rewards.probes import FORMS

LARGE = 10.0
"""Rewards beyond this size are warned about."""
SLOW_STEP = 60.0
"""Seconds of scoring a step that are warned about."""
ORDINARY = ("golden", "wrong", "garbage", "empty", "truncated")


def bench_findings(bench: Bench, config: RewardConfig, sequences: int = 0) -> Iterator[Finding]:
    """Yield what is wrong with a reward.

    Args:
        bench: its trials.
        config: the block ``reward``.
        sequences: responses that a step will score; 0 when that is not known.
    """
    yield from _failures(bench, config)
    yield from _returns(bench)
    yield from _golden(bench)
    yield from _traps(bench)
    yield from _scale(bench)
    yield from _time(bench, config, sequences)


def _failures(bench: Bench, config: RewardConfig) -> Iterator[Finding]:
    tried = bench.of(*ORDINARY)
    late = [trial for trial in bench.trials if is_timeout(trial.score)]
    if late:
        yield _finding(
            "R52",
            f"a call did not end: {_told(late[0])}",
            why="each such response would hold the run for reward.timeout seconds and teach it a false 0",
            fix="make it faster, or reward.timeout=SECONDS with what it needs; preflight.reward_rows=0 does not try it",
        )
    raised = [trial for trial in tried if _raised(trial)]
    if not raised:
        return
    stops = config.on_error == "stop" or len(raised) > config.max_error_rate * len(tried)
    yield _finding(
        "R52",
        f"{len(raised)} of {len(tried)} calls in a worker process failed; the first: {_told(raised[0])}",
        why="a response that cannot be scored counts as 0, which is false"
        + (
            f", and the run would stop (reward.on_error={config.on_error}, max_error_rate={config.max_error_rate:g})"
            * stops
        ),
        fix="let the function return a score for every text, also an empty one",
        stops=stops,
    )


def _returns(bench: Bench) -> Iterator[Finding]:
    bad = [
        trial
        for trial in bench.of(*ORDINARY)
        if trial.score.error and not _raised(trial) and not is_timeout(trial.score)
    ]
    if bad:
        yield _finding(
            "R51",
            f"{len(bad)} of {len(bench.of(*ORDINARY))} calls gave no finite number: {_told(bad[0])}",
            why="a response without a score counts as 0, which is false",
            fix='return a number, or {"score": number, ...}, for one response',
        )
    kinds = {tuple(sorted(trial.score.terms)) for trial in bench.of(*ORDINARY) if trial.score.error is None}
    if len(kinds) > 1:
        shown = " and ".join(f"[{', '.join(names)}]" for names in sorted(kinds)[:3])
        yield _finding(
            "R51",
            f"the terms beside the score differ between responses: {shown}",
            why="their means are over different responses, and cannot be compared",
            fix="return the same keys for every response",
            stops=False,
        )


def _golden(bench: Bench) -> Iterator[Finding]:
    told = {trial.probe.sample.uid for trial in bench.trials if not is_missing(trial.probe.sample.ground_truth)}
    golden = {uid: best for uid, best in bench.best("golden").items() if uid in told}
    every = bench.totals(*ORDINARY)
    if len(every) > 1 and len(set(every)) == 1:
        yield _finding(
            "R49",
            f"the reward is {every[0]:g} for all {len(every)} answers tried on {bench.rows} rows"
            + (f": right ones in {len(FORMS)} forms, wrong ones, garbage, nothing" if golden else ""),
            why="a reward that is always the same teaches nothing",
            fix="see what the function reads: `hone reward test` shows every answer it was given",
            stops=bool(golden),
        )
        return
    none = {uid: max(_worst(bench, uid), default=0.0) for uid in golden}
    failed = [uid for uid in golden if golden[uid] <= none[uid]]
    if not failed:
        return
    if not _looks_at_truth(bench):
        yield _finding(
            "R49",
            f"the reward does not depend on the ground truth, and in {len(failed)} of {len(golden)} rows garbage or nothing "
            "scores as well as a right answer",
            why="nothing but the form of an answer can be learned",
            fix="compare with ground_truth in the function, unless that is what you want: preflight.allow=[R49]",
            stops=False,
        )
        return
    worst = max(failed, key=lambda uid: none[uid] - golden[uid])
    truth = next(trial.probe.sample.ground_truth for trial in bench.of("golden") if trial.probe.sample.uid == worst)
    yield _finding(
        "R49",
        f"right answers score no better than garbage in {len(failed)} of {len(golden)} rows; row {worst}: "
        f"ground truth {str(truth)[:40]!r} scores {golden[worst]:g} at best, garbage or nothing {none[worst]:g}",
        why="the policy would learn from noise, or to say nothing",
        fix="compare extraction and ground truth: `hone reward test` shows every answer and its score",
        stops=2 * len(failed) >= len(golden),
    )


def _looks_at_truth(bench: Bench) -> bool:
    """Whether some text scores differently beside another ground truth."""
    seen: dict[str, float] = {}
    trials = [trial for trial in bench.of("golden", "wrong") if trial.score.error is None]
    return any(seen.setdefault(trial.probe.text, trial.score.total) != trial.score.total for trial in trials)


def _traps(bench: Bench) -> Iterator[Finding]:
    full = max(bench.totals("golden"), default=None)
    paid = [
        t for t in bench.of("adversarial") if t.score.error is None and full is not None and t.score.total >= full > 0
    ]
    if paid:
        yield _finding(
            "R49",
            f"{len(paid)} traps score like a right answer ({full:g}): {', '.join(sorted({t.probe.form for t in paid}))}",
            why="the policy finds such answers, and learns them instead of the task",
            fix="read one marked answer only, and refuse lists of guesses",
            stops=False,
        )
    failed = [trial for trial in bench.of("adversarial") if trial.score.error and not is_timeout(trial.score)]
    if failed:
        yield _finding(
            "R52",
            f"{len(failed)} of {len(bench.of('adversarial'))} traps make the function fail; the first: {_told(failed[0])}",
            why="policies write such text, and it counts as a false 0",
            fix="return a low score for what cannot be read",
            stops=False,
        )


def _scale(bench: Bench) -> Iterator[Finding]:
    largest = max((abs(total) for total in bench.totals(*ORDINARY)), default=0.0)
    if largest > LARGE:
        yield _finding(
            "R54",
            f"rewards reach {largest:g} in size",
            why="KL penalties, clip ranges and value losses are made for rewards of about 1",
            fix="divide by the largest reward",
            stops=False,
        )


def _time(bench: Bench, config: RewardConfig, sequences: int) -> Iterator[Finding]:
    seconds = bench.seconds_per_call * sequences / config.num_workers
    if seconds > SLOW_STEP:
        yield _finding(
            "R53",
            f"scoring takes {bench.seconds_per_call:.2g} s a call: {sequences} sequences / {config.num_workers} workers "
            f"= {seconds:.0f} s a step",
            why="generation and training wait for it",
            fix=f"reward.num_workers={2 * config.num_workers} or more, or an asynchronous function",
            stops=False,
        )


def _worst(bench: Bench, uid: str) -> Iterator[float]:
    return (t.score.total for t in bench.of("garbage", "empty") if t.probe.sample.uid == uid and t.score.error is None)


def _raised(trial: Trial) -> bool:
    """Whether the function raised or its process ended, rather than returning something that is no score."""
    said = trial.score.error
    return bool(said) and not is_timeout(trial.score) and not said.startswith(("returned", "'score' is", "term "))


def _told(trial: Trial) -> str:
    probe = trial.probe
    form = f" ({probe.form})" if probe.form else ""
    return f"{probe.kind} answer{form}, row {probe.sample.uid}: {str(trial.score.error)[:200]}"


def _finding(code: str, what: str, *, why: str, fix: str, stops: bool = True) -> Finding:
    where = "reward"
    return Finding(RewardError(what, why=why, fix=fix, where=where, code=code), stops)
