"""Memory of generation: the native engine in the trainer's process, and engines with processes of their own.

vLLM and SGLang take a share of a GPU, ``gpu_memory_utilization``, at their start and keep it through all phases of a step. So the
weights are on the device twice, and the trainer has what the share leaves. On a CPU the engine's processes add what they hold.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hone.config.engines import SERVED
from hone.config.limits import FROZEN_BYTES, PREFILL_TOKENS
from hone.config.pools import Pool
from hone.config.rollout import RolloutConfig
from hone.config.tree import RLConfig
from hone.models.registry import family_of
from hone.preflight.plan.activations import Passes
from hone.preflight.plan.work import Work

SERVED_PREFILL_TOKENS = 8192  # tokens of a forward pass of vLLM and SGLang where ``max_num_batched_tokens`` is not set
VLLM_CPU_CACHE_BYTES, SGLANG_CPU_CACHE_TOKENS = 2 * 2**30, 65536
"""Limits of the caches on a CPU (:mod:`hone.generation.server`)."""
SHARE_STEP = 0.05  # proposed shares of a device are multiples of this
_SAMPLING_BYTES = 24  # bytes per logit while a token is sampled: four float32 copies, and their sums in float64
_CACHE_ROUNDING = 32
_SHARE_OF_FREE = 0.9  # share of the free memory that pages take at most (:mod:`hone.generation.native.paged.support`)


class CacheShape(NamedTuple):
    """Capacity of the native engine's KV cache: sequences, the prompts that they share, and tokens of both."""

    rows: int
    prompts: int
    tokens: int


def uses_pages(work: Work, pool: Pool) -> bool:
    """Return whether the native engine in this process has a KV cache of pages, which takes what its share of a GPU leaves."""
    rollout, shares_weights = work.rollout, "actor" in pool.roles and not pool.divided
    if rollout is None or work.on_cpu or rollout.name != "native" or rollout.speculative.method is not None:
        return False
    return family_of(work.actor.shape.kind).llama_shaped and not (shares_weights and work.actor.lora_rank)


def space_for_pages(work: Work, pool: Pool, capacity: float, resident: float) -> float:
    """Return the bytes that a KV cache may take: without pages any, else what the engine's share and the free memory allow.

    Args:
        capacity: bytes of its device.
        resident: bytes that training holds in all phases.
    """
    if not uses_pages(work, pool):
        return math.inf
    assert work.rollout is not None
    return min(
        work.rollout.gpu_memory_utilization * capacity - _engine_weights(work), _SHARE_OF_FREE * (capacity - resident)
    )


def least_share_for_pages(work: Work, capacity: float) -> float:
    """Return the smallest ``gpu_memory_utilization`` with which the cache of pages holds one sequence."""
    one = (work.prompt + work.response) * token_bytes(work)
    return round(math.ceil((_engine_weights(work) + one) / capacity / SHARE_STEP) * SHARE_STEP, 2)


def _engine_weights(work: Work) -> float:
    """Return the bytes of the weights that count into an engine's share: those of the model and the fused ones."""
    return work.actor.shape.parameters * (FROZEN_BYTES + _number_bytes(work))


def cache_shape(work: Work, pool: Pool, space: float = math.inf) -> CacheShape:
    """Return the KV cache at its largest: in training, or when validation prompts are answered, each once. ``space``:
    bytes that the cache may take; one sequence counts anyway.
    """
    config, rollout = work.config, work.rollout
    assert isinstance(config, RLConfig) and rollout is not None
    limit = rollout.max_cache_tokens or rollout.max_num_seqs * (work.prompt + work.response)
    if space < math.inf:
        limit = min(limit, int(space / token_bytes(work)))
    shapes = [_cache_for(work, rollout, math.ceil(work.batch * work.samples / pool.world), work.samples, limit)]
    if config.data.val_files and (config.trainer.test_freq != 0 or config.trainer.val_before_train):
        shapes.append(_cache_for(work, rollout, rollout.max_num_seqs, 1, limit))
    return max(shapes, key=lambda shape: shape.tokens)


def _cache_for(work: Work, rollout: RolloutConfig, sequences: int, samples: int, limit: int) -> CacheShape:
    def tokens(rows: int, unit: int = 1) -> int:
        response, prompt = (math.ceil(length / unit) * unit for length in (work.response, work.prompt))
        return rows * response + math.ceil(rows / samples) * prompt

    rows = min(rollout.max_num_seqs, sequences)
    while rows > 1 and tokens(rows) > limit:
        rows -= 1
    rounded = tokens(rows, _CACHE_ROUNDING)
    return CacheShape(rows, math.ceil(rows / samples), rounded if rounded <= limit else tokens(rows))


def cache_bytes(work: Work, pool: Pool, space: float = math.inf) -> float:
    size, (rows, prompts, tokens) = work.actor.shape.cache, cache_shape(work, pool, space)
    return (tokens * size.per_token + (rows + prompts) * size.per_sequence) * _number_bytes(work)


def decoding(work: Work, pool: Pool, space: float = math.inf) -> dict[str, float]:
    """Return what the native engine holds while it decodes, without its KV cache, which has ``space`` bytes."""
    shape, passes = work.actor.shape, _decoding_passes(work, pool)
    rows, prompts, _ = cache_shape(work, pool, space)
    tokens = min(prompts * work.prompt, max(PREFILL_TOKENS, work.prompt))
    prefill = tokens * (passes.forward_peak + 4 * shape.hidden)
    sampling = rows * shape.vocabulary * (_SAMPLING_BYTES + 2 * work.rollout_bf16)
    moment = {"activations": prefill} if prefill > sampling else {"logits": sampling}
    return {**decoding_copies(work, pool), **moment}


