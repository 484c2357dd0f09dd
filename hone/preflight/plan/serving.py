"""Engines that serve in processes of their own, on the device of the worker that they answer to.

vLLM and SGLang take their share of a GPU, ``gpu_memory_utilization``, when they start and keep it through all phases of a step:
weights, cache and activations are theirs to divide. So the weights are on the device twice, the trainer's and the engine's, and
the trainer has what the share leaves. On a CPU the engine's processes add what they hold: weights, cache, libraries.
"""

from __future__ import annotations

import math

from hone.preflight.plan.activations import Computation, forward_moment
from hone.preflight.plan.generation import cache_bytes, generating
from hone.preflight.plan.work import Process, Work

PREFILL_TOKENS = 8192
"""Tokens of a forward pass of vLLM and SGLang where ``max_num_batched_tokens`` does not say."""
VLLM_CPU_CACHE_BYTES, VLLM_CPU_BLOCK = 2 * 2**30, 32
"""vLLM's cache on a CPU, and its blocks in tokens (:mod:`hone.generation.server.vllm_backend`)."""
SGLANG_CPU_CACHE_TOKENS = 65536
"""SGLang's cache on a CPU (:mod:`hone.generation.server.sglang_backend`)."""
SHARE_STEP = 0.05
"""Shares of a device are proposed in such steps."""


def engine_bytes(work: Work, process: Process, capacity: float, overhead: float) -> float:
    """Bytes of the device that the engines beside a process take, in every phase; 0 where there are none.

    Args:
        work: of the run.
        process: beside which they live.
        capacity: bytes of its device.
        overhead: bytes that a bare process takes.

    A share that is too small to start with is told as the device that it would be enough of.
    """
    rollout = work.rollout
    if rollout is None or not work.served or work.attached or "rollout" not in process.roles:
        return 0.0
    replicas = rollout.num_replicas or 1
    kept = _weights(work) if rollout.checkpoint_engine.delta and work.on_cpu else 0.0  # the server's copy, for deltas
    if rollout.name == "native":
        held = sum(part.size for part in generating(work, process))
        return replicas * (overhead + _weights(work) + kept + held + cache_bytes(work, process) / replicas)
    if work.on_cpu:
        processes = rollout.tensor_model_parallel_size
        return replicas * (processes * overhead + _weights(work) + kept + _cpu_cache(work))
    share, least = rollout.gpu_memory_utilization, least_bytes(work, overhead)
    return replicas * (share * capacity if share * capacity >= least else least / share)


def least_bytes(work: Work, overhead: float) -> float:
    """What one replica needs of a GPU to answer a prompt: its weights, a forward pass, and the cache of a group."""
    rollout, shape = work.rollout, work.actor.shape
    assert rollout is not None
    tensor = rollout.tensor_model_parallel_size
    group = work.prompt + min(work.samples, rollout.max_num_seqs) * work.response
    tokens = rollout.max_num_batched_tokens or PREFILL_TOKENS
    passing = tokens * forward_moment(shape, Computation(on_cpu=False, narrow=work.rollout_narrow))
    return overhead + (_weights(work) + group * token_bytes(work) + passing) / tensor


def least_share(work: Work, capacity: float, overhead: float) -> float:
    """The smallest ``gpu_memory_utilization`` that holds that."""
    return math.ceil(least_bytes(work, overhead) / capacity / SHARE_STEP) * SHARE_STEP


def served_rows(work: Work, capacity: float, overhead: float) -> int:
    """Sequences that one replica decodes at once: what its cache has room for, at most ``max_num_seqs``."""
    rollout = work.rollout
    assert rollout is not None
    if work.on_cpu or rollout.name == "native":
        room = _cpu_cache(work) if rollout.name != "native" else math.inf
    else:
        group = (work.prompt + min(work.samples, rollout.max_num_seqs) * work.response) * token_bytes(work)
        tensor = rollout.tensor_model_parallel_size
        room = (rollout.gpu_memory_utilization * capacity - least_bytes(work, overhead)) * tensor + group
    if rollout.max_cache_tokens:
        room = min(room, rollout.max_cache_tokens * token_bytes(work))
    longest = (work.response + work.prompt / work.samples) * token_bytes(work)
    return max(1, min(rollout.max_num_seqs, int(min(room / longest, rollout.max_num_seqs))))


def token_bytes(work: Work) -> float:
    """Keys and values of a token in all layers."""
    shape = work.actor.shape
    return shape.layers * 2 * shape.keys * (2 if work.rollout_narrow else 4)


def _weights(work: Work) -> float:
    return work.actor.shape.parameters * (2 if work.rollout_narrow else 4)


def _cpu_cache(work: Work) -> float:
    rollout, token = work.rollout, token_bytes(work)
    assert rollout is not None
    if rollout.max_cache_tokens is not None:
        return token * rollout.max_cache_tokens
    if rollout.name == "sglang":
        return token * SGLANG_CPU_CACHE_TOKENS
    longest = work.prompt + work.response + VLLM_CPU_BLOCK
    return max(min(token * rollout.max_num_seqs * longest, VLLM_CPU_CACHE_BYTES), token * longest)
