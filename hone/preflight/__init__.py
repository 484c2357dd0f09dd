"""What is checked before a run starts: no weights are loaded, and all that is wrong is said at once.

A rule is a small function with a stable code; see :mod:`hone.preflight.rules`. Its findings either stop the run or are
logged as warnings.
"""

from __future__ import annotations

import logging

from hone.config.preference import PreferenceConfig, RewardModelConfig
from hone.config.problems import raise_together
from hone.config.sft import SFTConfig
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig
from hone.preflight import algorithm, batches, device, effectless, files, methods, names, preference
from hone.preflight.plan import batch_plan, training_rows
from hone.preflight.rules import RULES, findings

__all__ = [
    "RULES",
    "algorithm",
    "batch_plan",
    "batches",
    "check_preference",
    "check_rl",
    "check_sft",
    "device",
    "effectless",
    "files",
    "findings",
    "methods",
    "names",
    "preference",
    "training_rows",
]

log = logging.getLogger(__name__)


def check_rl(config: RLConfig) -> None:
    """Check a configuration of `hone train` and the files it names.

    Raises:
        HoneError: something that the run cannot start with; with several, one error holds all their messages.
    """
    _check(config)


def check_sft(config: SFTConfig) -> None:
    """Check a configuration of `hone sft` and the files it names.

    Raises:
        HoneError: something that the run cannot start with; with several, one error holds all their messages.
    """
    _check(config)


def check_preference(config: PreferenceConfig | RewardModelConfig) -> None:
    """Check a configuration of `hone prefer` or `hone reward-model` and the files it names.

    Raises:
        HoneError: something that the run cannot start with; with several, one error holds all their messages.
    """
    _check(config)


def _check(config: AnyConfig) -> None:
    found = list(findings(config))
    for finding in found:
        if not finding.stops:
            log.warning("%s", finding.error.render())
    raise_together([finding.error for finding in found if finding.stops])
