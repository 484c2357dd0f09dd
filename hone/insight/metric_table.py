"""Table of all metrics. ``docs/metrics.md`` is generated from it.

Names follow the ecosystem. ``<x>`` in a name means any text, ``<n>`` a number.
"""

from __future__ import annotations

from hone.insight.episode_metrics import EPISODE_METRICS
from hone.insight.metric_spec import MetricSpec, Reduction
from hone.insight.special_metrics import (
    COVERAGE_METRICS,
    DISTILLATION_METRICS,
    PREFERENCE_METRICS,
    REPLICA_METRICS,
    STREAM_METRICS,
)

__all__ = ["GROUPS", "METRICS", "MetricSpec", "Reduction"]

_SUM, _MEAN, _MAX, _MIN, _LAST = Reduction.SUM, Reduction.MEAN, Reduction.MAX, Reduction.MIN, Reduction.LAST


def _mean_max_min(name: str, unit: str, meaning: str) -> tuple[MetricSpec, ...]:
    """Declare mean, largest and smallest value of one quantity."""
    return (
        MetricSpec(f"{name}/mean", unit, _MEAN, f"{meaning}: mean."),
        MetricSpec(f"{name}/max", unit, _MAX, f"{meaning}: largest."),
        MetricSpec(f"{name}/min", unit, _MIN, f"{meaning}: smallest."),
    )


_TRAINING = (
    MetricSpec("training/global_step", "steps", _LAST, "Number of the step, counted from 1; 0 means before training."),
    MetricSpec("insight/alerts", "alerts", _SUM, "Alerts of a step that has any, without those about the machine."),
    MetricSpec("insight/alerts/machine", "alerts", _SUM, "Alerts of `slow_steps` and `memory_growth`, if it has any."),
    MetricSpec("training/epoch", "epochs", _LAST, "Pass over the training data, of the step's prompts."),
    *STREAM_METRICS,
    MetricSpec(
        "training/staleness",
        "updates",
        _MAX,
        "Weight versions between sampling and training, the largest of the batch; 0 means on-policy."
        " Look when above the staleness bound of the run.",
    ),
    MetricSpec(
        "rollout/canary_gap",
        "nats",
        _MAX,
        "Mean |log-prob gap| between the engines and the trainer on the canary prompts after a weight sync; only "
        "where engines hold a copy of the weights."
        " Look when above 10 x the value after the first weight sync.",
    ),
    MetricSpec(
        "training/rollout_probs_diff_mean",
        "probability",
        _MEAN,
        "|p(engine) - p(trainer)| of the sampled tokens: mean.",
    ),
    MetricSpec("training/rollout_probs_diff_max", "probability", _MAX, "|p(engine) - p(trainer)|: largest."),
    MetricSpec(
        "training/rollout_log_probs_diff_mean",
        "nats",
        _MEAN,
        "|log p(engine) - log p(trainer)| of the sampled tokens: mean.",
    ),
    MetricSpec("training/rollout_log_probs_diff_max", "nats", _MAX, "|log p(engine) - log p(trainer)|: largest."),
    MetricSpec("training/filter_groups/tried_groups", "groups", _SUM, "Groups generated and scored for this step."),
    MetricSpec(
        "training/filter_groups/evicted_ratio",
        "share of groups",
        _LAST,
        "Groups of these that were replaced because all their answers are equally good.",
    ),
    MetricSpec("training/filter_groups/evicted_samples", "responses", _SUM, "Responses in the replaced groups."),
    MetricSpec(
        "training/filter_groups/evicted_value",
        "reward",
        _LAST,
        "Mean of the metric in the replaced groups: problems are too hard near its lowest value, solved near its highest.",
    ),
)

