"""The largest micro-batch that fits, and the first keys to change when a run does not fit, in the order of tuning.

bfloat16 -> micro-batch -> gradient checkpointing -> activation offload -> KV cache or an engine's share -> optimizer offload ->
parameter offload -> optimizer state in 8 bits -> LoRA -> a base in 4 bits
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.config.dtypes import dtype_keys
from hone.config.limits import micro_batch_tokens
from hone.config.model import OptimConfig
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig, model_block, parallel_block
from hone.preflight.plan.devices import Device
from hone.preflight.plan.memory import (
    CACHE,
    ENGINE,
    SHARE_STEP,
    Memory,
    cache_shape,
    least_share,
    least_share_for_pages,
    memory_of,
    uses_pages,
)
from hone.preflight.plan.model import ModelShape
from hone.preflight.plan.work import Work, work_of

TIGHT = 0.92  # share of the memory that a plan may fill: holes between blocks take the rest
_ROUNDING = 256
_ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Knob:
    """A setting to change, the bytes that it saves at the fullest moment, and those that are left there."""

    setting: str
    saved: float
    peak: float


@dataclass(frozen=True)
class Fitting:
    """A run that is fitted to a device by turning knobs."""

    config: AnyConfig
    work: Work
    memories: tuple[Memory, ...]
    knobs: tuple[Knob, ...]
    fits: bool
    largest_budget: int | None  # most tokens of a micro-batch that fit, None where not even one sequence does
    faster: str | None = None  # a setting that saves time and fits too

    @property
    def fullest(self) -> Memory:
        return max(self.memories, key=lambda memory: memory.peak.total)


@dataclass(frozen=True)
class Fitter:
    """Computes the memory of variants of a run on one kind of device; ``others`` are the other models of the run, by role."""

    device: Device
    shape: ModelShape
    others: Mapping[str, ModelShape]
    activation_scale: float = 1.0

    def work(self, config: AnyConfig) -> Work:
        kind = {"on_cpu": self.device.on_cpu, "bfloat16": self.device.computes_bfloat16}
        work = work_of(config, self.shape, **kind, others=self.others)
        return dataclasses.replace(work, activation_scale=self.activation_scale)

    def memories(self, work: Work) -> tuple[Memory, ...]:
        return tuple(memory_of(work, pool, self.device.overhead, self.device.memory) for pool in work.pools)

    def fullest(self, config: AnyConfig) -> Memory:
        return max(self.memories(self.work(config)), key=lambda memory: memory.peak.total)

    def peak(self, config: AnyConfig) -> float:
        return self.fullest(config).peak.total

    @property
    def limit(self) -> float:
        return TIGHT * self.device.memory

    def fit(self, config: AnyConfig) -> Fitting:
        """Turn knobs until the run fits or none is left; then leave out, from the last on, those without which it fits too."""
        turned, knobs = self._turned(config, LADDER)
        if self.peak(turned) <= self.limit:
            turns = [turn for turn, _ in knobs]
            for index in reversed(range(len(turns))):
                without = turns[:index] + turns[index + 1 :]
                if self.peak(self._turned(config, without)[0]) <= self.limit:
                    turns = without
            turned, knobs = self._turned(config, turns)
        return self._fitting(turned, knobs)

    def fit_with_offloading(self, config: AnyConfig) -> Fitting:
        """Do the same with optimizer and parameters on the host before the KV cache shrinks.

        Updates are slower then, and where responses are long a step is faster.
        """
        return self._fitting(*self._turned(config, _OFFLOADING_FIRST))

    def _fitting(self, config: AnyConfig, knobs: list[tuple[Turn, Knob]]) -> Fitting:
        work, turned = self.work(config), tuple(knob for _, knob in knobs)
        fits = self.peak(config) <= self.limit
        faster = self._faster(config) if fits else None
        return Fitting(config, work, self.memories(work), turned, fits, self.largest_budget(config), faster)

    def _faster(self, config: AnyConfig) -> str | None:
        """Return the setting that keeps attention under gradient checkpointing, if it fits."""
        path, block = model_block(config)
        recomputes = block.enable_gradient_checkpointing and block.gradient_checkpointing_keeps == "nothing"
        if self.device.on_cpu or not recomputes:
            return None
        changed = copy.deepcopy(config)
        setting = set_key(changed, f"{path}.gradient_checkpointing_keeps", "attention")
        return setting if self.peak(changed) <= self.limit else None

    def _turned(self, config: AnyConfig, turns: Sequence[Turn]) -> tuple[AnyConfig, list[tuple[Turn, Knob]]]:
        """Return a copy of the configuration after as many of the turns as needed, and what each of them saved."""
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
        """Return the most tokens of a micro-batch that fit, other keys unchanged; no more than a mini-batch has."""
        changed = copy.deepcopy(config)
        low, high = self.budget_bounds(config)

        def fits(budget: int) -> bool:
            set_key(changed, budget_key(config), budget)
            return self.peak(changed) <= self.limit

        if not fits(low) or fits(high):
            return high if fits(low) else None
        least = low
        while high - low > _ROUNDING:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return max(least, low // _ROUNDING * _ROUNDING)

    def budget_bounds(self, config: AnyConfig) -> tuple[int, int]:
        """Return the tokens of the longest sequence, and the most that a rank's mini-batch can fill."""
        work = self.work(config)
        longest, whole = work.prompt + work.response, work.micro_batch(work.actor, work.main, 2**60).tokens
        return longest, max(longest, micro_batch_tokens(whole, on_cpu=work.on_cpu))


