"""Detectors of tool calls, time and memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from hone.insight.detectors.base import ERROR, WARNING, Cause, Detector, Metrics, Settings, Symptom
from hone.insight.detectors.causes import ACTOR, call_causes, setting, slower, trains_policy
from hone.insight.detectors.series import Streak, fmean, median, window

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
        "or calls per episode fall to a tenth of their highest 5 steps"
    )
    why = "episodes without working calls cannot be solved, and the policy learns to do without tools"
    warm_up = 5
    columns = ("episode", "score")

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
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
        if self._streak.add(worse > 0.1 or gone) < 3:
            return None
        if gone:
            what = f"episodes have {calls:.3g} calls on average, they had {self._most_calls:.3g}"
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

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
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

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
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
