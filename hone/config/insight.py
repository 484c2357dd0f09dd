"""The block ``insight``: detectors that watch a run, and its webhook."""

from __future__ import annotations

from dataclasses import dataclass

from hone.config.fields import choices

DETECTORS = (
    "zero_reward", "flat_reward", "zero_gradient", "ratio_explosion", "clip_fraction", "policy_kl", "reference_kl",
    "entropy_collapse", "entropy_rise", "response_length", "gradient_spike", "engine_mismatch", "critic_lag",
    "advantage_shift", "reward_hacking", "tool_calls", "slow_steps", "memory_growth",
)  # fmt: skip
"""Names of the detectors, see docs/detectors.md."""


@dataclass
class InsightConfig:
    """Detectors that read the metrics of every step, and who hears of them."""

    stop_on: list[str] = choices(*DETECTORS)
    """Detectors whose alert ends the run after the step: it saves its state, exits with code 4, and the same command resumes it."""
    ignore: list[str] = choices(*DETECTORS)
    """Detectors that do not run."""
    webhook: str | None = None
    """Address that gets a POST of JSON for each alert and for an error that ends the run, with a `text` as Slack reads it; null sends
    nothing. It is a secret: give it as ${oc.env:NAME}."""
    notify_end: bool = False
    """Also send the end of a run that finished or was interrupted."""
