"""Rules about the reward, which is tried on a few training rows in its real workers."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.tree import RLConfig
from hone.errors import Finding
from hone.preflight.evidence import Evidence
from hone.preflight.rules import Check, Stage, rule

_QUESTIONS = {
    "R49": "Correct answers score higher than garbage, and not all answers get the same reward.",
    "R50": "The reward function can be loaded and called with the arguments of a run.",
    "R51": "The reward function returns a finite number for every response, always with the same terms.",
    "R52": "The reward function neither fails nor hangs in a worker process.",
    "R53": "Scoring a step takes at most a minute.",
    "R54": "Rewards have the magnitude that KL penalties and clip ranges assume.",
}


def _findings_with_code(code: str) -> Check:
    def check(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
        yield from (finding for finding in evidence.reward_findings if finding.error.code == code)

    check.__doc__, check.__name__ = _QUESTIONS[code], f"reward_{code}"
    return check


for _code in _QUESTIONS:
    rule(_code, RLConfig, stage=Stage.REWARD)(_findings_with_code(_code))
