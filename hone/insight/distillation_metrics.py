"""Metrics of distillation; part of the table in :mod:`hone.insight.metric_table`."""

from __future__ import annotations

from hone.insight.metric_spec import MetricSpec, Reduction

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
