"""Rules about asynchronous training: something to overlap, a correction for the age of tokens, responses that may be interrupted."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.derived import OldLogProbs, RunSpec
from hone.config.load import ASYNC_CORRECTION, CORRECTION
from hone.config.pools import own_pools
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
    key = f"max_staleness={staleness}" if staleness else "stream=true"
    yield error(
        f"{ASYNC}.{key}, but the engine '{rollout.name}' computes in the trainer's own processes",
        why="one process either generates or trains, so nothing would overlap and training would only be on older data",
        fix=f"{fix}, or without that key",
        where=f"{ASYNC}.{key.partition('=')[0]}",
    )


@rule("R68", RLConfig)
def batch_can_stream(config: RLConfig) -> Iterator[Finding]:
    """A batch that streams into the update has one update, and its groups need nothing of each other."""
    from hone.algorithms import advantage_estimators

    spec, name = RunSpec(config), config.algorithm.adv_estimator
    if not spec.streams:
        return
    reasons = {
        f"adv_estimator={name} compares all answers of a batch": advantage_estimators.get(name).scope == "batch",
        spec.old_log_probs.reason: spec.old_log_probs.value is not OldLogProbs.UPDATE_PASS,
        f"adv_estimator={name} needs greedy answers to the whole batch": "greedy_baseline" in spec.estimator.needs,
        f"a critic is trained ({spec.critic.reason})": spec.critic.value,
    }
    for reason in (text for text, holds in reasons.items() if holds):
        yield error(
            f"{ASYNC}.stream=true, but {reason}",
            why="groups are trained on before the batch is complete, in a single update",
            fix=f"{ASYNC}.stream=false, or one update of the whole batch without a critic, and adv_estimator=grpo",
            where=f"{ASYNC}.stream",
        )


@rule("R66", RLConfig)
def age_is_corrected(config: RLConfig) -> Iterator[Finding]:
    """In asynchronous training the loss corrects for the age of tokens."""
    spec, staleness = RunSpec(config), config.trainer.async_training.max_staleness
    if staleness == 0 or spec.corrects or spec.bypass:
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
    keys = config.trainer.async_training
    if not (RunSpec(config).asynchronous and keys.partial_rollouts) or keys.interrupted_cache == "keep":
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
            fix=f"{ASYNC}.partial_rollouts=false, or {ASYNC}.interrupted_cache=keep with {ROLLOUT}.name=native, or without that key",
            where=f"{ASYNC}.partial_rollouts",
        )


@rule("R77", RLConfig)
def cache_can_be_kept(config: RLConfig) -> Iterator[Finding]:
    """An engine that keeps the KV cache of interrupted responses says which weights sampled each token."""
    keys, engine = config.trainer.async_training, config.actor_rollout_ref.rollout.name
    if keys.interrupted_cache == "keep" and keys.partial_rollouts and engine != "native":
        yield error(
            f"{ASYNC}.interrupted_cache=keep with the engine '{engine}'",
            why=f"{engine} computes the cache of responses under way again when weights arrive, and does not say which weights "
            "sampled each of their tokens",
            fix=f"{ASYNC}.interrupted_cache=recompute, or {ROLLOUT}.name=native",
            where=f"{ASYNC}.interrupted_cache",
        )
