"""A trial of the reward on a few training rows, in its real workers: correct, garbage and empty answers."""

from __future__ import annotations

from dataclasses import replace

from hone.config.tree import RLConfig
from hone.errors import Finding, HoneError, RewardError
from hone.preflight.reading import file_list

CALL_SECONDS = 10.0
"""Time limit of one call, chosen to keep preflight short."""
ALL_SECONDS = 5.0
"""Time after which no further row is tried."""


def try_reward(config: RLConfig, *, thinks: bool = False) -> list[Finding]:
    """Return the findings about the reward of a run; none when a reward model alone gives the reward.

    Args:
        config: configuration of the run.
        thinks: True if the policy writes thoughts, as its chat template says.
    """
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
            prompt_key=config.data.prompt_key,
            limit=config.preflight.reward_rows,
        )
    except HoneError:
        return []  # R42 reports it
    settings = replace(config.reward, timeout=min(config.reward.timeout, CALL_SECONDS))
    try:
        bench = run_bench(settings, rows, seconds=ALL_SECONDS, agentic=_plays_tools(config))
    except RewardError as problem:
        return [] if problem.code == "R43" else [_coded(problem, "R50")]
    except HoneError:
        return []  # an unknown scorer: R11 reports it
    sequences = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    return list(bench_findings(bench, settings, sequences, thinks=thinks))


def _plays_tools(config: RLConfig) -> bool:
    rollout = config.actor_rollout_ref.rollout
    return rollout.multi_turn.enable and rollout.agent.default_agent_loop not in (None, "single_turn")


def _coded(e: HoneError, code: str) -> Finding:
    return Finding(type(e)(e.what, why=e.why, fix=e.fix, where=e.where, code=code), stops=True)
