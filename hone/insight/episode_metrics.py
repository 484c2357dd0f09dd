"""Metrics of episodes of several turns, and their computation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from hone.config.reward import EpisodePricesConfig
from hone.data.episode_log import CallRecord, CallStatus, EpisodeEnd, EpisodeLog
from hone.data.types import Trajectory
from hone.insight.metric_spec import MetricSpec, Reduction

_MEAN, _MAX, _MIN, _SUM = Reduction.MEAN, Reduction.MAX, Reduction.MIN, Reduction.SUM

EPISODE_METRICS = (
    MetricSpec("num_turns/mean", "messages", _MEAN, "Turns of a conversation, the prompt counts as one: mean."),
    MetricSpec("num_turns/max", "messages", _MAX, "Turns of a conversation: most."),
    MetricSpec("num_turns/min", "messages", _MIN, "Turns of a conversation: fewest."),
    MetricSpec(
        "episode/end/<reason>",
        "share of episodes",
        _MEAN,
        "Episodes that ended for this reason: answer, done, or the limit that they reached (tokens, context, assistant_turns, "
        "user_turns, tool_calls, time), aborted, error."
        " Look when a limit has more than a few percent: episodes are cut before they can be solved.",
    ),
    MetricSpec(
        "episode/error_rate",
        "share of episodes",
        _MEAN,
        "Episodes that failed in a tool, an environment or a loop, even after retries."
        " Look when > 0: read the trace in the log.",
    ),
    MetricSpec("episode/retries", "episodes", _SUM, "Episodes that were played again after an error."),
    MetricSpec(
        "episode/parts/mean", "parts", _MEAN, "Segments per episode: more than 1 where its history was rewritten."
    ),
    MetricSpec(
        "episode/tokenization/<kind>",
        "share of episodes",
        _MEAN,
        "Episodes whose tokens differ in this way from their conversation rendered again (training uses the sampled tokens)."
        " Look when > 0.1: the model writes text that its chat template renders differently; see `hone data template`.",
    ),
    MetricSpec(
        "episode/sampled_tokens/mean", "tokens", _MEAN, "Tokens that the policy sampled per episode, all its segments."
    ),
    MetricSpec(
        "episode/given_tokens/mean", "tokens", _MEAN, "Tokens of tool results, users and environments per episode."
    ),
    MetricSpec(
        "episode/fact/<name>",
        "defined by the environment",
        _MEAN,
        "Numbers that environments and tools report at the end of episodes.",
    ),
    MetricSpec(
        "episode/plan_completion",
        "share of goals",
        _MEAN,
        "Share of its goals that an episode reached: the fact `goals` where the environment reports it, else 1 for an episode that "
        "ended by itself (answer, done) with a positive reward, and 0 for others."
        " Look when it stays below val-core: episodes are cut before their plan is carried out; see episode/end/<reason>.",
    ),
    MetricSpec("tool/calls/mean", "calls", _MEAN, "Tool calls per episode."),
    MetricSpec("tool/calls/max", "calls", _MAX, "Most tool calls in an episode."),
    MetricSpec("tool/calls_per_solved", "calls", _MEAN, "Tool calls per episode with a positive reward."),
    MetricSpec("tool/turns_per_solved", "turns", _MEAN, "Assistant turns per episode with a positive reward."),
    MetricSpec("tool/success_rate", "share of calls", _MEAN, "Calls that a tool answered."),
    MetricSpec("tool/malformed_rate", "share of calls", _MEAN, "Calls that cannot be parsed."),
    MetricSpec("tool/unknown_tool_rate", "share of calls", _MEAN, "Calls of tools that do not exist."),
    MetricSpec(
        "tool/invalid_arguments_rate", "share of calls", _MEAN, "Calls whose arguments do not match the schema."
    ),
    MetricSpec("tool/timeout_rate", "share of calls", _MEAN, "Calls without an answer in time, after all attempts."),
    MetricSpec("tool/error_rate", "share of calls", _MEAN, "Calls that a tool refused, or in which it raised."),
    MetricSpec(
        "tool/over_limit_rate",
        "share of calls",
        _MEAN,
        "Calls that were not executed because of a limit; the model gets a message."
        " Look when > 0.1: raise multi_turn.max_parallel_calls or max_tool_calls.",
    ),
    MetricSpec(
        "tool/truncated_rate",
        "share of calls",
        _MEAN,
        "Calls whose result was truncated. Look when > 0.1: raise multi_turn.max_tool_response_length.",
    ),
    MetricSpec(
        "tool/left_out_rate",
        "share of calls",
        _MEAN,
        "Calls whose result had images or other parts that are not text; the model gets a message that they were left out."
        " Look when > 0: let the tool describe its images in words.",
    ),
    MetricSpec("tool/reward/mean", "reward", _MEAN, "Reward of tools per episode."),
    MetricSpec("tool/<name>/calls", "calls", _SUM, "Calls of this tool."),
    MetricSpec("tool/<name>/<metric>", "defined by the tool", _MEAN, "Numbers that a tool reports about its calls."),
    MetricSpec("agent_loop/generate_sequences/mean", "s", _MEAN, "Time that an episode waited for the engine: mean."),
    MetricSpec("agent_loop/generate_sequences/max", "s", _MAX, "Time that an episode waited for the engine: longest."),
    MetricSpec(
        "agent_loop/tool_calls/mean", "s", _MEAN, "Time that an episode waited for tools, environment or user: mean."
    ),
    MetricSpec(
        "agent_loop/tool_calls/max", "s", _MAX, "Time that an episode waited for tools, environment or user: longest."
    ),
    MetricSpec(
        "agent_loop/tool_latency/mean", "s", _MEAN, "Time of a tool call, including the wait for a free slot: mean."
    ),
    MetricSpec("agent_loop/tool_latency/max", "s", _MAX, "Time of a tool call: longest."),
    MetricSpec(
        "agent_loop/cost_aware_reward/mean",
        "reward - time",
        _MEAN,
        "Reward less the price of tokens and wall time (reward.episode_prices), mean over episodes with a verdict."
        " Look when it falls while critic/score rises: the policy buys reward with longer episodes.",
    ),
    MetricSpec("agent_loop/slowest/seconds", "s", _MAX, "Wall time of the slowest episode."),
    MetricSpec("agent_loop/slowest/tool_calls", "s", _MAX, "Its wait for tools, environment or user."),
)

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
