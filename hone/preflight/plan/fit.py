"""What fits: the largest micro-batch, and the first keys to change when nothing does, in the order in which one tunes.

micro-batch -> gradient checkpointing -> activation offload -> key-value cache (an engine's share) -> optimizer offload -> parameter offload -> LoRA
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig
from hone.preflight.evidence import model_block
from hone.preflight.plan.devices import Device
from hone.preflight.plan.generation import cache_shape
from hone.preflight.plan.memory import Memory, memory_of
from hone.preflight.plan.model import ModelShape
from hone.preflight.plan.parts import CACHE, ENGINE
from hone.preflight.plan.serving import SHARE_STEP, least_share
from hone.preflight.plan.work import CPU_TOKENS, Work, work_of

TIGHT = 0.92
"""Share of the memory that a plan may fill: the rest is what holes between blocks take."""
_ROUNDING = 256


@dataclass(frozen=True)
class Knob:
    """A key to change, and what it brings.

    Attributes:
        setting: ``key=value``, several with a space between them.
        saved: bytes less at the fullest moment.
        peak: bytes at the fullest moment, after this and all knobs before it.
    """

    setting: str
    saved: float
    peak: float


@dataclass(frozen=True)
class Fitting:
    """A run that is fitted to a device.

    Attributes:
        config: with the knobs turned.
        work: its numbers.
        memories: of each pool's processes.
        knobs: that were turned, in order.
        fits: whether all processes fit now.
        largest_budget: the most tokens of a micro-batch that fit with these settings, None where not even one sequence does.
    """

    config: AnyConfig
    work: Work
    memories: tuple[Memory, ...]
    knobs: tuple[Knob, ...]
    fits: bool
    largest_budget: int | None

    @property
    def fullest(self) -> Memory:
        """The process that needs most."""
        return max(self.memories, key=lambda memory: memory.peak.total)


@dataclass(frozen=True)
class Fitter:
    """Computes the memory of variants of a run on one kind of device.

    Attributes:
        device: every process has one.
        shape: of the trained model.
        others: shapes of other models of the run, by role.
    """

    device: Device
    shape: ModelShape
    others: Mapping[str, ModelShape]

    def work(self, config: AnyConfig) -> Work:
        """Its numbers."""
        return work_of(config, self.shape, on_cpu=self.device.on_cpu, others=self.others)

    def memories(self, work: Work) -> tuple[Memory, ...]:
        """Of one process of each pool."""
        device = self.device
        return tuple(memory_of(work, process, device.overhead, device.memory) for process in work.processes)

    def peak(self, config: AnyConfig) -> float:
        """Bytes of the fullest process."""
        return max(memory.peak.total for memory in self.memories(self.work(config)))

    @property
    def limit(self) -> float:
        """Bytes that may be filled."""
        return TIGHT * self.device.memory

    def fit(self, config: AnyConfig) -> Fitting:
        """Turn knobs, those that bring something, until the run fits or there are none left; then leave out again, from the
        last on, those without which it fits too.
        """
        turned, knobs = self._turned(config, LADDER)
        if self.peak(turned) <= self.limit:
            turns = [turn for turn, _ in knobs]
            for turn in reversed(list(turns)):
                without = [kept for kept in turns if kept is not turn]
                if self.peak(self._turned(config, without)[0]) <= self.limit:
                    turns = without
            turned, knobs = self._turned(config, turns)
        return self._fitting(turned, knobs)

    def fit_with_offloading(self, config: AnyConfig) -> Fitting:
        """The same with optimizer and parameters on the host before generation gets fewer sequences at once: slower updates, and
        where responses are long a faster step.
        """
        return self._fitting(*self._turned(config, CACHE_LAST))

    def _fitting(self, config: AnyConfig, knobs: list[tuple[Turn, Knob]]) -> Fitting:
        work, fits = self.work(config), self.peak(config) <= self.limit
        turned = tuple(knob for _, knob in knobs)
        return Fitting(config, work, self.memories(work), turned, fits, self.largest_budget(config))

    def _turned(self, config: AnyConfig, turns: Sequence[Turn]) -> tuple[AnyConfig, list[tuple[Turn, Knob]]]:
        """A copy of the configuration after as many of the turns as it takes, and what each of them brought."""
        config, knobs = copy.deepcopy(config), []
        peak = self.peak(config)
        for turn in turns:
            if peak <= self.limit:
                break
            changed = copy.deepcopy(config)
            settings = turn(changed, self)
            after = self.peak(changed) if settings else peak
            if after < peak:
                knobs.append((turn, Knob(" ".join(settings), peak - after, after)))
                config, peak = changed, after
        return config, knobs

    def largest_budget(self, config: AnyConfig) -> int | None:
        """The most tokens of a micro-batch that fit, with all other keys as they are; no more than a mini-batch has."""
        changed = copy.deepcopy(config)
        least, most = budget_bounds(self.work(config))

        def fits(budget: int) -> bool:
            set_key(changed, budget_key(config), budget)
            return self.peak(changed) <= self.limit

        if not fits(least):
            return None
        if fits(most):
            return most
        low, high = least, most
        while high - low > _ROUNDING:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return max(least, low // _ROUNDING * _ROUNDING)


def budget_bounds(work: Work) -> tuple[int, int]:
    """The least budget that takes the longest sequence, and the most that a rank's mini-batch can fill."""
    longest = work.prompt + work.response
    whole = work.micro_batch(work.actor, work.main, budget=2**60).tokens
    return longest, max(longest, min(whole, CPU_TOKENS) if work.on_cpu else whole)


