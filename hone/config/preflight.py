"""The block ``preflight``: what is checked before a run starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from hone.config.fields import number


@dataclass
class PreflightConfig:
    """The checks before a run. All of them run, and all they find is shown together."""

    allow: list[str] = field(default_factory=list)
    """Codes of rules whose findings are let pass, errors too: [R17,R47] for example. How many were passed over is said at
    each start; nothing else silences a rule."""


@dataclass
class RLPreflightConfig(PreflightConfig):
    """The checks before an RL run."""

    reward_rows: int = number(20, low=0)
    """Training rows on which the reward is tried (golden answers, garbage, an empty response) before the run starts; 0 does
    not try it."""
