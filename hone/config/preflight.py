"""The block ``preflight``: checks before a run starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from hone.config.fields import number


@dataclass
class PreflightConfig:
    """Checks before a run. All of them run, and all findings are shown together."""

    allow: list[str] = field(default_factory=list)
    """Codes of rules to silence, errors too, for example [R17,R47]. Each start logs how many findings were silenced; nothing else
    silences a rule."""


@dataclass
class RLPreflightConfig(PreflightConfig):
    """The checks before an RL run."""

    reward_rows: int = number(20, low=0)
    """Training rows for a trial of the reward (correct answers, garbage, an empty response) before the run starts; 0 skips
    the trial."""