_CORRECTION = (
    MetricSpec(
        "rollout_corr/kl",
        "nats",
        _MEAN,
        "KL from the engine that sampled to the trainer, mean of log p(engine) - log p(trainer) of the sampled tokens.",
    ),
    MetricSpec("rollout_corr/k3_kl", "nats", _MEAN, "The same KL by the k3 estimator: never negative, less noisy."),
    MetricSpec(
        "rollout_corr/chi2_token",
        "variance",
        _MEAN,
        "Mean squared importance ratio of a token, minus 1: the variance that exact token weights would add.",
    ),
    MetricSpec("rollout_corr/chi2_seq", "variance", _MEAN, "The same for whole sequences."),
    MetricSpec(
        "rollout_corr/log_ratio_<quantile>", "nats", _LAST, "Quantile of log p(trainer) - log p(engine) of a token."
    ),
    MetricSpec(
        "rollout_corr/ratio_outside",
        "share of tokens",
        _MEAN,
        "Sampled tokens with p(trainer) / p(engine) outside [0.5, 2]."
        " Look when > 0.001: different weights or temperatures, or tokens that are not aligned.",
    ),
    MetricSpec("rollout_corr/log_ratio_abs_max", "nats", _MAX, "Largest size of that gap."),
    MetricSpec("rollout_corr/training_log_ppl", "nats", _MEAN, "Log-perplexity of the responses under the trainer."),
    MetricSpec("rollout_corr/training_ppl", "perplexity", _MEAN, "Perplexity of the responses under the trainer."),
    MetricSpec("rollout_corr/rollout_log_ppl", "nats", _MEAN, "Log-perplexity of the responses under the engine."),
    MetricSpec("rollout_corr/rollout_ppl", "perplexity", _MEAN, "Perplexity of the responses under the engine."),
    MetricSpec(
        "rollout_corr/log_ppl_diff", "nats", _MEAN, "Log-perplexity, trainer minus engine: mean over responses."
    ),
    MetricSpec("rollout_corr/log_ppl_abs_diff", "nats", _MEAN, "Size of that difference: mean over responses."),
    MetricSpec("rollout_corr/log_ppl_diff_max", "nats", _MAX, "That difference: largest."),
    MetricSpec("rollout_corr/log_ppl_diff_min", "nats", _MIN, "That difference: smallest."),
    MetricSpec("rollout_corr/ppl_ratio", "ratio", _MEAN, "Perplexity under the trainer / under the engine."),
    MetricSpec(
        "rollout_corr/rollout_is_eff_sample_size",
        "share of samples",
        _MEAN,
        "Kish's effective sample size of the importance weights: 1 when all are equal.",
    ),
    MetricSpec(
        "rollout_corr/rollout_rs_masked_fraction",
        "share of tokens",
        _MEAN,
        "Tokens left out of the loss by rejection."
        " Look when > 0.1: engine and trainer disagree, or the bounds are too tight.",
    ),
    MetricSpec(
        "rollout_corr/rollout_rs_seq_masked_fraction", "share of sequences", _MEAN, "Sequences that lost a token."
    ),
    MetricSpec("rollout_corr/rollout_is_veto_fraction", "share of sequences", _MEAN, "Sequences left out by the veto."),
    MetricSpec("rollout_corr/<rule>_max", "ratio", _MAX, "Importance ratio or rejection statistic: largest."),
    MetricSpec("rollout_corr/<rule>_min", "ratio", _MIN, "Importance ratio or rejection statistic: smallest."),
    MetricSpec(
        "rollout_corr/rollout_is_<statistic>",
        "ratio",
        _MEAN,
        "Importance weights (seq_: averaged per sequence first): mean, std, share of ratios above and below the bounds, the "
        "largest deviation from 1, share masked, the factor of the normalisation.",
    ),
    MetricSpec(
        "rollout_corr/rollout_rs_<option>_<statistic>",
        "statistic",
        _MEAN,
        "A rejection statistic (k1 log-ratio, k2, k3): mean, std, share above and below its bounds.",
    ),
)

