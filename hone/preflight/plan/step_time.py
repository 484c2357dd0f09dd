"""Seconds of a step by stage, in closed form: matmuls at the rate that the device reaches, memory and messages at their bandwidth.

Every sequence has its greatest length, so this is an upper estimate. It serves to compare placements.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hone.config.pools import Pool, engine_devices
from hone.preflight.plan.devices import Device
from hone.preflight.plan.memory import cache_shape, cache_space, served_rows, shards_of, state_bytes, token_bytes
from hone.preflight.plan.work import TrainedModel, Work

_OPERATIONS = 28  # operations of a layer in a decode step on a CPU
_GRAPH_SECONDS = 24e-6  # least seconds of a layer in a decode step on a GPU: 12 kernels of a CUDA graph
_LOGIT_BYTES = 40  # bytes that sampling reads and writes per logit


class StepTime(NamedTuple):
    """Seconds of each stage; the stages of a step follow one another."""

    generation: float
    log_probs: float
    update: float
    messages: float

    @property
    def total(self) -> float:
        return sum(self)

    def as_json(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in {**self._asdict(), "total": self.total}.items()}


def step_time(work: Work, device: Device) -> StepTime:
    """Estimate a step: the prompts of a batch are answered and scored, and the models updated."""
    generation = log_probs = update = messages = 0.0
    for role, model in (("actor", work.actor), ("critic", work.critic)):
        if model is not None:
            pool = work.pool_of(role)
            update += _update(work, model, pool, device)
            messages += _messages(work, model, pool, device)
    scored = {"critic": work.critic, "actor": work.actor if work.old_log_probs else None}
    for role, model in {**scored, "reference": work.actor if work.reference else None}.items():
        log_probs += _forward(work, model, work.pool_of(role), device) if model is not None else 0.0
    log_probs += sum(_forward(work, teacher, work.pool_of("teacher"), device) for teacher in work.teachers)
    if work.rollout is not None:
        engines = work.pool_of("rollout")
        generation = _generation(work, engines, device)
        if work.served or engines.divided or engines is not work.main:  # engines with a copy of the weights
            other_node = engines is not work.main and work.main.nodes + engines.nodes > 2
            size = 2 if work.rollout_bf16 else 4
            messages += size * work.actor.shape.parameters / (device.network if other_node else device.link)
    return StepTime(generation, log_probs, update, messages)


def _tokens(work: Work, rows: int) -> int:
    return rows * work.response + math.ceil(rows / work.samples) * work.prompt


def _rank_rows(work: Work, pool: Pool) -> int:
    return math.ceil(work.batch * work.samples / pool.layout.dp_size)


def _computing(work: Work, model: TrainedModel, pool: Pool, device: Device) -> float:
    """Return the seconds of one rank's matmuls and attention in a forward pass over the batch."""
    shape, rows, longest = model.shape, _rank_rows(work, pool), work.prompt + work.response
    matmuls = shape.multiplications * _tokens(work, rows)
    matmuls += 0 if model.value else shape.embedding * rows * work.response
    pairs = rows * (longest**2 - work.prompt**2 * (1 - 1 / work.samples)) / 2
    operations = 2 * matmuls + 4 * pairs * shape.queries * shape.layers
    return operations / pool.layout.ranks_a_shard / device.rate(bf16=model.bf16)


def _layer_tokens(work: Work, model: TrainedModel, pool: Pool) -> float:
    return model.shape.layers * _tokens(work, _rank_rows(work, pool)) / pool.layout.ranks_a_row


def _forward(work: Work, model: TrainedModel, pool: Pool, device: Device) -> float:
    moved = _layer_tokens(work, model, pool) * work.passes(model, pool).forward_peak
    return _computing(work, model, pool, device) + moved / device.bandwidth


