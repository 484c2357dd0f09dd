"""Rollout role: plays episodes with the engine of its process."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hone.agents.base import EpisodeContext
from hone.agents.episode import LimitedClient
from hone.agents.forking import ForkPoint, play_forks
from hone.agents.player import Player
from hone.agents.program.loop import serve_policy
from hone.agents.suites import Suite, TaskScore, measure
from hone.cluster.context import WorkerContext
from hone.cluster.dispatch import Collect, Split, dispatch
from hone.cluster.handles import Weights
from hone.cluster.weight_broadcast import WeightTarget
from hone.config.derived import RunSpec
from hone.config.pools import engine_devices
from hone.config.tree import RLConfig
from hone.data.batch import Batch, to_batch
from hone.data.seeding import derive_seed
from hone.data.types import Sample
from hone.generation import is_served
from hone.generation.build import build_engine, replica_limit
from hone.generation.options import has_adapter, needs_untied_head, sends_adapter
from hone.generation.pool import EnginePool, ReplicaState
from hone.generation.protocol import Alternatives, Engine, SamplingParams
from hone.generation.remote.transports import share_parameters
from hone.models.loading import causal_lm, load_policy
from hone.models.tied import untie
from hone.training.prompt_log_probs import prompt_log_probs

SERVING = "replica/serving"
DRAFTED, ACCEPTED, ACCEPTANCE = "rollout/drafted_tokens", "rollout/accepted_tokens", "rollout/draft_acceptance"


def merged_metrics(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Merge the metrics of all workers; the numbers of serving replicas, drafted and accepted tokens are those of all."""
    merged = {name: value for part in parts for name, value in part.items()}
    merged |= {name: sum(part[name] for part in parts) for name in (SERVING, DRAFTED, ACCEPTED) if name in merged}
    return merged | _acceptance(merged)


def _acceptance(metrics: dict[str, float]) -> dict[str, float]:
    """Return the share of accepted drafts; empty without drafts."""
    return {ACCEPTANCE: metrics[ACCEPTED] / metrics[DRAFTED]} if metrics.get(DRAFTED) else {}


def joined(parts: Sequence[list[Any]]) -> list[Any]:
    """Return the lists of all workers as one."""
    return [entry for part in parts for entry in part]


def scorer_of(engine: Engine) -> Callable[[Sequence[int], int], list[Alternatives]] | None:
    """Return the function that computes log-probs of prompts; None if the model is in another process."""
    from hone.generation.native.engine import NativeEngine

    if not isinstance(engine, NativeEngine):
        return None
    return functools.partial(prompt_log_probs, engine.model, device=engine.device, dtype=engine.dtype)


def lowest_limit(limits: Sequence[tuple[int, str]]) -> tuple[int, str]:
    """Return the lowest of the workers' limits, with its reason."""
    return min(limits)


