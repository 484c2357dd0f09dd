"""Rules about updates: batch sizes and token budgets, learning rates and dtypes that are usually a mistake, optimizers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from hone.config.derived import RunSpec, longest_sequence
from hone.config.dtypes import DtypeKey, dtype_keys, is_narrow
from hone.config.model import ModelConfig, OptimConfig
from hone.config.offline import PreferenceConfig, RewardModelConfig, SFTConfig
from hone.config.param_groups import read_param_groups
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig, model_block
from hone.errors import ConfigError, HoneError
from hone.preflight.environment import computes_bfloat16, on_cpu
from hone.preflight.layouts import actor_processes
from hone.preflight.reading import mini_batches, read_json
from hone.preflight.rules import Finding, Findings, Stage, error, error_of, rule, warning

if TYPE_CHECKING:
    from torch import nn


ACTOR = "actor_rollout_ref.actor"
_REF_BUDGET = "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"
_SMALL_LR = 5e-6
_LARGE_LR = 0.1
_FORWARD_RATIO = 4
_KL_PLACES = {"grpo": "loss", "reinforce_plus_plus": "reward"}
_ACTOR, _CRITIC = "actor_rollout_ref.actor.optim", "critic.optim"
_MANY_UPDATES = 16  # updates per batch in DAPO


def nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of ``number`` nearest to ``wanted``; of two equally near, the larger."""
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - wanted), -d))


@rule("R13")
def mini_batch_not_larger(config: RLConfig) -> Findings:
    """A mini-batch is not larger than the batch."""
    prompts = config.data.train_batch_size
    for key, size in mini_batches(config).items():
        if size > prompts:
            yield error(
                f"{key.rpartition('.')[2]}={size} prompts, but a step has data.train_batch_size={prompts}",
                why="mini-batches are split from the batch of one step",
                fix=f"{key}={prompts}",
            )


@rule("R14")
def mini_batch_divides(config: RLConfig) -> Findings:
    """The mini-batch divides the batch."""
    prompts = config.data.train_batch_size
    for key, size in mini_batches(config).items():
        if size <= prompts and prompts % size:
            yield error(
                f"{key.rpartition('.')[2]}={size} does not divide data.train_batch_size={prompts}",
                why=f"the last mini-batch would have {prompts % size} prompts, with more weight per prompt than in the others",
                fix=f"{key}={nearest_divisor(prompts, size)}",
            )


