"""Detector of a problem in the metrics of a run, and its alert.

A detector examines every step. The first step that shows its symptom opens an episode and gives one alert. The episode ends after
``cool_down`` steps without the symptom; only then can the detector give another alert.

Likely causes of symptoms: of rewards that are all 0, each named only with the figure that shows it; and of an unstable policy.

The settings of an unstable policy change in this order: batches, clip and KL, learning rate and warm-up, loss mode.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev
from typing import Any, ClassVar

Settings = Mapping[str, Any]  # configuration of a run, flat: dotted key to value
Metrics = Mapping[str, float]  # metrics of a step

WARNING, ERROR = "warning", "error"


@dataclass(frozen=True)
class Cause:
    """Likely cause of a symptom."""

    evidence: str  # what was measured, with numbers
    fix: str  # what to change, with the exact keys


@dataclass(frozen=True)
class Symptom:
    """Symptom in the metrics of a step."""

    severity: str  # ``warning`` or ``error``
    what: str  # the symptom, with figures
    causes: tuple[Cause, ...]  # likely causes, the most likely first


@dataclass(frozen=True)
class Alert:
    """Report of a detector."""

    detector: str
    step: int  # step that showed the symptom first
    severity: str  # ``warning`` or ``error``
    what: str  # the symptom, with figures
    why: str  # why it matters
    causes: tuple[Cause, ...]  # likely causes, the most likely first
    samples: tuple[Mapping[str, Any], ...] = ()  # step, uid and index of samples to look at, in the archive

    @property
    def fix(self) -> str:
        return self.causes[0].fix

    def record(self) -> dict[str, Any]:
        """Return the alert as an object of ``alerts.jsonl``, without its step."""
        return {
            "detector": self.detector,
            "severity": self.severity,
            "what": self.what,
            "why": self.why,
            "causes": [f"{cause.evidence}. Fix: {cause.fix}" for cause in self.causes],
            "fix": self.fix,
            "samples": [dict(sample) for sample in self.samples],
        }


def render_alert(record: Mapping[str, Any], run: str = "RUN") -> str:
    """Return an object of ``alerts.jsonl`` as text, with the command that shows its samples. ``run``: run directory, or
    its name.
    """
    lines = [f"alert, step {record['step']}, {record['detector']} ({record['severity']}): {record['what']}."]
    lines.append(f"  Why it matters: {record['why']}")
    lines += [f"  {number}. {cause}" for number, cause in enumerate(record["causes"], 1)]
    if record["samples"]:
        first = record["samples"][0]
        lines.append(f"  Samples: hone runs samples {run} --step {first['step']} --uid {first['uid']}")
    return "\n".join(lines)


class Detector(ABC):
    """Detector of one symptom."""

    name: ClassVar[str]  # name in ``insight.stop_on`` and ``insight.ignore``
    question: ClassVar[str]  # question of a user that it answers
    changes: ClassVar[str]  # what its alerts advise to change, in order, as Markdown
    # metrics that decide whether it fires; steps that have none of them are not counted
    reads: ClassVar[tuple[str, ...]]
    fires: ClassVar[str]  # figures at which it fires, with their source
    why: ClassVar[str]  # why the symptom matters
    warm_up: ClassVar[int] = 0  # steps before it can fire, counted from the start of the run
    cool_down: ClassVar[int] = 20  # steps without the symptom that end an episode
    columns: ClassVar[tuple[str, ...]] = ("score",)  # columns of the archive that :meth:`concern` reads

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._steps = 0
        self._absent = self.cool_down
        self.begin()

    def begin(self) -> None:  # noqa: B027 - not all have one
        """Make the history, which is empty."""

    def observe(self, step: int, metrics: Metrics) -> Alert | None:
        """Read the metrics of a step; return an alert if an episode begins."""
        if not any(name in metrics for name in self.reads):
            return None
        self._steps += 1
        symptom = self.examine(metrics)
        if symptom is None or self._steps <= self.warm_up:
            self._absent += 1
            return None
        begins, self._absent = self._absent >= self.cool_down, 0
        if not begins:
            return None
        return Alert(self.name, step, symptom.severity, symptom.what, self.why, symptom.causes)

    def state(self) -> dict[str, Any]:
        """Return what it has seen as values of JSON, for a checkpoint."""
        return {name: _plain(value) for name, value in vars(self).items() if name != "settings"}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state`; what a detector of another version has seen is left out."""
        for name in state.keys() & (vars(self).keys() - {"settings"}):
            setattr(self, name, _restored(getattr(self, name), state[name]))

    @abstractmethod
    def examine(self, metrics: Metrics) -> Symptom | None:
        """Add the metrics of a step to the history, and return the symptom that they show."""

    def concern(self, record: Mapping[str, Any]) -> float:
        """Return how much a sample of the archive illustrates the symptom; the default prefers low scores."""
        return -(record["score"] or 0.0)


