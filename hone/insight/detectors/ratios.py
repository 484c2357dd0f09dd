"""Detectors of how far the policy moves: ratios, clipping, and the KL to the old and the reference policy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import fmean, pstdev
from typing import Any

from hone.insight.detectors.base import ERROR, WARNING, Cause, Detector, Metrics, Settings, Symptom
from hone.insight.detectors.causes import ACTOR, learning_rate_key, setting, slower, tuning
from hone.insight.detectors.series import Reward, Streak, window

_CORRECTION = "algorithm.rollout_correction"


class _Moves(Detector):
    """Detector whose samples are those with the largest change of log-probs."""

    columns = ("old_log_probs", "new_log_probs")

    def concern(self, record: Mapping[str, Any]) -> float:
        old, new = record["old_log_probs"] or (), record["new_log_probs"] or ()
        return max((abs(after - before) for before, after in zip(old, new, strict=False)), default=0.0)


class RatioExplosion(_Moves):
    """The ratio of the policy to the one that sampled is far from 1."""

    name = "ratio_explosion"
    question = "Why does the ratio explode?"
    changes = "tokens and masks of a loop of your own, `rollout_correction.rollout_is`, `async_training.max_staleness`; then the order above, with a tenth of the rate"
    reads = ("actor/ratio/mean", "actor/ratio/max")
    fires = (
        "the mean ratio is outside 0.5 to 2 or a token's ratio is above 1000 (TRL: too drastic), or above 20 (verl notes: broken) in 3 "
        "steps in a row"
    )
    why = "clipped tokens teach nothing, and unclipped ones move the policy by noise"
    mean, largest, drastic = (0.5, 2.0), 20.0, 1000.0
    first_ratio, engine_gap = 0.05, 0.01  # invariant D-ratio in bfloat16; verl's FAQ: a problem

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._streak = Streak()

    def examine(self, metrics: Metrics) -> Symptom | None:
        mean, largest = metrics.get("actor/ratio/mean", 1.0), metrics.get("actor/ratio/max", 1.0)
        sound = self.mean[0] <= mean <= self.mean[1] and largest <= self.drastic
        if self._streak.add(not largest <= self.largest) < 3 and sound:
            return None
        what = f"the ratio of the policy to the one that sampled is {mean:.3g} on average and {largest:.3g} at most"
        return Symptom(WARNING if sound else ERROR, what, tuple(self._causes(metrics)))

    def _causes(self, metrics: Metrics) -> Iterator[Cause]:
        first = metrics.get("actor/first_ratio_max_abs_log", 0.0)
        gap, age = metrics.get("training/rollout_probs_diff_mean", 0.0), metrics.get("training/staleness", 0.0)
        if first > self.first_ratio:
            yield Cause(
                f"|log ratio| is {first:.3g} in the first update, where it should be 0: the tokens, the mask, the temperature or the "
                "weights are not those of sampling",
                "look for D-ratio and D-ids in the log; a loop of your own must not change tokens or masks",
            )
        if gap > self.engine_gap:
            bypass = self.settings.get(f"{_CORRECTION}.bypass_mode")
            fix = f"{_CORRECTION}.bypass_mode=false" if bypass else f"{_CORRECTION}.rollout_is=token"
            evidence = (
                f"probabilities of engine and trainer differ by {gap:.3g} on average (sound: below {self.engine_gap:g})"
            )
            yield Cause(evidence, f"check rollout/canary_gap; {fix}")
        if age > 0:
            evidence = f"tokens are up to {age:g} weight updates old (mean {metrics.get('async/age/mean', 0.0):.3g})"
            yield Cause(evidence, "trainer.async_training.max_staleness=0, or a rollout correction")
        if first <= self.first_ratio:
            norm, key = metrics.get("actor/grad_norm", 0.0), learning_rate_key(self.settings)
            rate, epochs = setting(self.settings, key, 1e-6), setting(self.settings, f"{ACTOR}.ppo_epochs", 1)
            one = f" {ACTOR}.ppo_epochs=1" if epochs > 1 else ""
            seen = f"|log ratio| is {first:.3g} in the first update, so later updates of the step move the policy; gradient norm {norm:.3g}"
            if largest_per_update := metrics.get("actor/pg_clipfrac"):
                seen += f", {largest_per_update:.0%} of the tokens are clipped"
            steps = list(tuning(self.settings, seen))
            # the ratio is far off: the rate goes down tenfold (verl notes: 1e-5 -> 1e-6), not by half
            drastic = Cause(f"the learning rate is {rate:.3g}; {seen}", f"{slower(self.settings, 10)}{one}")
            yield from (drastic if step.fix == slower(self.settings) else step for step in steps)


class ClipFraction(_Moves):
    """Most tokens are clipped."""

    name = "clip_fraction"
    question = "Are too many tokens clipped?"
    changes = "the order above"
    reads = ("actor/pg_clipfrac",)
    fires = "more than 0.5 (error: 0.8) of the tokens are clipped in 3 steps in a row (agent-loop notes: above 0.5 is too aggressive)"
    why = "clipped tokens have no gradient: most of the batch teaches nothing"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._streak = Streak()

    def examine(self, metrics: Metrics) -> Symptom | None:
        share = metrics["actor/pg_clipfrac"]
        if self._streak.add(share > 0.5) < 3:
            return None
        lower = metrics.get("actor/pg_clipfrac_lower", 0.0)
        what = f"{share:.0%} of the tokens are clipped, {lower:.0%} at the dual-clip bound"
        return Symptom(
            ERROR if share > 0.8 else WARNING, what, tuple(tuning(self.settings, f"{share:.0%} are clipped"))
        )


class PolicyKL(_Moves):
    """The policy moves far within a step."""

    name = "policy_kl"
    question = "Is a step too large?"
    changes = "the order above"
    reads = ("actor/ppo_kl",)
    fires = (
        "|KL of the old and the new policy| is above 0.1 (error: 0.5) in 3 steps in a row (agent-loop notes: below 0.1)"
    )
    why = "ratios far from 1 make the clipped objective a poor estimate of the improvement"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._streak = Streak()

    def examine(self, metrics: Metrics) -> Symptom | None:
        kl = metrics["actor/ppo_kl"]
        if self._streak.add(not abs(kl) <= 0.1) < 3:
            return None
        causes = tuple(tuning(self.settings, f"the KL of a step is {kl:.3g} nats"))
        severity = WARNING if abs(kl) <= 0.5 else ERROR
        return Symptom(severity, f"the policy moves by {kl:.3g} nats in a step (actor/ppo_kl)", causes)


class ReferenceKL(_Moves):
    """The KL to the reference policy jumps while the reward does not rise, or is negative for long."""

    name = "reference_kl"
    question = "Why does the KL to the reference blow up?"
    changes = "the order above, with a larger KL weight before the rate"
    reads = ("actor/kl_loss", "actor/reward_kl_penalty")
    fires = (
        "in 3 steps in a row the KL is above 0.01, 2 x the mean of the last 100 steps and 3 (error: 4.5) standard deviations over it "
        "(rlwatch: z-score), and the reward does not rise; or it is below -0.01 for 20 steps; or it is not finite"
    )
    why = "the policy leaves its reference without earning more: general abilities and readable text are lost"
    warm_up = 20
    columns = ("old_log_probs", "ref_log_probs")
    floor = 0.01

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._past, self._reward = window(100), Reward(20)
        self._jumps, self._negative = Streak(), Streak()

    def examine(self, metrics: Metrics) -> Symptom | None:
        name = next(name for name in self.reads if name in metrics)
        kl = metrics[name]
        self._reward.add(metrics)
        if not math.isfinite(kl):
            return Symptom(ERROR, f"{name} is {kl}", tuple(tuning(self.settings, "exp of a log-ratio overflows")))
        mean, deviation = (fmean(self._past), pstdev(self._past)) if self._past else (0.0, 0.0)
        score = (kl - mean) / deviation if deviation else 0.0
        jumps = len(self._past) >= 20 and kl > max(self.floor, 2 * mean) and score > 3
        if not jumps:
            self._past.append(kl)
        if self._negative.add(kl < -self.floor) >= 20:
            return Symptom(WARNING, f"{name} is {kl:.3g} and was negative for 20 steps", (_DIFFERENT,))
        if self._jumps.add(jumps) < 3 or self._reward.rises:
            return None
        falls = self._reward.falls
        then = (
            "falls: stop, and go back to an earlier checkpoint" if falls else "is flat: the run has little left to gain"
        )
        what = f"{name} is {kl:.3g}, {score:.1f} standard deviations above its mean {mean:.3g}, and the reward {then}"
        causes = tuple(self._causes(f"the KL is {kl / mean:.1f} times its mean" if mean > 0 else f"the KL is {kl:.3g}"))
        return Symptom(ERROR if score > 4.5 or falls else WARNING, what, causes)

    def _causes(self, seen: str) -> Iterator[Cause]:
        key = f"{ACTOR}.kl_loss_coef" if self.settings.get(f"{ACTOR}.use_kl_loss") else "algorithm.kl_ctrl.kl_coef"
        weight = setting(self.settings, key, 0.001)
        for step in tuning(self.settings, seen):
            if learning_rate_key(self.settings) in step.fix:  # clip and KL come before the learning rate
                yield Cause(f"the KL penalty has weight {weight:g}; {seen}", f"{key}={max(0.001, 10 * weight):.3g}")
            yield step

    def concern(self, record: Mapping[str, Any]) -> float:
        old, reference = record["old_log_probs"] or (), record["ref_log_probs"] or ()
        return max((abs(one - other) for one, other in zip(old, reference, strict=False)), default=0.0)


_DIFFERENT = Cause(
    "policy and reference differ in temperature, end-of-sequence token or template (sampling noise alone changes sign)",
    "compare actor_rollout_ref.rollout.temperature and the tokenizer of both; algorithm.kl_penalty=low_var_kl is never negative",
)
