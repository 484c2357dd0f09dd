"""Rules about engines: separate environments, speculative decoding, asynchronous training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hone.config.derived import OldLogProbs, RunSpec, as_judge
from hone.config.load import ASYNC_CORRECTION, CORRECTION
from hone.config.pools import own_pools
from hone.config.tree import RLConfig
from hone.errors import ConfigError, HoneError, ModelError, RequestError
from hone.generation import is_served
from hone.preflight.evidence import Evidence
from hone.preflight.reading import read_model
from hone.preflight.rules import Finding, Findings, Stage, error, rule, warning

ASYNC, ROLLOUT = "trainer.async_training", "actor_rollout_ref.rollout"
BLOCK = "actor_rollout_ref.rollout.speculative"


@rule("R76", Stage.ENVIRONMENT)
def engine_is_installed(config: RLConfig) -> Findings:
    """An external engine is installed on this machine, unless the run attaches to a running one."""
    from hone.generation import SERVED
    from hone.generation.environments import interpreter_of

    rollout = config.actor_rollout_ref.rollout
    if rollout.name not in SERVED or rollout.engine_url is not None:
        return
    try:
        interpreter_of(rollout.name, rollout.engine_env)
    except ConfigError as missing:
        yield warning(missing.what, why=missing.why, fix=missing.fix, where=missing.where)


@rule("R76", Stage.ENVIRONMENT)
def engine_of_the_reward_model_is_installed(config: RLConfig) -> Findings:
    """The engine that judges is installed too."""
    yield from of_judge(config, engine_is_installed)


@rule("R76")
def engine_judges(config: RLConfig) -> Findings:
    """An engine can run the reward model as configured."""
    from hone.generation.options import engine_options

    settings, judge = config.reward.reward_model, RunSpec(config).judge
    if judge is None:
        return
    if settings.kind == "discriminative" and settings.rollout.name != "vllm":
        yield error(
            f"engine '{settings.rollout.name}' gives no scores of a model, but reward.reward_model.kind=discriminative",
            why="only vLLM returns the output of a scoring model as it is",
            fix="reward.reward_model.rollout.name=vllm, or reward.reward_model.rollout.name=native",
        )
    longest = settings.max_token_len_per_gpu or config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    longest = min(longest, read_model(settings.path).get("max_position_embeddings") or longest)
    if settings.kind == "generative" and config.reward.judge.max_tokens >= longest:
        yield error(
            f"reward.judge.max_tokens={config.reward.judge.max_tokens}, but the reward model reads and writes {longest} tokens",
            why="no prompt would fit, so nothing would be judged",
            fix=f"reward.judge.max_tokens={max(1, longest // 4)}, or a larger reward.reward_model.max_token_len_per_gpu",
        )
    yield from of_judge(config, engine_has_replicas)
    try:
        engine_options(judge.actor_rollout_ref.rollout)
    except ConfigError as problem:
        raise as_judge(problem) from problem


def of_judge(config: RLConfig, check: Callable[[RLConfig], Findings]) -> Findings:
    """Yield the findings of a rule about engines for the one of the reward model, with its keys."""
    judge = RunSpec(config).judge
    for finding in check(judge) if judge is not None else ():
        yield Finding(as_judge(finding.error), finding.stops)


@rule("R76")
def engine_has_replicas(config: RLConfig) -> Findings:
    """An engine with replicas can run in separate processes."""
    from hone.generation import SERVED

    rollout = config.actor_rollout_ref.rollout
    if rollout.num_replicas is not None and rollout.name not in ("native", *SERVED):
        yield error(
            f"engine '{rollout.name}' does not support replicas, but rollout.num_replicas={rollout.num_replicas}",
            why="it only runs in the trainer's process",
            fix="actor_rollout_ref.rollout.num_replicas=null, or actor_rollout_ref.rollout.name=native",
        )


@rule("R76")
def engine_follows_constraints(config: RLConfig) -> Findings:
    """A constraint on responses compiles, and the engine follows it."""
    from hone.generation.constraints import configured_constraint
    from hone.generation.grammars import check_compiles

    rollout, where = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout.constraint"
    try:
        constraint = configured_constraint(rollout.constraint)
        if constraint is not None:
            check_compiles(constraint)
    except (ConfigError, RequestError) as problem:
        yield error(problem.what, why=problem.why, fix=problem.fix, where=problem.where or where)
        return
    if constraint is not None and rollout.name in ("sglang", "trtllm"):
        yield error(
            f"engine '{rollout.name}' does not follow constraints, but rollout.constraint.kind={rollout.constraint.kind}",
            why="it refuses every request with one",
            fix="actor_rollout_ref.rollout.name=native",
            where=where,
        )


@rule("R76")
def engine_takes_the_adapter(config: RLConfig) -> Findings:
    """Sending an adapter alone needs a trained adapter and an engine that computes with it."""
    from hone.generation.options import adapter_shape, needs_untied_head

    try:
        shape = adapter_shape(config)
        needs_untied_head(config)
    except ModelError:
        return  # R08 says what the model lacks
    if shape is None and not config.actor_rollout_ref.rollout.merge_lora:
        yield warning(
            "rollout.merge_lora=false, but no adapter is trained",
            why="all weights are sent, as with merge_lora=true",
            fix="actor_rollout_ref.model.lora_rank=32, or actor_rollout_ref.rollout.merge_lora=true",
            where="actor_rollout_ref.rollout.merge_lora",
        )


@rule("R90")
def engine_drafts_as_configured(config: RLConfig) -> Findings:
    """The engine has the configured speculative decoding, and its keys fit each other."""
    from hone.generation.options import check_speculation

    rollout, settings = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.speculative
    check_speculation(rollout)
    if settings.method == "ngram" and settings.prompt_lookup_min > settings.prompt_lookup_max:
        yield error(
            f"speculative.prompt_lookup_min={settings.prompt_lookup_min} exceeds prompt_lookup_max={settings.prompt_lookup_max}",
            why="no n-gram has such a length, so nothing would be drafted",
            fix=f"{BLOCK}.prompt_lookup_min={settings.prompt_lookup_max}",
        )
    if settings.method == "draft_model" and settings.model is None:
        yield error(
            "speculative.method=draft_model, but speculative.model=null names no draft model",
            fix=f"{BLOCK}.model=<directory of a small model with the tokenizer of the policy>, or {BLOCK}.method=ngram",
        )
    if rollout.name == "vllm" and settings.method is not None and rollout.min_p > 0:
        yield error(
            f"vLLM cannot sample with min_p={rollout.min_p:g} and speculative decoding",
            why="it verifies drafts without min_p",
            fix=f"actor_rollout_ref.rollout.min_p=0, or {BLOCK}.method=null",
        )


@rule("R90", Stage.FILES)
def draft_model_shares_the_tokenizer(config: RLConfig, evidence: Evidence) -> Findings:
    """The draft model has the tokenizer of the policy, and rejected drafts can be taken back from the caches of both models."""
    settings = config.actor_rollout_ref.rollout.speculative
    native = config.actor_rollout_ref.rollout.name == "native" and settings.method is not None
    if native and not _has_entries_per_token(evidence.model_settings):
        yield error(
            f"speculative.method={settings.method}, but a {evidence.model_settings['model_type']} model keeps one state a sequence",
            why="rejected drafts could not be taken back from it",
            fix=f"{BLOCK}.method=null",
        )
    if not native or settings.method != "draft_model" or settings.model is None or evidence.tokenizer is None:
        return
    from hone.data.tokenizer import load_tokenizer

    fix = f"{BLOCK}.model=<directory of a model with the tokenizer of the policy>, or {BLOCK}.method=ngram"
    try:
        trusted = config.actor_rollout_ref.model.trust_remote_code
        drafted = load_tokenizer(settings.model, trust_remote_code=trusted).get_vocab()
    except HoneError as problem:
        yield error(
            f"the draft model '{settings.model}' cannot be used: {problem.what}",
            why=problem.why,
            fix=fix,
            where=f"{BLOCK}.model",
        )
        return
    policy = evidence.tokenizer.get_vocab()
    others = sum(drafted.get(token) != number for token, number in policy.items())
    if others or len(drafted) != len(policy):
        yield error(
            f"the draft model '{Path(settings.model).name}' has another tokenizer: {others} of the policy's {len(policy)} tokens have "
            f"another id or none, and {len(drafted.keys() - policy.keys())} tokens of the draft model are not the policy's",
            why="its drafts are token ids that the policy verifies",
            fix=fix,
            where=f"{BLOCK}.model",
        )
    elif not _has_entries_per_token(read_model(settings.model)):
        yield error(
            f"the draft model '{Path(settings.model).name}' keeps one state a sequence",
            why="rejected drafts could not be taken back from it",
            fix=fix,
            where=f"{BLOCK}.model",
        )


def _has_entries_per_token(settings: dict[str, Any]) -> bool:
    """Return whether the KV cache of every layer of a model has an entry for each token; True for unreadable settings."""
    from types import SimpleNamespace

    from hone.models.registry import entries_per_token, keeps_states

    known = {"model_type", "num_hidden_layers"} <= settings.keys()
    return not known or (entries_per_token(SimpleNamespace(**settings)) and not keeps_states(settings))


@rule("R65")
def something_to_overlap(config: RLConfig) -> Findings:
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


@rule("R68")
def batch_can_stream(config: RLConfig) -> Findings:
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
        )


@rule("R66")
def age_is_corrected(config: RLConfig) -> Findings:
    """In asynchronous training the loss corrects for the age of tokens."""
    spec, staleness = RunSpec(config), config.trainer.async_training.max_staleness
    if staleness == 0 or spec.corrects or spec.bypass:
        return
    yield warning(
        f"{ASYNC}.max_staleness={staleness}, but no rollout correction weights or rejects tokens",
        why=f"old log-probs are the trainer's, so the loss treats tokens of weights up to {staleness} "
        f"update{'s'[: staleness > 1]} old as its own",
        fix=f"{CORRECTION}.preset={ASYNC_CORRECTION}",
    )


@rule("R67")
def responses_can_be_interrupted(config: RLConfig) -> Findings:
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
        )


@rule("R77")
def cache_can_be_kept(config: RLConfig) -> Findings:
    """An engine that keeps the KV cache of interrupted responses says which weights sampled each token."""
    keys, engine = config.trainer.async_training, config.actor_rollout_ref.rollout.name
    if keys.interrupted_cache == "keep" and keys.partial_rollouts and engine != "native":
        yield error(
            f"{ASYNC}.interrupted_cache=keep with the engine '{engine}'",
            why=f"{engine} computes the cache of responses under way again when weights arrive, and does not say which weights "
            "sampled each of their tokens",
            fix=f"{ASYNC}.interrupted_cache=recompute, or {ROLLOUT}.name=native",
        )
