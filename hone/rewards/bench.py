"""Reward bench: try a reward function or scorer, in a run's workers, on answers of known quality."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from hone.config.reward import RewardConfig
from hone.data.checks.rows import answer_fix, is_missing
from hone.data.episode_log import EpisodeEnd
from hone.data.prompts import ScoredRow
from hone.data.types import StopReason, Trajectory
from hone.errors import Finding, RewardError
from hone.rewards.manager import RewardManager, logger
from hone.rewards.probes import FORMS, PRINTS, Probe, after_thoughts, is_agentic, ordinary, traps, with_episodes
from hone.rewards.score import Cause, Score
from hone.rewards.scorers import SCORERS
from hone.rewards.worker import HAVE


@dataclass(frozen=True)
class Trial:
    """Probe and its score."""

    probe: Probe
    score: Score


@dataclass
class Bench:
    """Result of a reward bench."""

    trials: list[Trial] = field(default_factory=list)  # all scored probes
    rows: int = 0
    seconds_per_call: float = 0.0  # wall time of a call in its worker, without the first call; 0 for a single call
    stopped: str = ""  # reason why the bench ended early, or empty

    def of_kinds(self, *kinds: str) -> list[Trial]:
        return [trial for trial in self.trials if trial.probe.kind in kinds]

    def totals(self, *kinds: str) -> list[float]:
        return [trial.score.total for trial in self.of_kinds(*kinds) if trial.score.error is None]

    def best(self, kind: str) -> dict[str, float]:
        """Return the best reward of this kind by row, without rows that have none."""
        best: dict[str, float] = {}
        for trial in self.of_kinds(kind):
            if trial.score.error is None:
                uid = trial.probe.sample.uid
                best[uid] = max(best.get(uid, trial.score.total), trial.score.total)
        return best


def run_bench(
    config: RewardConfig,
    rows: Sequence[ScoredRow],
    *,
    adversarial: bool = False,
    seconds: float = float("inf"),
    agentic: bool = False,
) -> Bench:
    """Score probes of every sample.

    Args:
        adversarial: True to add adversarial answers and ground truths of another type.
        seconds: start no further row after this time. A call that times out or ends its process also ends the bench.

        agentic: True if the run plays every row with an agent, whatever the row says.

    Raises:
        RewardError: the function cannot be loaded or called, or a row's data source has no scorer.
    """
    bench = Bench()
    manager = RewardManager(replace(config, max_no_verdict_rate=1.0, max_retries=0))
    begun, calls, busy = time.monotonic(), 0, 0.0
    try:
        for number, row in enumerate(rows):
            probes = [*ordinary(rows, number)]
            probes += after_thoughts(probes)
            if agentic or manager.reads_episodes or is_agentic(row.sample):
                probes = [*with_episodes(rows, number, probes)]
            probes += traps(row) if adversarial else ()
            for batch in (
                [probes[:1], probes[1:]] if number == 0 else [probes]
            ):  # the first call separately: it may never end
                start = time.monotonic()
                bench.trials += _score(manager, batch)
                if bench.trials[0].probe is not batch[0]:
                    calls, busy = calls + len(batch), busy + time.monotonic() - start
                costly = next((trial for trial in bench.trials if _ended_its_process(trial.score)), None)
                if costly is not None:
                    bench.stopped = f"{costly.probe.kind} answer, row {costly.probe.sample.uid}: {costly.score.error}"
                    return bench
            bench.rows += 1
            if time.monotonic() - begun > seconds:
                bench.stopped = f"{bench.rows} of {len(rows)} rows took {time.monotonic() - begun:.1f} s"
                return bench
        return bench
    finally:
        manager.close()
        bench.seconds_per_call = busy / calls * min(config.num_workers, max(1, calls)) if calls else 0.0


def _score(manager: RewardManager, probes: Sequence[Probe]) -> list[Trial]:
    with _quiet(logger):
        scores = asyncio.run(manager.score([_trajectory(probe, index) for index, probe in enumerate(probes)]))
    return [Trial(probe, score) for probe, score in zip(probes, scores, strict=True)]


def _ended_its_process(score: Score) -> bool:
    """Return whether the call cost a worker process; replacing hundreds of them would take minutes."""
    return score.cause in (Cause.TIMEOUT, Cause.CRASH, Cause.MEMORY)


def _trajectory(probe: Probe, index: int) -> Trajectory:
    cut = probe.episode is not None and probe.episode.end is EpisodeEnd.TOKENS
    reason = StopReason.LENGTH if cut else StopReason.STOP
    return Trajectory(
        probe.sample.uid,
        index,
        [],
        [*probe.text.encode()],
        [],
        [],
        [],
        probe.text,
        reason,
        probe.sample,
        episode=probe.episode,
    )


@contextmanager
def _quiet(log: logging.Logger) -> Iterator[None]:
    """Disable a logger, since failed calls are expected here and reported by the bench."""
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


LARGE = 10.0  # absolute reward above which a warning is given
SLOW_STEP = 60.0  # seconds of scoring per step above which a warning is given
ORDINARY = ("golden", "wrong", "garbage", "empty", "truncated")
UNANSWERED = ("cut", "nothing said", "injected text")  # forms of bad episodes in which the policy gives no answer


def bench_findings(
    bench: Bench,
    config: RewardConfig,
    sequences: int = 0,
    *,
    thinks: bool | None = None,
    probabilities: bool = False,
) -> Iterator[Finding]:
    """Yield the findings about a reward.

    Args:
        sequences: responses scored per step; 0 if unknown.
        thinks: whether the policy writes thoughts. None, unknown: right answers that fail after a thought are only a warning.
        probabilities: whether rewards must be from 0 to 1.
    """
    if (
        needs_truths(config)
        and bench.trials
        and all(is_missing(one.probe.sample.ground_truth) for one in bench.of_kinds(*ORDINARY))
    ):
        yield _finding(
            "R49",
            f"no ground truth is known of {bench.rows} rows, so no right answer could be tried",
            why="answers to these prompts cannot be scored as right or wrong",
            fix=answer_fix(bench.trials[0].probe.sample.extra_info)
            or "data.answer_key=COLUMN names the column of right answers",
        )
        return
    yield from _failures(bench, config)
    yield from _returns(bench, config)
    yield from _golden(bench)
    yield from _last_turns(bench, "a tool call", stops=True)
    if thinks is not False:
        yield from _last_turns(bench, "a thought", stops=thinks is True)
    yield from _traps(bench)
    yield from _programs(bench)
    yield from _scale(bench, probabilities)
    yield from _time(bench, config, sequences)


def needs_truths(reward: RewardConfig) -> bool:
    """Return whether only built-in scorers score, and they compare with a ground truth."""
    built_in, name = reward.custom_reward_function.path is None and not reward.terms, reward.scorer
    return built_in and (name is None or name not in SCORERS or SCORERS.get(name).needs_truth)


def _failures(bench: Bench, config: RewardConfig) -> Iterator[Finding]:
    tried = bench.of_kinds(*ORDINARY, "program", "episode")
    late = [trial for trial in bench.trials if trial.score.cause is Cause.TIMEOUT]
    if late:
        yield _finding(
            "R52",
            f"a call exceeded the time limit: {_described(late[0])}",
            why="each such response blocks the run for reward.timeout seconds, and is then left out of training",
            fix="make the function faster or raise reward.timeout=SECONDS; preflight.reward_rows=0 skips this check",
        )
    raised = [trial for trial in tried if _raised(trial)]
    if not raised:
        return
    stops = len(raised) > config.max_no_verdict_rate * len(tried)
    yield _finding(
        "R52",
        f"{len(raised)} of {len(tried)} calls in a worker process failed; the first: {_described(raised[0])}",
        why="a response that cannot be scored is left out, so the policy never learns that it was bad"
        + f", and the run would stop (reward.max_no_verdict_rate={config.max_no_verdict_rate:g})" * stops,
        fix="read a column that the rows have, or add it to the file"
        if HAVE in str(raised[0].score.error)
        else "return a score for every text, including an empty one",
        stops=stops,
    )


def _returns(bench: Bench, config: RewardConfig) -> Iterator[Finding]:
    tried = bench.of_kinds(*ORDINARY)
    for cause, what in (
        (Cause.INVALID, "returned no finite number"),
        (Cause.DECLINED, "returned None, so no finite number"),
    ):
        bad = [trial for trial in tried if trial.score.cause == cause]
        if bad:
            yield _finding(
                "R51",
                f"{len(bad)} of {len(tried)} calls {what}: {_described(bad[0])}",
                why="a response without a score is left out, so the policy never learns that it was bad",
                fix='return a number, or {"score": number, ...}, for one response'
                + ("; None is for answers that cannot be judged" if cause == Cause.DECLINED else ""),
                stops=cause is Cause.INVALID or len(bad) > config.max_no_verdict_rate * len(tried),
            )
    kinds = {  # without the answer, which is a term only where it is a number
        tuple(sorted(name for name in trial.score.terms if not name.endswith("pred")))
        for trial in bench.of_kinds(*ORDINARY)
        if trial.score.error is None
    }
    if len(kinds) > 1:
        shown = " and ".join(f"[{', '.join(names)}]" for names in sorted(kinds)[:3])
        yield _finding(
            "R51",
            f"the terms differ between responses: {shown}",
            why="their means cover different responses and cannot be compared",
            fix="return the same keys for every response",
            stops=False,
        )


def _golden(bench: Bench) -> Iterator[Finding]:
    with_truth = {trial.probe.sample.uid for trial in bench.trials if not is_missing(trial.probe.sample.ground_truth)}
    golden = {uid: best for uid, best in bench.best("golden").items() if uid in with_truth}
    every = bench.totals(*ORDINARY, "episode")
    if len(every) > 1 and len(set(every)) == 1:
        untried = not bench.of_kinds("golden")
        fix = "`hone reward test --show 3` prints answers of each kind with their scores"
        if untried:
            fix = "data.answer_key=COLUMN if a column holds the right answers, else preflight.allow=[R49]"
        yield _finding(
            "R49",
            f"the reward is {every[0]:g} for all {len(every)} trial answers to {bench.rows} rows"
            + (f": correct ones in {len(FORMS)} forms, wrong ones, garbage, empty ones" if golden else "")
            + (", and episodes that went badly" if bench.of_kinds("episode") else "")
            + ("; no ground truth is known, so no right answer could be tried" if untried else ""),
            why="whether a right answer gets more is not known"
            if untried
            else "a constant reward gives no learning signal",
            fix=fix if with_truth else answer_fix(bench.trials[0].probe.sample.extra_info) or fix,
            stops=bool(golden),
        )
        return
    baseline = {uid: max(_worst(bench, uid), default=0.0) for uid in golden}
    failed = [uid for uid in golden if golden[uid] <= baseline[uid]]
    if not failed:
        return
    if not _depends_on_truth(bench):
        yield _finding(
            "R49",
            f"the reward does not depend on the ground truth, and in {len(failed)} of {len(golden)} rows garbage or an empty answer "
            "scores at least as high as a correct answer",
            why="the policy could learn only the form of an answer",
            fix="compare with ground_truth in the function, or accept this: preflight.allow=[R49]",
            stops=False,
        )
        return
    worst = max(failed, key=lambda uid: baseline[uid] - golden[uid])
    truth = next(
        trial.probe.sample.ground_truth for trial in bench.of_kinds("golden") if trial.probe.sample.uid == worst
    )
    yield _finding(
        "R49",
        f"correct answers score no better than garbage in {len(failed)} of {len(golden)} rows; row {worst}: "
        f"ground truth {str(truth)[:40]!r} scores {golden[worst]:g} at best, garbage or empty {baseline[worst]:g}",
        why="the policy would learn noise, or to give empty answers",
        fix="compare answer extraction and ground truth with `hone reward test`, which shows every score",
        stops=2 * len(failed) >= len(golden),
    )


def _last_turns(bench: Bench, after: str, *, stops: bool) -> Iterator[Finding]:
    """Yield a finding if right answers pass alone, but score like garbage after a thought or a tool call."""
    scores: dict[tuple[str, str], dict[str, float]] = {}
    for trial in bench.of_kinds("golden"):
        if trial.score.error is None and trial.probe.after in ("", after):
            place = scores.setdefault((trial.probe.sample.uid, trial.probe.alone), {})
            place[trial.probe.after] = max(trial.score.total, place.get(trial.probe.after, trial.score.total))
    lowest = {uid: max(_worst(bench, uid), default=0.0) for uid, _ in scores}
    tried = {key: place for key, place in scores.items() if after in place and place.get("", 0.0) > lowest[key[0]]}
    failed = {uid: form for (uid, form), place in tried.items() if place[after] <= lowest[uid]}
    if failed:
        (uid, form), rows = next(iter(failed.items())), len({uid for uid, _ in tried})
        yield _finding(
            "R49",
            f"in {len(failed)} of {rows} rows a right answer after {after} scores like garbage; row {uid}, form '{form}': "
            f"{tried[uid, form]['']:g} alone, {tried[uid, form][after]:g} after {after}",
            why="the policy gets no reward for such answers" + ("" if stops else ", if it thinks or is taught to"),
            fix="read extra_info['last_answer'] (or an argument last_answer): the last turn without thoughts and tool calls",
            stops=stops and 2 * len(failed) >= rows,
        )


def _depends_on_truth(bench: Bench) -> bool:
    """Return whether some text scores differently with another ground truth."""
    seen: dict[str, float] = {}
    trials = [trial for trial in bench.of_kinds("golden", "wrong") if trial.score.error is None]
    return any(seen.setdefault(trial.probe.text, trial.score.total) != trial.score.total for trial in trials)


def _traps(bench: Bench) -> Iterator[Finding]:
    full, judges = max(bench.totals("golden"), default=None), _depends_on_truth(bench)
    paid = [
        t
        for t in bench.of_kinds("adversarial", "episode")
        if (t.probe.kind == "adversarial" or (judges and t.probe.form in UNANSWERED))
        and t.score.error is None
        and full is not None
        and t.score.total >= full > 0
    ]
    if paid:
        yield _finding(
            "R49",
            f"{len(paid)} adversarial answers score like a correct one ({full:g}): {', '.join(sorted({t.probe.form for t in paid}))}",
            why="the policy may learn such answers instead of the task",
            fix="read only one marked answer, and reject lists of guesses",
            stops=False,
        )
    failed = [
        trial for trial in bench.of_kinds("adversarial") if trial.score.error and trial.score.cause is not Cause.TIMEOUT
    ]
    if failed:
        yield _finding(
            "R52",
            f"{len(failed)} of {len(bench.of_kinds('adversarial'))} adversarial answers make the function fail; the first: {_described(failed[0])}",
            why="policies write such text, and would never see that it was bad",
            fix="return a low score for unreadable text",
            stops=False,
        )


def _programs(bench: Bench) -> Iterator[Finding]:
    full, nothing = max(bench.totals("golden"), default=0.0), max(bench.totals("garbage", "empty"), default=0.0)
    paid = [
        (trial.score.total, trial.probe.form)
        for trial in bench.of_kinds("program")
        if trial.score.error is None
        and trial.score.total > nothing
        and trial.score.total >= (full or float(trial.probe.form == PRINTS))
    ]
    if paid:
        yield _finding(
            "R49",
            f"programs that solve nothing score up to {max(paid)[0]:g}, garbage {nothing:g}: a program that "
            + ", or ".join(sorted({form for _, form in paid})),
            why="the policy would learn such programs instead of the task",
            fix="more tests a row, values compared outside of the program, and 0 for a program that ends before the first test",
            stops=any(total >= (full or 1.0) and form != PRINTS for total, form in paid),
        )


def _scale(bench: Bench, probabilities: bool) -> Iterator[Finding]:
    totals = bench.totals(*ORDINARY)
    if probabilities and totals and not (min(totals) >= -1e-4 and max(totals) <= 1 + 1e-4):  # as the loss checks them
        yield _finding(
            "R54",
            f"rewards are from {min(totals):.4g} to {max(totals):.4g}, but a process reward model learns from 0 (wrong) to 1 (right)",
            why="they are the probabilities that it predicts, and the run would end at the first one outside",
            fix="a reward from 0 to 1, or algorithm.adv_estimator=rloo",
        )
        return
    largest = max((abs(total) for total in totals), default=0.0)
    if largest > LARGE:
        yield _finding(
            "R54",
            f"rewards reach {largest:g} in absolute value",
            why="KL penalties, clip ranges and value losses assume rewards of about 1",
            fix="divide by the largest reward",
            stops=False,
        )


def _time(bench: Bench, config: RewardConfig, sequences: int) -> Iterator[Finding]:
    seconds = bench.seconds_per_call * sequences / config.num_workers
    if seconds > SLOW_STEP:
        yield _finding(
            "R53",
            f"scoring takes {bench.seconds_per_call:.2g} s per call: {sequences} sequences / {config.num_workers} workers "
            f"= {seconds:.0f} s per step",
            why="generation and training wait for it",
            fix=f"reward.num_workers={2 * config.num_workers} or more, or use an asynchronous function",
            stops=False,
        )


def _worst(bench: Bench, uid: str) -> Iterator[float]:
    return (
        t.score.total for t in bench.of_kinds("garbage", "empty") if t.probe.sample.uid == uid and t.score.error is None
    )


def _raised(trial: Trial) -> bool:
    """Return whether the function raised or its process ended, as opposed to returning no usable score."""
    return trial.score.error is not None and trial.score.cause not in (Cause.INVALID, Cause.DECLINED, Cause.TIMEOUT)


def _described(trial: Trial) -> str:
    probe = trial.probe
    form = f" ({probe.form})" if probe.form else ""
    return f"{probe.kind} answer{form}, row {probe.sample.uid}: {str(trial.score.error)[:200]}"


def _finding(code: str, what: str, *, why: str, fix: str, stops: bool = True) -> Finding:
    where = "reward"
    return Finding(RewardError(what, why=why, fix=fix, where=where, code=code), stops)