def _update(work: Work, model: TrainedModel, pool: Pool, device: Device) -> float:
    """Return the seconds of all passes, of the optimizer's steps, and of what moves to and from the host's memory."""
    passes, tokens, shards = work.passes(model, pool), _layer_tokens(work, model, pool), shards_of(pool)
    steps, trained = max(1, work.batch // model.mini_batch) * model.epochs, model.trained_parameters / shards
    state = state_bytes(model) / shards
    stepping = steps * 2 * (8 * trained + state) / device.bandwidth
    to_host, fsdp = 2 * model.epochs * tokens * passes.layer_kept * passes.on_host, pool.parallel.fsdp_config
    if pool.divided and (fsdp.param_offload or fsdp.offload_policy):
        to_host += 2 * (steps + 1) * model.shape.parameters / shards * 4
    if pool.divided and (fsdp.optimizer_offload or fsdp.offload_policy):
        to_host += 2 * steps * state
    # a backward pass is two forward passes; frozen matrices have no gradient, checkpointing repeats the forward pass
    computed = (3 + model.checkpointing - bool(model.lora_rank)) * _computing(work, model, pool, device)
    moved = 3 * tokens * (passes.forward_peak if model.checkpointing else passes.layer_kept)
    seconds = model.epochs * (computed + moved / device.bandwidth) + stepping
    return seconds + (to_host / device.host if device.host else 0.0)


def _generation(work: Work, pool: Pool, device: Device) -> float:
    """Return the seconds of the prompts and of decode steps: matmuls, or reading weights and cache, then sampling."""
    shape, rollout = work.actor.shape, work.rollout
    assert rollout is not None
    sequences, tensor, rows = math.ceil(work.batch * work.samples / pool.world), 1, rows_at_once(work, pool, device)
    if work.served and work.spec is not None:
        together = engine_devices(work.spec.config) // rollout.data_parallel_size  # workers of one copy of the model
        sequences *= together
        tensor = together if work.on_cpu else rollout.tensor_model_parallel_size
        rows = (rollout.num_replicas or 1) * served_rows(work, device.memory, device.overhead)
    rate, rounds = device.rate(bf16=work.rollout_bf16), math.ceil(sequences / rows)
    rows = sequences / rounds
    prompts = 2 * shape.multiplications * math.ceil(sequences / work.samples) * work.prompt / rate
    steps = rounds * work.response
    matrices = shape.multiplications + shape.embedding
    cached = rows * work.response / 2 + math.ceil(rows / work.samples) * work.prompt
    read = matrices * (2 if work.rollout_bf16 else 4) + cached * token_bytes(work)
    decode = max(2 * rows * matrices / rate, read / device.bandwidth) / tensor
    layer = _OPERATIONS * device.launch if device.on_cpu else _GRAPH_SECONDS
    return steps * (decode + rows * shape.vocabulary * _LOGIT_BYTES / device.bandwidth + shape.layers * layer) + prompts


def rows_at_once(work: Work, pool: Pool, device: Device) -> int:
    return cache_shape(work, pool, cache_space(work, pool, device.overhead, device.memory)).rows


def _messages(work: Work, model: TrainedModel, pool: Pool, device: Device) -> float:
    """Return the seconds of messages: parameters and gradients (FSDP), activations (tensor, sequence and context parallelism)."""
    if not pool.divided:
        return 0.0
    layout, shape, size = pool.layout, model.shape, 2 if model.bf16 else 4
    steps = max(1, work.batch // model.mini_batch) * model.epochs
    micro = work.micro_batch(model, pool)
    passes, shard = micro.per_update * steps, layout.dp_shard * layout.ranks_a_row
    speed = device.link if shard * layout.tensor <= pool.per_node else device.network
    gathers = passes * (2 if pool.parallel.fsdp_config.reshard_after_forward else 1) + micro.per_update
    seconds = shape.parameters / layout.tensor * (shard - 1) / shard * (gathers * size + 4 * passes) / speed
    if layout.dp_replicate > 1:
        seconds += shape.parameters / layout.tensor / shard * 8 * steps / device.network
    layer_tokens = micro.tokens * passes * shape.layers
    if layout.tensor > 1:
        reduced = 2 * shape.hidden * size * (layout.tensor - 1) / layout.tensor
        seconds += 6 * layer_tokens * reduced / device.link
    layer_tokens /= layout.ranks_a_row * layout.tensor
    if layout.sequence > 1:
        seconds += 3 * layer_tokens * 8 * (shape.queries + shape.keys) / device.link
    if layout.context > 1:  # keys and values go round in both passes, their float32 gradients in the second
        blocks = (layout.context - 1) * 2 * size * 2 + layout.context * 2 * 4
        seconds += layer_tokens * blocks * shape.keys / device.link
    return seconds
