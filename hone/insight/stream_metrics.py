"""Metrics of a curriculum's stages, and of the age of tokens."""

from __future__ import annotations

from hone.insight.metric_spec import MetricSpec, Reduction

_LAST, _MEAN = Reduction.LAST, Reduction.MEAN

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
