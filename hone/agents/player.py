"""Play the episodes of a batch concurrently on one engine, with retries of failed episodes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from hone.agents.base import AGENT_LOOPS, AgentLoop, EpisodeContext
from hone.agents.episode import BudgetSpent, EngineClient, Episode, Limits
from hone.agents.tool_agent import default_loop
from hone.data.episode_log import EpisodeEnd
from hone.data.seeding import derive_seed
from hone.data.types import Sample, StopReason, Trajectory
from hone.errors import ConfigError, EpisodeError, HoneError, NoVerdict
from hone.generation.protocol import Engine, SamplingParams
from hone.insight import activity
from hone.progress import ON_DONE
from hone.together import gather_or_cancel

log = logging.getLogger("hone.agents")

SeedOf = Callable[[str, int], int]
T = TypeVar("T")


class Player:
    """Player of episodes with the loops that the rows name."""

    def __init__(self, engine: Engine, context: EpisodeContext, client: EngineClient | None = None) -> None:
        self.client, self.context = client or EngineClient(engine), context
        self._loops: dict[str, AgentLoop] = {}

    async def play(
        self,
        samples: Sequence[Sample],
        sampling: SamplingParams,
        *,
        n: int,
        seed_of: SeedOf,
    ) -> list[Trajectory]:
        """Play every sample, of distinct uids, ``n`` times; return trajectories in the order of samples, episodes and segments.

        ``max_tokens`` of ``sampling`` bounds an episode. ``seed_of(uid, index)`` is its seed.
        What :data:`~hone.progress.ON_DONE` has is called after each.
        """
        limit = self.context.agent.max_concurrent_episodes
        free = asyncio.Semaphore(limit) if limit else contextlib.nullcontext()

        async def one(sample: Sample, index: int) -> list[Trajectory]:
            async with free:
                trajectories = await self._with_retries(sample, index, sampling, seed_of(sample.uid, index))
            ON_DONE.get()(1)
            return trajectories

        played = await gather_or_cancel([one(sample, index) for sample in samples for index in range(n)])
        return [trajectory for segments in played for trajectory in segments]

    def loop_of(self, sample: Sample) -> AgentLoop:
        name = sample.agent_name or default_loop(self.context.multi_turn, self.context.agent)
        if name not in self._loops:
            loop = AGENT_LOOPS.get(name)
            if loop.several_turns and not self.context.multi_turn.enable:
                raise ConfigError(
                    f"row {sample.uid} needs the loop '{name}', but multi-turn episodes are not enabled",
                    why="multi-turn episodes are longer and need limits, so they must be enabled explicitly",
                    fix="actor_rollout_ref.rollout.multi_turn.enable=true",
                    where="agent_name",
                    code="R33",
                )
            self._loops[name] = loop(self.context)
        return self._loops[name]

    async def _with_retries(self, sample: Sample, index: int, sampling: SamplingParams, seed: int) -> list[Trajectory]:
        retries, attempt = self.context.agent.max_retries, 0
        episode = self._episode(sample, index, sampling, seed, attempt)
        await self._play(episode)
        while episode.log.error is not None and attempt < retries:
            log.warning("episode %s failed: %s", episode.name, episode.log.error.splitlines()[-1])
            attempt += 1
            episode = self._episode(sample, index, sampling, seed, attempt)
            await self._play(episode)
        if episode.log.error is not None and not episode.log.no_verdict and self.context.agent.on_error == "stop":
            raise failed_episode_error(episode, retries)
        activity.tick()
        return episode.trajectories(self._decode) or [failed_trajectory(episode)]

    def _episode(self, sample: Sample, index: int, sampling: SamplingParams, seed: int, attempt: int) -> Episode:
        several = self.context.multi_turn
        limits = Limits(
            sampling.max_tokens,
            several.max_assistant_turns,
            several.max_user_turns,
            several.max_tool_calls,
            several.max_episode_seconds,
            self.context.max_model_len,
        )
        turn = min(sampling.max_tokens, several.max_tokens_per_turn or sampling.max_tokens)
        sampling = dataclasses.replace(sampling, max_tokens=turn)
        seed = derive_seed(seed, "attempt", attempt) if attempt else seed
        keeps = self.loop_of(sample).several_turns
        return Episode(
            sample,
            index,
            self.client,
            sampling,
            limits,
            seed=seed,
            keeps_session=keeps,
            attempt=attempt,
            image_processor=self.context.image_processor,
        )

    async def _play(self, episode: Episode) -> None:
        """Play one episode to its end and log the error of a failed one."""
        loop = self.loop_of(episode.sample)
        try:
            try:
                await loop.play(episode)
            except BudgetSpent as spent:
                episode.log.end = spent.end
            finally:
                await episode.finish()
            if not any(segment.sampled for segment in episode.segments):
                raise RuntimeError(f"the episode ended ({episode.log.end}) before a token was sampled")
        except HoneError:
            raise
        except Exception as error:  # noqa: BLE001 - any error of a tool, environment or loop fails only its episode
            episode.log.end, episode.log.no_verdict = EpisodeEnd.ERROR, isinstance(error, NoVerdict)
            episode.log.error = "".join(traceback.format_exception(error)).rstrip()
        finally:
            if episode.session is not None:
                await self.client.end_sessions([episode.session])

    def _decode(self, ids: list[int]) -> str:
        return str(self.context.tokenizer.decode(ids, skip_special_tokens=True))


def failed_episode_error(episode: Episode, retries: int) -> EpisodeError:
    """Return the error that ends a run after an episode's last failed attempt."""
    trace = episode.log.error or ""
    return EpisodeError(
        f"episode {episode.index} of row {episode.sample.uid} failed{f' {retries + 1} times' if retries else ''}: "
        f"{trace.splitlines()[-1]}",
        why="its group would be incomplete, so that advantages would be wrong",
        fix="fix the tool, environment or loop (trace below), or accept failures: "
        f"actor_rollout_ref.rollout.agent.on_error=drop, or agent.max_retries={retries + 2}\n\n{trace}",
        where="actor_rollout_ref.rollout.agent",
    )


def failed_trajectory(episode: Episode) -> Trajectory:
    """Return an empty trajectory with the error, for an episode that failed before a token was sampled."""
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
        seed=episode.seed,
    )
