"""The block ``data.sampler``: the order of prompts."""

from __future__ import annotations

from dataclasses import dataclass, field

from hone.config.fields import choice


@dataclass
class SamplerConfig:
    """The order of the training prompts."""

    name: str = choice("epoch", "epoch", "mixture", "difficulty", "pass_rate")
    """epoch visits every row once per epoch; mixture samples the data sources in the proportions of weights; difficulty visits
    easy rows first; pass_rate prefers rows that the policy answers correctly about half the time, as measured in this run. All
    resume exactly from a checkpoint."""
    weights: dict[str, float] = field(default_factory=dict)
    """mixture: share of each data source in a batch, for example {gsm8k: 3, math: 1}; other sources are not sampled."""
    difficulty_key: str = "difficulty"
    """difficulty: entry of extra_info with the difficulty of a row, a number; small is easy. Dots select nested entries, such as
    environment.options.max_number."""
    pass_rate_of: str = choice("row", "row", "difficulty", "data_source")
    """pass_rate: unit that a pass rate is measured for. Rows of the same difficulty (difficulty_key) or data source can share one
    pass rate, for data whose rows occur only once, such as seeds of environments."""