_ACTOR = (
    MetricSpec(
        "actor/pg_loss",
        "loss",
        _MEAN,
        "Policy loss, mean over the updates of the step. About 0 is expected on-policy with normalised advantages; "
        "read the reward and the gradient norm instead.",
    ),
    MetricSpec("actor/pg_clipfrac", "share of tokens", _MEAN, "Tokens whose ratio was clipped."),
    MetricSpec("actor/pg_clipfrac_lower", "share of tokens", _MEAN, "Tokens at the dual-clip bound."),
    MetricSpec(
        "actor/ppo_kl",
        "nats",
        _MEAN,
        "KL from the policy that sampled to the current policy, estimated as old minus new log-prob.",
    ),
    MetricSpec("actor/ratio/mean", "ratio", _MEAN, "Ratio of the current policy to the policy that sampled: mean."),
    MetricSpec("actor/ratio/max", "ratio", _MAX, "That ratio: largest."),
    MetricSpec("actor/kl_loss", "nats", _MEAN, "KL to the reference policy as used in the loss."),
    MetricSpec("actor/kl_coef", "weight", _LAST, "Weight of the KL term in the loss."),
    MetricSpec(
        "moe/max_load",
        "ratio",
        _MEAN,
        "Tokens of the busiest expert in a micro-batch, as a multiple of an even share; mean over the routers.",
    ),
    MetricSpec(
        "moe/balance_loss",
        "1",
        _MEAN,
        "Auxiliary loss of load balancing (Switch Transformers): experts x sum over experts of their share of tokens times their mean"
        " probability, in a micro-batch; 1 if both are even, mean over the routers. It is measured, not trained.",
    ),
    MetricSpec("moe/idle_experts", "share", _MEAN, "Experts that computed no token of a micro-batch."),
    MetricSpec("moe/replayed", "share", _MEAN, "Tokens trained with the experts of the engine (router_replay.mode)."),
    MetricSpec(
        "moe/changed_experts",
        "share",
        _MEAN,
        "Experts of the engine that the trainer's routers would not have chosen: what router replay removes.",
    ),
    MetricSpec("actor/entropy", "nats", _MEAN, "Entropy of the next-token distribution over response tokens."),
    MetricSpec("actor/entropy_loss", "nats", _MEAN, "Entropy as it enters the loss, aggregated like the policy loss."),
    MetricSpec("actor/loss", "loss", _MEAN, "Minimised loss: policy loss, KL term and entropy bonus together."),
    MetricSpec(
        "actor/grad_norm", "norm", _MEAN, "Norm of the policy's gradient before clipping, mean over the updates."
    ),
    MetricSpec("actor/loss_scale", "factor", _LAST, "float16: factor of the policy's loss in the backward pass."),
    MetricSpec(
        "actor/overflows",
        "updates",
        _SUM,
        "float16: updates of the policy that were skipped because a scaled gradient overflowed; the next scale is half."
        " Look when > 0 in most steps: train in bfloat16.",
    ),
    MetricSpec("actor/lr", "rate", _LAST, "Learning rate of the policy at the last update."),
    MetricSpec("actor/reward_kl_penalty", "nats", _MEAN, "KL to the reference policy, as subtracted from the reward."),
    MetricSpec("actor/reward_kl_penalty_coeff", "weight", _LAST, "Weight of the KL in the reward."),
    MetricSpec(
        "actor/sum_pi_squared",
        "probability",
        _MEAN,
        "Sum of the squared probabilities of the next-token distribution, mean over response tokens; 1 means certainty.",
    ),
    MetricSpec(
        "actor/pg_cov_fraction",
        "share of tokens",
        _MEAN,
        "clip_cov, kl_cov: tokens selected for their covariance of advantage and log-prob.",
    ),
    MetricSpec(
        "actor/squared_log_ratio", "nats^2", _MEAN, "dro, m2po: squared log-ratio of the new to the old policy."
    ),
    MetricSpec("actor/topr_weight", "weight", _MEAN, "topr: weight of a token; below 1 in unlikely bad responses."),
    MetricSpec("actor/rollout_is_weight", "weight", _MEAN, "bypass_mode: importance weight of policy against engine."),
    MetricSpec(
        "actor/rollout_rejected",
        "share of tokens",
        _MEAN,
        "bypass_mode: tokens without gradient because policy and engine disagree on them. Look when > 0.1.",
    ),
    MetricSpec(
        "actor/first_ratio_max_abs_log",
        "nats",
        _MAX,
        "Largest |log ratio| of the step's first update against the old log-probs; 0 where the update's forward pass gave them."
        " Look when > 1e-3 in float32, > 0.05 in bfloat16: tokens, masks or temperatures do not match.",
    ),
)