def decoding_copies(work: Work, pool: Pool) -> dict[str, float]:
    """Return the native engine's copies of weights; an engine with weights of its own keeps them until it gets the next."""
    shape, passes = work.actor.shape, _decoding_passes(work, pool)
    copies = work.rollout_bf16 or (family_of(shape.kind).llama_shaped and not passes.lora_rank)
    copies = copies and not (passes.lora_rank and work.narrows_frozen(work.actor, pool))
    matrices = (shape.layers * shape.matrices + shape.embedding) * passes.number
    return {"copies of weights": matrices if copies else 0}


def shares_weights(pool: Pool) -> bool:
    """Return whether the native engine of a pool decodes with the weights that are trained."""
    return "actor" in pool.roles and not pool.divided


def _decoding_passes(work: Work, pool: Pool) -> Passes:
    lora_rank = work.actor.lora_rank if shares_weights(pool) else 0
    return Passes(work.actor.shape, work.on_cpu, work.rollout_bf16, lora_rank=lora_rank)


# engines with processes of their own -------------------------------------------------------------------------------------


def engine_bytes(work: Work, pool: Pool, capacity: float, overhead: float) -> float:
    """Return the bytes of a device that the engines of its process take in every phase; 0 where there are none.

    A share that is too small for an engine to start counts as the device for which it would suffice.

    Args:
        capacity: bytes of its device.
        overhead: bytes of a bare process.
    """
    rollout = work.rollout
    if rollout is None or not work.served or rollout.engine_url is not None or "rollout" not in pool.roles:
        return 0.0
    replicas = rollout.num_replicas or 1
    held = weights = work.actor.shape.parameters * _number_bytes(work)
    if work.on_cpu and rollout.checkpoint_engine.delta:
        held += weights  # the server's copy, to which it adds deltas
    if rollout.name == "native":
        return replicas * (overhead + held + sum(decoding(work, pool).values())) + cache_bytes(work, pool)
    if work.on_cpu:
        return replicas * (rollout.tensor_model_parallel_size * overhead + held + _cpu_cache(work))
    share, least = rollout.gpu_memory_utilization, least_bytes(work, overhead)
    return replicas * (share * capacity if share * capacity >= least else least / share)


def frees_memory(work: Work) -> bool:
    """Return whether engines free cache and copies of weights while the policy trains."""
    rollout, spec = work.rollout, work.spec
    if rollout is None or spec is None or rollout.name == "trtllm" or (work.on_cpu and rollout.name in SERVED):
        return False
    wanted = not work.on_cpu if rollout.free_cache_engine is None else rollout.free_cache_engine
    return wanted and spec.engines_take_turns


def least_bytes(work: Work, overhead: float) -> float:
    """Return what one replica needs of a GPU to answer a prompt: weights, a forward pass, and the cache of a group."""
    rollout, shape = work.rollout, work.actor.shape
    assert rollout is not None
    passes = Passes(shape, on_cpu=False, bf16=work.rollout_bf16)
    held = shape.parameters * _number_bytes(work) + _group_bytes(work)
    held += (rollout.max_num_batched_tokens or SERVED_PREFILL_TOKENS) * passes.forward_peak
    return overhead + held / rollout.tensor_model_parallel_size


def least_share(work: Work, capacity: float, overhead: float) -> float:
    return math.ceil(least_bytes(work, overhead) / capacity / SHARE_STEP) * SHARE_STEP


def served_rows(work: Work, capacity: float, overhead: float) -> int:
    """Return the sequences that one replica decodes at once: those that its cache holds, at most ``max_num_seqs``."""
    rollout = work.rollout
    assert rollout is not None
    cache = math.inf
    if rollout.name != "native":
        free = rollout.gpu_memory_utilization * capacity - least_bytes(work, overhead)
        cache = _cpu_cache(work) if work.on_cpu else free * rollout.tensor_model_parallel_size + _group_bytes(work)
    if rollout.max_cache_tokens:
        cache = min(cache, rollout.max_cache_tokens * token_bytes(work))
    rows = cache / ((work.response + work.prompt / work.samples) * token_bytes(work))
    return max(1, int(min(rows, rollout.max_num_seqs)))


def token_bytes(work: Work) -> float:
    return work.actor.shape.cache.per_token * _number_bytes(work)


def _group_bytes(work: Work) -> float:
    """Return the KV cache of one prompt with the responses that an engine decodes at once."""
    assert work.rollout is not None
    return (work.prompt + min(work.samples, work.rollout.max_num_seqs) * work.response) * token_bytes(work)


def _number_bytes(work: Work) -> int:
    return 2 if work.rollout_bf16 else FROZEN_BYTES


def _cpu_cache(work: Work) -> float:
    rollout, token = work.rollout, token_bytes(work)
    assert rollout is not None
    limit = token * SGLANG_CPU_CACHE_TOKENS if rollout.name == "sglang" else VLLM_CPU_CACHE_BYTES
    return token * rollout.max_cache_tokens if rollout.max_cache_tokens is not None else limit
