"""Diagnoses of a run while it trains: rewards that are all 0, and ratios that explode, each with its likely causes in numbers.

Each reads the metrics of the step, logs one warning, and is silent for :data:`COOLDOWN` steps. A cause is named only with the number
that shows it. The third diagnosis of agents, tool tokens in the loss, is the invariant D-mask: it stops the run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hone.config.tree import RLConfig

log = logging.getLogger(__name__)

COOLDOWN = 20
"""Steps before a diagnosis that still holds is reported again."""
ZERO_STEPS = 3
"""Consecutive steps without any reward that are reported."""
RATIO_MEAN, RATIO_MAX = (0.5, 2.0), 20.0
"""Range of a sound mean ratio, and the largest sound ratio of a token."""
_OFTEN, _MANY_CALLS, _FIRST_RATIO, _ENGINE_GAP = 0.5, 0.2, 0.05, 0.01
_MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
_ACTOR = "actor_rollout_ref.actor"
_LIMITS = {
    "tokens": "data.max_response_length",
    "context": f"{_MULTI_TURN}.compaction.context_tokens",
    "assistant_turns": f"{_MULTI_TURN}.max_assistant_turns",
    "user_turns": f"{_MULTI_TURN}.max_user_turns",
    "tool_calls": f"{_MULTI_TURN}.max_tool_calls",
    "time": f"{_MULTI_TURN}.max_episode_seconds",
}
"""Key of the limit for each reason by which an episode ends early."""


@dataclass(frozen=True)
class Cause:
    """Likely cause of a symptom.

    Attributes:
        name: name of the cause.
        evidence: what was measured, with numbers.
        fix: what to do.
    """

    name: str
    evidence: str
    fix: str


@dataclass(frozen=True)
class Diagnosis:
    """Symptom of a run with its likely causes, the most likely first.

    Attributes:
        name: ``zero_reward`` or ``ratio_explosion``.
        what: the symptom, with numbers.
        why: why it matters.
        causes: causes that the metrics show.
    """

    name: str
    what: str
    why: str
    causes: tuple[Cause, ...]


class Diagnoses:
    """Observer of the metrics of a run; it changes nothing. Its record is empty in a resumed process.

    Args:
        config: configuration of the run.
    """

    def __init__(self, config: RLConfig) -> None:
        self._config = config
        self._zero_steps = 0
        self._reported: dict[str, int] = {}

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Diagnosis]:
        """Log what the metrics of a step show, and return it."""
        due = self.due(step, metrics)
        for diagnosis in due:
            causes = "".join(
                f"\n  {number}. {c.evidence}. Fix: {c.fix}" for number, c in enumerate(diagnosis.causes, 1)
            )
            log.warning("diagnosis, step %d: %s.\n  Why it matters: %s%s", step, diagnosis.what, diagnosis.why, causes)
        return due

    def due(self, step: int, metrics: Mapping[str, float]) -> list[Diagnosis]:
        """Return what the metrics of a step show, without what was reported in the last :data:`COOLDOWN` steps."""
        due = []
        for diagnosis in (self._zero_reward(metrics), self._ratio_explosion(metrics)):
            if diagnosis is None or step - self._reported.get(diagnosis.name, -COOLDOWN) < COOLDOWN:
                continue
            self._reported[diagnosis.name] = step
            due.append(diagnosis)
        return due

    def _zero_reward(self, metrics: Mapping[str, float]) -> Diagnosis | None:
        zero = metrics.get("critic/score/max") == 0 and metrics.get("critic/score/min") == 0
        self._zero_steps = self._zero_steps + 1 if zero else 0
        if self._zero_steps < ZERO_STEPS:
            return None
        return Diagnosis(
            "zero_reward",
            f"every reward of the last {self._zero_steps} steps is 0",
            "all advantages are 0, so these steps teach nothing",
            tuple(_zero_causes(self._config, metrics)) or (_TOO_HARD,),
        )

    def _ratio_explosion(self, metrics: Mapping[str, float]) -> Diagnosis | None:
        mean, largest = metrics.get("actor/ratio/mean", 1.0), metrics.get("actor/ratio/max", 1.0)
        if RATIO_MEAN[0] <= mean <= RATIO_MEAN[1] and largest <= RATIO_MAX:
            return None
        return Diagnosis(
            "ratio_explosion",
            f"the ratio of the policy to the one that sampled is {mean:.3g} on average, {largest:.3g} at most (sound: "
            f"{RATIO_MEAN[0]:g} to {RATIO_MEAN[1]:g}, at most {RATIO_MAX:g})",
            "clipped tokens teach nothing, and unclipped ones move the policy by noise",
            tuple(_ratio_causes(self._config, metrics)),
        )


_TOO_HARD = Cause(
    "too_hard",
    "responses end by themselves and can be read, and are still wrong",
    "try the reward on right answers (hone reward test), begin with easier rows (data.sampler.name=stages), or train on "
    "demonstrations first (hone sft)",
)


def _zero_causes(config: RLConfig, metrics: Mapping[str, float]) -> Iterator[Cause]:
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    cut = max(metrics.get("response_length/clip_ratio", 0.0), metrics.get("rollout/stop_reason/length", 0.0))
    if cut > _OFTEN:
        evidence = f"{cut:.0%} of the responses reach data.max_response_length={config.data.max_response_length}"
        yield Cause("length", evidence, f"data.max_response_length={2 * config.data.max_response_length}")
    for reason, key in _LIMITS.items():
        share = metrics.get(f"episode/end/{reason}", 0.0)
        if share > _OFTEN and not (reason == "tokens" and cut > _OFTEN):
            yield Cause(f"end_{reason}", f"{share:.0%} of the episodes end by the limit {key}", f"raise {key}")
    broken = metrics.get("episode/error_rate", 0.0)
    if broken > _MANY_CALLS:
        yield Cause("episode_errors", f"{broken:.0%} of the episodes fail", "read the trace in the log")
    missing = metrics.get("reward/no_verdict_rate", 0.0)
    if missing > _MANY_CALLS:
        yield Cause("no_verdict", f"{missing:.0%} of the responses have no verdict", "see reward/no_verdict/<cause>")
    has_tools = multi_turn.enable and bool(multi_turn.tool_config_path or multi_turn.function_tool_path)
    if has_tools and metrics.get("tool/calls/mean", 0.0) == 0:
        fix = f"compare the prompt with what {_MULTI_TURN}.format reads (hone data template), or train on demonstrations of calls"
        yield Cause("no_calls", "the run has tools, and no response calls one", fix)
    names = ("malformed_rate", "unknown_tool_rate", "invalid_arguments_rate")
    unreadable = [metrics.get(f"tool/{name}", 0.0) for name in names]
    if sum(unreadable) > _MANY_CALLS:
        parts = ", ".join(f"{name} {share:.0%}" for name, share in zip(names, unreadable, strict=True))
        yield Cause("unreadable_calls", f"tool calls cannot be carried out: {parts}", f"check {_MULTI_TURN}.format")
    failed = metrics.get("tool/error_rate", 0.0) + metrics.get("tool/timeout_rate", 0.0)
    if failed > _MANY_CALLS:
        parts = ", ".join(f"{name} {metrics.get(f'tool/{name}', 0.0):.0%}" for name in ("error_rate", "timeout_rate"))
        yield Cause(
            "failing_tools", f"tools fail: {parts}", f"try the tools alone, or raise {_MULTI_TURN}.tool_timeout"
        )
    form = metrics.get("reward/format/mean", 1.0)
    if form < _OFTEN:
        yield Cause(
            "format",
            f"the scorer finds an answer in {form:.0%} of the responses",
            "ask for the scorer's answer format in the prompt, or choose the scorer that reads yours (reward.scorer)",
        )


def _ratio_causes(config: RLConfig, metrics: Mapping[str, float]) -> Iterator[Cause]:
    first = metrics.get("actor/first_ratio_max_abs_log", 0.0)
    gap, age = metrics.get("training/rollout_probs_diff_mean", 0.0), metrics.get("training/staleness", 0.0)
    bypass, actor = config.algorithm.rollout_correction.bypass_mode, config.actor_rollout_ref.actor
    if first > _FIRST_RATIO:
        yield Cause(
            "first_update",
            f"|log ratio| is {first:.3g} in the first update, where it should be 0: the tokens, the mask, the temperature or the "
            "weights are not those of sampling",
            "look for D-ratio and D-ids in the log; a loop of your own must not change tokens or masks",
        )
    if gap > _ENGINE_GAP:
        fix = (
            "algorithm.rollout_correction.bypass_mode=false"
            if bypass
            else "algorithm.rollout_correction.rollout_is=token"
        )
        evidence = f"probabilities of engine and trainer differ by {gap:.3g} on average (sound: below {_ENGINE_GAP:g})"
        yield Cause("engine", evidence, f"check rollout/canary_gap; {fix}")
    if age > 0:
        evidence = f"tokens are up to {age:g} weight updates old (mean {metrics.get('async/age/mean', 0.0):.3g})"
        yield Cause("old_tokens", evidence, "trainer.async_training.max_staleness=0, or a rollout correction")
    if first <= _FIRST_RATIO:
        rate = metrics.get("actor/lr", actor.optim.lr)
        epochs = f" {_ACTOR}.ppo_epochs=1" if actor.ppo_epochs > 1 else ""
        yield Cause(
            "learning_rate",
            f"|log ratio| is {first:.3g} in the first update, so later updates of the step move the policy: learning rate {rate:.3g}, "
            f"ppo_epochs {actor.ppo_epochs}, gradient norm {metrics.get('actor/grad_norm', 0.0):.3g}",
            f"{_ACTOR}.optim.lr={rate / 10:.3g}{epochs}",
        )