_CRITIC = (
    *_mean_max_min("critic/score", "reward", "Sequence score before the KL penalty"),
    *_mean_max_min("critic/rewards", "reward", "Sequence reward after the KL penalty"),
    *_mean_max_min("critic/greedy_baseline", "reward", "Score of the greedy response to the prompt (remax)"),
    *_mean_max_min("critic/advantages", "reward", "Advantage of response tokens"),
    *_mean_max_min("critic/returns", "reward", "Return of response tokens"),
    *_mean_max_min("critic/values", "reward", "Value predicted for response tokens"),
    MetricSpec("critic/vf_loss", "loss", _MEAN, "Value loss, mean over the updates of the step."),
    MetricSpec("critic/vf_clipfrac", "share of tokens", _MEAN, "Tokens whose value change was clipped."),
    MetricSpec("critic/vpred_mean", "reward", _MEAN, "Mean value prediction during the update."),
    MetricSpec("critic/grad_norm", "norm", _MEAN, "Norm of the critic's gradient before clipping."),
    MetricSpec("critic/loss_scale", "factor", _LAST, "float16: factor of the critic's loss in the backward pass."),
    MetricSpec(
        "critic/overflows",
        "updates",
        _SUM,
        "float16: updates of the critic that were skipped because a scaled gradient overflowed; the next scale is half."
        " Look when > 0 in most steps: train in bfloat16.",
    ),
    MetricSpec("critic/lr", "rate", _LAST, "Learning rate of the critic at the last update."),
    MetricSpec(
        "critic/vf_explained_var", "share", _MEAN, "1 - Var(returns - values) / Var(returns); 1 is a perfect critic."
    ),
)

