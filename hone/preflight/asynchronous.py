"""Rules about asynchronous training: something to overlap, a correction for the age of tokens, responses that may be interrupted."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.derived import RunSpec, own_pools
from hone.config.implied import ASYNC_CORRECTION, CORRECTION
from hone.config.tree import RLConfig
from hone.generation import is_served
from hone.preflight.rules import Finding, error, rule, warning

ASYNC, ROLLOUT = "trainer.async_training", "actor_rollout_ref.rollout"


@rule("R65", RLConfig)
def something_to_overlap(config: RLConfig) -> Iterator[Finding]:
    """In asynchronous training the engine computes in other processes than the trainer."""
    rollout, staleness = config.actor_rollout_ref.rollout, config.trainer.async_training.max_staleness
    if not RunSpec(config).asynchronous or is_served(rollout) or "rollout" in own_pools(config):
        return
    if config.trainer.runtime == "ray":
        fix = f"{ROLLOUT}.enable_resource_pool=true {ROLLOUT}.nnodes=1 {ROLLOUT}.n_gpus_per_node=1"
    else:
        fix = f"{ROLLOUT}.name=native"
    yield error(
        f"{ASYNC}.max_staleness={staleness}, but the engine '{rollout.name}' computes in the trainer's own processes",
        why="one process either generates or trains, so nothing would overlap and training would only be on older data",
        fix=f"{fix} , or {ASYNC}.max_staleness=0",
        where=f"{ASYNC}.max_staleness",
    )


@rule("R66", RLConfig)
def age_is_corrected(config: RLConfig) -> Iterator[Finding]:
    """In asynchronous training the loss corrects for the age of tokens."""
    spec, staleness = RunSpec(config), config.trainer.async_training.max_staleness
    if not spec.asynchronous or spec.corrects or spec.bypass:
        return
    yield warning(
        f"{ASYNC}.max_staleness={staleness}, but no rollout correction weights or rejects tokens",
        why=f"old log-probs are the trainer's, so the loss treats tokens of weights up to {staleness} "
        f"update{'s'[: staleness > 1]} old as its own",
        fix=f"{CORRECTION}.preset={ASYNC_CORRECTION}",
        where=f"{CORRECTION}.preset",
    )


@rule("R67", RLConfig)
def responses_can_be_interrupted(config: RLConfig) -> Iterator[Finding]:
    """A response that is interrupted by new weights depends only on its tokens."""
    rollout = config.actor_rollout_ref.rollout
    if not (RunSpec(config).asynchronous and config.trainer.async_training.partial_rollouts):
        return
    settings = {
        f"{ROLLOUT}.stop={rollout.stop}": bool(rollout.stop),
        f"{ROLLOUT}.constraint.kind={rollout.constraint.kind}": rollout.constraint.kind is not None,
    }
    for setting in (text for text, holds in settings.items() if holds):
        yield error(
            f"{ASYNC}.partial_rollouts=true with {setting}",
            why="an interrupted response resumes as a prompt that contains its beginning, and the engine would not look for the "
            "text of a stop string or a constraint in a prompt",
            fix=f"{ASYNC}.partial_rollouts=false, or without that key",
            where=f"{ASYNC}.partial_rollouts",
        )