def budget_key(config: AnyConfig) -> str:
    """The key of the token budget."""
    if isinstance(config, RLConfig):
        return "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    return "data.max_token_len_per_gpu"


def set_key(config: Any, key: str, value: Any) -> str:
    """Set a dotted key and return the override that does the same."""
    *blocks, last = key.split(".")
    for block in blocks:
        config = getattr(config, block)
    setattr(config, last, value)
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


# the ladder --------------------------------------------------------------------------------------------------------------


def _smaller_micro_batch(config: AnyConfig, fitter: Fitter) -> Iterator[str]:
    budget = fitter.largest_budget(config) or budget_bounds(fitter.work(config))[0]
    if budget < fitter.work(config).actor.budget:
        yield set_key(config, budget_key(config), budget)


def _recompute(config: AnyConfig, fitter: Fitter) -> Iterator[str]:
    path, block = model_block(config)
    if not block.enable_gradient_checkpointing:
        yield set_key(config, f"{path}.enable_gradient_checkpointing", True)
        if isinstance(config, RLConfig) and fitter.work(config).critic is not None:
            yield set_key(config, "critic.model.enable_gradient_checkpointing", True)
        yield from _smaller_micro_batch(config, fitter)


def _activations_on_host(config: AnyConfig, fitter: Fitter) -> Iterator[str]:
    path, block = model_block(config)
    if not fitter.device.on_cpu and not block.enable_activation_offload:
        yield set_key(config, f"{path}.enable_activation_offload", True)


def _smaller_cache(config: AnyConfig, fitter: Fitter) -> Iterator[str]:
    """So few sequences at once that the fullest process fits, one at least."""
    if not isinstance(config, RLConfig):
        return
    work = fitter.work(config)
    memories = [memory for memory in fitter.memories(work) if memory.peak.size(CACHE)]
    if not memories:
        return
    fullest = max(memories, key=lambda memory: memory.peak.total)
    present = cache_shape(work, fullest.process).rows
    over, cache = fullest.peak.total - fitter.limit, fullest.peak.size(CACHE)
    rows = int(present * max(0.0, 1 - over / cache)) if over > 0 else present
    rows = max(min(8, present), rows // 8 * 8)
    if rows < present:
        yield set_key(config, "actor_rollout_ref.rollout.max_num_seqs", rows)


def _engine_share(config: AnyConfig, fitter: Fitter) -> Iterator[str]:
    """The share of a GPU that leaves room for training, or that the engine needs to start."""
    work = fitter.work(config)
    if (
        not isinstance(config, RLConfig)
        or not work.served
        or work.on_cpu
        or config.actor_rollout_ref.rollout.name == "native"
    ):
        return
    fullest = max(fitter.memories(work), key=lambda memory: memory.peak.total)
    least = least_share(work, fitter.device.memory, fitter.device.overhead)
    present = config.actor_rollout_ref.rollout.gpu_memory_utilization
    if not fullest.peak.size(ENGINE) or least > 1:
        return
    over = (
        (fullest.peak.total - fitter.limit)
        / fitter.device.memory
        / (config.actor_rollout_ref.rollout.num_replicas or 1)
    )
    wanted = round(max(least, math.floor((present - over) / SHARE_STEP) * SHARE_STEP), 2)
    if wanted != present:
        yield set_key(config, "actor_rollout_ref.rollout.gpu_memory_utilization", wanted)


def _offload(name: str) -> Callable[[AnyConfig, Fitter], Iterator[str]]:
    def turn(config: AnyConfig, fitter: Fitter) -> Iterator[str]:
        if isinstance(config, RLConfig) and not fitter.device.on_cpu and fitter.work(config).main.divided:
            yield set_key(config, f"actor_rollout_ref.actor.fsdp_config.{name}", True)

    return turn


def _adapters(config: AnyConfig, fitter: Fitter) -> Iterator[str]:
    path, block = model_block(config)
    if not fitter.work(config).adapters and block.lora_rank == 0:
        yield set_key(config, f"{path}.lora_rank", 32)


Turn = Callable[[AnyConfig, Fitter], "list[str]"]


def _named(turn: Callable[[AnyConfig, Fitter], Iterator[str]]) -> Turn:
    return lambda config, fitter: list(turn(config, fitter))


_FIRST = (_named(_smaller_micro_batch), _named(_recompute), _named(_activations_on_host))
_OFFLOADS = (_named(_offload("optimizer_offload")), _named(_offload("param_offload")))
LADDER: tuple[Turn, ...] = (
    *_FIRST,
    _named(_smaller_cache),
    _named(_engine_share),
    *_OFFLOADS,
    _named(_smaller_cache),  # generation may be the fullest phase now
    _named(_engine_share),
    _named(_adapters),
)
"""The knobs in the order in which one tunes."""
CACHE_LAST: tuple[Turn, ...] = (
    *_FIRST,
    *_OFFLOADS,
    _named(_smaller_cache),
    _named(_engine_share),
    _named(_adapters),
)
"""Offloading before the key-value cache."""