@rule("R15")
def micro_batch_limits(config: RLConfig) -> Findings:
    """A limit on the sequences of a micro-batch is below the sequences of a mini-batch."""
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    limit, sequences = actor.ppo_micro_batch_size_per_gpu, actor.ppo_mini_batch_size * n
    if limit is not None and limit > sequences:
        yield warning(
            f"ppo_micro_batch_size_per_gpu={limit} sequences exceeds the mini-batch: "
            f"{actor.ppo_mini_batch_size} prompts x {n} = {sequences}",
            why="the limit has no effect",
            fix=f"at most {sequences}, or null and ppo_max_token_len_per_gpu alone",
            where="actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        )


@rule("R17")
def clip_without_effect(config: RLConfig) -> Findings:
    """A changed clip range has an effect."""
    actor = config.actor_rollout_ref.actor
    spec = RunSpec(config)
    from hone.algorithms import policy_losses

    clips = (
        "clip_ratio_low" in policy_losses.get(spec.policy_loss).options and actor.clip_ratio != type(actor)().clip_ratio
    )
    chosen = clips or actor.clip_ratio_low is not None or actor.clip_ratio_high is not None
    if spec.on_policy and chosen and not spec.bypass:
        yield warning(
            "the clip range is set, but there is only 1 update per batch",
            why="at the first update the ratio is 1 and nothing is clipped",
            fix=f"actor_rollout_ref.actor.ppo_mini_batch_size={max(1, actor.ppo_mini_batch_size // 4)} "
            "for several updates per batch",
            where="actor_rollout_ref.actor.clip_ratio, clip_ratio_low, clip_ratio_high",
        )


@rule("R18")
def many_updates(config: RLConfig) -> Findings:
    """The last update of a batch is not too far from the policy that sampled the batch."""
    actor = config.actor_rollout_ref.actor
    updates = RunSpec(config).updates_per_batch
    if updates > _MANY_UPDATES:
        yield warning(
            f"{updates} updates per batch ({config.data.train_batch_size} prompts / {actor.ppo_mini_batch_size} "
            f"x {actor.ppo_epochs} epochs)",
            why="the last updates are very off-policy",
            fix=f"a larger actor_rollout_ref.actor.ppo_mini_batch_size, for at most {_MANY_UPDATES} updates",
            where="actor_rollout_ref.actor.ppo_mini_batch_size",
        )


def _longest_keys(config: RLConfig) -> str:
    data, compaction = config.data, config.actor_rollout_ref.rollout.multi_turn.compaction
    if compaction.strategy is not None:
        return "multi_turn.compaction.context_tokens"
    return f"data.max_prompt_length={data.max_prompt_length} + data.max_response_length={data.max_response_length}"


@rule("R29")
def token_budgets(config: RLConfig) -> Findings:
    """Every token budget is at least the longest sequence."""
    roles, longest = config.actor_rollout_ref, longest_sequence(config)
    budgets = {
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": roles.actor.ppo_max_token_len_per_gpu,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": roles.ref.log_prob_max_token_len_per_gpu,
        "actor_rollout_ref.rollout.max_cache_tokens": roles.rollout.max_cache_tokens,
        "critic.ppo_max_token_len_per_gpu": config.critic.ppo_max_token_len_per_gpu,
    }
    for key, budget in budgets.items():
        if budget is not None and budget < longest:
            yield error(
                f"{key.rpartition('.')[2]}={budget} tokens < {_longest_keys(config)} = {longest}",
                why="the longest sequence does not fit",
                fix=f"{key}={2 * longest}, at least {longest} (one sequence at a time), or shorter sequences",
            )


@rule("R29")
def sft_token_budget(config: SFTConfig | PreferenceConfig | RewardModelConfig) -> Findings:
    """The token budget is at least the longest conversation."""
    data = config.data
    if data.max_token_len_per_gpu < data.max_length:
        yield error(
            f"max_token_len_per_gpu={data.max_token_len_per_gpu} tokens < data.max_length={data.max_length}",
            why="the longest conversation does not fit",
            fix=f"data.max_token_len_per_gpu={data.max_length} or more",
        )


@rule("R56")
def steps_and_saving(config: AnyConfig) -> Findings:
    """Warm-up and decay fit into the run, and weights are saved."""
    trainer, steps = config.trainer, config.trainer.total_training_steps
    optims = {_ACTOR: config.actor_rollout_ref.actor.optim} if isinstance(config, RLConfig) else {"optim": config.optim}
    if isinstance(config, RLConfig) and RunSpec(config).critic.value:
        optims[_CRITIC] = config.critic.optim
    for key, optim in optims.items():
        if steps is None:
            break
        warmup = max(0, optim.lr_warmup_steps)
        decay = max(0, optim.lr_wsd_decay_steps) if optim.lr_scheduler_type == "wsd" else 0
        if warmup >= steps:
            yield error(
                f"warm-up takes {warmup} steps, but trainer.total_training_steps={steps}",
                why="the learning rate would never reach lr",
                fix=f"{key}.lr_warmup_steps={steps // 10}",
            )
        elif steps < warmup + decay:
            yield error(
                f"warm-up takes {warmup} steps and the decay {decay}, but trainer.total_training_steps={steps}",
                why="the decay would begin before the warm-up ends",
                fix=f"{key}.lr_wsd_decay_steps={steps - warmup} or fewer",
            )
    if trainer.save_freq == 0:
        yield warning(
            "no checkpoint will be saved",
            why="the trained weights are lost when the run ends",
            fix="trainer.save_freq=-1 to save at the end",
            where="trainer.save_freq=0",
        )


@rule("R24")
def reference_is_the_start(config: RLConfig) -> Findings:
    """The reference is the policy that training starts from, and an adapter belongs to the configured model."""
    model = config.actor_rollout_ref.model
    if model.lora_adapter_path is None:
        return
    ref = config.actor_rollout_ref.ref
    if RunSpec(config).reference.value and ref.adapter == "start" and ref.enable_resource_pool:
        yield error(
            f"the reference has devices of its own, and there no adapter, but training starts from '{model.lora_adapter_path}'",
            why="the KL penalty would pull the policy back to the model before the adapter was trained",
            fix="actor_rollout_ref.ref.enable_resource_pool=false, or actor_rollout_ref.ref.adapter=off",
        )
    base = read_json(Path(model.lora_adapter_path) / "adapter_config.json").get("base_model_name_or_path")
    if isinstance(base, str) and base and model.path and Path(base).name != Path(model.path).name:
        yield warning(
            f"the adapter was trained on '{base}', but model.path={model.path}",
            why="an adapter is only valid for its base model",
            fix=f"actor_rollout_ref.model.path={base}, unless both are the same weights",
            where="actor_rollout_ref.model.lora_adapter_path",
        )


@rule("R25")
def kl_in_its_usual_place(config: RLConfig) -> Findings:
    """The KL penalty is in the place (reward or loss) that the estimator's paper uses."""
    name, actor = config.algorithm.adv_estimator, config.actor_rollout_ref.actor
    usual = _KL_PLACES.get(name)
    if usual == "loss" and config.algorithm.use_kl_in_reward and not actor.use_kl_loss:
        yield warning(
            f"adv_estimator={name} usually has its KL penalty in the loss, but use_kl_in_reward=true",
            why="group normalisation divides the penalty by the standard deviation of the rewards",
            fix=f"algorithm.use_kl_in_reward=false {ACTOR}.use_kl_loss=true",
        )
    if usual == "reward" and actor.use_kl_loss and not config.algorithm.use_kl_in_reward:
        yield warning(
            f"adv_estimator={name} usually has its KL penalty in the reward, but use_kl_loss=true",
            why="its returns include the penalty of every token",
            fix=f"algorithm.use_kl_in_reward=true {ACTOR}.use_kl_loss=false",
            where=f"{ACTOR}.use_kl_loss",
        )


@rule("R27")
def engine_log_probs_match_the_update(config: RLConfig) -> Findings:
    """With the engine's log-probs as the old ones, rounding to bfloat16 does not move the ratio of an on-policy update."""
    spec, actor = RunSpec(config), config.actor_rollout_ref.actor
    key = "algorithm.rollout_correction.bypass_mode"
    if not (spec.on_policy and spec.bypass):
        return
    rounded = [entry for entry in dtype_keys(config) if _rounds(entry, config) and not entry.key.startswith("critic.")]
    if rounded:
        yield warning(
            f"{' and '.join(f'{entry.key}={entry.value}' for entry in rounded)} with bypass_mode=true: the engine computes the old log-probs "
            f"token by token, and the update computes its log-probs for up to {actor.ppo_max_token_len_per_gpu} tokens at once",
            why="in bfloat16 the two differ by about 0.01 per token, and in float16 by an eighth of that, so the ratio of the on-policy update is not exactly 1",
            fix=f"{key}=false (the update computes the old log-probs), or {' '.join(f'{entry.key}=float32' for entry in rounded)}",
        )


@rule("R27")
def float16_on_both_sides(config: RLConfig) -> Findings:
    """Updates and generation share float16, so that their log-probs round alike."""
    entries = {entry.key: entry for entry in dtype_keys(config)}
    actor, rollout = entries[f"{ACTOR}.dtype"], entries.get("actor_rollout_ref.rollout.dtype")
    if rollout is None:
        return
    bfloat16 = computes_bfloat16(config)
    dtypes = {actor.resolved(bfloat16=bfloat16), rollout.resolved(bfloat16=bfloat16)}
    if len(dtypes) == 2 and "float16" in dtypes:
        yield warning(
            f"{rollout.key}={rollout.value}, but updates compute in {actor.resolved(bfloat16=bfloat16)}",
            why="the log-probs of engine and trainer differ by the rounding of two dtypes, where one float16 would round both alike",
            fix=f"{actor.key}=float16 {rollout.key}=auto",
            where=rollout.key,
        )


@rule("R27")
def reference_log_probs_match_the_policy(config: RLConfig) -> Findings:
    """In bfloat16 on a GPU, the reference and the policy use micro-batches of the same size."""
    actor, budget = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu
    if budget in (None, actor.ppo_max_token_len_per_gpu) or not RunSpec(config).reference.value:
        return
    if not on_cpu(config) and _rounds(dtype_keys(config)[0], config):
        yield warning(
            f"the reference uses micro-batches of {budget} tokens and the policy of {actor.ppo_max_token_len_per_gpu}, both in "
            "bfloat16",
            why="a GPU selects kernels by the shape of the micro-batch, which moves bfloat16 log-probs by up to 0.01: "
            "the KL divergence is not 0 at the first step, although both models are equal",
            fix=f"{_REF_BUDGET}=null (the actor's), or {ACTOR}.dtype=float32",
        )


@rule("R29")
def budget_for_two_sequences(config: RLConfig) -> Findings:
    """A micro-batch fits at least two sequences of maximum length."""
    budget, longest = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu, longest_sequence(config)
    if longest <= budget < 2 * longest:
        yield warning(
            f"ppo_max_token_len_per_gpu={budget} tokens is less than two sequences of {longest}",
            why="most micro-batches would hold a single sequence, which is slow",
            fix=f"{ACTOR}.ppo_max_token_len_per_gpu={2 * longest} if memory allows",
        )


def _policy_rate(config: AnyConfig) -> tuple[OptimConfig, str]:
    """Return the optimizer of the policy, or of the one model, and the key of its learning rate."""
    block, optim = next(iter(optim_blocks(config).items()))
    return optim, f"{block}.lr"


@rule("R60")
def adapter_learning_rate(config: AnyConfig) -> Findings:
    """An adapter gets a larger learning rate than full weights."""
    model = model_block(config)[1]
    optim, key = _policy_rate(config)
    if (model.lora_rank > 0 or model.lora_adapter_path is not None) and 0 < optim.lr < _SMALL_LR:
        yield warning(
            f"LoRA with lr={optim.lr:g}, which is a learning rate for full fine-tuning",
            why="adapters need about 10 times as much; at this rate the reward hardly changes",
            fix=f"{key}={10 * optim.lr:g} or more (1e-5 to 1e-4 are usual)",
        )


@rule("R60")
def learning_rate_fits_adam(config: AnyConfig) -> Findings:
    """A rate of Adam is far below the size of a weight."""
    optim, key = _policy_rate(config)
    if optim.optimizer.startswith("Adam") and optim.lr >= _LARGE_LR:
        yield warning(
            f"lr={optim.lr:g} with {optim.optimizer}, whose steps move each weight by about lr, whatever the gradient",
            why="weights are about 0.02, so a few steps replace the model",
            fix=f"{key}=1e-6 for all weights, 1e-4 for an adapter",
        )


@rule("R63")
def reference_keeps_up(config: RLConfig) -> Findings:
    """The reference uses micro-batches of about the size of the update's."""
    budget = config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu
    actor = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    if budget is not None and RunSpec(config).reference.value and budget * _FORWARD_RATIO < actor:
        yield warning(
            f"ref.log_prob_max_token_len_per_gpu={budget} tokens needs {actor / budget:.0f} forward passes for one of the update "
            f"({actor} tokens)",
            why="a forward pass needs less memory than an update; small micro-batches only make it slow",
            fix=f"{_REF_BUDGET}={actor} or null",
        )


def _rounds(entry: DtypeKey, config: RLConfig) -> bool:
    """Return whether a dtype key means bfloat16 or float16 on the device of the run."""
    return is_narrow(entry.resolved(bfloat16=computes_bfloat16(config)))


def optim_blocks(config: AnyConfig) -> dict[str, OptimConfig]:
    """Return the optimizer blocks of the models that a run trains, by their keys."""
    if not isinstance(config, RLConfig):
        return {"optim": config.optim}
    critic = {_CRITIC: config.critic.optim} if RunSpec(config).critic.value else {}
    return {_ACTOR: config.actor_rollout_ref.actor.optim, **critic}


@rule("R85")
def optimizer_settings(config: AnyConfig) -> Findings:
    """Entries of ``param_groups`` are well-formed, and an average of weights moves."""
    for key, optim in optim_blocks(config).items():
        yield from error_of(read_param_groups, optim.param_groups, f"{key}.param_groups")
        if optim.ema_decay == 1:
            yield error(
                "an average of weights with ema_decay=1 never moves",
                why="it would be the initial weights for ever",
                fix=f"{key}.ema_decay=0.999, or null for no average",
            )


@rule("R85", Stage.FILES)
def optimizer_of_this_model(config: AnyConfig) -> Findings:
    """The optimizer exists, takes its arguments and this layout, and every entry of ``param_groups`` has parameters."""
    for key, optim in optim_blocks(config).items():
        plain = optim.optimizer == "AdamW" and not optim.param_groups and not optim.override_optimizer_config
        if plain or any(finding.stops for finding in optimizer_settings(config)):
            continue
        try:
            _build(config, key, optim)
        except ConfigError as problem:
            where = problem.where.replace("optim", key, 1)
            fix = problem.fix.replace("optim.", f"{key}.")
            yield Finding(ConfigError(problem.what, why=problem.why, fix=fix, where=where), stops=True)


def _build(config: AnyConfig, key: str, optim: OptimConfig) -> None:
    """Create the optimizer of a model without storage. Raises ConfigError: it cannot be created."""
    from hone.training import eight_bits  # slow to import
    from hone.training.optimizer import build_optimizer, optimizer_groups

    if optim.optimizer == eight_bits.NAME and _divided(config, key):
        raise eight_bits.sharded_error()
    model = _without_storage(config, key)
    if model is None:
        return
    if ":" in optim.optimizer:  # what a custom optimizer does with parameters without storage is not known
        optimizer_groups(model, optim)
    else:
        build_optimizer(model, optim)


def _divided(config: AnyConfig, key: str) -> bool:
    if not isinstance(config, RLConfig):
        return actor_processes(config) > 1
    role = "actor" if key == _ACTOR else "critic"
    return any(pool.divided for pool in RunSpec(config).pools if role in pool.roles)


def _without_storage(config: AnyConfig, key: str) -> nn.Module | None:
    """Return the model that an optimizer updates; None where its directory is incomplete (R08), or an adapter decides its names."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

    from hone.models.loading import VALUE_SETTINGS, as_policy, model_settings
    from hone.models.streaming import empty_model

    model, scores = model_block(config)[1], isinstance(config, RewardModelConfig)
    if key == _CRITIC and isinstance(config, RLConfig):
        model = ModelConfig(path=config.critic.model.path or model.path, trust_remote_code=model.trust_remote_code)
    if model.path is None or model.lora_adapter_path or (scores and model.lora_rank):
        return None
    factory, settings = AutoModelForCausalLM, {}
    if scores:
        factory, settings = AutoModelForSequenceClassification, {"num_labels": 1}
    elif key == _CRITIC:
        factory, settings = AutoModelForTokenClassification, VALUE_SETTINGS
    try:
        empty = empty_model(factory, model_settings(model, **settings), trust_remote_code=model.trust_remote_code)
    except (HoneError, OSError, ValueError, KeyError, TypeError):
        return None
    small = dataclasses.replace(model, lora_rank=min(1, model.lora_rank))
    return empty if scores or key == _CRITIC else as_policy(empty, small, seed=0, trainable=True)
