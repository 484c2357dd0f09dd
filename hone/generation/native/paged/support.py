"""Checks of whether a model can be decoded from pages, and the number of pages that a device has memory for."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import nn

from hone.errors import GenerationError
from hone.generation.native.paged.pool import PageShape, pages_for
from hone.generation.native.rows import CacheLimits
from hone.models.attention import paged
from hone.models.llama.spec import layers_of, supports

log = logging.getLogger("hone.generation.native")

_SHARE_OF_FREE = 0.9
"""Share of the free memory that the pages take at most; prefill and sampling need the rest."""


def obstacle(causal: nn.Module, device: torch.device) -> str | None:
    """Return why this model, without adapters around it, is not decoded from pages, or None if it is."""
    if device.type == "cpu":
        return "a CPU reads contiguous rows faster"
    if not supports(causal):
        return "the model is not Llama-shaped, or adapters change it"
    return paged.obstacle(device, max(layer.head_dim for layer in layers_of(causal)))


@functools.cache
def report_contiguous(reason: str) -> None:
    """Log once for each reason that the KV cache is not paged."""
    log.warning("the KV cache has no pages, and decode steps no CUDA graph: %s", reason)


def page_shape(causal: nn.Module, dtype: torch.dtype) -> PageShape:
    """Return what a page of this model holds."""
    layers = layers_of(causal)
    return PageShape(len(layers), layers[0].heads[1], layers[0].head_dim, dtype)


def graph_obstacle(causal: Any, device: torch.device) -> str | None:
    """Return why no step of this model can be a CUDA graph, or None if it can."""
    if device.type != "cuda":
        return f"the device is '{device.type}'"
    rope = getattr(causal.get_decoder().rotary_emb, "rope_type", "default")
    if "dynamic" in rope or rope == "longrope":
        return f"its rotary embedding ('{rope}') reads the longest position on the host"
    return None


def number_of_pages(shape: PageShape, limits: CacheLimits, weights: int, device: torch.device) -> int:
    """Return how many pages to allocate, the scratch page included: as many as the limits allow and memory has.

    ``weights`` are the bytes of the engine's weights, which count into its share of the memory.

    Raises:
        GenerationError: memory is missing for a single sequence.
    """
    longest = pages_for(limits.max_model_len, shape.tokens)
    wanted = limits.max_num_seqs * longest
    if limits.max_cache_tokens is not None:
        wanted = pages_for(limits.max_cache_tokens, shape.tokens)
        longest = min(longest, wanted)
    if device.type != "cuda":
        return 1 + wanted
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    budget = min(limits.memory_share * total - weights, _SHARE_OF_FREE * free)
    count = min(1 + wanted, int(budget / shape.bytes))
    if count < 1 + longest:
        raise GenerationError(
            f"the KV cache can have {max(0, count - 1) * shape.tokens} tokens, and a sequence may need "
            f"{limits.max_model_len}: {budget / 2**30:.2f} GiB are left for pages of {shape.bytes / 2**20:.2f} MiB",
            why=f"weights and cache get {limits.memory_share:.0%} of the GPU's {total / 2**30:.0f} GiB, and at most "
            f"{_SHARE_OF_FREE:.0%} of the {free / 2**30:.2f} GiB that are free",
            fix="raise actor_rollout_ref.rollout.gpu_memory_utilization, or lower data.max_response_length",
        )
    return count
