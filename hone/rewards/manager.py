"""Scores responses: with a reward function of the user's own, or with the built-in scorer of each kind of problem."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.config.reward import RewardConfig
from hone.data.types import Trajectory
from hone.errors import RewardError, did_you_mean
from hone.insight import activity
from hone.rewards.outcome import TIMEOUT, failed, to_score
from hone.rewards.pool import ASYNC_GRACE, Outcome, WorkerPool
from hone.rewards.score import Score
from hone.rewards.scorers import SCORERS, Scorer, scorer_for
from hone.rewards.worker import Target

logger = logging.getLogger("hone.rewards")


class RewardManager:
    """Scores trajectories, in parallel and with a time limit each.

    A custom function, and built-in scorers that may hang (symbolic mathematics, other packages' verifiers), run in worker
    processes; built-in scorers that only read text run here. A call that raises, runs out of time, kills its process or
    returns no finite number is an error: counted and shown, or the end of the run (``reward.on_error``).

    Args:
        config: the block ``reward``.

    Raises:
        RewardError: the custom function cannot be loaded or called, or an option is unknown.
        ConfigError: ``reward.scorer`` is unknown.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self._pool: WorkerPool | None = None
        self._traceback_logged = False
        self._forced = SCORERS.get(config.scorer) if config.scorer else None
        self._custom = config.custom_reward_function.path is not None
        if self._custom and self._forced:
            raise RewardError(
                f"both reward.scorer={config.scorer} and a custom reward function are set",
                why="one of them would be ignored",
                fix="reward.scorer=null or reward.custom_reward_function.path=null",
            )
        if self._custom:
            self._pool = WorkerPool(self._custom_target(), config.num_workers)
        else:
            self._check_options([self._forced] if self._forced else [SCORERS.get(name) for name in SCORERS])

    def check(self, data_sources: Mapping[str, int]) -> None:
        """Make sure, before anything is generated, that every kind of problem can be scored.

        Args:
            data_sources: data source to number of rows.

        Raises:
            RewardError: a data source has no scorer, or its scorer needs a package that is not installed.
        """
        if self._custom:
            return
        found = {source: self._forced or scorer_for(source) for source in data_sources}
        missing = sorted((source for source, scorer in found.items() if scorer is None), key=lambda s: -data_sources[s])
        if missing:
            rows = ", ".join(f"'{source}' ({data_sources[source]} rows)" for source in missing[:5])
            known = ", ".join(sorted({pattern for name in SCORERS for pattern in SCORERS.get(name).data_sources}))
            raise RewardError(
                f"no reward for data_source {rows}{' and more' if len(missing) > 5 else ''}. Known: {known}",
                why="their responses could not be scored",
                fix=f"reward.scorer=<one of {', '.join(SCORERS.names())}> for all rows, or a function of your own: "
                "reward.custom_reward_function.path=<file>.py",
                code="R43",
                where="data",
            )
        used = {scorer.name: scorer for scorer in found.values() if scorer is not None}
        for scorer in used.values():
            scorer.check_installed()
        self._check_options(list(used.values()))

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Score each trajectory; scores come back in the same order.

        Raises:
            RewardError: a call failed and ``on_error`` is ``stop``, more than ``max_error_rate`` of these failed, or a
                trajectory's data source has no scorer.
        """
        total = len(trajectories)
        allowed = 0 if self.config.on_error == "stop" else int(self.config.max_error_rate * total + 1e-9)
        chosen = [None if self._custom else self._scorer(trajectory) for trajectory in trajectories]
        sent = [index for index, scorer in enumerate(chosen) if scorer is None or scorer.may_hang]
        outcomes: list[Outcome | None] = [None] * total
        job = None
        if sent:
            job = self._workers().submit([self._call(trajectories[i], chosen[i]) for i in sent], max_failures=allowed)
        for index, scorer in enumerate(chosen):
            if scorer is not None and not scorer.may_hang:
                outcomes[index] = _score_here(scorer, self._arguments(trajectories[index], scorer))
                activity.tick()
        if job is not None:
            limit = self.config.timeout + ASYNC_GRACE
            with activity.waiting(f"{len(sent)} scores", on=["reward worker"], limit=limit):
                answers = await asyncio.wrap_future(job.done)
            for index, outcome in zip(sent, answers, strict=True):
                outcomes[index] = outcome
        self._judge(trajectories, outcomes, allowed)
        return [outcome.score for outcome in outcomes if outcome is not None]

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    # calls -----------------------------------------------------------------------------------------------------------

    def _custom_target(self) -> Target:
        custom = self.config.custom_reward_function
        path = Path(str(custom.path)).expanduser().resolve()
        if not path.is_file():
            near = [file.name for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
            raise RewardError(
                f"there is no file {custom.path}",
                why="without it no response can be scored",
                fix=did_you_mean(path.name, near) if near else f"the directory {path.parent} holds no Python file",
                where="reward.custom_reward_function.path",
            )
        return Target(self.config.timeout, str(path), custom.name, dict(custom.reward_kwargs))

    def _workers(self) -> WorkerPool:
        if self._pool is None:
            names = tuple(n for n in SCORERS if SCORERS.get(n).may_hang and SCORERS.get(n).is_installed())
            self._pool = WorkerPool(Target(self.config.timeout, scorers=names), self.config.num_workers)
        return self._pool

    def _scorer(self, trajectory: Trajectory) -> Scorer:
        source = trajectory.sample.data_source
        scorer = self._forced or scorer_for(source)
        if scorer is None:
            self.check({source: 1})
            raise AssertionError(source)
        return scorer

    def _call(self, trajectory: Trajectory, scorer: Scorer | None) -> dict[str, Any]:
        if scorer is None:
            return _field_arguments(trajectory)
        return {"scorer": scorer.name, **self._arguments(trajectory, scorer)}

    def _arguments(self, trajectory: Trajectory, scorer: Scorer) -> dict[str, Any]:
        options = {name: value for name, value in self.config.scorer_kwargs.items() if name in scorer.options}
        return _field_arguments(trajectory) | options

    def _check_options(self, scorers: Sequence[Scorer]) -> None:
        known = {option for scorer in scorers for option in scorer.options}
        for option in self.config.scorer_kwargs:
            if option not in known:
                names = ", ".join(scorer.name for scorer in scorers)
                raise RewardError(
                    f"no scorer in use ({names}) has an option '{option}'",
                    where="reward.scorer_kwargs",
                    fix=did_you_mean(option, known),
                )

    # errors ----------------------------------------------------------------------------------------------------------

    def _judge(self, trajectories: Sequence[Trajectory], outcomes: Sequence[Outcome | None], allowed: int) -> None:
        """Log what failed; raise when it is more than allowed."""
        bad = [
            (t, o) for t, o in zip(trajectories, outcomes, strict=True) if o is not None and o.score.error is not None
        ]
        if not bad:
            return
        trajectory, first = bad[0]
        slow = sum(is_timeout(outcome.score) for _, outcome in bad)
        where = f"data_source '{trajectory.sample.data_source}', row {trajectory.sample.uid}"
        at_least = "at least " if any(outcome is None for outcome in outcomes) else ""
        what = f"{at_least}{len(bad)} of {len(outcomes)} responses could not be scored ({slow} ran out of time)"
        logger.warning("%s; the first (%s): %s", what, where, first.score.error)
        self._log_traceback(outcome.traceback for _, outcome in bad)
        if len(bad) <= allowed:
            return
        repair = "repair the reward function" if self._custom else "see the first error"
        raise RewardError(
            f"{what}; the first ({where}): {first.score.error}",
            why="a score that is missing counts as 0 and teaches the policy something false",
            fix=f"{repair}{f', or reward.timeout={2 * self.config.timeout:g}' if slow else ''}, or tolerate it: "
            "reward.on_error=count reward.max_error_rate=<share>",
            where="reward",
        )

    def _log_traceback(self, traces: Any) -> None:
        trace = next((trace for trace in traces if trace), None)
        if trace is not None and not self._traceback_logged:
            self._traceback_logged = True
            logger.error("the first traceback of the reward function (later ones are only counted):\n%s", trace)


def is_timeout(score: Score) -> bool:
    """Whether scoring ran out of time."""
    return score.error is not None and score.error.startswith(TIMEOUT)


def error_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """``reward/error_rate`` and ``reward/timeout_rate`` of a batch."""
    count = max(len(scores), 1)
    return {
        "reward/error_rate": sum(score.error is not None for score in scores) / count,
        "reward/timeout_rate": sum(map(is_timeout, scores)) / count,
    }


def _field_arguments(trajectory: Trajectory) -> dict[str, Any]:
    sample = trajectory.sample
    return {
        "data_source": sample.data_source,
        "solution_str": trajectory.text,
        "ground_truth": sample.ground_truth,
        "extra_info": sample.extra_info,
    }


def _score_here(scorer: Scorer, arguments: dict[str, Any]) -> Outcome:
    try:
        return Outcome(to_score(scorer.compute(**arguments)))
    except (ValueError, TypeError, KeyError) as error:  # a ground truth that the scorer cannot read
        return Outcome(failed(f"{type(error).__name__}: {error}"))
