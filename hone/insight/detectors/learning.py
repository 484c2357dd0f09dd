"""Detectors of gradients, of the critic, and of the gap between engine and trainer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from hone.insight.detectors.base import ERROR, WARNING, Cause, Detector, Metrics, Settings, Symptom
from hone.insight.detectors.causes import ACTOR, learning_rate_key, setting, slower, trains_policy, tuning
from hone.insight.detectors.series import Baseline, Streak, fmean, median, pstdev, window

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

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
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

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
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

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
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

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
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
