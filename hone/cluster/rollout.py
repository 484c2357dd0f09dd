"""The rollout role: plays episodes with the engine that lives in its process."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from torch import Tensor

from hone.agents import single_turn
from hone.cluster.context import WorkerContext
from hone.cluster.dispatch import Collect, Split, dispatch
from hone.data.batch import Batch
from hone.data.seeding import derive_seed
from hone.data.trajectories import to_batch
from hone.data.types import Sample
from hone.errors import ConfigError
from hone.generation import ENGINES
from hone.generation.protocol import Engine, SamplingParams
from hone.training.model import load_policy


class Weights(Enum):
    """Where an engine's weights come from."""

    OWN = "own"
    """It reads the very parameters that are trained."""
    GATHERED = "gathered"
    """It has a whole copy, put together from the parts of the model that the processes of its pool hold."""
    APART = "apart"
    """It has a whole copy, and the actor lives elsewhere."""


class RolloutWorker:
    """Episodes, played next to the engine.

    In the actor's process the engine reads the actor's own parameters while one process holds all of them. Otherwise it has
    a whole copy, which takes every new version of the weights. See :class:`Weights`.

    Args:
        context: of the process.
        engine: None builds the one that the configuration names.
    """

    def __init__(self, context: WorkerContext, engine: Engine | None = None) -> None:
        self.context, self.tokenizer = context, context.tokenizer
        actor = context.roles.get("actor")
        self.weights, model = Weights.APART, None
        if actor is not None:
            self.weights = Weights.OWN if context.meshes is None else Weights.GATHERED
            model = actor.engine.model if self.weights is Weights.OWN else None
        self.engine = engine or self._build(model)

    def _build(self, model: Any) -> Engine:
        config, context = self.context.config, self.context
        shared, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
        arguments: dict[str, Any] = {}
        if model is None:
            if rollout.name != "native":
                raise ConfigError(
                    f"engine '{rollout.name}' reads the trainer's own weights, and here it would need a copy",
                    why="rollout lives apart from the actor, or the actor's model is divided over several processes",
                    fix="actor_rollout_ref.rollout.name=native",
                    where="actor_rollout_ref.rollout.name",
                )
            # a copy without adapters: the actor publishes merged weights
            model = load_policy(shared.model, device=context.device, seed=config.trainer.seed, trainable=False)
            arguments = {"shares_weights": False}
        return ENGINES.get(rollout.name)(
            model=model,
            tokenizer=self.tokenizer,
            device=context.device,
            dtype=shared.actor.dtype if rollout.dtype == "auto" else rollout.dtype,
            max_num_seqs=rollout.max_num_seqs,
            max_cache_tokens=rollout.max_cache_tokens,
            max_model_len=config.data.max_prompt_length + config.data.max_response_length,
            **arguments,
        )

    @dispatch(Split.ZERO)
    def source(self) -> Weights:
        """Where the engine's weights come from."""
        return self.weights

    @dispatch(Split.ROWS)
    async def play(
        self, samples: Sequence[Sample], sampling: SamplingParams, *, n: int, seeding: tuple[Any, ...]
    ) -> Batch:
        """Ask every sample ``n`` times; rows are in the order of the samples and of the answers' numbers.

        Args:
            samples: rows with distinct uids.
            sampling: how answers are drawn.
            n: answers to each.
            seeding: what the draws depend on, besides the uid of the sample and the number of the answer.
        """

        def seed_of(uid: str, index: int) -> int:
            return derive_seed(*seeding, uid, index)

        episodes = single_turn.play(samples, self.engine, self.tokenizer, sampling, n=n, seed_of=seed_of)
        place = {sample.uid: number for number, sample in enumerate(samples)}
        played = sorted([t async for t in episodes], key=lambda t: (place[t.uid], t.index))
        return to_batch(played)

    @dispatch(Split.ALL, Collect.FIRST)
    async def gather_weights(self, version: int) -> None:
        """Take the weights of this version from the actor in this process, of which every process holds a part."""
        await self.engine.load_weights(self.context.roles["actor"].engine.export_weights("merged"), version)

    @dispatch(Split.ALL, Collect.FIRST)
    async def load_weights(self, weights: Sequence[tuple[str, Tensor]], version: int) -> None:
        """Take some of the weights of this version; without any, note that all have arrived."""
        await self.engine.load_weights(weights, version)
