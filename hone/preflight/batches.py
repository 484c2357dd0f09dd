"""Rules about batch arithmetic: sizes that must divide or not exceed each other."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.derived import RunSpec, longest_sequence
from hone.config.preference import PreferenceConfig, RewardModelConfig
from hone.config.sft import SFTConfig
from hone.config.tree import RLConfig
from hone.config.trees import TREES, AnyConfig
from hone.preflight.rules import Finding, error, rule, warning

_MANY_UPDATES = 16  # updates per batch in DAPO


def nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of ``number`` nearest to ``wanted``; of two equally near, the larger."""
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - wanted), -d))


def mini_batches(config: RLConfig) -> dict[str, int]:
    sizes = {"actor_rollout_ref.actor.ppo_mini_batch_size": config.actor_rollout_ref.actor.ppo_mini_batch_size}
    if RunSpec(config).critic.value and config.critic.ppo_mini_batch_size is not None:
        sizes["critic.ppo_mini_batch_size"] = config.critic.ppo_mini_batch_size
    return sizes


@rule("R13", RLConfig)
def mini_batch_not_larger(config: RLConfig) -> Iterator[Finding]:
    """A mini-batch is not larger than the batch."""
    prompts = config.data.train_batch_size
    for key, size in mini_batches(config).items():
        if size > prompts:
            yield error(
                f"{key.rpartition('.')[2]}={size} prompts, but a step has data.train_batch_size={prompts}",
                why="mini-batches are split from the batch of one step",
                fix=f"{key}={prompts}",
                where=key,
            )


@rule("R14", RLConfig)
def mini_batch_divides(config: RLConfig) -> Iterator[Finding]:
    """The mini-batch divides the batch."""
    prompts = config.data.train_batch_size
    for key, size in mini_batches(config).items():
        if size <= prompts and prompts % size:
            yield error(
                f"{key.rpartition('.')[2]}={size} does not divide data.train_batch_size={prompts}",
                why=f"the last mini-batch would have {prompts % size} prompts, with more weight per prompt than in the others",
                fix=f"{key}={nearest_divisor(prompts, size)}",
                where=key,
            )


@rule("R15", RLConfig)
def micro_batch_limits(config: RLConfig) -> Iterator[Finding]:
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


@rule("R17", RLConfig)
def clip_without_effect(config: RLConfig) -> Iterator[Finding]:
    """A changed clip range has an effect."""
    actor = config.actor_rollout_ref.actor
    spec = RunSpec(config)
    chosen = actor.clip_ratio_low is not None or actor.clip_ratio_high is not None
    if spec.on_policy and chosen and not spec.bypass:
        yield warning(
            "the clip range is set, but there is only 1 update per batch",
            why="at the first update the ratio is 1 and nothing is clipped",
            fix=f"actor_rollout_ref.actor.ppo_mini_batch_size={max(1, actor.ppo_mini_batch_size // 4)} "
            "for several updates per batch",
            where="actor_rollout_ref.actor.clip_ratio_low, clip_ratio_high",
        )


@rule("R18", RLConfig)
def many_updates(config: RLConfig) -> Iterator[Finding]:
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


@rule("R29", RLConfig)
def token_budgets(config: RLConfig) -> Iterator[Finding]:
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
                fix=f"{key}={2 * longest} or more, or shorter sequences",
                where=key,
            )


@rule("R29", SFTConfig, PreferenceConfig, RewardModelConfig)
def sft_token_budget(config: SFTConfig | PreferenceConfig | RewardModelConfig) -> Iterator[Finding]:
    """The token budget is at least the longest conversation."""
    data = config.data
    if data.max_token_len_per_gpu < data.max_length:
        yield error(
            f"max_token_len_per_gpu={data.max_token_len_per_gpu} tokens < data.max_length={data.max_length}",
            why="the longest conversation does not fit",
            fix=f"data.max_token_len_per_gpu={2 * data.max_length} or more",
            where="data.max_token_len_per_gpu",
        )


@rule("R56", *TREES.values())
def steps_and_saving(config: AnyConfig) -> Iterator[Finding]:
    """Warm-up and decay fit into the run, and weights are saved."""
    trainer = config.trainer
    optim = config.actor_rollout_ref.actor.optim if isinstance(config, RLConfig) else config.optim
    steps, warmup = trainer.total_training_steps, optim.lr_warmup_steps
    if steps is not None and warmup >= steps:
        key = "actor_rollout_ref.actor.optim" if isinstance(config, RLConfig) else "optim"
        yield error(
            f"warm-up takes {warmup} steps, but trainer.total_training_steps={steps}",
            why="the learning rate would never reach lr",
            fix=f"{key}.lr_warmup_steps={max(0, steps // 10)}",
            where=f"{key}.lr_warmup_steps",
        )
    decay = max(0, optim.lr_wsd_decay_steps) if optim.lr_scheduler_type == "wsd" else 0
    if steps is not None and warmup < steps < max(0, warmup) + decay:
        key = "actor_rollout_ref.actor.optim" if isinstance(config, RLConfig) else "optim"
        yield error(
            f"warm-up takes {max(0, warmup)} steps and the decay {decay}, but trainer.total_training_steps={steps}",
            why="the decay would begin before the warm-up ends",
            fix=f"{key}.lr_wsd_decay_steps={steps - max(0, warmup)} or fewer",
            where=f"{key}.lr_wsd_decay_steps",
        )
    if trainer.save_freq == 0:
        yield warning(
            "no checkpoint will be saved",
            why="the trained weights are lost when the run ends",
            fix="trainer.save_freq=-1 to save at the end",
            where="trainer.save_freq=0",
        )
