"""The block ``trainer.async_training``: asynchronous training."""

from __future__ import annotations

from dataclasses import dataclass

from hone.config.fields import choice, number


@dataclass
class AsyncConfig:
    """Training while the next groups are generated."""

    max_staleness: int = number(0, low=0)
    """Most weight updates between the sampling of a token and its training. 0 takes turns: generate, then train. From 1 on the
    engines generate the next groups while the policy trains, and the loss corrects for their age. 1 is enough where generation
    and training take about as long."""
    partial_rollouts: bool = False
    """With max_staleness of at least 1: new weights do not wait for responses under way. A response stops at a token, keeps its
    tokens, and resumes under the new weights; every token keeps the version that sampled it. false waits for them, so that each
    turn has one version."""
    order: str = choice("admission", "admission", "ready_first")
    """Groups of a batch: admission takes them in the order in which their prompts were drawn, without bias. ready_first takes those
    that finished first among the admitted ones, so a slow group waits up to max_staleness updates and no longer; short responses
    then come earlier, which rollout/order_bias measures."""
    engine_threads: int | None = number(None, low=1)
    """CPU threads of each engine process with runtime=local; null means that all of them share half of
    the cores. Training takes trainer.num_threads, by default the other cores."""