def budget_key(config: AnyConfig) -> str:
    rl = isinstance(config, RLConfig)
    return "actor_rollout_ref.actor.ppo_max_token_len_per_gpu" if rl else "data.max_token_len_per_gpu"


def set_key(config: Any, key: str, value: Any) -> str:
    """Set a dotted key and return the override that does the same."""
    *blocks, last = key.split(".")
    for block in blocks:
        config = getattr(config, block)
    setattr(config, last, value)
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


# the knobs: each changes the configuration and returns the overrides, none where it does not apply -----------------------

Turn = Callable[[AnyConfig, Fitter], list[str]]


def _bfloat16(config: AnyConfig, fitter: Fitter) -> list[str]:
    """Compute in bfloat16 on a GPU that is faster in it: activations, KV cache and an engine's weights take half."""
    key = dtype_keys(config)[0].key
    applies = fitter.device.computes_bfloat16 and not fitter.work(config).actor.bf16
    return [set_key(config, key, "bfloat16")] if applies else []


def _smaller_micro_batch(config: AnyConfig, fitter: Fitter) -> list[str]:
    budget = fitter.largest_budget(config) or fitter.budget_bounds(config)[0]
    smaller = budget < fitter.work(config).actor.max_tokens
    return [set_key(config, budget_key(config), budget)] if smaller else []


def _checkpointing(config: AnyConfig, fitter: Fitter) -> list[str]:
    path, block = model_block(config)
    if block.enable_gradient_checkpointing:
        return []
    settings = [set_key(config, f"{path}.enable_gradient_checkpointing", True)]
    if fitter.work(config).critic is not None:
        settings.append(set_key(config, "critic.model.enable_gradient_checkpointing", True))
    return settings + _smaller_micro_batch(config, fitter)


def _activation_offload(config: AnyConfig, fitter: Fitter) -> list[str]:
    path, block = model_block(config)
    applies = not fitter.device.on_cpu and not block.enable_activation_offload
    return [set_key(config, f"{path}.enable_activation_offload", True)] if applies else []


