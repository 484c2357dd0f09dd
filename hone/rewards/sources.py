"""Sources of scores: a custom function, a server, or the built-in scorers."""

from __future__ import annotations

import asyncio
import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hone.config.reward import CustomRewardConfig, RewardConfig
from hone.data.answers import last_answer
from hone.data.types import Trajectory
from hone.errors import NoVerdict, RewardError, did_you_mean
from hone.insight import activity
from hone.rewards.http import JsonService, ServiceError, Throttle
from hone.rewards.pool import ASYNC_GRACE, WorkerLimits, WorkerPool
from hone.rewards.scorers import SCORERS, Scorer, scorer_for
from hone.rewards.services import Services
from hone.rewards.worker import (
    ARGUMENTS,
    CONVERSATIONS,
    PLURALS,
    Outcome,
    Target,
    failed,
    failed_by,
    to_score,
    to_scores,
)
from hone.user_objects import UserObject, is_user_object, user_object


def arguments(trajectory: Trajectory) -> dict[str, Any]:
    """Return the arguments of a reward function.

    For a multi-turn episode, ``extra_info`` also has ``num_turns`` and ``episode``: its messages, tool calls, rewards and end
    (:meth:`~hone.data.episode_log.EpisodeLog.summary`), and what it cost: ``seconds`` by kind and tool, and ``tokens`` of the prompt,
    sampled and given (tool results, user turns) of this segment. ``last_answer`` is the last turn without thoughts and tool calls;
    an entry of the dataset with this name stays.
    """
    sample, extra = trajectory.sample, trajectory.sample.extra_info
    if trajectory.episode is not None and not trajectory.episode.is_plain:
        record = {**trajectory.episode.summary(), **trajectory.episode.costs(), "tokens": _tokens(trajectory)}
        extra = {**extra, "num_turns": trajectory.episode.num_turns, "episode": record}
    extra = {"last_answer": last_answer(trajectory.text, extra), **extra}
    return {
        "data_source": sample.data_source,
        "solution_str": trajectory.text,
        "ground_truth": sample.ground_truth,
        "extra_info": extra,
    }


def _tokens(trajectory: Trajectory) -> dict[str, int]:
    sampled = sum(trajectory.response_mask)
    return {"prompt": len(trajectory.prompt_ids), "sampled": sampled, "given": len(trajectory.response_mask) - sampled}


def conversation(trajectory: Trajectory) -> dict[str, Any]:
    """Return what TRL's functions receive besides: messages of the prompt, of the episode after it, and the response's token ids.

    The prompt is text where the row's was, and None for token ids; the messages of the episode are None if it was one answer.
    """
    episode = trajectory.episode
    turns = None if episode is None or episode.is_plain else episode.messages or None
    prompt = trajectory.sample.text if turns is None else None
    return {"prompt": prompt or trajectory.sample.messages, "turns": turns, "ids": list(trajectory.response_ids)}


def with_conversation(trajectory: Trajectory) -> dict[str, Any]:
    return arguments(trajectory) | {CONVERSATIONS: [conversation(trajectory)]}


