"""Metrics of the fates of drawn prompts, see :mod:`hone.insight.coverage`."""

from __future__ import annotations

from hone.insight.metric_spec import MetricSpec, Reduction

_LAST = Reduction.LAST

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