def _smaller_cache(config: AnyConfig, fitter: Fitter) -> list[str]:
    """Decode as many sequences at once as the fullest process with a KV cache can hold, one at least."""
    work = fitter.work(config)
    memories = [m for m in fitter.memories(work) if m.peak.size(CACHE) and not uses_pages(work, m.pool)]
    if not memories:
        return []
    fullest = max(memories, key=lambda memory: memory.peak.total)
    present, excess = cache_shape(work, fullest.pool).rows, fullest.peak.total - fitter.limit
    rows = int(present * min(1.0, max(0.0, 1 - excess / fullest.peak.size(CACHE))))
    rows = max(min(8, present), rows // 8 * 8)
    return [set_key(config, f"{_ROLLOUT}.max_num_seqs", rows)] if rows < present else []


def _engine_share(config: AnyConfig, fitter: Fitter) -> list[str]:
    """Change the share of a GPU to what training leaves, or to what the engine needs to start."""
    work, device, fullest = fitter.work(config), fitter.device, fitter.fullest(config)
    rollout = work.rollout
    pages = uses_pages(work, fullest.pool)
    if rollout is None or work.on_cpu or not fullest.peak.size(CACHE if pages else ENGINE):
        return []
    if rollout.name == "native" and not pages:
        return []
    least = least_share_for_pages(work, device.memory) if pages else least_share(work, device.memory, device.overhead)
    excess = (fullest.peak.total - fitter.limit) / device.memory / (rollout.num_replicas or 1)
    present = rollout.gpu_memory_utilization
    share = round(max(least, math.floor((present - excess) / SHARE_STEP) * SHARE_STEP), 2)
    return [set_key(config, f"{_ROLLOUT}.gpu_memory_utilization", share)] if least <= 1 and share != present else []


def _offload(name: str) -> Turn:
    def turn(config: AnyConfig, fitter: Fitter) -> list[str]:
        applies = not fitter.device.on_cpu and fitter.work(config).main.divided
        key = parallel_block(config).key(f"fsdp_config.{name}")
        return [set_key(config, key, True)] if applies else []

    return turn


def _eight_bits(config: AnyConfig, fitter: Fitter) -> list[str]:
    """Keep AdamW's moments in 8 bits, on a GPU that has the whole model."""
    work = fitter.work(config)
    optims = {"optim": config.optim} if not isinstance(config, RLConfig) else _optimizers(config, work)
    large = [path for path, optim in optims.items() if optim.optimizer == "AdamW"]
    if work.on_cpu or work.main.divided or work.actor.lora_rank:
        return []
    return [set_key(config, f"{path}.optimizer", "AdamW8bit") for path in large]


def _optimizers(config: RLConfig, work: Work) -> dict[str, OptimConfig]:
    critic = {"critic.optim": config.critic.optim} if work.critic is not None else {}
    return {"actor_rollout_ref.actor.optim": config.actor_rollout_ref.actor.optim, **critic}


def _adapters(config: AnyConfig, fitter: Fitter) -> list[str]:
    return [] if fitter.work(config).actor.lora_rank else [set_key(config, f"{model_block(config)[0]}.lora_rank", 32)]


def _four_bits(config: AnyConfig, fitter: Fitter) -> list[str]:
    """Hold the frozen base in 4 bits, where one process has all of it and the engine reads it there."""
    work = fitter.work(config)
    apart = work.main.divided or work.served or (work.rollout is not None and work.rollout.enable_resource_pool)
    if apart or not work.actor.lora_rank or work.actor.packed or work.actor.shape.experts:
        return []
    return [set_key(config, f"{model_block(config)[0]}.quantization", "nf4")]


_UPDATE = (_bfloat16, _smaller_micro_batch, _checkpointing, _activation_offload)
_OFFLOADS = (_offload("optimizer_offload"), _offload("param_offload"))
_GENERATION = (_smaller_cache, _engine_share)
LADDER: tuple[Turn, ...] = (*_UPDATE, *_GENERATION, *_OFFLOADS, *_GENERATION, _eight_bits, _adapters, _four_bits)
"""The knobs in the order of tuning; those of generation again after offloading, which changes the fullest phase."""
_OFFLOADING_FIRST: tuple[Turn, ...] = (*_UPDATE, *_OFFLOADS, *_GENERATION, _eight_bits, _adapters, _four_bits)
