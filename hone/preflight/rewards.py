"""Rules about the reward, which is tried on a few training rows in its real workers: golden answers, garbage, nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hone.config.tree import RLConfig
from hone.errors import Finding, HoneError, RewardError
from hone.preflight.evidence import Evidence, file_list
from hone.preflight.rules import Check, Stage, rule

CALL_SECONDS = 10.0
"""Longest that a call may take before the run: the whole of preflight should take no longer."""
ALL_SECONDS = 5.0
"""After so long no further row is tried."""

_QUESTIONS = {
    "R49": "Right answers score better than garbage, and not all answers alike.",
    "R50": "The reward function can be loaded, and called with what it is given.",
    "R51": "It returns a finite number for every response, with the same terms.",
    "R52": "It neither fails nor hangs in a worker process.",
    "R53": "Scoring a step does not take longer than a minute.",
    "R54": "Rewards are of a size that KL penalties and clip ranges are made for.",
}


def try_reward(config: RLConfig) -> list[Finding]:
    """Return what is wrong with the reward of a run; nothing is tried where a reward model alone gives it."""
    from hone.data.scored_rows import scored_rows
    from hone.rewards.bench import run_bench
    from hone.rewards.bench_findings import bench_findings

    model = config.reward.reward_model
    if not config.preflight.reward_rows or (model.enable and model.combine == "replace"):
        return []
    try:
        rows = scored_rows(
            file_list(config.data.train_files),
            reward_fn_key=config.data.reward_fn_key,
            most=config.preflight.reward_rows,
        )
    except HoneError:
        return []  # R42 tells
    settings = replace(config.reward, timeout=min(config.reward.timeout, CALL_SECONDS))
    try:
        bench = run_bench(settings, rows, seconds=ALL_SECONDS)
    except RewardError as found:
        return [] if found.code == "R43" else [_coded(found, "R50")]
    except HoneError:
        return []  # an unknown scorer: R11 tells
    sequences = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    return list(bench_findings(bench, settings, sequences))


def _coded(e: HoneError, code: str) -> Finding:
    return Finding(type(e)(e.what, why=e.why, fix=e.fix, where=e.where, code=code), stops=True)


def _about(code: str) -> Check:
    def look(config: RLConfig, evidence: Evidence) -> Iterator[Finding]:
        yield from (found for found in evidence.reward_findings if found.error.code == code)

    look.__doc__, look.__name__ = _QUESTIONS[code], f"reward_{code}"
    return look


for _code in _QUESTIONS:
    rule(_code, RLConfig, stage=Stage.REWARD)(_about(_code))