_SAMPLES = (
    *_mean_max_min("response_length", "tokens", "Response length"),
    MetricSpec("response_length/clip_ratio", "share of responses", _MEAN, "Responses that reached the token limit."),
    *_mean_max_min("prompt_length", "tokens", "Prompt length, chat template included"),
    MetricSpec("prompt_length/clip_ratio", "share of prompts", _MEAN, "Prompts that fill data.max_prompt_length."),
    MetricSpec("rollout/stop_reason/<reason>", "share of responses", _MEAN, "Responses that ended for this reason."),
    MetricSpec(
        "rollout/ids_outside_tokenizer",
        "tokens",
        _SUM,
        "Sampled ids that the tokenizer lacks: padding of the embeddings, without text. `native`, `hf` and vLLM without drafts sample none.",
    ),
    MetricSpec(
        "rollout/drafted_tokens",
        "tokens",
        _SUM,
        "Tokens that speculative decoding drafted in a native engine in the trainer's process, validation included.",
    ),
    MetricSpec(
        "rollout/accepted_tokens",
        "tokens",
        _SUM,
        "Drafted tokens that the policy sampled; each saves its response a forward pass.",
    ),
    MetricSpec(
        "rollout/draft_acceptance",
        "share of tokens",
        _MEAN,
        "rollout/accepted_tokens / rollout/drafted_tokens."
        " Look when it falls during a run: the policy has moved away from the draft model, raise rollout.speculative.draft_lr.",
    ),
    MetricSpec(
        "forks/turns", "turns", _MEAN, "Turns from which episodes were continued (adv_estimator=turn_value_by_forks)."
    ),
    MetricSpec("forks/continued_tokens", "tokens", _MEAN, "Tokens sampled or replayed in these continuations."),
    MetricSpec(
        "forks/no_verdict_rate",
        "share of continuations",
        _MEAN,
        "Continuations that failed, did not repeat, or have no verdict.",
    ),
    MetricSpec(
        "rollout/support_tokens",
        "tokens",
        _MEAN,
        "Tokens that top_k, top_p and min_p left, a sampled token; the trainer's log-probs are normalised over them.",
    ),
    MetricSpec(
        "rollout/support_bytes", "bytes", _MEAN, "Bytes of the ids of these tokens in the batch, a sampled token."
    ),
    MetricSpec(
        "reward/no_verdict_rate",
        "share of responses",
        _MEAN,
        "Responses without a verdict, which are left out of their groups and of training: scoring failed, the episode broke, or "
        "the function returned None."
        " Look when > 0: read the first traceback in the log, and reward/no_verdict/<cause>.",
    ),
    MetricSpec(
        "reward/no_verdict/<cause>",
        "responses",
        _SUM,
        "Responses without a verdict by cause: declined, infrastructure, raised, invalid, timeout, memory, crash, service, sandbox, "
        "episode.",
    ),
    MetricSpec(
        "training/no_verdict_groups",
        "groups",
        _SUM,
        "Groups replaced by other prompts: fewer than two verdicts in them.",
    ),
    MetricSpec(
        "reward/zero_std_group_ratio",
        "share of groups",
        _MEAN,
        "Groups whose rewards are all equal; group estimators learn nothing from them.",
    ),
    MetricSpec("reward/<term>/mean", "reward", _MEAN, "A named term that the reward function returned: mean."),
    MetricSpec(
        "invariant/<id>",
        "count",
        _SUM,
        "Tolerated violations of an always-on invariant, e.g. `invariant/D-ratio`; each is explained in the log."
        " Look when > 0.",
    ),
)

_TIME = (
    MetricSpec(
        "timing_s/save_checkpoint",
        "s",
        _SUM,
        "Wall time that the previous step's checkpoint blocked the run; its files are written during training.",
    ),
    MetricSpec("timing_s/<stage>", "s", _SUM, "Wall time of a stage of the step; `step` is the whole step."),
    MetricSpec("perf/total_num_tokens", "tokens", _SUM, "Prompt and response tokens of the step."),
    MetricSpec("perf/time_per_step", "s", _SUM, "Wall time of the step."),
    MetricSpec("perf/throughput", "tokens/s/device", _LAST, "perf/total_num_tokens over wall time and devices."),
    MetricSpec(
        "perf/driver_overhead_ratio",
        "share of time",
        _LAST,
        "Wall time that is neither generation, scoring, forward nor backward.",
    ),
    MetricSpec(
        "perf/idle/<role>",
        "share of time",
        _LAST,
        "Share of the step in which the model of a role (actor, reference, critic) does not compute, in its busiest process.",
    ),
    MetricSpec("perf/cpu_memory_used_gb", "GB", _MAX, "Resident memory of the process and those that it started."),
    MetricSpec("perf/cpu_memory_used_gb/children", "GB", _MAX, "That of the processes that it started alone."),
    MetricSpec("perf/max_memory_allocated_gb", "GB", _MAX, "Most device memory allocated so far."),
)

