"""How long a step takes, stage by stage: products at the rate that the device reaches, memory at its bandwidth, messages at the
speed of the links. Every sequence is taken to be as long as it may be, so this is an upper estimate of the work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hone.preflight.plan.activations import forward_moment, layer_kept
from hone.preflight.plan.devices import Device
from hone.preflight.plan.generation import cache_shape
from hone.preflight.plan.memory import state_bytes, trained_parameters
from hone.preflight.plan.serving import served_rows
from hone.preflight.plan.work import Process, Trained, Work

_OPERATIONS = 28
"""Operations of a layer in a decode step."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of each stage; those of one step add up, as its stages follow one another."""

    generation: float
    log_probs: float
    update: float
    messages: float

    @property
    def total(self) -> float:
        """Seconds."""
        return self.generation + self.log_probs + self.update + self.messages

    def as_json(self) -> dict[str, float]:
        """Seconds by stage."""
        return {name: round(value, 4) for name, value in {**vars(self), "total": self.total}.items()}


def step_time(work: Work, device: Device) -> StepTime:
    """Estimate a step: ``work.batch`` prompts are answered, scored and learnt from (or learnt from only)."""
    main = work.main
    update = _update(work, work.actor, main, device)
    messages = _messages(work, work.actor, main, device)
    scoring = _forward(work, work.actor, main, device) if work.old_log_probs else 0.0
    if work.reference:
        scoring += _forward(work, work.actor, work.process_of("reference") or main, device)
    if work.critic is not None:
        process = work.process_of("critic") or main
        scoring += _forward(work, work.critic, process, device)
        update += _update(work, work.critic, process, device)
        messages += _messages(work, work.critic, process, device)
    generation = 0.0
    if work.rollout is not None:
        engines = work.process_of("rollout") or main
        generation = _generation(work, engines, device)
        messages += _publication(work, engines, device)
    return StepTime(generation, scoring, update, messages)


def _rate(narrow: bool, device: Device) -> float:
    return device.narrow_rate if narrow else device.wide_rate


def _rows(work: Work, process: Process) -> int:
    """Sequences of a step that one data-parallel rank has."""
    return math.ceil(work.batch * work.samples / process.layout.dp_size)


def _operations(work: Work, trained: Trained, rows: int) -> float:
    """Operations of a forward pass over ``rows`` sequences of full length that share their prompts."""
    shape, longest = trained.shape, work.prompt + work.response
    tokens = rows * work.response + math.ceil(rows / work.samples) * work.prompt
    matrices = shape.products * tokens + (0 if trained.value else shape.embedding * rows * work.response)
    pairs = rows * (longest**2 - work.prompt**2 * (1 - 1 / work.samples)) / 2
    return 2 * matrices + 4 * pairs * shape.queries * shape.layers


def _forward(work: Work, trained: Trained, process: Process, device: Device) -> float:
    how, rows = work.computation(trained, process), _rows(work, process)
    ranks = process.layout.ranks_a_shard
    tokens = rows * work.response + math.ceil(rows / work.samples) * work.prompt
    moved = tokens * forward_moment(trained.shape, how) * trained.shape.layers / process.layout.sequence
    return _operations(work, trained, rows) / ranks / _rate(trained.narrow, device) + moved / device.bandwidth


