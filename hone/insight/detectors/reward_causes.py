"""Likely causes of rewards that are all 0; each is named only with the figure that shows it."""

from __future__ import annotations

from collections.abc import Iterator

from hone.insight.detectors.base import Cause, Metrics, Settings
from hone.insight.detectors.tuning import setting

OFTEN, MANY_CALLS = 0.5, 0.2
_MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
LIMITS = {
    "tokens": "data.max_response_length",
    "context": f"{_MULTI_TURN}.compaction.context_tokens",
    "assistant_turns": f"{_MULTI_TURN}.max_assistant_turns",
    "user_turns": f"{_MULTI_TURN}.max_user_turns",
    "tool_calls": f"{_MULTI_TURN}.max_tool_calls",
    "time": f"{_MULTI_TURN}.max_episode_seconds",
}
"""Key of the limit for each reason by which an episode ends early."""
TOO_HARD = Cause(
    "responses end by themselves and can be read, and are still wrong",
    "try the reward on right answers (hone reward test), begin with easier rows (data.sampler.name=stages), or train on "
    "demonstrations first (hone sft)",
)


def zero_causes(settings: Settings, metrics: Metrics) -> Iterator[Cause]:
    """Yield the causes of rewards that are all 0, which the metrics of the step show."""
    cut = max(metrics.get("response_length/clip_ratio", 0.0), metrics.get("rollout/stop_reason/length", 0.0))
    if cut > OFTEN:
        limit = setting(settings, "data.max_response_length", 0)
        evidence = f"{cut:.0%} of the responses reach data.max_response_length={limit}"
        yield Cause(evidence, f"data.max_response_length={2 * limit}")
    for reason, key in LIMITS.items():
        share = metrics.get(f"episode/end/{reason}", 0.0)
        if share > OFTEN and not (reason == "tokens" and cut > OFTEN):
            yield Cause(f"{share:.0%} of the episodes end by the limit {key}", f"raise {key}")
    broken = metrics.get("episode/error_rate", 0.0)
    if broken > MANY_CALLS:
        yield Cause(f"{broken:.0%} of the episodes fail", "read the trace in the log")
    missing = metrics.get("reward/no_verdict_rate", 0.0)
    if missing > MANY_CALLS:
        yield Cause(f"{missing:.0%} of the responses have no verdict", "see reward/no_verdict/<cause>")
    tools = settings.get(f"{_MULTI_TURN}.tool_config_path") or settings.get(f"{_MULTI_TURN}.function_tool_path")
    if settings.get(f"{_MULTI_TURN}.enable") and tools and metrics.get("tool/calls/mean", 0.0) == 0:
        fix = f"compare the prompt with what {_MULTI_TURN}.format reads (hone data template), or train on demonstrations of calls"
        yield Cause("the run has tools, and no response calls one", fix)
    yield from call_causes(settings, metrics, MANY_CALLS)
    form = metrics.get("reward/format/mean", 1.0)
    if form < OFTEN:
        yield Cause(
            f"the scorer finds an answer in {form:.0%} of the responses",
            "ask for the scorer's answer format in the prompt, or choose the scorer that reads yours (reward.scorer)",
        )


def call_causes(settings: Settings, metrics: Metrics, share: float) -> Iterator[Cause]:
    """Yield the causes of tool calls that have no effect, of which more than a share shows them."""
    names = ("malformed_rate", "unknown_tool_rate", "invalid_arguments_rate")
    if sum(metrics.get(f"tool/{name}", 0.0) for name in names) > share:
        evidence = f"tool calls cannot be carried out: {_shares(names, metrics)}"
        yield Cause(evidence, f"check {_MULTI_TURN}.format")
    names = ("error_rate", "timeout_rate")
    if sum(metrics.get(f"tool/{name}", 0.0) for name in names) > share:
        late = metrics.get("tool/timeout_rate", 0.0) > share / 2
        longer = f", or {_MULTI_TURN}.tool_timeout={2 * setting(settings, f'{_MULTI_TURN}.tool_timeout', 30.0):g}"
        fix = f"try the tools alone{longer if late else ''}"
        yield Cause(f"tools fail: {_shares(names, metrics)}", fix)


def _shares(names: tuple[str, ...], metrics: Metrics) -> str:
    return ", ".join(f"{name} {metrics.get(f'tool/{name}', 0.0):.0%}" for name in names)