def _plain(value: Any) -> Any:
    """Return a part of a detector as values of JSON: histories become lists, objects become their fields."""
    if isinstance(value, (deque, list, tuple)):
        return [_plain(item) for item in value]
    fields = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    return value if fields is None else {name: _plain(item) for name, item in fields.items()}


def _restored(fresh: Any, value: Any) -> Any:
    """Return a part of a new detector with a saved value."""
    if isinstance(fresh, deque):
        return deque(value, fresh.maxlen)
    if isinstance(fresh, dict):
        return {name: _restored(fresh.get(name), item) for name, item in value.items()}
    if hasattr(fresh, "__dict__"):
        for name, item in value.items():
            setattr(fresh, name, _restored(getattr(fresh, name), item))
        return fresh
    return value


__all__ = ["Baseline", "Reward", "Streak", "fmean", "median", "pstdev", "rose", "window"]

SOLVED = 0.9  # share of the range of seen scores above which a task counts as solved. Proposal of Hone

GAIN = 0.1  # share of that range by which a reward that rises gains over a window. Proposal of Hone


def window(size: int) -> deque[float]:
    return deque(maxlen=size)


def rose(values: Sequence[float]) -> bool:
    """Return whether the mean of the second half exceeds that of the first by more than the standard error of the difference."""
    half = len(values) // 2
    if half < 2:
        return False
    first, second = values[:half], values[-half:]
    error = math.sqrt((pstdev(first) ** 2 + pstdev(second) ** 2) / (half - 1))
    return fmean(second) - fmean(first) > error


class Streak:
    """Number of consecutive steps for which a condition holds."""

    def __init__(self) -> None:
        self.length = 0

    def add(self, holds: bool) -> int:
        self.length = self.length + 1 if holds else 0
        return self.length


class Baseline:
    """Mean of the first values of a run, frozen afterwards."""

    def __init__(self, size: int = 20) -> None:
        self._size, self._values = size, list[float]()

    def add(self, value: float) -> bool:
        """Add a value while the baseline is open; return whether it was complete before."""
        if len(self._values) >= self._size:
            return True
        if math.isfinite(value):
            self._values.append(value)
        return False

    @property
    def mean(self) -> float:
        return fmean(self._values) if self._values else 0.0


class Reward:
    """Level and trend of the score over the latest steps."""

    def __init__(self, size: int) -> None:
        self.means = window(size)
        self.lowest, self.highest = math.inf, -math.inf

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the scores of a step, if it has any."""
        if "critic/score/mean" not in metrics:
            return
        mean = metrics["critic/score/mean"]
        self.means.append(mean)
        self.lowest = min(self.lowest, metrics.get("critic/score/min", mean))
        self.highest = max(self.highest, metrics.get("critic/score/max", mean))

    @property
    def rises(self) -> bool:
        """True if the mean score rose over the window: by halves, or from the first to the last quarter by a tenth of the range."""
        values, quarter = list(self.means), len(self.means) // 4
        gain = fmean(values[-quarter:]) - fmean(values[:quarter]) if quarter else 0.0
        return rose(values) or gain > GAIN * (self.highest - self.lowest) > 0

    @property
    def falls(self) -> bool:
        return rose([-mean for mean in self.means])

    @property
    def solved(self) -> bool:
        """True if the mean score of the latest steps is near the best score that a response ever had."""
        latest = list(self.means)[-5:]
        return bool(latest) and fmean(latest) >= self.lowest + SOLVED * (self.highest - self.lowest) > self.lowest

    @property
    def change(self) -> str:
        """Return the mean score of the first and of the second half of the window as text."""
        values, half = list(self.means), len(self.means) // 2
        return f"{fmean(values[:half]):.3g} -> {fmean(values[half:]):.3g}" if half else "unknown"


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
