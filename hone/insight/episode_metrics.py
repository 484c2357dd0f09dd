"""Computation of the metrics of episodes of several turns."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from hone.config.reward import EpisodePricesConfig
from hone.data.episode_log import CallRecord, CallStatus, EpisodeEnd, EpisodeLog
from hone.data.types import Trajectory

_RATES = {
    CallStatus.OK: "success_rate",
    CallStatus.MALFORMED: "malformed_rate",
    CallStatus.UNKNOWN_TOOL: "unknown_tool_rate",
    CallStatus.INVALID_ARGUMENTS: "invalid_arguments_rate",
    CallStatus.TIMEOUT: "timeout_rate",
    CallStatus.ERROR: "error_rate",
    CallStatus.OVER_LIMIT: "over_limit_rate",
}


def episode_metrics(
    trajectories: Sequence[Trajectory], rewards: Sequence[float | None], prices: EpisodePricesConfig
) -> dict[str, float]:
    """Return the metrics of a batch of episodes; empty if all are one answer to one prompt.

    Args:
        trajectories: trajectories of the batch, segments of an episode next to each other.
        rewards: reward of each trajectory, None without a verdict.
    """
    first = [(t, reward) for t, reward in zip(trajectories, rewards, strict=True) if t.part == 0]
    logged = [(t, t.episode, reward) for t, reward in first if t.episode is not None]
    if not logged:
        return {}
    episodes, logs = len(first), [log for _, log, _ in logged]
    turns = [float(log.num_turns) for log in logs] + [2.0] * (episodes - len(logged))
    metrics = {"num_turns/mean": _mean(turns), "num_turns/max": max(turns), "num_turns/min": min(turns)}
    ends = Counter(log.end.value for log in logs)
    metrics |= {f"episode/end/{end}": count / len(logs) for end, count in ends.items()}
    odd = Counter(log.tokenization for log in logs if log.tokenization is not None)
    metrics |= {f"episode/tokenization/{kind}": count / len(logs) for kind, count in odd.items()}
    facts: dict[str, list[float]] = defaultdict(list)
    for log in logs:
        for name, value in log.facts.items():
            facts[name].append(value)
    metrics |= {f"episode/fact/{name}": _mean(values) for name, values in facts.items()}
    metrics["episode/error_rate"] = sum(log.error is not None for log in logs) / episodes
    metrics["episode/retries"] = float(sum(log.retries for log in logs))
    metrics["episode/parts/mean"] = len(trajectories) / episodes
    sampled = sum(sum(t.response_mask) for t in trajectories)
    metrics["episode/sampled_tokens/mean"] = sampled / episodes
    metrics["episode/given_tokens/mean"] = (sum(len(t.response_mask) for t in trajectories) - sampled) / episodes
    metrics |= _planning(trajectories, first, prices)
    return metrics | _calls(logged) | _times([(t, log) for t, log, _ in logged])


def _planning(
    trajectories: Sequence[Trajectory], first: Sequence[tuple[Trajectory, float | None]], prices: EpisodePricesConfig
) -> dict[str, float]:
    """Return plan completion and the cost-aware reward; an episode without a verdict counts in neither, unless it has goals."""
    completed = [value for t, reward in first if (value := _plan_completion(t.episode, reward)) is not None]
    tokens: dict[tuple[str, int], int] = defaultdict(int)
    for t in trajectories:
        tokens[t.uid, t.index] += len(t.response_mask)
    rewards = [
        reward - prices.per_1k_tokens * tokens[t.uid, t.index] / 1000 - prices.per_second * t.seconds
        for t, reward in first
        if reward is not None
    ]
    metrics = {"episode/plan_completion": _mean(completed)} if completed else {}
    return metrics | ({"agent_loop/cost_aware_reward/mean": _mean(rewards)} if rewards else {})


def _plan_completion(log: EpisodeLog | None, reward: float | None) -> float | None:
    """Return the share of its goals that an episode reached; None without goals and without a verdict."""
    if log is not None and "goals" in log.facts:
        return log.facts["goals"]
    if reward is None:
        return None
    return float(reward > 0 and (log is None or log.end in (EpisodeEnd.ANSWER, EpisodeEnd.DONE)))


def _calls(logged: Sequence[tuple[Trajectory, EpisodeLog, float | None]]) -> dict[str, float]:
    counts = [float(len(log.calls)) for _, log, _ in logged]
    calls = [call for _, log, _ in logged for call in log.calls]
    metrics = {"tool/calls/mean": _mean(counts), "tool/calls/max": max(counts)}
    solved = [log for _, log, reward in logged if reward is not None and reward > 0]
    if solved:
        metrics["tool/calls_per_solved"] = _mean([float(len(log.calls)) for log in solved])
        metrics["tool/turns_per_solved"] = _mean([float(log.assistant_turns) for log in solved])
    if not calls:
        return metrics
    statuses = Counter(call.status for call in calls)
    metrics |= {f"tool/{rate}": statuses[status] / len(calls) for status, rate in _RATES.items()}
    metrics["tool/truncated_rate"] = sum(call.truncated for call in calls) / len(calls)
    metrics["tool/left_out_rate"] = sum(call.left_out > 0 for call in calls) / len(calls)
    metrics["tool/reward/mean"] = sum(call.reward for call in calls) / len(logged)
    return metrics | _by_tool(calls)


def _by_tool(calls: Sequence[CallRecord]) -> dict[str, float]:
    nameless = (CallStatus.UNKNOWN_TOOL, CallStatus.MALFORMED)
    valid = [call for call in calls if call.name and call.status not in nameless]
    metrics = {f"tool/{name}/calls": float(count) for name, count in Counter(call.name for call in valid).items()}
    reported: Mapping[str, list[float]] = defaultdict(list)
    for call in valid:
        for name, value in call.metrics.items():
            reported[f"tool/{call.name}/{name}"].append(float(value))
    return metrics | {name: _mean(values) for name, values in reported.items()}


def _times(logged: Sequence[tuple[Trajectory, EpisodeLog]]) -> dict[str, float]:
    generating, outside = [log.generate_seconds for _, log in logged], [log.tool_seconds for _, log in logged]
    slowest, log = max(logged, key=lambda pair: pair[0].seconds)
    metrics = {
        "agent_loop/generate_sequences/mean": _mean(generating),
        "agent_loop/generate_sequences/max": max(generating),
        "agent_loop/tool_calls/mean": _mean(outside),
        "agent_loop/tool_calls/max": max(outside),
        "agent_loop/slowest/seconds": slowest.seconds,
        "agent_loop/slowest/tool_calls": log.tool_seconds,
    }
    latencies = [call.seconds for _, log in logged for call in log.calls]
    if latencies:
        metrics |= {"agent_loop/tool_latency/mean": _mean(latencies), "agent_loop/tool_latency/max": max(latencies)}
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