def batched(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """Return the arguments of a reward function that scores all responses in one call."""
    rows = [arguments(trajectory) for trajectory in trajectories]
    return {plural: [row[name] for row in rows] for name, plural in zip(ARGUMENTS, PLURALS, strict=True)}


def batched_with_conversations(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    return batched(trajectories) | {CONVERSATIONS: [conversation(trajectory) for trajectory in trajectories]}


def split(outcome: Outcome, count: int) -> list[Outcome | None]:
    """Split the outcome of one call into outcomes of its responses; all fail if the call failed."""
    if outcome.batch is None:
        return [Outcome(copy.deepcopy(outcome.score), outcome.traceback) for _ in range(count)]
    return [Outcome(score) for score in outcome.batch]


async def run_calls(
    calls: Sequence[Callable[[], Awaitable[Outcome]]], throttle: Throttle, allowed: int
) -> list[Outcome | None]:
    """Run the calls under the throttle.

    After more than ``allowed`` failures, calls not yet started are skipped (None).
    """
    outcomes: list[Outcome | None] = [None] * len(calls)
    failures = 0

    async def one(index: int) -> None:
        nonlocal failures
        async with throttle:
            if failures > allowed:
                return
            outcome = await calls[index]()
        outcomes[index] = outcome
        failures += outcome.score.failed
        activity.tick()

    await asyncio.gather(*(one(index) for index in range(len(calls))))
    return outcomes


SERVICE_CALLS = 64  # default limit of concurrent service calls


class Source(ABC):
    """Source of scores, with one outcome per response."""

    @abstractmethod
    async def outcomes(self, trajectories: Sequence[Trajectory], allowed: int) -> list[Outcome | None]:
        """Score each trajectory, in order; None if skipped after more than ``allowed`` failures."""

    def check(self, data_sources: Mapping[str, int]) -> None:  # noqa: B027 - most take every kind
        """Raise RewardError if a data source (given with its number of rows) cannot be scored."""

    @property
    def reads_episodes(self) -> bool:
        """True if the scoring code mentions episodes; a server's code is not known."""
        return False

    @property
    def may_probe(self) -> bool:
        """True if further calls cost nothing: the code runs on this machine, and waits for no service."""
        return False

    @abstractmethod
    def name_of(self, trajectory: Trajectory) -> str:
        """Return the name of the function or scorer of a trajectory, for messages."""

    @abstractmethod
    def identity(self, data_sources: Mapping[str, int]) -> dict[str, str]:
        """Return name and version (code hash or address) of the scorers of these data sources."""

    def close(self) -> None:  # noqa: B027 - not every source starts something
        """Stop processes that the source started."""


def worker_limits(config: RewardConfig) -> WorkerLimits:
    return WorkerLimits(memory_mb=config.memory_mb, output_kb=config.max_output_kb)


def is_address(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def function_source(function: CustomRewardConfig, config: RewardConfig) -> Source:
    """Return the source for a custom reward function: a file or a server."""
    return (RemoteSource if is_address(str(function.path)) else FunctionSource)(function, config)


class FunctionSource(Source):
    """Function in a file, called in worker processes with a time limit for each call.

    Raises RewardError: the function cannot be loaded or called.
    """

    def __init__(self, function: CustomRewardConfig, config: RewardConfig) -> None:
        self._object: UserObject | None = None
        self.path, self.name, code = str(function.path), function.name, None
        if is_user_object(self.path):
            self._object = user_object(self.path)
            code = self._object.code
        else:
            self.path = str(self._file(function))
        self.timeout, self.batch = config.timeout, config.reward_manager == "batch"
        self.throttle = Throttle(config.max_concurrent, config.requests_per_minute)
        kwargs = dict(function.reward_kwargs)
        target = Target(self.timeout, self.path, self.name, kwargs, code, batch=self.batch)
        self.pool = WorkerPool(target, 1 if self.batch else config.num_workers, worker_limits(config))

    @staticmethod
    def _file(function: CustomRewardConfig) -> Path:
        file = Path(str(function.path)).expanduser().resolve()
        if not file.is_file():
            near = [other.name for other in file.parent.glob("*.py")] if file.parent.is_dir() else []
            raise RewardError(
                f"file {function.path} does not exist",
                why="without it no response can be scored",
                fix=did_you_mean(file.name, near)
                if near
                else f"put it there: the directory {file.parent} has no Python file",
                where="reward.custom_reward_function.path",
            )
        return file

    async def outcomes(self, trajectories: Sequence[Trajectory], allowed: int) -> list[Outcome | None]:
        if self.batch:
            with self._waiting(1):
                return split(await self._call(batched_with_conversations(trajectories)), len(trajectories))
        calls = [with_conversation(trajectory) for trajectory in trajectories]
        with self._waiting(len(calls)):
            if self.throttle.limits:
                return await run_calls([partial(self._call, call) for call in calls], self.throttle, allowed)
            return await asyncio.wrap_future(self.pool.submit(calls, max_failures=allowed).done)

    @property
    def may_probe(self) -> bool:
        return not self.batch and not self.pool.is_async

    @property
    def reads_episodes(self) -> bool:
        return self._object is None and mentions_episodes(Path(self.path))

    def name_of(self, trajectory: Trajectory) -> str:
        return self.path if self._object is not None else f"{self.path}:{self.name}"

    def identity(self, data_sources: Mapping[str, int]) -> dict[str, str]:
        if self._object is not None:
            return {self.path: f"sha256:{self._object.source_hash}"}
        return {f"{self.path}:{self.name}": file_hash(Path(self.path))}

    def close(self) -> None:
        self.pool.close()

    async def _call(self, call: dict[str, Any]) -> Outcome:
        (outcome,) = await asyncio.wrap_future(self.pool.submit([call], max_failures=1).done)
        assert outcome is not None  # one failure is allowed
        return outcome

    def _waiting(self, calls: int) -> Any:
        limit = self.timeout + ASYNC_GRACE + self.throttle.wait_seconds(1)
        return activity.waiting(f"{calls} scores", on=["reward worker"], limit=limit)


class RemoteSource(Source):
    """Function at a URL, which receives the arguments as JSON and answers with a function's return value. ``function``:
    its address (``path``) and additional arguments.
    """

    def __init__(self, function: CustomRewardConfig, config: RewardConfig) -> None:
        self.address, self.kwargs = str(function.path), dict(function.reward_kwargs)
        self.batch = config.reward_manager == "batch"
        self.service = JsonService(self.address, timeout=config.timeout)
        self.throttle = Throttle(config.max_concurrent or SERVICE_CALLS, config.requests_per_minute)

    async def outcomes(self, trajectories: Sequence[Trajectory], allowed: int) -> list[Outcome | None]:
        if self.batch:
            return split(await self._call(batched(trajectories), len(trajectories)), len(trajectories))
        calls = [partial(self._call, arguments(trajectory)) for trajectory in trajectories]
        return await run_calls(calls, self.throttle, allowed)

    def name_of(self, trajectory: Trajectory) -> str:
        return self.address

    def identity(self, data_sources: Mapping[str, int]) -> dict[str, str]:
        return {self.address: "remote"}

    async def _call(self, call: Mapping[str, Any], count: int | None = None) -> Outcome:
        try:
            answer = await self.service.post("", {**call, **self.kwargs})
        except ServiceError as error:
            return Outcome(failed_by(error, f"ServiceError: {error}"))
        except (TypeError, ValueError) as error:
            return Outcome(failed(f"the arguments are not JSON: {error}"))
        if count is None:
            return Outcome(to_score(answer))
        scores = to_scores(answer, count)
        return Outcome(scores[0], batch=scores)


class ScorerSource(Source):
    """Built-in scorers: one for every row, or the one registered for the row's ``data_source``.

    Scorers that only read text run in this process, those that may hang in worker processes, and those that use a service
    concurrently in the event loop.

    Args:
        scorer: scorer for every row, or None.
        options: keyword arguments; each scorer receives those it supports.

    Raises:
        RewardError: no scorer supports an option.
    """

    def __init__(
        self, scorer: Scorer | None, options: Mapping[str, Any], config: RewardConfig, services: Services
    ) -> None:
        self.forced, self.options, self.config, self.services = scorer, dict(options), config, services
        self.throttle = Throttle(config.max_concurrent or SERVICE_CALLS, config.requests_per_minute)
        self._pool: WorkerPool | None = None
        self._check_options([scorer] if scorer else [SCORERS.get(name) for name in SCORERS])

    def check(self, data_sources: Mapping[str, int]) -> None:
        scorers = {source: self.forced or scorer_for(source) for source in data_sources}
        missing = sorted(
            (source for source, scorer in scorers.items() if scorer is None), key=lambda s: -data_sources[s]
        )
        if missing:
            rows = ", ".join(f"'{source}' ({data_sources[source]} rows)" for source in missing[:5])
            known_sources = ", ".join(
                sorted({pattern for name in SCORERS for pattern in SCORERS.get(name).data_sources})
            )
            raise RewardError(
                f"no scorer for data_source {rows}{' and more' if len(missing) > 5 else ''}. Known data sources: {known_sources}",
                why="responses to these rows could not be scored",
                fix=f"reward.scorer=<one of {', '.join(SCORERS.names())}> for all rows, or your function: "
                "reward.custom_reward_function.path=<file>.py",
                code="R43",
                where="data",
            )
        used = {scorer.name: scorer for scorer in scorers.values() if scorer is not None}
        for scorer in used.values():
            scorer.check_installed()
            if scorer.check is not None:
                scorer.check(self.services)
        self._check_options(list(used.values()))

    async def outcomes(self, trajectories: Sequence[Trajectory], allowed: int) -> list[Outcome | None]:
        chosen = [self._scorer(trajectory) for trajectory in trajectories]
        outcomes: list[Outcome | None] = [None] * len(chosen)
        sent = [index for index, scorer in enumerate(chosen) if scorer.may_hang]
        asking = [index for index, scorer in enumerate(chosen) if scorer.is_async]
        job = None
        if sent:
            calls = [{"scorer": chosen[i].name, **self._arguments(trajectories[i], chosen[i])} for i in sent]
            job = self._workers().submit(calls, max_failures=allowed)
        for index, scorer in enumerate(chosen):
            if not scorer.may_hang and not scorer.is_async:
                outcomes[index] = await _score(scorer, self._arguments(trajectories[index], scorer))
                activity.tick()
        if asking:
            calls = [partial(_score, chosen[i], self._arguments(trajectories[i], chosen[i])) for i in asking]
            with activity.waiting(f"{len(asking)} scores", on=["services"]):
                answers = await run_calls(calls, self.throttle, allowed)
            for index, outcome in zip(asking, answers, strict=True):
                outcomes[index] = outcome
        if job is not None:
            limit = self.config.timeout + ASYNC_GRACE
            with activity.waiting(f"{len(sent)} scores", on=["reward worker"], limit=limit):
                answers = await asyncio.wrap_future(job.done)
            for index, outcome in zip(sent, answers, strict=True):
                outcomes[index] = outcome
        return outcomes

    @property
    def may_probe(self) -> bool:
        return self.forced is None or self.forced.name != "llm_judge"

    @property
    def reads_episodes(self) -> bool:
        return self.forced is not None and mentions_episodes(Path(self.forced.file))

    def name_of(self, trajectory: Trajectory) -> str:
        scorer = self.forced or scorer_for(trajectory.sample.data_source)
        return "no scorer" if scorer is None else f"scorer {scorer.name}"

    def identity(self, data_sources: Mapping[str, int]) -> dict[str, str]:
        used = [self.forced] if self.forced else [scorer_for(source) for source in data_sources]
        return {scorer.name: file_hash(Path(scorer.file)) for scorer in used if scorer is not None}

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _workers(self) -> WorkerPool:
        if self._pool is None:
            every = [self.forced] if self.forced else [SCORERS.get(name) for name in SCORERS]
            names = tuple(scorer.name for scorer in every if scorer.may_hang and scorer.is_installed())
            target = Target(self.config.timeout, scorers=names)
            self._pool = WorkerPool(target, self.config.num_workers, worker_limits(self.config))
        return self._pool

    def _scorer(self, trajectory: Trajectory) -> Scorer:
        source = trajectory.sample.data_source
        scorer = self.forced or scorer_for(source)
        if scorer is None:
            self.check({source: 1})
            raise AssertionError(source)
        return scorer

    def _arguments(self, trajectory: Trajectory, scorer: Scorer) -> dict[str, Any]:
        options = {name: value for name, value in self.options.items() if name in scorer.options}
        context = {"services": self.services, "messages": trajectory.sample.messages, "trajectory": trajectory}
        return arguments(trajectory) | options | {name: context[name] for name in scorer.context}

    def _check_options(self, scorers: Sequence[Scorer]) -> None:
        known_options = {option for scorer in scorers for option in scorer.options}
        for option in self.options:
            if option not in known_options:
                names = ", ".join(scorer.name for scorer in scorers)
                raise RewardError(
                    f"no scorer in use ({names}) has an option '{option}'",
                    where="reward.scorer_kwargs",
                    fix=did_you_mean(option, known_options),
                )


def mentions_episodes(path: Path) -> bool:
    """Return whether a source file reads the record of an episode."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return any(f"{mark}{name}{mark}" in text for mark in "'\"" for name in ("episode", "num_turns"))


def file_hash(path: Path) -> str:
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


async def _score(scorer: Scorer, call: dict[str, Any]) -> Outcome:
    try:
        value = scorer.compute(**call)
        return Outcome(to_score(await value if scorer.is_async else value))
    except UNSCORABLE as error:
        return Outcome(failed_by(error, f"{type(error).__name__}: {error}"))


UNSCORABLE = (NoVerdict, ValueError, TypeError, KeyError, RuntimeError, ArithmeticError)
"""Exceptions of a built-in scorer for an invalid ground truth or an unavailable service."""
