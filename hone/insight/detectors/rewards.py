"""Detectors of rewards and of the running program: tool calls, time of a step, memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import fmean, median
from typing import Any

from hone.insight.detectors.base import (
    ACTOR,
    ERROR,
    TOO_HARD,
    WARNING,
    Cause,
    Detector,
    Metrics,
    Reward,
    Settings,
    Streak,
    Symptom,
    call_causes,
    learning_rate_key,
    setting,
    slower,
    trains_policy,
    window,
    zero_causes,
)


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

    def begin(self) -> None:
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

    def begin(self) -> None:
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

    def begin(self) -> None:
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

    def begin(self) -> None:
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


_ROLLOUT = "actor_rollout_ref.rollout"
_UNREADABLE = ("tool/malformed_rate", "tool/unknown_tool_rate", "tool/invalid_arguments_rate")


class ToolCalls(Detector):
    """Tool calls become unreadable, fail, or are given up."""

    name = "tool_calls"
    question = "Do tool calls work?"
    changes = "`multi_turn.format`, the tools, `multi_turn.tool_timeout`, `multi_turn.max_tool_response_length`, `max_parallel_calls`, `use_kl_loss`, `optim.lr`"
    reads = ("tool/calls/mean", *_UNREADABLE)
    fires = (
        "in 3 steps in a row more calls than in the best 5 steps so far are unreadable or fail, by 10 points (proposal; error: 50 points); "
        "or more than 10 % of the calls end at their time limit; or calls per episode fall to a tenth of their highest 5 steps"
    )
    why = "episodes without working calls cannot be solved, and the policy learns to do without tools"
    warm_up = 5
    columns = ("episode", "score")

    def begin(self) -> None:
        self._bad, self._calls, self._streak = window(5), window(5), Streak()
        self._fewest_bad, self._most_calls = 1.0, 0.0

    def examine(self, metrics: Metrics) -> Symptom | None:
        names = (*_UNREADABLE, "tool/error_rate", "tool/timeout_rate")
        bad, calls = sum(metrics.get(name, 0.0) for name in names), metrics.get("tool/calls/mean", 0.0)
        if any(name in metrics for name in names):
            self._bad.append(bad)
        self._calls.append(calls)
        if len(self._bad) == 5:
            self._fewest_bad = min(self._fewest_bad, fmean(self._bad))
        if len(self._calls) == 5:
            self._most_calls = max(self._most_calls, fmean(self._calls))
        worse, gone = bad - self._fewest_bad, calls < 0.1 * self._most_calls
        late = metrics.get("tool/timeout_rate", 0.0)  # never the policy's doing, so from the first step on
        if self._streak.add(worse > 0.1 or gone or late > 0.1) < 3:
            return None
        if gone:
            what = f"episodes have {calls:.3g} calls on average, they had {self._most_calls:.3g}"
        elif worse <= 0.1:
            what = f"{late:.0%} of the calls end at their time limit"
        else:
            what = f"{bad:.0%} of the calls are unreadable or fail, the best 5 steps had {self._fewest_bad:.0%}"
        return Symptom(ERROR if worse > 0.5 else WARNING, what, tuple(self._causes(metrics)))

    def _causes(self, metrics: Metrics) -> Iterator[Cause]:
        yield from call_causes(self.settings, metrics, 0.05)  # one of its two kinds has half of the 10 points
        cut = metrics.get("tool/truncated_rate", 0.0)
        if cut > 0.1:
            limit = setting(self.settings, f"{_ROLLOUT}.multi_turn.max_tool_response_length", 256)
            fix = f"{_ROLLOUT}.multi_turn.max_tool_response_length={2 * limit}"
            yield Cause(f"{cut:.0%} of the results are cut at {limit} characters", fix)
        refused = metrics.get("tool/over_limit_rate", 0.0)
        if refused > 0.1:
            calls = setting(self.settings, f"{_ROLLOUT}.multi_turn.max_parallel_calls", 4)
            fix = f"{_ROLLOUT}.multi_turn.max_parallel_calls={2 * calls}"
            yield Cause(f"{refused:.0%} of the calls exceed a limit", fix)
        if not self.settings.get(f"{ACTOR}.use_kl_loss"):
            yield Cause("no KL penalty keeps the form of calls", f"{ACTOR}.use_kl_loss=true")
        yield Cause("updates unlearn the form of calls", slower(self.settings))

    def concern(self, record: Mapping[str, Any]) -> float:
        calls = [call for turn in (record["episode"] or {}).get("turns", ()) for call in turn.get("calls", ())]
        return sum(call.get("status", "ok") != "ok" for call in calls)


class SlowSteps(Detector):
    """Steps take a multiple of their time, or the models idle."""

    name = "slow_steps"
    question = "Why is it slow?"
    changes = "`reward.num_workers`, `rollout.max_cache_tokens`, `async_training.max_staleness`, `multi_turn.max_episode_seconds`"
    reads = ("perf/throughput", "perf/driver_overhead_ratio")
    fires = (
        "the median throughput of 10 steps is below a tenth of that of steps 2 to 21 (proposal; other load slows a shared machine less); or over 10 "
        "steps scoring and the driver take more than half of the step (proposal), and a step takes more than 10 s"
    )
    why = "devices wait: the run costs a multiple of what it could (trainer.watchdog_seconds ends a run without any progress)"
    warm_up = 10
    columns = ("seconds",)

    def begin(self) -> None:
        self._start, self._latest, self._idle = list[float](), window(10), window(10)
        self._first = True

    def examine(self, metrics: Metrics) -> Symptom | None:
        speed, seconds = metrics.get("perf/throughput", 0.0), metrics.get("perf/time_per_step", 0.0)
        if self._first:  # the first step compiles and fills caches
            self._first = False
            return None
        idle = metrics.get("perf/driver_overhead_ratio", 0.0)
        if seconds > 0:
            idle += metrics.get("timing_s/reward", 0.0) / seconds
        self._idle.append(idle)
        self._latest.append(speed)
        if len(self._start) < 20:
            self._start.append(speed)
        usual, latest = median(self._start), median(self._latest)
        if len(self._start) >= 20 and latest < usual / 10:
            return Symptom(
                WARNING, f"10 steps have {latest:.3g} tokens/s, at the start {usual:.3g}", self._causes(metrics)
            )
        if len(self._idle) == 10 and fmean(self._idle) > 0.5 and seconds > 10:
            what = f"scoring and the driver take {fmean(self._idle):.0%} of 10 steps; the last took {seconds:.0f} s"
            return Symptom(WARNING, what, self._causes(metrics))
        return None

    def _causes(self, metrics: Metrics) -> tuple[Cause, ...]:
        stages = {
            name: value for name, value in metrics.items() if name.startswith("timing_s/") and name != "timing_s/step"
        }
        longest = sorted(stages, key=lambda name: -stages[name])[:3]
        shown = (
            ", ".join(f"{name.removeprefix('timing_s/')} {stages[name]:.3g} s" for name in longest)
            or "no stage is timed"
        )
        by_stage = {
            "timing_s/reward": f"reward.num_workers={self._workers(metrics)}",
            "timing_s/gen": f"{_ROLLOUT}.max_cache_tokens=null, or trainer.async_training.max_staleness=1",
        }
        first = by_stage.get(
            longest[0] if longest else "", "hone plan shows what a step should take; look for other load on the machine"
        )
        slowest = metrics.get("agent_loop/slowest/seconds", 0.0)
        tail = (
            ()
            if not slowest
            else (
                Cause(
                    f"the slowest episode took {slowest:.3g} s, {metrics.get('agent_loop/slowest/tool_calls', 0.0):.3g} s of it in tools",
                    f"{_ROLLOUT}.multi_turn.max_episode_seconds={max(1.0, slowest / 2):.0f}",
                ),
            )
        )
        return (Cause(f"the longest stages are {shown}", first), *tail)

    def _workers(self, metrics: Metrics) -> int:
        """Workers that score in the time of the rest of the step: at least twice as many as now, at most one a response."""
        workers, scoring = setting(self.settings, "reward.num_workers", 2), metrics.get("timing_s/reward", 0.0)
        rest = max(metrics.get("perf/time_per_step", 0.0) - scoring, 0.01 * scoring)
        responses = setting(self.settings, "data.train_batch_size", 0) * setting(self.settings, f"{_ROLLOUT}.n", 1)
        needed = math.ceil(workers * scoring / rest) if rest > 0 else 0
        return max(2 * workers, min(needed, responses))

    def concern(self, record: Mapping[str, Any]) -> float:
        return record["seconds"] or 0.0


_CHILDREN = "perf/cpu_memory_used_gb/children"


class MemoryGrowth(Detector):
    """Memory grows step after step."""

    name = "memory_growth"
    question = "Does memory creep?"
    changes = "`ppo_max_token_len_per_gpu` (device), `reward.memory_mb`, verifiers and callbacks that keep objects"
    reads = ("perf/cpu_memory_used_gb", "perf/max_memory_allocated_gb")
    fires = "after 30 steps memory grows in each quarter of 20 steps, by more than 0.5 % a step in all (proposal) and 0.5 GB"
    why = "the run ends out of memory, at a step that the growth predicts"
    warm_up = 30
    columns = ("response_ids",)
    size = 20

    def begin(self) -> None:
        self._past = {name: window(self.size) for name in self.reads}
        self._children = window(self.size)

    def examine(self, metrics: Metrics) -> Symptom | None:
        self._children.append(metrics.get(_CHILDREN, 0.0))
        for name, past in self._past.items():
            if name not in metrics:
                continue
            past.append(metrics[name])
            if len(past) < self.size:
                continue
            values = list(past)
            quarters = [fmean(values[at : at + 5]) for at in range(0, self.size, 5)]
            grows = all(after > before for before, after in zip(quarters, quarters[1:], strict=False))
            slope = (values[-1] - values[0]) / (self.size - 1)
            if grows and slope > 0.005 * values[0] and values[-1] - values[0] > 0.5:
                what = f"{name} grew from {values[0]:.3g} to {values[-1]:.3g} GB in {self.size} steps, {slope:.2g} GB a step"
                return Symptom(WARNING, what, tuple(self._causes(name, metrics, values[-1] - values[0])))
        return None

    def _causes(self, name: str, metrics: Metrics, growth: float) -> Iterator[Cause]:
        policy = trains_policy(self.settings)
        if name == "perf/max_memory_allocated_gb":
            key = f"{ACTOR}.ppo_max_token_len_per_gpu" if policy else "data.max_token_len_per_gpu"
            tokens = setting(self.settings, key, 16384)
            seen = f"micro-batches of up to {tokens} tokens"
            if policy:
                seen += f"; the longest response has {metrics.get('response_length/max', 0.0):.0f}"
            yield Cause(seen, f"{key}={tokens // 2}")
        else:
            first, last = self._children[0], self._children[-1]
            if policy and last - first > growth / 2:
                # the level before the window: workers are restarted before they grow for another one
                workers = setting(self.settings, "reward.num_workers", 2)
                workers += bool(
                    setting(self.settings, "reward.doctor.enable", True)
                )  # probes have a worker of their own
                limit = 1024 * (first + 0.125) / workers
                yield Cause(
                    f"processes that the run started, such as those of a verifier, grew from {first:.3g} to {last:.3g} GB",
                    f"reward.memory_mb={max(64, limit):.0f} restarts workers that hold more",
                )
            else:
                what = "a callback, tool or asynchronous verifier" if policy else "a callback"
                yield Cause(
                    f"{what} keeps objects in the run's own process",
                    "train some steps without it, and compare the memory",
                )
        yield Cause(
            "the state is saved: a restart frees memory", "run the command again, it resumes; trainer.save_freq=20"
        )

    def concern(self, record: Mapping[str, Any]) -> float:
        return len(record["response_ids"] or ())
