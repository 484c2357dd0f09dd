"""Metrics of each replica of an engine that runs in separate processes."""

from __future__ import annotations

from hone.insight.metric_spec import MetricSpec, Reduction

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
