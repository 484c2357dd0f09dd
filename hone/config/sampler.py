"""The block ``data.sampler``: the order of prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hone.config.fields import choice, number


@dataclass
class SamplerConfig:
    """The order of the training prompts."""

    class_path: str | None = None
    """Python file, or module as `package.module`, of a sampler class of the user; null uses name. The class takes the arguments
    data_source (the dataset), data_config (the block data), batch_size and seed, or some of them, and has `__iter__`, which yields
    the row numbers of an epoch. It may have `set_epoch(epoch)`, `state_dict()` with `load_state_dict(state)`, and `observe(rates)`
    for the measured pass rate of each row, after which `__iter__` continues within the epoch. A resumed run draws the rows of its epoch
    again up to the checkpoint (without state_dict, those of all epochs), and ends with an error if they differ."""
    class_name: str | None = None
    """Name of the class; null takes the only class that the file defines."""
    name: str = choice("epoch", "epoch", "mixture", "difficulty", "pass_rate", "stages")
    """epoch visits every row once per epoch; mixture samples the data sources in the proportions of weights; difficulty visits
    easy rows first; pass_rate prefers rows that the policy answers correctly about half the time, as measured in this run; stages
    draws from one set of rows after the other, each opened by measured success. All resume exactly from a checkpoint."""
    weights: dict[str, float] = field(default_factory=dict)
    """mixture: share of each data source in a batch, for example {gsm8k: 3, math: 1}; other sources are not sampled."""
    difficulty_key: str = "difficulty"
    """difficulty: entry of extra_info with the difficulty of a row, a number; small is easy. Dots select nested entries, such as
    environment.options.max_number."""
    pass_rate_of: str = choice("row", "row", "difficulty", "data_source")
    """pass_rate: unit that a pass rate is measured for. Rows of the same difficulty (difficulty_key) or data source can share one
    pass rate, for data whose rows occur only once, such as seeds of environments."""
    stages: list[Any] = field(default_factory=list)
    """stages: the stages in order, each {name, rows, success, groups, max_batches}. rows selects by data_source, agent_name or an entry
    of extra_info, to one value or a list; without it, all rows. The next stage begins when the mean pass rate of the latest groups
    of the stage (32 by default) reaches success (0 to 1), or after max_batches batches, which is logged. The last has no gate."""
    keep_earlier: float = number(0.0, low=0, high=0.9)
    """stages: share of the rows of a later stage's batches that comes from earlier stages, from each equally."""
