"""Detectors of what the policy writes: entropy and length of responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hone.insight.detectors.base import ERROR, WARNING, Cause, Detector, Metrics, Settings, Symptom
from hone.insight.detectors.causes import ACTOR, learning_rate_key, setting, slower, tuning
from hone.insight.detectors.series import Baseline, Reward, Streak, fmean, window


class _Entropy(Detector):
    """Detector that compares the entropy with the mean of the first 20 steps."""

    reads = ("actor/entropy",)
    warm_up = 20
    columns = ("entropy",)

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
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
    changes = "the order above, with `clip_ratio_high=0.28` before the rate; `algorithm.filter_groups.enable`"
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

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
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
