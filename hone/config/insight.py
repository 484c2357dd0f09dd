"""The block ``insight``: detectors that watch a run."""

from __future__ import annotations

from dataclasses import dataclass

from hone.config.fields import choices

DETECTORS = (
    "zero_reward",
    "flat_reward",
    "zero_gradient",
    "ratio_explosion",
    "clip_fraction",
    "policy_kl",
    "reference_kl",
    "entropy_collapse",
    "entropy_rise",
    "response_length",
    "gradient_spike",
    "engine_mismatch",
    "critic_lag",
    "advantage_shift",
    "reward_hacking",
    "tool_calls",
    "slow_steps",
    "memory_growth",
)
"""Names of the detectors, see docs/detectors.md."""


@dataclass
class InsightConfig:
    """Detectors that read the metrics of every step."""

    stop_on: list[str] = choices(*DETECTORS)
    """Detectors whose alert ends the run after the step: it saves its state, exits with code 4, and the same command resumes it."""
    ignore: list[str] = choices(*DETECTORS)
    """Detectors that do not run."""