_BALANCE = (
    MetricSpec("global_seqlen/min", "tokens", _LAST, "Fewest tokens of a rank if rows were assigned in order."),
    MetricSpec("global_seqlen/max", "tokens", _LAST, "Most tokens of a rank if rows were assigned in order."),
    MetricSpec("global_seqlen/minmax_diff", "tokens", _LAST, "Difference of the two."),
    MetricSpec("global_seqlen/balanced_min", "tokens", _LAST, "Fewest tokens of a rank with balanced rows."),
    MetricSpec("global_seqlen/balanced_max", "tokens", _LAST, "Most tokens of a rank with balanced rows."),
    MetricSpec(
        "global_seqlen/mean",
        "tokens",
        _LAST,
        "Mean tokens per rank; the prompt that rows of a group share in a rank counts once.",
    ),
    MetricSpec(
        "global_seqlen/imbalance",
        "ratio",
        _LAST,
        "Work of the busiest rank over the mean, attention included, if rows were assigned in order; 1 is perfect.",
    ),
    MetricSpec(
        "global_seqlen/balanced_imbalance",
        "ratio",
        _LAST,
        "The same with balanced rows; ranks wait for the busiest one."
        " Look when > 1.1: a single sequence is longer than a rank's share; use fewer ranks, or more sequences per step.",
    ),
)

_VALIDATION = (
    MetricSpec(
        "val-core/<data_source>/<metric>/mean@<n>",
        "score",
        _LAST,
        "Main result: mean score on held-out problems with n responses each. The metric is `acc` where the "
        "scorer returns one, else `reward`.",
    ),
    MetricSpec("val-core/<data_source>/<metric>/best@<n>/mean", "score", _LAST, "Expected best of all n responses."),
    MetricSpec("val-core/<data_source>/<metric>/maj@<n>/mean", "score", _LAST, "Score of the majority answer of n."),
    MetricSpec(
        "val-aux/no_verdict_rate",
        "share of responses",
        _LAST,
        "Validation responses without a verdict; they count nowhere else.",
    ),
    MetricSpec("val-aux/<data_source>/<metric>/mean@<n>", "score", _LAST, "As in val-core, for the other metrics."),
    MetricSpec(
        "val-aux/<data_source>/<metric>/std@<n>",
        "score",
        _LAST,
        "Standard deviation (population) among the n responses to one problem, averaged over problems.",
    ),
    MetricSpec("val-aux/<data_source>/<metric>/best@<n>/mean", "score", _LAST, "Expected best of n drawn responses."),
    MetricSpec("val-aux/<data_source>/<metric>/worst@<n>/mean", "score", _LAST, "Expected worst of n drawn responses."),
    MetricSpec(
        "val-aux/<data_source>/<metric>/maj@<n>/mean", "score", _LAST, "Score of the majority answer of n drawn."
    ),
)

_SFT = (
    MetricSpec("train/loss", "nats", _MEAN, "SFT: cross-entropy per trained token, weighted by tokens."),
    MetricSpec("train/grad_norm", "norm", _MEAN, "SFT: gradient norm before clipping."),
    MetricSpec("train/loss_scale", "factor", _LAST, "SFT, float16: factor of the loss in the backward pass."),
    MetricSpec(
        "train/overflows", "updates", _SUM, "SFT, float16: updates skipped because a scaled gradient overflowed."
    ),
    MetricSpec("train/lr", "rate", _LAST, "SFT: learning rate of the update."),
    MetricSpec("train/tokens", "tokens", _SUM, "SFT: tokens that carry loss in the update."),
    MetricSpec("val/loss", "nats", _MEAN, "SFT: cross-entropy per trained token on held-out conversations."),
)

GROUPS: dict[str, tuple[MetricSpec, ...]] = {
    "Training": _TRAINING,
    "Engine against trainer": _CORRECTION,
    "Policy": _ACTOR,
    "Rewards, advantages and critic": _CRITIC,
    "Samples": _SAMPLES,
    "Fates of drawn prompts": COVERAGE_METRICS,
    "Episodes of several turns": EPISODE_METRICS,
    "Time and memory": _TIME,
    "Replicas of the engine": REPLICA_METRICS,
    "Balance over ranks": _BALANCE,
    "Validation": _VALIDATION,
    "Supervised fine-tuning": _SFT,
    "Preferences": PREFERENCE_METRICS,
    "Distillation": DISTILLATION_METRICS,
}
"""The table in sections, as documented."""

METRICS: tuple[MetricSpec, ...] = tuple(spec for group in GROUPS.values() for spec in group)  # every metric
