"""Detectors of the policy: gradients, the critic, the gap to the engine, ratios and KL, entropy and length of responses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import fmean, median, pstdev
from typing import Any

from hone.insight.detectors.base import (
    ACTOR,
    ERROR,
    WARNING,
    Baseline,
    Cause,
    Detector,
    Metrics,
    Reward,
    Streak,
    Symptom,
    learning_rate_key,
    setting,
    slower,
    trains_policy,
    tuning,
    window,
)

_CORRECTION = "algorithm.rollout_correction"


class ZeroGradient(Detector):
    """The gradient is exactly 0 although rewards differ."""

    name = "zero_gradient"
    question = "The loss is 0: is that normal?"
    changes = "`rollout.n`, `optim.lr`, `rollout_correction.rollout_rs`, masks"
    reads = ("actor/grad_norm",)
    fires = (
        "the gradient norm is exactly 0 in 2 steps in a row (proposal), and the rewards of the steps differ or never differed; a "
        "policy loss of 0 alone is normal on-policy (TRL#2703)"
    )
    why = "the weights do not change"

    def begin(self) -> None:
        self._streak, self._differed = Streak(), False

    def examine(self, metrics: Metrics) -> Symptom | None:
        low, high = metrics.get("critic/score/min", 0.0), metrics.get("critic/score/max", 1.0)
        solved = low == high != 0 and self._differed
        self._differed = self._differed or low != high
        zero = metrics["actor/grad_norm"] == 0 and not solved and not low == high == 0  # zero_reward reports that
        if self._streak.add(zero) < 2:
            return None
        what = (
            f"the gradient norm is exactly 0 in {self._streak.length} steps, with scores from {low:.3g} to {high:.3g}"
        )
        return Symptom(WARNING, what, tuple(self._causes(metrics)))

    def _causes(self, metrics: Metrics) -> Iterator[Cause]:
        equal = metrics.get("reward/zero_std_group_ratio", 0.0)
        if equal == 1:
            n = setting(self.settings, "actor_rollout_ref.rollout.n", 1)
            fix = f"actor_rollout_ref.rollout.n={2 * n}, or algorithm.filter_groups.enable=true"
            yield Cause(f"all groups of {n} responses have equal rewards", fix)
        clipped = metrics.get("actor/pg_clipfrac", 0.0)
        if clipped > 0.9:
            yield Cause(f"{clipped:.0%} of the tokens are clipped", slower(self.settings))
        rejected = max(
            metrics.get(name, 0.0) for name in ("rollout_corr/rollout_rs_masked_fraction", "actor/rollout_rejected")
        )
        if rejected > 0.9:
            yield Cause(
                f"the rollout correction rejects {rejected:.0%} of the tokens", f"{_CORRECTION}.rollout_rs=null"
            )
        spread = metrics.get("critic/advantages/max", 0.0) - metrics.get("critic/advantages/min", 0.0)
        yield Cause(
            f"advantages span {spread:.3g}: a loss or a mask leaves no token, or the weights are frozen",
            f"{ACTOR}.policy_loss.loss_mode=vanilla; read response_mask and loss_mask of a sample",
        )


class GradientSpike(Detector):
    """The gradient norm is not finite, or far above its usual size."""

    name = "gradient_spike"
    question = "Why does the gradient spike?"
    changes = "`rollout_correction.rollout_is`; the order above; `optim.clip_grad`"
    reads = ("actor/grad_norm", "train/grad_norm")
    fires = (
        "the norm before clipping is not finite; or it is 3 standard deviations above the mean of the first 20 steps (rlwatch: frozen "
        "baseline) and above 30 x the median of the 50 steps before, or above 10 x in 3 of 10 steps (proposals: clipping makes a lone "
        "smaller spike harmless)"
    )
    why = "one bad sample or a mismatch decides the direction of the step; clipping keeps only its size in bounds"
    warm_up = 20
    columns = ("advantages", "old_log_probs")

    def begin(self) -> None:
        self._norms, self._spikes, self._start = window(50), window(10), list[float]()

    def examine(self, metrics: Metrics) -> Symptom | None:
        name = next(name for name in self.reads if name in metrics)
        norm, before = metrics[name], list(self._norms)
        if not math.isfinite(norm):
            return Symptom(ERROR, f"{name} is {norm}", tuple(self._causes(metrics)))
        usual = median(before) if before else 0.0
        if len(self._start) < 20:
            self._start.append(norm)
        bound = fmean(self._start) + 3 * pstdev(self._start)
        spikes = len(before) >= 20 and norm > bound and norm > 10 * usual > 0
        self._spikes.append(float(spikes))
        if not spikes:
            self._norms.append(norm)
        if not spikes or (norm <= 30 * usual and sum(self._spikes) < 3):
            return None
        return Symptom(WARNING, f"{name} is {norm:.3g}, the median was {usual:.3g}", tuple(self._causes(metrics)))

    def _causes(self, metrics: Metrics) -> Iterator[Cause]:
        gap = metrics.get("training/rollout_probs_diff_mean", 0.0)
        if gap > EngineMismatch.problem:
            yield Cause(f"engine and trainer differ by {gap:.3g} in probability", f"{_CORRECTION}.rollout_is=token")
        policy = trains_policy(self.settings)
        if policy and setting(self.settings, "algorithm.norm_adv_by_std_in_grpo", True) is False:
            low, high = (metrics.get(f"critic/advantages/{end}", 0.0) for end in ("min", "max"))
            yield Cause(
                f"advantages reach from {low:.3g} to {high:.3g}, in the scale of the reward",
                "algorithm.norm_adv_by_std_in_grpo=true",
            )
        sample = "a sample has an extreme ratio, advantage or KL (read the samples)"
        yield from tuning(self.settings, sample if policy else "a batch has an extreme loss")
        prefix = learning_rate_key(self.settings).removesuffix("lr")
        clip = setting(self.settings, f"{prefix}clip_grad", 1.0)
        yield Cause(f"gradients are clipped at {clip:g}", f"{prefix}clip_grad={clip / 4:.3g}")

    def concern(self, record: Mapping[str, Any]) -> float:
        pairs = zip(record["advantages"] or (), record["old_log_probs"] or (), strict=False)
        return max((abs(advantage * log_prob) for advantage, log_prob in pairs), default=0.0)


class EngineMismatch(Detector):
    """Engine and trainer disagree on the probabilities of the sampled tokens."""

    name = "engine_mismatch"
    question = "Do engine and trainer disagree?"
    changes = "stale weights (D-sync), `async_training.max_staleness`, dtypes, `rollout.keep_support`, `rollout_correction.rollout_is`"
    reads = (
        "training/rollout_probs_diff_mean",
        "training/rollout_log_probs_diff_mean",
        "rollout_corr/kl",
        "rollout_corr/chi2_token",
        "rollout_corr/rollout_is_mean",
        "rollout_corr/rollout_is_eff_sample_size",
    )
    fires = (
        "in 3 steps in a row: mean |p(engine) - p(trainer)| above 0.01 with fresh weights (verl FAQ: a problem); or "
        "|rollout_corr/kl| above 0.1, chi2_token above 1, mean weight outside 0.5 to 2, or effective sample share below 0.3 (verl's "
        "page on rollout correction); or the log-prob gap above 0.02 and 3 x its first 20 steps (vime#64)"
    )
    why = "the update uses other probabilities than the engine sampled from: the gradient is biased"
    columns = ("old_log_probs", "rollout_log_probs")
    problem, severe = 0.01, 0.05

    def begin(self) -> None:
        self._streak, self._start = Streak(), Baseline()

    def examine(self, metrics: Metrics) -> Symptom | None:
        seen = self._seen(metrics)
        if self._streak.add(bool(seen)) < 3:
            return None
        severe = metrics.get("training/rollout_probs_diff_mean", 0.0) > self.severe or len(seen) > 1
        return Symptom(ERROR if severe else WARNING, "; ".join(seen), tuple(self._causes(metrics)))

    def _seen(self, metrics: Metrics) -> list[str]:
        """Return the figures of a step that are out of bounds."""
        fresh = metrics.get("training/staleness", 0.0) == 0
        gap, log_gap = (metrics.get(f"training/rollout_{kind}_diff_mean", 0.0) for kind in ("probs", "log_probs"))
        kl, chi2 = metrics.get("rollout_corr/kl", 0.0), metrics.get("rollout_corr/chi2_token", 0.0)
        size = metrics.get("rollout_corr/rollout_is_eff_sample_size", 1.0)
        weight = metrics.get("rollout_corr/rollout_is_mean", 1.0)
        drifts = self._start.add(log_gap) and fresh and log_gap > max(0.02, 3 * self._start.mean)
        checks = {
            f"training/rollout_probs_diff_mean is {gap:.3g}": fresh and not gap <= self.problem,
            f"training/rollout_log_probs_diff_mean rose from {self._start.mean:.3g} to {log_gap:.3g}": drifts,
            f"rollout_corr/kl is {kl:.3g}": not abs(kl) <= 0.1,
            f"rollout_corr/chi2_token is {chi2:.3g}": not chi2 <= 1,
            f"the mean importance weight is {weight:.3g}": not 0.5 <= weight <= 2,
            f"the effective sample share is {size:.3g}": not size >= 0.3,
        }
        return [text for text, holds in checks.items() if holds]

    def _causes(self, metrics: Metrics) -> Iterator[Cause]:
        canary = metrics.get("rollout/canary_gap")
        if canary is not None and canary > 0.1:
            yield Cause(
                f"rollout/canary_gap is {canary:.3g} nats: the engine's weights are stale", "look for D-sync in the log"
            )
        age = metrics.get("training/staleness", 0.0)
        if age > 0:
            yield Cause(
                f"tokens are up to {age:g} updates old", "trainer.async_training.max_staleness=0, or a smaller rate"
            )
        dtypes = [setting(self.settings, f"actor_rollout_ref.{role}.dtype", "auto") for role in ("rollout", "actor")]
        evidence = f"the engine computes in {dtypes[0]}, the trainer in {dtypes[1]}"
        yield Cause(
            evidence, "actor_rollout_ref.rollout.dtype=float32, or the same float16 for both; hone mismatch measures it"
        )
        truncated = {
            key: setting(self.settings, f"actor_rollout_ref.rollout.{key}") for key in ("top_k", "top_p", "min_p")
        }
        if truncated != {"top_k": -1, "top_p": 1.0, "min_p": 0.0} and None not in truncated.values():
            yield Cause(f"sampling is truncated ({truncated})", "actor_rollout_ref.rollout.keep_support=true")
        if self.settings.get(f"{_CORRECTION}.rollout_is") is None:
            yield Cause(
                "no importance weights correct the gap",
                f"{_CORRECTION}.rollout_is=token {_CORRECTION}.rollout_is_threshold=2.0",
            )

    def concern(self, record: Mapping[str, Any]) -> float:
        pairs = zip(record["old_log_probs"] or (), record["rollout_log_probs"] or (), strict=False)
        return max((abs(trainer - engine) for trainer, engine in pairs), default=0.0)


class CriticLag(Detector):
    """The critic predicts returns worse than a constant."""

    name = "critic_lag"
    question = "Does the critic lag?"
    changes = "`critic.cliprange_value`, `critic.optim.lr`, `trainer.critic_warmup`, the scale of the reward"
    reads = ("critic/vf_explained_var", "critic/vf_loss")
    fires = "after 20 steps the mean explained variance of 10 steps is below -0.1, as a constant has 0 (proposals); or the value loss is not finite"
    why = "advantages are then noisier than without a critic"
    warm_up = 20
    columns = ("values", "returns")

    def begin(self) -> None:
        self._explained = window(10)

    def examine(self, metrics: Metrics) -> Symptom | None:
        loss, explained = metrics.get("critic/vf_loss", 0.0), metrics.get("critic/vf_explained_var")
        spread = metrics.get("critic/returns/max", 1.0) - metrics.get("critic/returns/min", 0.0)
        if explained is not None and spread > 1e-3:  # equal returns have no variance to explain
            self._explained.append(max(-1.0, explained))
        finite = math.isfinite(loss)
        if finite and (len(self._explained) < 10 or fmean(self._explained) >= -0.1):
            return None
        shown = fmean(self._explained) if self._explained else math.nan
        what = f"the explained variance of 10 steps is {shown:.3g}, the value loss {loss:.3g}"
        return Symptom(WARNING if finite else ERROR, what, tuple(self._causes(metrics)))

    def _causes(self, metrics: Metrics) -> Iterator[Cause]:
        values, returns = metrics.get("critic/values/mean", 0.0), metrics.get("critic/returns/mean", 0.0)
        rate, clipped = setting(self.settings, "critic.optim.lr", 1e-5), metrics.get("critic/vf_clipfrac", 0.0)
        if clipped > 0.5:
            bound = setting(self.settings, "critic.cliprange_value", 0.5)
            yield Cause(f"{clipped:.0%} of the value changes are clipped", f"critic.cliprange_value={2 * bound:g}")
        # a slow critic says the same of every token and explains 0: below that, values scatter, and a faster critic scatters more
        factor = 10 if self._explained and self._explained[-1] < -0.5 else 3
        finite = math.isfinite(metrics.get("critic/vf_loss", 0.0))
        seen = "values scatter more than returns do" if finite else "the value loss is not finite"
        seen += f": values average {values:.3g}, returns {returns:.3g}; learning rate of the critic {rate:.3g}"
        yield Cause(seen, f"critic.optim.lr={rate / factor:.3g}, before any change of the policy's")
        warm = setting(self.settings, "trainer.critic_warmup", 0)
        yield Cause(f"the critic trains alone for {warm} steps", f"trainer.critic_warmup={max(10, 2 * warm)}")
        low, high = metrics.get("critic/returns/min", 0.0), metrics.get("critic/returns/max", 0.0)
        if max(abs(low), abs(high)) > 10:
            yield Cause(f"returns reach from {low:.3g} to {high:.3g}", "scale the reward to about -1 to 1")

    def concern(self, record: Mapping[str, Any]) -> float:
        pairs = zip(record["values"] or (), record["returns"] or (), strict=False)
        return max((abs(value - target) for value, target in pairs), default=0.0)


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

    def begin(self) -> None:
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

    def begin(self) -> None:
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

    def begin(self) -> None:
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

    def begin(self) -> None:
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


class _Entropy(Detector):
    """Detector that compares the entropy with the mean of the first 20 steps."""

    reads = ("actor/entropy",)
    warm_up = 20
    columns = ("entropy",)

    def begin(self) -> None:
        self._baseline, self._first_reward = Baseline(), Baseline()
        self._latest, self._reward, self._streak = window(10), Reward(40), Streak()

    def _ready(self, metrics: Metrics) -> bool:
        """Add a step; return whether the baseline is complete."""
        self._reward.add(metrics)
        if "critic/score/mean" in metrics:
            self._first_reward.add(metrics["critic/score/mean"])
        self._latest.append(metrics["actor/entropy"])
        return self._baseline.add(metrics["actor/entropy"])


class EntropyCollapse(_Entropy):
    """The entropy falls far below its start while the reward does not rise."""

    name = "entropy_collapse"
    question = "Does the entropy collapse?"
    changes = "the order above, with `clip_ratio_high=0.28` before the rate; `algorithm.filter_groups.enable`; `entropy_target`"
    fires = (
        "the mean of 10 steps is less than 0.5 (error: 0.2) of the mean of the first 20 steps (proposal; absolute floors differ by "
        "model), and the reward neither rose over 40 steps nor is near the best score"
    )
    why = "all responses to a prompt become alike: groups have equal rewards, and nothing new is tried"

    def examine(self, metrics: Metrics) -> Symptom | None:
        start = self._baseline.mean
        if not self._ready(metrics) or start <= 0:
            return None
        share = fmean(self._latest) / start
        means = list(self._reward.means)[-10:]
        learned = bool(means) and fmean(means) > self._first_reward.mean + 0.05 * (
            self._reward.highest - self._reward.lowest
        )
        gains = self._reward.rises or self._reward.solved or (learned and share >= 0.2)
        if self._streak.add(share < 0.5 and not gains) < 3:
            return None
        what = f"the entropy is {fmean(self._latest):.3g} nats, {share:.0%} of its start ({start:.3g}), and the reward is flat"
        causes = tuple(self._causes(f"the entropy fell to {share:.0%}", metrics))
        return Symptom(ERROR if share < 0.2 else WARNING, what, causes)

    def _causes(self, seen: str, metrics: Metrics) -> Iterator[Cause]:
        high = setting(self.settings, f"{ACTOR}.clip_ratio_high")
        low = setting(self.settings, f"{ACTOR}.clip_ratio", 0.2)
        for step in tuning(self.settings, seen):
            if step.fix.startswith(f"{ACTOR}.clip_ratio_high="):
                continue  # a lower clip holds unlikely tokens down even more
            if learning_rate_key(self.settings) in step.fix and (high is None or high <= low):
                yield Cause(
                    f"the upper clip ({low:g}) holds unlikely tokens down", f"{ACTOR}.clip_ratio_high=0.28"
                )  # DAPO, arXiv 2503.14476
            yield step
        equal = metrics.get("reward/zero_std_group_ratio", 0.0)
        yield Cause(
            f"{equal:.0%} of the groups have equal rewards", "algorithm.filter_groups.enable=true, or other rows"
        )
        if setting(self.settings, f"{ACTOR}.entropy_target") is None:
            target = f"{ACTOR}.entropy_target={self._baseline.mean / 2:.2g}"
            yield Cause("the loss does not hold the entropy above a target", target)

    def concern(self, record: Mapping[str, Any]) -> float:
        return -fmean(record["entropy"]) if record["entropy"] else -1e9


class EntropyRise(_Entropy):
    """The entropy grows to a multiple of its start."""

    name = "entropy_rise"
    question = "Why does the entropy rise?"
    changes = "`entropy_coeff`, `reward.overlong_buffer.enable`; then the order above"
    fires = "the mean of 10 steps exceeds 2 x the mean of the first 20 steps and 0.1 nats (proposal), and the reward does not rise"
    why = "the policy becomes random: long repetitive text follows"
    floor = 0.1

    def examine(self, metrics: Metrics) -> Symptom | None:
        start = self._baseline.mean
        if not self._ready(metrics):
            return None
        level = fmean(self._latest)
        if self._streak.add(level > max(2 * start, self.floor) and not self._reward.rises) < 3:
            return None
        cut = metrics.get("response_length/clip_ratio", 0.0)
        causes = list(tuning(self.settings, f"the entropy rose from {start:.3g} to {level:.3g} nats"))
        if cut > 0.05:  # more than 5 % of over-long samples in training (verl#2738)
            fix = "reward.overlong_buffer.enable=true, or a larger data.max_response_length"
            causes.insert(0, Cause(f"{cut:.0%} of the responses are cut and trained on", fix))
        bonus = setting(self.settings, f"{ACTOR}.entropy_coeff", 0.0)
        if bonus > 0:
            causes.insert(0, Cause(f"the loss pays for entropy with weight {bonus:g}", f"{ACTOR}.entropy_coeff=0"))
        return Symptom(WARNING, f"the entropy is {level:.3g} nats, at the start it was {start:.3g}", tuple(causes))

    def concern(self, record: Mapping[str, Any]) -> float:
        return fmean(record["entropy"]) if record["entropy"] else -1e9


class ResponseLength(Detector):
    """Responses are cut, or their length changes by half while the reward does not rise."""

    name = "response_length"
    question = "Why do responses get long, short or cut?"
    changes = (
        "`data.max_response_length`, `reward.overlong_buffer.enable`, terms of the reward, `optim.lr`, `loss_agg_mode`"
    )
    reads = ("response_length/mean", "response_length/clip_ratio")
    fires = (
        "more than 0.1 (error: 0.3) of the responses of 10 steps are cut; or after 10 steps their mean length grew or fell by half in 20 steps; the "
        "reward does not rise meanwhile (proposals)"
    )
    why = "a cut response has no answer, and a length that moves without the reward shows that the loss or the reward pays for it"
    warm_up = 10
    columns = ("response_ids",)

    def begin(self) -> None:
        self._cut, self._lengths, self._reward = window(10), window(20), Reward(20)

    def examine(self, metrics: Metrics) -> Symptom | None:
        self._reward.add(metrics)
        if self._steps > self.warm_up:  # before, the policy learns the format of an answer
            self._lengths.append(metrics["response_length/mean"])
        self._cut.append(metrics.get("response_length/clip_ratio", 0.0))
        cut, limit = fmean(self._cut), setting(self.settings, "data.max_response_length", 0)
        if self._reward.rises or self._reward.solved:
            return None
        if cut > 0.1:
            causes = (
                Cause(f"{cut:.0%} of the responses reach {limit} tokens", f"data.max_response_length={2 * limit}"),
                Cause("nothing makes the policy end in time", "reward.overlong_buffer.enable=true"),
                *self._length_causes(),
            )
            return Symptom(ERROR if cut > 0.3 else WARNING, f"{cut:.0%} of the responses of 10 steps are cut", causes)
        lengths = list(self._lengths)
        before, after = fmean(lengths[:5] or [0.0]), fmean(lengths[-5:] or [0.0])
        if len(lengths) < 20 or before <= 0 or 0.5 < after / before < 1.5:
            return None
        what = f"responses went from {before:.0f} to {after:.0f} tokens in 20 steps, and the reward is flat ({self._reward.change})"
        return Symptom(WARNING, what, tuple(self._length_causes()))

    def _length_causes(self) -> Iterator[Cause]:
        yield Cause(
            "the reward may pay for length", "hone reward test shows each term; bound it, or divide it by the length"
        )
        mode = setting(self.settings, f"{ACTOR}.loss_agg_mode", "token-mean")
        yield Cause("updates move the policy more than the reward asks", slower(self.settings))
        other = "seq-mean-token-sum-norm"  # Dr. GRPO, arXiv 2503.20783: no length bias
        if mode != other:
            yield Cause(f"the loss aggregation {mode} weighs tokens by the length", f"{ACTOR}.loss_agg_mode={other}")

    def concern(self, record: Mapping[str, Any]) -> float:
        return len(record["response_ids"] or ())
