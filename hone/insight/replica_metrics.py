"""Metrics of each replica of an engine in processes of its own."""

from __future__ import annotations

from hone.insight.metric_spec import MetricSpec, Reduction

REPLICA_METRICS = (
    MetricSpec(
        "replica/<n>/throughput",
        "tokens/s",
        Reduction.LAST,
        "Tokens that the engine's replica sampled in the step, over the time in which it had requests.",
        "one far below the others: its cores or its GPU are shared",
    ),
    MetricSpec("replica/<n>/num_requests", "requests", Reduction.SUM, "Requests that it completed."),
    MetricSpec(
        "replica/<n>/queue_time",
        "s",
        Reduction.MEAN,
        "Mean time of a request between its arrival and the moment at which the engine began it.",
        "a large part of timing_s/gen: more replicas, or a larger cache (max_cache_tokens)",
    ),
    MetricSpec(
        "replica/<n>/time_to_first_token",
        "s",
        Reduction.MEAN,
        "Mean time of a request until its first token, queue_time included; only of engines that tell.",
    ),
    MetricSpec("replica/<n>/slowest_request", "s", Reduction.MAX, "Longest time of a request, queue_time included."),
    MetricSpec(
        "replica/<n>/cache_hit_rate",
        "share of tokens",
        Reduction.MEAN,
        "Prompt tokens that were found in the cache; only of engines that tell.",
    ),
    MetricSpec(
        "replica/<n>/num_preemptions",
        "requests",
        Reduction.SUM,
        "Requests that were thrown out of the cache to be begun anew; only of engines that tell.",
        "> 0 in most steps: the cache is too small, raise max_cache_tokens or gpu_memory_utilization",
    ),
    MetricSpec(
        "replica/<n>/max_concurrency",
        "requests",
        Reduction.LAST,
        "Requests that it is given at once; it shrinks when requests wait in the engine or are preempted, and grows again.",
    ),
    MetricSpec(
        "replica/<n>/num_retried",
        "requests",
        Reduction.SUM,
        "Requests taken from it and given to another, because it was lost or too slow.",
        "> 0: look into its log in engines/",
    ),
    MetricSpec(
        "replica/<n>/num_restarts",
        "starts",
        Reduction.LAST,
        "Times since the beginning of the run that its engine was started again.",
        "a rise: look into its log in engines/",
    ),
    MetricSpec(
        "replica/<n>/draft_acceptance",
        "share of tokens",
        Reduction.MEAN,
        "Tokens that speculative decoding drafted and the policy accepted; only with speculative_config.",
    ),
    MetricSpec(
        "replica/<n>/weights_sent_mb",
        "MiB",
        Reduction.SUM,
        "Weights, or what changed of them, that were sent to it since the step before.",
    ),
    MetricSpec(
        "replica/<n>/weights_changed",
        "share of entries",
        Reduction.MEAN,
        "Entries of the weights, as they are served, that the update changed; only with checkpoint_engine.delta.",
        "> 0.5: whole weights are no larger, checkpoint_engine.delta=false is faster",
    ),
    MetricSpec(
        "replica/<n>/weights_refused",
        "weights",
        Reduction.SUM,
        "Weights that were not what they should be after their delta, and were sent whole; only with checkpoint_engine.delta.",
        "> 0: bytes are lost on the way, or somebody else gives weights to the same server",
    ),
)
