"""Metrics that runs with a certain setting have; parts of the table in :mod:`hone.insight.metric_table`."""

from __future__ import annotations

from hone.insight.metric_spec import MetricSpec, Reduction

_LAST, _MEAN = Reduction.LAST, Reduction.MEAN

COVERAGE_METRICS = (
    MetricSpec("coverage/drawn", "prompts", _LAST, "Prompts taken from the sampler since the start of the run."),
    MetricSpec("coverage/trained", "prompts", _LAST, "Prompts of these that took part in a weight update."),
    MetricSpec("coverage/filtered", "prompts", _LAST, "Prompts that a filter removed, such as dynamic sampling."),
    MetricSpec(
        "coverage/failed",
        "prompts",
        _LAST,
        "Prompts dropped because of a failed episode."
        " Look when it grows: `hone runs coverage` says whether these prompts differ from the trained ones.",
    ),
    MetricSpec(
        "coverage/too_old",
        "prompts",
        _LAST,
        "Prompts dropped because their answers exceeded the staleness bound."
        " Look when it grows: long answers are dropped first; use more rollout capacity or a larger bound.",
    ),
    MetricSpec("coverage/open", "prompts", _LAST, "Prompts without a fate: waiting, in flight, or finished."),
    *(
        MetricSpec(
            f"coverage/{fate}_token_share",
            "fraction",
            _LAST,
            f"Share of the sampled tokens whose prompts {became}.{advice}",
        )
        for fate, became, advice in (
            ("trained", "were trained on", " Look when it falls: generation is spent on answers that are dropped."),
            ("filtered", "a filter removed", ""),
            ("failed", "had a failed episode", ""),
            ("too_old", "exceeded the staleness bound", ""),
        )
    ),
)

STREAM_METRICS = (
    MetricSpec(
        "curriculum/stage", "stages", _LAST, "Stage of the latest drawn prompts (data.sampler.name=stages), from 1."
    ),
    MetricSpec(
        "curriculum/forced",
        "stages",
        _LAST,
        "Stages that began after max_batches of the stage before, without success."
        " Look when > 0: the stage before is too hard, or its gate too high.",
    ),
    MetricSpec(
        "curriculum/success/<stage>", "pass rate", _LAST, "Mean pass rate of the latest groups drawn for this stage."
    ),
    MetricSpec(
        "async/age/mean",
        "updates",
        _MEAN,
        "Weight updates between a token's sampling and its training: mean over tokens.",
    ),
    MetricSpec("async/age_<age>/token_share", "share of tokens", _MEAN, "Trained tokens of this age."),
    MetricSpec(
        "async/age_<age>/log_ratio_abs_mean",
        "nats",
        _MEAN,
        "Size of log p(trainer) - log p(engine) of tokens of this age.",
    ),
    MetricSpec(
        "async/age_<age>/effective_sample_share",
        "share of tokens",
        _MEAN,
        "Effective sample size of the importance weights trainer / engine of tokens of this age, before truncation."
        " Look when below 0.5: the policy moves too far for data of that age; a smaller trainer.async_training.max_staleness or learning rate.",
    ),
)

DISTILLATION_METRICS = (
    MetricSpec(
        "distillation/loss",
        "nats",
        Reduction.MEAN,
        "Distance of the policy from the teacher per token (distillation.loss_mode). Look when it stops falling far from 0: raise the "
        "learning rate, or the policy is too small for this teacher.",
    ),
    MetricSpec(
        "distillation/span_tokens",
        "tokens",
        Reduction.MEAN,
        "Tokens of the policy in a span of text that a teacher with another tokenizer ends at the same place: mean over spans. Look when "
        "> 4: the tokenizers have little in common, and single tokens hardly differ in what they learn.",
    ),
    MetricSpec(
        "distillation/student_mass",
        "probability",
        Reduction.MEAN,
        "Probability of the teacher's topk tokens under the policy: mean over tokens.",
    ),
    MetricSpec(
        "distillation/teacher_mass",
        "probability",
        Reduction.MEAN,
        "Probability of the teacher's topk tokens under the teacher: mean over tokens. Look when < 0.9: raise distillation.topk.",
    ),
)

_PREFERENCE_NUMBERS = (
    ("rewards/chosen", "reward", "Reward of chosen responses: implicit (prefer) or the model's score (reward-model)."),
    ("rewards/rejected", "reward", "Reward of rejected responses."),
    ("rewards/margins", "reward", "Reward of the chosen response minus that of the rejected one."),
    (
        "rewards/accuracies",
        "share of pairs",
        "Pairs whose chosen response has the higher reward, ties count half; with labels only: responses on the right side. "
        "Look when 0.5 after many steps: nothing is learned; raise the learning rate or lower beta.",
    ),
    (
        "logps/chosen",
        "nats",
        "Log-prob of a whole chosen response. Look when it falls together with logps/rejected: neither response gains probability; lower the "
        "learning rate or raise beta.",
    ),
    ("logps/rejected", "nats", "Log-prob of a whole rejected response."),
    ("preference/nll", "nats", "Negative log-likelihood per token of chosen responses, as in the loss (orpo, cpo)."),
    ("preference/log_odds", "nats", "Log odds of chosen minus rejected responses (orpo)."),
    ("preference/kl", "nats", "Estimated KL to the reference that rewards are compared with (kto)."),
)

