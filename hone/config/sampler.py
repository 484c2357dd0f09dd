"""The block ``data.sampler``: which prompts come when."""

from __future__ import annotations

from dataclasses import dataclass, field

from hone.config.fields import choice


@dataclass
class SamplerConfig:
    """The order of the training prompts."""

    name: str = choice("epoch", "epoch", "mixture", "difficulty", "pass_rate")
    """epoch visits every row once an epoch; mixture draws the data sources in the proportions of weights; difficulty visits
    easy rows first; pass_rate prefers rows that the policy answers right about half the time, as measured in this run. All
    go on exactly where a checkpoint left off."""
    weights: dict[str, float] = field(default_factory=dict)
    """mixture: share of each data source in a batch, {gsm8k: 3, math: 1} for example; sources left out are not drawn."""
    difficulty_key: str = "difficulty"
    """difficulty: entry of extra_info that says how hard a row is, a number; small is easy. Dots lead into entries, as in
    environment.options.max_number."""
    pass_rate_of: str = choice("row", "row", "difficulty", "data_source")
    """pass_rate: what a pass rate is measured of. Rows of the same difficulty (difficulty_key), or of the same data source, share
    one: so that levels are chosen by success where every row is seen once, as the seeds of environments are."""