class RolloutWorker(WeightTarget):
    """Plays episodes with a colocated engine.

    In the actor's process the engine reads the actor's parameters if one process holds all of them. Otherwise it has a whole
    copy, which receives every new version of the weights; so do engines in separate processes. See :class:`Weights`.

    An engine over several devices belongs to the worker on the first of them. The workers on the others have none: they only
    take part in gathering the actor's shards.

    Attributes:
        engine: absent in a worker that lends its device to another's engine.

    Args:
        engine: None builds the configured engine.
    """

    def __init__(self, context: WorkerContext[RLConfig], engine: Engine | None = None) -> None:
        self.context, self.tokenizer = context, context.tokenizer
        self.weights = self._source()
        group = engine_devices(context.config)
        self._worker, self._workers = context.rank // group, context.world // group
        self._lends = context.rank % group != 0
        if not self._lends:
            self.engine = engine or self._build()
        self._validation_share: float | None = None
        self._drafts: dict[str, int] = {}

    def _source(self) -> Weights:
        actor = self.context.roles.get("actor")
        if actor is None:
            return Weights.REMOTE
        if actor.engine.shared_module() is None:
            return Weights.GATHERED
        return Weights.REMOTE if is_served(self.context.config.actor_rollout_ref.rollout) else Weights.SHARED

    def _build(self) -> Engine:
        config, context, shares = self.context.config, self.context, self.weights is Weights.SHARED

        mapped = config.actor_rollout_ref.rollout.checkpoint_engine.backend in ("auto", "shared_memory")
        if mapped and self.weights is Weights.REMOTE and "actor" in context.roles and not has_adapter(config):
            share_parameters(context.roles["actor"].engine.shared_module())  # the sync sends its current weights

        def model() -> Any:
            if shares:
                return context.roles["actor"].engine.shared_module()
            # a copy without adapters: the actor sends merged weights
            shared = config.actor_rollout_ref.model
            copy = load_policy(shared, device=context.device, seed=config.trainer.seed, trainable=False)
            if needs_untied_head(config):
                untie(causal_lm(copy))
            return copy

        return build_engine(
            config,
            model=model,
            tokenizer=self.tokenizer,
            device=context.device,
            shares_weights=shares,
            number=self._worker,
            world=self._workers,
            devices=context.engine_devices,
        )

    @functools.cached_property
    def player(self) -> Player:
        """Return the player of the episodes."""
        return Player(
            self.engine, EpisodeContext.from_config(self.context.config, self.tokenizer, self.context.image_processor)
        )

    @functools.cached_property
    def validation_client(self) -> LimitedClient:
        """Return the client of validation during training, whose requests are limited to a share of the engine's."""
        return LimitedClient(self.engine, self._validation_limit)

    @functools.cached_property
    def validation_player(self) -> Player:
        """Return the player of validation during training. Its requests are never interrupted by new weights."""
        return Player(self.engine, self.player.context, self.validation_client)

    def _validation_limit(self) -> int | None:
        if self._validation_share is None:
            return None
        return max(1, int(self._validation_share * self._capacity))

    @property
    def _capacity(self) -> int:
        """Number of requests that the engine serves at once."""
        if isinstance(self.engine, EnginePool):
            return sum(replica.concurrency.limit for replica in self.engine.replicas if replica.serves)
        return self.context.config.actor_rollout_ref.rollout.max_num_seqs

    def close(self) -> None:
        """Close engine and tools."""
        self.leave_broadcast()
        if self._lends:
            return
        if "player" in vars(self):
            self.player.context.close()
        self.engine.close()

    @dispatch(Split.ZERO)
    def source(self) -> Weights:
        """Return the source of the engine's weights."""
        return self.weights

    @dispatch(Split.ZERO)
    def sleeps(self) -> bool:
        """Return whether the engine frees its memory while the policy trains; never one that generates meanwhile."""
        rollout = self.context.config.actor_rollout_ref.rollout
        if not RunSpec(self.context.config).engines_take_turns or rollout.engine_url is not None:
            return False
        if rollout.free_cache_engine is not None:
            return rollout.free_cache_engine
        return self.context.device.type == "cuda"

    @dispatch(Split.ZERO)
    def replicas(self) -> int:
        """Return the wanted number of engines of each worker."""
        return self.engine.count if isinstance(self.engine, EnginePool) else 1

    @dispatch(Split.ALL, merged_metrics)
    async def take_engine_metrics(self) -> dict[str, float]:
        """Return metrics of every replica, and the drafts of an engine without replicas, since the last call."""
        if not isinstance(self.engine, EnginePool):
            return self._take_drafts()
        metrics = await self.engine.take_metrics()
        serving = sum(replica.serves for replica in self.engine.replicas)
        return {SERVING: serving} | {
            f"replica/{self._number(i)}/{name}": value
            for i, values in enumerate(metrics)
            for name, value in values.items()
        }

    def _take_drafts(self) -> dict[str, float]:
        """Return how many tokens were drafted and accepted since the last call; empty without speculative decoding."""
        if self.context.config.actor_rollout_ref.rollout.speculative.method is None:
            return {}
        stats = self.engine.describe().stats
        now = {DRAFTED: stats["drafted_tokens"], ACCEPTED: stats["accepted_tokens"]}
        new = {name: count - self._drafts.get(name, 0) for name, count in now.items()}
        self._drafts = now
        return new | _acceptance(new)

    def _number(self, index: int) -> int:
        """Return the number of a replica among those of all workers; it stays when the pools change their sizes."""
        return index * self._workers + self._worker

    @dispatch(Split.ALL, lowest_limit)
    def replica_limit(self) -> tuple[int, str]:
        """Return the maximum number of replicas of a worker, with the reason."""
        return replica_limit(self.context.config, world=self._workers)

    @dispatch(Split.ALL)
    async def resize(self, replicas: int) -> None:
        """Have this number of replicas in every worker from now on; see :meth:`EnginePool.resize`."""
        assert isinstance(self.engine, EnginePool), "an engine in this process has no replicas"
        self.engine.resize(replicas)

    @dispatch(Split.ALL, joined)
    async def replica_reports(self) -> list[dict[str, Any]]:
        """Return number, state, load and version of the weights of each replica."""
        assert isinstance(self.engine, EnginePool), "an engine in this process has no replicas"
        return [
            {"replica": self._number(replica.index), "worker": self.context.rank, **replica.report()}
            | {"devices": list(self.context.engine_devices or ())}
            | {"version": self.engine.version if replica.state is ReplicaState.SERVING else None}
            for replica in self.engine.replicas
        ]

    @dispatch(Split.ROWS)
    async def play(
        self, samples: Sequence[Sample], sampling: SamplingParams, *, n: int, seeding: tuple[Any, ...]
    ) -> Batch:
        """Play every sample ``n`` times; rows are in the order of the samples and of the episode numbers.

        Args:
            samples: rows with distinct uids.
            sampling: sampling parameters.
            n: episodes per sample.
            seeding: parts of the seed, in addition to the uid of the sample and the number of the episode.
        """

        return await self._play(self.player, samples, sampling, n, seeding)

    async def _play(
        self, player: Player, samples: Sequence[Sample], sampling: SamplingParams, n: int, seeding: tuple[Any, ...]
    ) -> Batch:
        def seed_of(uid: str, index: int) -> int:
            return derive_seed(*seeding, uid, index)

        played = await player.play(samples, sampling, n=n, seed_of=seed_of)
        return to_batch(played, reads_images=self.context.image_processor is not None)

    @dispatch(Split.ROWS)
    async def play_during_training(
        self, samples: Sequence[Sample], sampling: SamplingParams, *, n: int, seeding: tuple[Any, ...]
    ) -> Batch:
        """Play like :meth:`play`, with as many requests at once as :meth:`limit_validation` allows."""
        return await self._play(self.validation_player, samples, sampling, n, seeding)

    @dispatch(Split.ROWS)
    async def play_forks(
        self, points: Sequence[ForkPoint], sampling: SamplingParams, *, n: int, seeding: tuple[Any, ...]
    ) -> Batch:
        """Continue recorded episodes ``n`` times from a turn; see :func:`~hone.agents.forking.play_forks`."""
        return await play_forks(self.engine, self.player, points, sampling, n, seeding)

    @dispatch(Split.ALL, Collect.FIRST)
    async def limit_validation(self, share: float | None) -> None:
        """Set the share of the engine's requests that validation during training may take; None means no limit."""
        self._validation_share = share
        self.validation_client.admit()

    @dispatch(Split.ONE, Collect.FIRST)
    async def play_here(
        self, samples: Sequence[Sample], sampling: SamplingParams, *, n: int, seeding: tuple[Any, ...]
    ) -> Batch:
        """Play like :meth:`play`, in one worker only."""
        return await self.play(samples, sampling, n=n, seeding=seeding)

    @dispatch(Split.ONE, Collect.FIRST)
    async def run_suite(
        self, suite: Suite, folder: Path, limit: int, stops: tuple[int, ...], during_training: bool
    ) -> list[TaskScore]:
        """Run a suite against this worker's engine, see :func:`hone.agents.suites.measure`; ``stops``: tokens that end an answer.

        ``during_training``: take as many requests at once as :meth:`limit_validation` allows.
        """
        player, scorer = self.validation_player if during_training else self.player, scorer_of(self.engine)
        endpoint, server = serve_policy(
            player.context, player.client, token=None, stop_token_ids=stops, prompt_log_probs=scorer
        )
        try:
            return await measure(suite, server.url, endpoint.services.current.max_model_len, folder, limit=limit)
        finally:
            await asyncio.to_thread(server.stop)

    @dispatch(Split.ALL, Collect.FIRST, lenders=True)
    async def gather_weights(self, version: int) -> None:
        """Copy this version of the weights from the colocated actor, whose processes hold a shard each."""
        weights = self.context.roles["actor"].engine_weights()
        if self._lends:
            deque(weights, maxlen=0)  # all processes gather together; this one has no engine that takes the result
            return
        await self.engine.load_weights(weights, version)

    @dispatch(Split.ALL, Collect.FIRST)
    async def load_weights(self, weights: Sequence[tuple[str, Tensor]], version: int, *, last: bool = True) -> None:
        """Load some of the weights of this version; more follow unless they are the last."""
        await self.engine.load_weights(weights, version, last=last)

    @dispatch(Split.ALL, Collect.FIRST)
    async def sleep(self) -> None:
        """Free the engine's memory: the KV cache, and weights that the next weight sync sends in full."""
        await self.engine.sleep(keep_weights=self.weights is Weights.SHARED or sends_adapter(self.context.config))

    @dispatch(Split.ALL, Collect.FIRST)
    async def wake(self, *, cache: bool = True) -> None:
        """Take the memory of the weights back, and with ``cache`` that of the KV cache too."""
        await self.engine.wake(cache=cache)

    @dispatch(Split.ALL, Collect.FIRST)
    async def pause(self) -> None:
        """Stop decoding. Responses under way stop at a token, and :meth:`resume` continues them."""
        client = self.player.client
        if self.context.config.trainer.async_training.interrupted_cache == "keep":
            client.hold()
        else:
            await client.interrupt()
        await self.engine.pause()

    @dispatch(Split.ALL, Collect.FIRST)
    async def resume(self) -> None:
        """Resume decoding."""
        await self.engine.resume()
        self.player.client.proceed()