def _update(work: Work, trained: Trained, process: Process, device: Device) -> float:
    """Forward and backward (twice a forward pass; once more where it is recomputed) for every epoch, and the optimizer's steps."""
    how, rows = work.computation(trained, process), _rows(work, process)
    passes = 4 if trained.recompute else 3
    if how.adapter_rank:
        passes -= 1  # no gradients of the frozen matrices
    tokens = rows * work.response + math.ceil(rows / work.samples) * work.prompt
    inside = layer_kept(trained.shape, how).a_token if not trained.recompute else forward_moment(trained.shape, how)
    moved = 3 * tokens * trained.shape.layers * inside / process.layout.sequence
    computed = passes * _operations(work, trained, rows) / process.layout.ranks_a_shard / _rate(trained.narrow, device)
    shards = process.layout.dp_shard * process.layout.ranks_a_shard if process.divided else 1
    state = trained_parameters(work, trained) / shards * 2 * (8 + state_bytes(trained.optim))
    steps = max(1, work.batch // trained.mini) * trained.epochs
    seconds = trained.epochs * (computed + moved / device.bandwidth) + steps * state / device.bandwidth
    return seconds + (_offloading(work, trained, process, tokens, steps) / device.host if device.host else 0.0)


def _offloading(work: Work, trained: Trained, process: Process, tokens: int, steps: int) -> float:
    """Bytes that go to the host's memory and come back in the updates of a step."""
    how, shape, fsdp = work.computation(trained, process), trained.shape, work.fsdp
    moved = 0.0
    if how.on_host:
        moved += 2 * trained.epochs * tokens * shape.layers * layer_kept(shape, how).a_token / process.layout.sequence
    if process.divided:
        shards = process.layout.dp_shard * process.layout.ranks_a_shard
        count = trained_parameters(work, trained) / shards
        if fsdp.param_offload or fsdp.offload_policy:
            moved += 2 * (steps + 1) * shape.parameters / shards * 4
        if fsdp.optimizer_offload or fsdp.offload_policy:
            moved += 2 * steps * count * state_bytes(trained.optim)
    return moved


def _generation(work: Work, process: Process, device: Device) -> float:
    """Decode steps bound by products, by reading weights and cache, or by the number of operations; and the prompts."""
    shape, narrow = work.actor.shape, work.rollout_narrow
    size, rate = (2 if narrow else 4), _rate(narrow, device)
    sequences = math.ceil(work.batch * work.samples / process.world)
    rows, tensor = cache_shape(work, process).rows, 1
    if work.served and work.rollout is not None:
        tensor = 1 if work.on_cpu else work.rollout.tensor_model_parallel_size
        rows = (work.rollout.num_replicas or 1) * served_rows(work, device.memory, device.overhead)
    rows = min(rows, sequences)
    weights = (shape.products + shape.embedding) * size
    tokens = rows * work.response / 2 + math.ceil(rows / work.samples) * work.prompt
    read = tokens * shape.layers * 2 * shape.keys * size
    drawing = rows * shape.vocabulary * 40
    computed = 2 * rows * (shape.products + shape.embedding) / rate
    a_step = max(computed, (weights + read) / device.bandwidth) / tensor + drawing / device.bandwidth
    a_step += shape.layers * _OPERATIONS * device.launch
    prompts = 2 * shape.products * math.ceil(sequences / work.samples) * work.prompt / rate
    return math.ceil(sequences / rows) * work.response * a_step + prompts


def _messages(work: Work, trained: Trained, process: Process, device: Device) -> float:
    """What the ranks of a divided model send: parameters and gradients (FSDP), activations (tensor and sequence parallel)."""
    if not process.divided:
        return 0.0
    layout, shape, size = process.layout, trained.shape, 2 if trained.narrow else 4
    micro = work.micro_batch(trained, process)
    mini_batches = max(1, work.batch // trained.mini) * trained.epochs
    shard = layout.dp_shard * layout.sequence
    within = shard * layout.tensor <= process.per_node
    speed = device.link if within else device.network
    whole = shape.parameters / layout.tensor * (shard - 1) / shard
    gathers = micro.count * mini_batches * (2 if work.fsdp.reshard_after_forward else 1) + micro.count
    sent = whole * (gathers * size + micro.count * mini_batches * 4) / speed
    if layout.dp_replicate > 1:
        sent += shape.parameters / layout.tensor / shard * 4 * 2 * mini_batches / device.network
    tokens = micro.tokens * micro.count * mini_batches
    if layout.tensor > 1:
        sent += 6 * shape.layers * tokens * shape.hidden * size * 2 * (layout.tensor - 1) / layout.tensor / device.link
    if layout.sequence > 1:
        heads = (2 * shape.queries + 2 * shape.keys) * 4 / layout.tensor / layout.sequence
        sent += 3 * shape.layers * tokens * heads / device.link
    return sent


def _publication(work: Work, engines: Process, device: Device) -> float:
    """New weights to engines that hold copies."""
    if "actor" in engines.roles and not engines.divided and not work.served:
        return 0.0
    apart = "actor" not in engines.roles
    speed = device.network if apart and work.main.nodes + engines.nodes > 2 else device.link
    return work.actor.shape.parameters * 4 / speed
