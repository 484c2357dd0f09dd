"""Likely causes of symptoms: of rewards that are all 0, each named only with the figure that shows it; and of an unstable policy.

The settings of an unstable policy change in this order: batches, clip and KL, learning rate and warm-up, loss mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hone.insight.detectors.base import Cause, Metrics, Settings

ACTOR = "actor_rollout_ref.actor"


def setting(settings: Settings, key: str, default: Any = None) -> Any:
    """Return the value of a key, the default where the run has no such key or null."""
    value = settings.get(key)
    return default if value is None else value


def trains_policy(settings: Settings) -> bool:
    """Return whether the run is one of RL, with the keys of a policy; other programs have ``optim.lr``."""
    return "optim.lr" not in settings


def learning_rate_key(settings: Settings) -> str:
    """Return the key of the learning rate: that of the policy in RL, else of the model."""
    return f"{ACTOR}.optim.lr" if trains_policy(settings) else "optim.lr"


def slower(settings: Settings, factor: float = 2.0) -> str:
    """Return the change that lowers the learning rate by a factor, with a warm-up if the run has none."""
    key = learning_rate_key(settings)
    change = f"{key}={setting(settings, key, 1e-6) / factor:.3g}"
    warm_up, ratio = f"{key}_warmup_steps", f"{key}_warmup_steps_ratio"
    none = setting(settings, warm_up, -1) <= 0 and setting(settings, ratio, 0.0) == 0
    return f"{change} {warm_up}=10" if none else change


def tuning(settings: Settings, seen: str) -> Iterator[Cause]:
    """Yield changes that make updates smaller, in the order in which to try them; without a policy the learning rate
    only. ``seen``: what was measured, as evidence of the first change.
    """
    key = learning_rate_key(settings)
    rate = Cause(f"the learning rate is {setting(settings, key, 1e-6):.3g}; {seen}", slower(settings))
    if not trains_policy(settings):
        yield rate
        return
    epochs = setting(settings, f"{ACTOR}.ppo_epochs", 1)
    batch, mini = setting(settings, "data.train_batch_size", 0), setting(settings, f"{ACTOR}.ppo_mini_batch_size", 0)
    updates = epochs * max(1, -(-batch // mini)) if mini else epochs
    if updates > 1:
        one = " ".join(
            [
                *([f"{ACTOR}.ppo_epochs=1"] if epochs > 1 else []),
                *([f"{ACTOR}.ppo_mini_batch_size={batch}"] if mini < batch else []),
            ]
        )
        yield Cause(f"a batch is used for {updates} updates; {seen}", one)
    clip = setting(settings, f"{ACTOR}.clip_ratio_high", setting(settings, f"{ACTOR}.clip_ratio", 0.2))
    if clip > 0.2:  # 0.2 is the default of PPO (arXiv 1707.06347)
        yield Cause(f"the upper clip is {clip:g}", f"{ACTOR}.clip_ratio_high=0.2")
    if not (settings.get(f"{ACTOR}.use_kl_loss") or settings.get("algorithm.use_kl_in_reward")):
        yield Cause("no KL penalty holds the policy near its reference", f"{ACTOR}.use_kl_loss=true")
    yield rate
    if setting(settings, f"{ACTOR}.policy_loss.loss_mode", "vanilla") == "vanilla":
        yield Cause("ratios are clipped by token (loss mode vanilla)", f"{ACTOR}.policy_loss.loss_mode=gspo")


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