_ONLINE_LOSS = MetricSpec(
    "actor/preference_pairs",
    "pairs",
    Reduction.SUM,
    "Online preference optimisation: prompts whose best and worst answer form a pair. "
    "Look when 0: nothing was learned in this step; use more answers per prompt, or problems of suitable difficulty.",
)

PREFERENCE_METRICS = (_ONLINE_LOSS,) + tuple(
    MetricSpec(f"{prefix}{name}", unit, Reduction.MEAN, f"{where}{meaning}")
    for prefix, where in (("", ""), ("val/", "Held-out: "))
    for name, unit, meaning in _PREFERENCE_NUMBERS
)

REPLICA_METRICS = (
    MetricSpec("replica/serving", "replicas", Reduction.LAST, "Replicas that get requests, at the end of the step."),
    MetricSpec(
        "replica/<n>/throughput",
        "tokens/s",
        Reduction.LAST,
        "Tokens that the replica sampled in the step, divided by the time in which it had requests."
        " Look when one is far below the others: its cores or its GPU are shared.",
    ),
    MetricSpec("replica/<n>/num_requests", "requests", Reduction.SUM, "Requests that it completed."),
    MetricSpec(
        "replica/<n>/queue_time",
        "s",
        Reduction.MEAN,
        "Mean time of a request between its arrival and its start in the engine."
        " Look when it is a large part of timing_s/gen: use more replicas, or a larger cache (max_cache_tokens).",
    ),
    MetricSpec(
        "replica/<n>/time_to_first_token",
        "s",
        Reduction.MEAN,
        "Mean time of a request until its first token, queue_time included; only from engines that report it.",
    ),
    MetricSpec("replica/<n>/slowest_request", "s", Reduction.MAX, "Longest time of a request, queue_time included."),
    MetricSpec(
        "replica/<n>/cache_hit_rate",
        "share of tokens",
        Reduction.MEAN,
        "Prompt tokens that were in the KV cache; only from engines that report it.",
    ),
    MetricSpec(
        "replica/<n>/num_preemptions",
        "requests",
        Reduction.SUM,
        "Requests that were evicted from the KV cache and restarted; only from engines that report it."
        " Look when > 0 in most steps: the cache is too small, raise max_cache_tokens or gpu_memory_utilization.",
    ),
    MetricSpec(
        "replica/<n>/max_concurrency",
        "requests",
        Reduction.LAST,
        "Limit of concurrent requests; it shrinks when requests wait in the engine or are preempted, and grows again.",
    ),
    MetricSpec(
        "replica/<n>/num_retried",
        "requests",
        Reduction.SUM,
        "Requests moved to another replica, because this one was lost or too slow."
        " Look when > 0: see its log in engines/.",
    ),
    MetricSpec(
        "replica/<n>/num_restarts",
        "starts",
        Reduction.LAST,
        "Restarts of its engine since the beginning of the run. Look when it rises: see its log in engines/.",
    ),
    MetricSpec(
        "replica/<n>/draft_acceptance",
        "share of tokens",
        Reduction.MEAN,
        "Tokens that speculative decoding drafted and the policy accepted; only with rollout.speculative.",
    ),
    MetricSpec(
        "replica/<n>/weights_sent_mb",
        "MiB",
        Reduction.SUM,
        "Bytes of weights, or of their changes, that were sent to it since the previous step.",
    ),
    MetricSpec(
        "replica/<n>/weights_on_gpu_mb",
        "MiB",
        Reduction.SUM,
        "Bytes of replica/<n>/weights_sent_mb that stayed on the GPU (cuda_ipc); the others went through the host."
        " Look when 0 although the engine has the trainer's GPU: the run's log says why.",
    ),
    MetricSpec(
        "replica/<n>/weights_changed",
        "share of entries",
        Reduction.MEAN,
        "Entries of the served weights that the update changed; only with checkpoint_engine.delta."
        " Look when > 0.5: whole weights are as small, so checkpoint_engine.delta=false is faster.",
    ),
    MetricSpec(
        "replica/<n>/weights_refused",
        "weights",
        Reduction.SUM,
        "Weights with wrong values after their delta, which were sent whole; only with checkpoint_engine.delta."
        " Look when > 0: bytes are lost in transfer, or another program sends weights to the same server.",
    ),
)
