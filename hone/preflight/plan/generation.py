"""Memory of generation in the trainer's own process: the key-value cache, and what the native engine holds while it decodes."""

from __future__ import annotations

import math
from typing import NamedTuple

from hone.preflight.plan.activations import Computation, forward_moment
from hone.preflight.plan.parts import ACTIVATIONS, COPIES, LOGITS, Part
from hone.preflight.plan.work import Process, Work

PREFILL_TOKENS = 16384
"""Most prompt tokens of a forward pass of the native engine (:data:`hone.generation.native.runner.PREFILL_TOKENS`)."""
SAMPLING_BYTES = 24
"""A logit while a token is drawn: logits, scaled, log-probs, probabilities in float32, their sums in float64."""
_CACHE_ROUNDING = 32


class CacheShape(NamedTuple):
    """What the engine's cache has room for: ``rows`` of ``own`` tokens, and ``prompts`` of ``prompt`` tokens."""

    rows: int
    own: int
    prompts: int
    prompt: int

    @property
    def tokens(self) -> int:
        """In all."""
        return self.rows * self.own + self.prompts * self.prompt


def cache_shape(work: Work, process: Process) -> CacheShape:
    """The key-value cache at its largest: in training, or when validation prompts are answered, each once."""
    share = math.ceil(work.batch * work.samples / process.world)
    shapes = [_cache_for(work, share, work.samples)]
    if work.validates:
        assert work.rollout is not None
        shapes.append(_cache_for(work, work.rollout.max_num_seqs, 1))
    return max(shapes, key=lambda shape: shape.tokens)


def _cache_for(work: Work, sequences: int, samples: int) -> CacheShape:
    """The cache for so many sequences, of which ``samples`` continue the same prompt."""
    rollout = work.rollout
    assert rollout is not None
    limit = rollout.max_cache_tokens or rollout.max_num_seqs * (work.prompt + work.response)
    rows = min(rollout.max_num_seqs, sequences)
    while rows > 1 and rows * work.response + math.ceil(rows / samples) * work.prompt > limit:
        rows -= 1
    prompts = math.ceil(rows / samples)
    rounded = CacheShape(rows, _rounded(work.response), prompts, _rounded(work.prompt))
    return rounded if rounded.tokens <= limit else CacheShape(rows, work.response, prompts, work.prompt)


def _rounded(tokens: int) -> int:
    return -(-tokens // _CACHE_ROUNDING) * _CACHE_ROUNDING


def cache_bytes(work: Work, process: Process) -> float:
    """Bytes of keys and values of all layers."""
    shape = work.actor.shape
    tokens = cache_shape(work, process).tokens
    return tokens * shape.layers * 2 * shape.keys * (2 if work.rollout_narrow else 4)


def generating(work: Work, process: Process) -> list[Part]:
    """What the engine holds while it decodes, beside the cache."""
    shape, narrow = work.actor.shape, work.rollout_narrow
    own = "actor" in process.roles and not process.divided
    whole = Computation(on_cpu=work.on_cpu, narrow=narrow, adapter_rank=work.rank if own else 0)
    matrices = shape.layers * shape.matrices + shape.embedding
    fused = shape.llama_shaped and not whole.adapter_rank
    copies = matrices * whole.bytes if fused or narrow else 0
    rows, _, prompts, _ = cache_shape(work, process)
    tokens = min(prompts * work.prompt, max(PREFILL_TOKENS, work.prompt))
    filling = tokens * (forward_moment(shape, whole) + shape.hidden * 4)
    drawing = rows * shape.vocabulary * (SAMPLING_BYTES + 2 * narrow)
    moment = Part(ACTIVATIONS, filling) if filling > drawing else Part(LOGITS, drawing)
    return [Part(COPIES, copies), moment]
