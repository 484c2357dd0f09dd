"""The rollout role: plays episodes with the engine that lives in its process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from enum import Enum
from typing import Any

from torch import Tensor

from hone.agents.player import Player
from hone.agents.setting import Setting
from hone.cluster.context import WorkerContext
from hone.cluster.dispatch import Collect, Split, dispatch
from hone.data.batch import Batch
from hone.data.seeding import derive_seed
from hone.data.trajectories import to_batch
from hone.data.types import Sample
from hone.generation import is_served
from hone.generation.build import build_engine
from hone.generation.options import has_adapter, sends_adapter
from hone.generation.pool import EnginePool
from hone.generation.protocol import Engine, SamplingParams
from hone.generation.remote.transports import settle
from hone.training.model import load_policy


class Weights(Enum):
    """Where an engine's weights come from."""

    OWN = "own"
    """It reads the very parameters that are trained."""
    GATHERED = "gathered"
    """It has a whole copy, put together from the parts of the model that the processes of its pool hold."""
    APART = "apart"
    """It has a whole copy, and the actor lives in another process."""


def joined(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The entries of all workers."""
    return {name: value for part in parts for name, value in part.items()}


class RolloutWorker:
    """Episodes, played next to the engine.

    In the actor's process the engine reads the actor's own parameters while one process holds all of them. Otherwise it has
    a whole copy, which takes every new version of the weights, as do engines in processes of their own. See :class:`Weights`.

    Args:
        context: of the process.
        engine: None builds the one that the configuration names.
    """

    def __init__(self, context: WorkerContext, engine: Engine | None = None) -> None:
        self.context, self.tokenizer = context, context.tokenizer
        self.weights = self._source()
        self.engine = engine or self._build()

    def _source(self) -> Weights:
        if "actor" not in self.context.roles:
            return Weights.APART
        if self.context.meshes is not None:
            return Weights.GATHERED
        return Weights.APART if is_served(self.context.config.actor_rollout_ref.rollout) else Weights.OWN

    def _build(self) -> Engine:
        config, context, shares = self.context.config, self.context, self.weights is Weights.OWN

        mapped = config.actor_rollout_ref.rollout.checkpoint_engine.backend in ("auto", "shared_memory")
        if mapped and self.weights is Weights.APART and "actor" in context.roles and not has_adapter(config):
            settle(context.roles["actor"].engine.model)  # what is published are its weights as they are

        def model() -> Any:
            if shares:
                return context.roles["actor"].engine.model
            # a copy without adapters: the actor publishes merged weights
            shared = config.actor_rollout_ref.model
            return load_policy(shared, device=context.device, seed=config.trainer.seed, trainable=False)

        return build_engine(
            config,
            model=model,
            tokenizer=self.tokenizer,
            device=context.device,
            shares_weights=shares,
            number=context.rank,
            world=context.world,
        )

    @functools.cached_property
    def player(self) -> Player:
        """Plays the episodes."""
        return Player(self.engine, Setting.of(self.context.config, self.tokenizer))

    def close(self) -> None:
        """End what engine and tools have started."""
        if "player" in vars(self):
            self.player.setting.close()
        self.engine.close()

    @dispatch(Split.ZERO)
    def source(self) -> Weights:
        """Where the engine's weights come from."""
        return self.weights

    @dispatch(Split.ZERO)
    def replicas(self) -> int:
        """Engines of each worker."""
        return len(self.engine.replicas) if isinstance(self.engine, EnginePool) else 1

    @dispatch(Split.ALL, joined)
    async def take_engine_metrics(self) -> dict[str, float]:
        """Metrics of every replica since the last call; none of an engine without replicas."""
        if not isinstance(self.engine, EnginePool):
            return {}
        found = await self.engine.take_metrics()
        first = self.context.rank * len(found)
        return {f"replica/{first + i}/{name}": value for i, one in enumerate(found) for name, value in one.items()}

    @dispatch(Split.ROWS)
    async def play(
        self, samples: Sequence[Sample], sampling: SamplingParams, *, n: int, seeding: tuple[Any, ...]
    ) -> Batch:
        """Play every sample ``n`` times; rows are in the order of the samples and of the episodes' numbers.

        Args:
            samples: rows with distinct uids.
            sampling: how answers are drawn.
            n: episodes of each.
            seeding: what the draws depend on, besides the uid of the sample and the number of the episode.
        """

        def seed_of(uid: str, index: int) -> int:
            return derive_seed(*seeding, uid, index)

        return to_batch(await self.player.play(samples, sampling, n=n, seed_of=seed_of))

    @dispatch(Split.ALL, Collect.FIRST)
    async def gather_weights(self, version: int) -> None:
        """Take the weights of this version from the actor in this process, of which every process holds a part."""
        which = "adapter" if sends_adapter(self.context.config) else "merged"
        await self.engine.load_weights(self.context.roles["actor"].engine.export_weights(which), version)

    @dispatch(Split.ALL, Collect.FIRST)
    async def load_weights(self, weights: Sequence[tuple[str, Tensor]], version: int, *, last: bool = True) -> None:
        """Take some of the weights of this version, of which more follow unless they are the last."""
        await self.engine.load_weights(weights, version, last=last)

    @dispatch(Split.ALL, Collect.FIRST)
    async def pause(self) -> None:
        """Stop decoding; requests stay where they are."""
        await self.engine.pause()

    @dispatch(Split.ALL, Collect.FIRST)
    async def resume(self) -> None:
        """Go on."""
        await self.engine.resume()
