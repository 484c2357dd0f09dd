"""Plays the episodes of a batch: many at a time on one engine, each to its end, and again when it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import traceback
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

from hone.agents import catalogue
from hone.agents.base import AgentLoop, Setting
from hone.agents.budget import BudgetSpent, Limits
from hone.agents.client import EngineClient
from hone.agents.episode import Episode
from hone.data.episode_log import EpisodeEnd
from hone.data.seeding import derive_seed
from hone.data.types import Sample, StopReason, Trajectory
from hone.errors import ConfigError, EpisodeError, HoneError
from hone.generation.protocol import Engine, SamplingParams
from hone.insight import activity

log = logging.getLogger("hone.agents")

SeedOf = Callable[[str, int], int]
T = TypeVar("T")


class Player:
    """Plays episodes with the loops that the rows ask for.

    Args:
        engine: serves all of them.
        setting: what they share.
    """

    def __init__(self, engine: Engine, setting: Setting) -> None:
        self.client, self.setting = EngineClient(engine), setting
        self._loops: dict[str, AgentLoop] = {}

    async def play(
        self, samples: Sequence[Sample], sampling: SamplingParams, *, n: int, seed_of: SeedOf
    ) -> list[Trajectory]:
        """Play every sample ``n`` times.

        Args:
            samples: rows with distinct uids.
            sampling: how tokens are drawn; ``max_tokens`` bounds an episode.
            n: episodes a sample.
            seed_of: seed of episode ``index`` of the row ``uid``.

        Returns:
            Trajectories in the order of the samples, then of the episodes' numbers, then of their parts.

        Raises:
            HoneError: a mistake of the user's, or an episode that broke under ``agent.on_error=stop``.
        """
        limit = self.setting.agent.max_concurrent_episodes
        free = asyncio.Semaphore(limit) if limit else contextlib.nullcontext()

        async def one(sample: Sample, index: int) -> list[Trajectory]:
            async with free:
                return await self._with_retries(sample, index, sampling, seed_of(sample.uid, index))

        played = await gathered([one(sample, index) for sample in samples for index in range(n)])
        return [trajectory for parts in played for trajectory in parts]

    def loop_of(self, sample: Sample) -> AgentLoop:
        """The loop that plays a row.

        Raises:
            ConfigError: there is none of that name, or episodes of several turns are not enabled.
        """
        name = sample.agent_name or catalogue.default_loop(self.setting.multi_turn, self.setting.agent)
        if name not in self._loops:
            loop = catalogue.AGENT_LOOPS.get(name)
            if loop.several_turns and not self.setting.multi_turn.enable:
                raise ConfigError(
                    f"row {sample.uid} is played by the loop '{name}', and episodes of several turns are not enabled",
                    why="they are longer and need bounds, so they are played only where that is asked for",
                    fix="actor_rollout_ref.rollout.multi_turn.enable=true",
                    where="agent_name",
                    code="R33",
                )
            self._loops[name] = loop(self.setting)
        return self._loops[name]

    async def _with_retries(self, sample: Sample, index: int, sampling: SamplingParams, seed: int) -> list[Trajectory]:
        retries, attempt = self.setting.agent.max_retries, 0
        episode = self._episode(sample, index, sampling, seed, attempt)
        await self._play(episode)
        while episode.log.error is not None and attempt < retries:
            log.warning("episode %s broke: %s", episode.name, episode.log.error.splitlines()[-1])
            attempt += 1
            episode = self._episode(sample, index, sampling, seed, attempt)
            await self._play(episode)
        if episode.log.error is not None and self.setting.agent.on_error == "stop":
            raise broken(episode, retries)
        activity.tick()
        return episode.trajectories(self._decode) or [unplayed(episode)]

    def _episode(self, sample: Sample, index: int, sampling: SamplingParams, seed: int, attempt: int) -> Episode:
        several = self.setting.multi_turn
        limits = Limits(
            sampling.max_tokens,
            several.max_assistant_turns,
            several.max_user_turns,
            several.max_tool_calls,
            several.max_episode_seconds,
            self.setting.context,
        )
        turn = min(sampling.max_tokens, several.max_tokens_per_turn or sampling.max_tokens)
        sampling = dataclasses.replace(sampling, max_tokens=turn)
        seed = derive_seed(seed, "attempt", attempt) if attempt else seed
        keeps = self.loop_of(sample).several_turns
        return Episode(sample, index, self.client, sampling, limits, seed=seed, keeps_session=keeps, attempt=attempt)

    async def _play(self, episode: Episode) -> None:
        """Play one episode to its end; what breaks it stands in its log."""
        loop = self.loop_of(episode.sample)
        try:
            try:
                await loop.play(episode)
            except BudgetSpent as spent:
                episode.log.end = spent.end
            finally:
                await episode.finish()
            if not any(part.sampled for part in episode.parts):
                raise RuntimeError(f"it ended ({episode.log.end}) before a token was sampled")
        except HoneError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a tool, an environment or a loop raises breaks its episode
            episode.log.end = EpisodeEnd.ERROR
            episode.log.error = "".join(traceback.format_exception(error)).rstrip()
        finally:
            if episode.session is not None:
                await self.client.end_sessions([episode.session])

    def _decode(self, ids: list[int]) -> str:
        return str(self.setting.tokenizer.decode(ids, skip_special_tokens=True))


async def gathered(coroutines: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """The results of all, in order; when one fails the others are cancelled, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise _first(failures) from None
    return [task.result() for task in tasks]


def _first(group: BaseExceptionGroup) -> BaseException:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def broken(episode: Episode, retries: int) -> EpisodeError:
    """The error that ends a run when an episode broke for good."""
    trace = episode.log.error or ""
    return EpisodeError(
        f"episode {episode.index} of row {episode.sample.uid} broke{f' {retries + 1} times' if retries else ''}: "
        f"{trace.splitlines()[-1]}",
        why="its group would be incomplete, and what it learns from would be a guess",
        fix="mend the tool, environment or loop (trace below); or tolerate it: "
        f"actor_rollout_ref.rollout.agent.on_error=drop, or agent.max_retries={retries + 2}\n\n{trace}",
        where="actor_rollout_ref.rollout.agent",
    )


def unplayed(episode: Episode) -> Trajectory:
    """What stands for an episode that broke before a token was sampled: an empty response that bears the error."""
    return Trajectory(
        uid=episode.sample.uid,
        index=episode.index,
        prompt_ids=episode.sample.prompt_ids,
        response_ids=[],
        response_mask=[],
        rollout_log_probs=[],
        sampling_log_probs=[],
        text="",
        stop_reason=StopReason.ERROR,
        sample=episode.sample,
        episode=episode.log,
    )
