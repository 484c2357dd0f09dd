"""Detectors of rewards and advantages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hone.insight.detectors.base import ERROR, WARNING, Cause, Detector, Metrics, Settings, Symptom
from hone.insight.detectors.causes import ACTOR, TOO_HARD, learning_rate_key, setting, slower, zero_causes
from hone.insight.detectors.series import Reward, Streak, fmean, median, window


class ZeroReward(Detector):
    """Every reward of several steps is 0."""

    name = "zero_reward"
    question = "Why is the reward 0 from the start?"
    changes = "what the figures show: the limit that cuts responses (`data.max_response_length`, `multi_turn.max_*`), `reward.scorer`, `multi_turn.format`, `data.sampler.name=stages`"
    reads = ("critic/score/max", "critic/score/min")
    fires = "every score of 3 steps in a row is 0 (proposal)"
    why = "all advantages are 0, so these steps teach nothing"
    columns = ("stop_reason", "terms")
    steps = 3

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._streak = Streak()

    def examine(self, metrics: Metrics) -> Symptom | None:
        zero = metrics.get("critic/score/max") == 0 and metrics.get("critic/score/min") == 0
        if self._streak.add(zero) < self.steps:
            return None
        causes = tuple(zero_causes(self.settings, metrics)) or (TOO_HARD,)
        return Symptom(ERROR, f"every reward of the last {self._streak.length} steps is 0", causes)

    def concern(self, record: Mapping[str, Any]) -> float:
        return float(record["stop_reason"] == "length")


class FlatReward(Detector):
    """Most groups have equal rewards, and the reward does not rise."""

    name = "flat_reward"
    question = "Why is the reward flat?"
    changes = "difficulty of the rows, `algorithm.filter_groups.enable`, `rollout.n`, the KL weight, `optim.lr`"
    reads = ("reward/zero_std_group_ratio", "training/filter_groups/evicted_ratio")
    fires = (
        "over 20 steps more than 0.5 (error: 0.8) of the groups have equal rewards (proposal), the reward does not rise by its "
        "standard error, and is below 0.9 of the range seen"
    )
    why = "group estimators learn nothing from groups of equal rewards: that share of generation is wasted"
    warm_up = 20
    size = 20
    some, most = 0.5, 0.8

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._shares, self._reward = window(self.size), Reward(self.size)

    def examine(self, metrics: Metrics) -> Symptom | None:
        self._shares.append(max(metrics.get(name, 0.0) for name in self.reads))
        self._reward.add(metrics)
        share = fmean(self._shares)
        waiting = len(self._shares) < self.size
        zero = metrics.get("critic/score/max") == 0 == metrics.get("critic/score/min")  # zero_reward reports it
        if waiting or zero or share <= self.some or self._reward.rises or self._reward.solved:
            return None
        what = f"{share:.0%} of the groups of {self.size} steps have equal rewards, and the reward is flat ({self._reward.change})"
        return Symptom(ERROR if share > self.most else WARNING, what, tuple(self._causes(metrics)))

    def _causes(self, metrics: Metrics) -> Iterator[Cause]:
        n = setting(self.settings, "actor_rollout_ref.rollout.n", 1)
        mean, low, high = fmean(self._reward.means or [0.0]), self._reward.lowest, self._reward.highest
        place = (mean - low) / (high - low) if high > low else 0.0
        hard = "too hard" if place < 0.5 else "too easy"
        yield Cause(
            f"problems are {hard}: the mean reward is at {place:.0%} of the range {low:g} to {high:g}",
            "rows of another difficulty, or a curriculum (data.sampler with stages); algorithm.filter_groups.enable=true replaces dead groups",
        )
        yield Cause(f"a group has {n} responses", f"actor_rollout_ref.rollout.n={2 * n}")
        if settings_kl(self.settings) > 0.01:  # arXiv 2203.02155 uses 0.02, tuned runs 0.001 to 0.05
            yield Cause(
                f"the KL penalty has weight {settings_kl(self.settings):g}",
                f"{ACTOR}.kl_loss_coef=0.001 or algorithm.kl_ctrl.kl_coef=0.001",
            )
        rate = metrics.get("actor/lr", 0.0)
        key = learning_rate_key(self.settings)
        yield Cause(f"the learning rate is {rate:.3g}", f"{key}={2 * setting(self.settings, key, 1e-6):.3g}")

    def concern(self, record: Mapping[str, Any]) -> float:
        return 0.0


def settings_kl(settings: Settings) -> float:
    """Return the weight of the KL penalty in loss or reward, 0 without one."""
    in_loss = setting(settings, f"{ACTOR}.kl_loss_coef", 0.0) if settings.get(f"{ACTOR}.use_kl_loss") else 0.0
    in_reward = settings.get("algorithm.use_kl_in_reward")
    return max(in_loss, setting(settings, "algorithm.kl_ctrl.kl_coef", 0.0) if in_reward else 0.0)


class AdvantageShift(Detector):
    """The spread of advantages is a multiple of what it was."""

    name = "advantage_shift"
    question = "Are the advantages odd?"
    changes = "bounds of reward terms, `algorithm.norm_adv_by_std_in_grpo`, `optim.lr`"
    reads = ("critic/advantages/max", "critic/advantages/min")
    fires = (
        "3 steps in a row the range of advantages exceeds 3 x the median of the 50 steps before (rlwatch: std ratio 3)"
    )
    why = "the same learning rate now makes larger steps, and a clip by value no longer fits"
    warm_up = 20
    columns = ("score", "advantages")
    times = 3.0

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._ranges, self._streak = window(50), Streak()

    def examine(self, metrics: Metrics) -> Symptom | None:
        spread = metrics.get("critic/advantages/max", 0.0) - metrics.get("critic/advantages/min", 0.0)
        before = [value for value in self._ranges if value > 0]
        usual = median(before) if len(before) >= 10 else 0.0
        odd = spread != spread or (usual > 0 and spread > self.times * usual)
        if not odd:
            self._ranges.append(spread)
        if self._streak.add(odd) < 3:
            return None
        score = f"scores reach from {metrics.get('critic/score/min', 0.0):.3g} to {metrics.get('critic/score/max', 0.0):.3g}"
        causes = (
            Cause(
                f"the scale of the reward changed: {score}",
                "bound each term of the reward; hone reward test shows them",
            ),
            Cause(
                f"estimator {setting(self.settings, 'algorithm.adv_estimator', 'grpo')}, normalised by the std of a group: "
                f"{setting(self.settings, 'algorithm.norm_adv_by_std_in_grpo', True)}",
                "algorithm.norm_adv_by_std_in_grpo=true",
            ),
            Cause("the larger advantages act at the same learning rate", slower(self.settings)),
        )
        return Symptom(WARNING, f"advantages span {spread:.3g}, the median was {usual:.3g}", causes)

    def concern(self, record: Mapping[str, Any]) -> float:
        return max(map(abs, record["advantages"] or [0.0]))


class RewardHacking(Detector):
    """The training reward rises while the held-out score falls."""

    name = "reward_hacking"
    question = "Is the reward hacked?"
    changes = "terms of the reward, `reward.overlong_buffer.enable`, `use_kl_loss`, `optim.lr`"
    reads = ("critic/score/mean",)
    fires = (
        "since the best validation the training score rose by more than 0.1 of the range that it had until then (rlwatch: drift 0.1) "
        "and the held-out score fell by as much, in 2 validations in a row"
    )
    why = "the policy learns what the reward pays for, not the task"
    columns = ("score", "text")
    drift = 0.1

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._reward, self._streak = Reward(10), Streak()
        self._symptom: Symptom | None = None
        self._best: dict[str, tuple[float, float, float, float]] = {}
        """Best held-out score; the train score, the length and the range of train scores then, which a hack widens later."""

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        if saved := state.get("_symptom"):
            causes = tuple(Cause(**cause) for cause in saved["causes"])
            self._symptom = Symptom(saved["severity"], saved["what"], causes)

    def examine(self, metrics: Metrics) -> Symptom | None:
        self._reward.add(metrics)
        held_out = {name: value for name, value in metrics.items() if name.startswith("val-core/") and "/mean@" in name}
        if not held_out or not self._reward.means:
            return self._symptom if self._streak.length >= 2 else None
        train, length = fmean(self._reward.means), metrics.get("response_length/mean", 0.0)
        span = self._reward.highest - self._reward.lowest
        widest: tuple[float, str] | None = None
        for name, value in held_out.items():
            best = self._best.setdefault(name, (value, train, length, span))
            scale = self.drift * (best[3] or span)
            if value >= best[0]:
                self._best[name] = (value, train, length, span)
            elif scale > 0 and best[0] - value > scale and train - best[1] > scale:
                widest = max(widest or (0.0, ""), (best[0] - value, name))
        if self._streak.add(widest is not None) < 2 or widest is None:
            return None
        name = widest[1]
        self._symptom = self._describe(name, held_out[name], train, metrics)
        return self._symptom

    def _describe(self, name: str, value: float, train: float, metrics: Metrics) -> Symptom:
        score, train_then, length_then, _ = self._best[name]
        what = f"the training score rose {train_then:.3g} -> {train:.3g}, while {name} fell {score:.3g} -> {value:.3g}"
        terms = {name: metrics[name] for name in metrics if name.startswith("reward/") and name.endswith("/mean")}
        shown = ", ".join(f"{name} {mean:.3g}" for name, mean in terms.items()) or "the reward has one term"
        causes = [
            Cause(
                f"some term pays for more than the task: {shown}",
                "reward.terms with a bound each; reward.doctor.enable=true",
            )
        ]
        if metrics.get("response_length/mean", 0.0) > 1.5 * length_then > 0:
            causes.append(
                Cause(
                    f"responses grew from {length_then:.0f} to {metrics['response_length/mean']:.0f} tokens",
                    "reward.overlong_buffer.enable=true",
                )
            )
        if settings_kl(self.settings) == 0:
            causes.append(Cause("no KL penalty holds the policy near its reference", f"{ACTOR}.use_kl_loss=true"))
        causes.append(Cause("the policy moves fast for the data that it sees", slower(self.settings)))
        return Symptom(ERROR, what, tuple(causes))

    def concern(self, record: Mapping[str, Any]) -> float:
        return record["score"] or 0.0
