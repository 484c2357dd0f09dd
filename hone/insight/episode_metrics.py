"""Metrics of episodes of several turns, and how they are counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from hone.data.episode_log import CallRecord, CallStatus, EpisodeLog
from hone.data.types import Trajectory
from hone.insight.metric_spec import MetricSpec, Reduction

_MEAN, _MAX, _MIN, _SUM = Reduction.MEAN, Reduction.MAX, Reduction.MIN, Reduction.SUM

EPISODE_METRICS = (
    MetricSpec("num_turns/mean", "messages", _MEAN, "Turns of a conversation, the prompt counted as one: mean."),
    MetricSpec("num_turns/max", "messages", _MAX, "Turns of a conversation: most."),
    MetricSpec("num_turns/min", "messages", _MIN, "Turns of a conversation: fewest."),
    MetricSpec(
        "episode/end/<reason>",
        "share of episodes",
        _MEAN,
        "Episodes that ended for this reason: answer, done, or the limit that they met (tokens, assistant_turns, user_turns, "
        "tool_calls, time), aborted, error.",
        "a limit for more than a few per cent: episodes are cut before they could be solved",
    ),
    MetricSpec(
        "episode/error_rate",
        "share of episodes",
        _MEAN,
        "Episodes that broke in a tool, an environment or a loop, retries included.",
        "> 0: read the trace in the log",
    ),
    MetricSpec("episode/retries", "episodes", _SUM, "Episodes that were played again because they broke."),
    MetricSpec("episode/dropped_groups", "groups", _SUM, "Groups replaced by other prompts because an episode broke."),
    MetricSpec(
        "episode/parts/mean", "parts", _MEAN, "Trajectories an episode: more than 1 where its history was rewritten."
    ),
    MetricSpec(
        "episode/tokenization/<kind>",
        "share of episodes",
        _MEAN,
        "Episodes whose tokens differ so from their conversation rendered anew (they are trained on as sampled).",
        "> 0.1: the model writes what its chat template would write otherwise; see `hone data template`",
    ),
    MetricSpec(
        "episode/sampled_tokens/mean", "tokens", _MEAN, "Tokens that the policy sampled in an episode, all its parts."
    ),
    MetricSpec(
        "episode/given_tokens/mean", "tokens", _MEAN, "Tokens of tool results, users and environments in an episode."
    ),
    MetricSpec(
        "episode/fact/<name>",
        "as the environment says",
        _MEAN,
        "What environments and tools report at the end of episodes.",
    ),
    MetricSpec("tool/calls/mean", "calls", _MEAN, "Tool calls an episode."),
    MetricSpec("tool/calls/max", "calls", _MAX, "Most tool calls in an episode."),
    MetricSpec("tool/calls_per_solved", "calls", _MEAN, "Tool calls an episode with a positive reward."),
    MetricSpec("tool/turns_per_solved", "turns", _MEAN, "Assistant turns an episode with a positive reward."),
    MetricSpec("tool/success_rate", "share of calls", _MEAN, "Calls that a tool answered."),
    MetricSpec(
        "tool/malformed_rate",
        "share of calls",
        _MEAN,
        "Calls that cannot be read.",
        "> 0.2: the wrong multi_turn.format, or a model that has never seen it",
    ),
    MetricSpec("tool/unknown_tool_rate", "share of calls", _MEAN, "Calls of tools that do not exist."),
    MetricSpec("tool/invalid_arguments_rate", "share of calls", _MEAN, "Calls whose arguments do not fit the schema."),
    MetricSpec("tool/timeout_rate", "share of calls", _MEAN, "Calls without an answer in time, after all tries."),
    MetricSpec("tool/error_rate", "share of calls", _MEAN, "Calls that a tool refused, or in which it raised."),
    MetricSpec(
        "tool/over_limit_rate",
        "share of calls",
        _MEAN,
        "Calls that were not carried out because of a limit; the model is told so.",
        "> 0.1: raise multi_turn.max_parallel_calls or max_tool_calls",
    ),
    MetricSpec(
        "tool/truncated_rate",
        "share of calls",
        _MEAN,
        "Calls whose result was cut.",
        "> 0.1: raise multi_turn.max_tool_response_length",
    ),
    MetricSpec(
        "tool/left_out_rate",
        "share of calls",
        _MEAN,
        "Calls whose result had images or other parts that are no text; the model was told that they were left out.",
        "> 0: let the tool say in words what its images show",
    ),
    MetricSpec("tool/reward/mean", "reward", _MEAN, "Reward that tools gave, an episode."),
    MetricSpec("tool/<name>/calls", "calls", _SUM, "Calls of this tool."),
    MetricSpec("tool/<name>/<metric>", "as the tool says", _MEAN, "What a tool reports of its calls."),
    MetricSpec("agent_loop/generate_sequences/mean", "s", _MEAN, "Time that an episode waited for the engine: mean."),
    MetricSpec("agent_loop/generate_sequences/max", "s", _MAX, "Time that an episode waited for the engine: longest."),
    MetricSpec(
        "agent_loop/tool_calls/mean", "s", _MEAN, "Time that an episode waited for tools, environment or user: mean."
    ),
    MetricSpec(
        "agent_loop/tool_calls/max", "s", _MAX, "Time that an episode waited for tools, environment or user: longest."
    ),
    MetricSpec(
        "agent_loop/tool_latency/mean", "s", _MEAN, "Time of a tool call, waiting for a free place included: mean."
    ),
    MetricSpec("agent_loop/tool_latency/max", "s", _MAX, "Time of a tool call: longest."),
    MetricSpec("agent_loop/slowest/seconds", "s", _MAX, "Wall time of the slowest episode."),
    MetricSpec("agent_loop/slowest/tool_calls", "s", _MAX, "What of it was waiting for tools, environment or user."),
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


def episode_metrics(trajectories: Sequence[Trajectory], rewards: Sequence[float]) -> dict[str, float]:
    """Numbers of a batch of episodes; none when all are one answer to one prompt.

    Args:
        trajectories: of the batch, parts of an episode beside each other.
        rewards: of each trajectory.
    """
    first = [(t, reward) for t, reward in zip(trajectories, rewards, strict=True) if t.part == 0]
    told = [(t, t.episode, reward) for t, reward in first if t.episode is not None]
    if not told:
        return {}
    episodes, logs = len(first), [log for _, log, _ in told]
    turns = [float(log.num_turns) for log in logs] + [2.0] * (episodes - len(told))
    found = {"num_turns/mean": _mean(turns), "num_turns/max": max(turns), "num_turns/min": min(turns)}
    ends = Counter(log.end.value for log in logs)
    found |= {f"episode/end/{end}": count / len(logs) for end, count in ends.items()}
    odd = Counter(log.tokenization for log in logs if log.tokenization is not None)
    found |= {f"episode/tokenization/{kind}": count / len(logs) for kind, count in odd.items()}
    facts: dict[str, list[float]] = defaultdict(list)
    for log in logs:
        for name, value in log.facts.items():
            facts[name].append(value)
    found |= {f"episode/fact/{name}": _mean(values) for name, values in facts.items()}
    found["episode/error_rate"] = sum(log.error is not None for log in logs) / episodes
    found["episode/retries"] = float(sum(log.retries for log in logs))
    found["episode/parts/mean"] = len(trajectories) / episodes
    sampled = sum(sum(t.response_mask) for t in trajectories)
    found["episode/sampled_tokens/mean"] = sampled / episodes
    found["episode/given_tokens/mean"] = (sum(len(t.response_mask) for t in trajectories) - sampled) / episodes
    return found | _calls(told) | _times([(t, log) for t, log, _ in told])


def _calls(told: Sequence[tuple[Trajectory, EpisodeLog, float]]) -> dict[str, float]:
    counts = [float(len(log.calls)) for _, log, _ in told]
    calls = [call for _, log, _ in told for call in log.calls]
    found = {"tool/calls/mean": _mean(counts), "tool/calls/max": max(counts)}
    solved = [log for _, log, reward in told if reward > 0]
    if solved:
        found["tool/calls_per_solved"] = _mean([float(len(log.calls)) for log in solved])
        found["tool/turns_per_solved"] = _mean([float(log.assistant_turns) for log in solved])
    if not calls:
        return found
    statuses = Counter(call.status for call in calls)
    found |= {f"tool/{rate}": statuses[status] / len(calls) for status, rate in _RATES.items()}
    found["tool/truncated_rate"] = sum(call.truncated for call in calls) / len(calls)
    found["tool/left_out_rate"] = sum(call.left_out > 0 for call in calls) / len(calls)
    found["tool/reward/mean"] = sum(call.reward for call in calls) / len(told)
    return found | _by_tool(calls)


def _by_tool(calls: Sequence[CallRecord]) -> dict[str, float]:
    known = [call for call in calls if call.status not in (CallStatus.UNKNOWN_TOOL, CallStatus.MALFORMED)]
    found = {f"tool/{name}/calls": float(count) for name, count in Counter(call.name for call in known).items()}
    reported: Mapping[str, list[float]] = defaultdict(list)
    for call in known:
        for name, value in call.metrics.items():
            reported[f"tool/{call.name}/{name}"].append(float(value))
    return found | {name: _mean(values) for name, values in reported.items()}


def _times(told: Sequence[tuple[Trajectory, EpisodeLog]]) -> dict[str, float]:
    generating, outside = [log.generate_seconds for _, log in told], [log.tool_seconds for _, log in told]
    slowest, log = max(told, key=lambda pair: pair[0].seconds)
    found = {
        "agent_loop/generate_sequences/mean": _mean(generating),
        "agent_loop/generate_sequences/max": max(generating),
        "agent_loop/tool_calls/mean": _mean(outside),
        "agent_loop/tool_calls/max": max(outside),
        "agent_loop/slowest/seconds": slowest.seconds,
        "agent_loop/slowest/tool_calls": log.tool_seconds,
    }
    latencies = [call.seconds for _, log in told for call in log.calls]
    if latencies:
        found |= {"agent_loop/tool_latency/mean": _mean(latencies), "agent_loop/tool_latency/max": max(latencies)}
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
