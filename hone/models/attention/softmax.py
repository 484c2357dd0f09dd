"""Causal softmax attention over padded tiles, with torch's own kernels where they support the scoring."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hone.models.attention.context import Scoring


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Compute causal attention over ``[b, heads, L, head_dim]``; keys and values may have fewer heads."""
    length = query.shape[2]
    window = scoring.window if scoring.window is not None and scoring.window < length else None
    visible = None
    if window is not None or not scoring.plain:
        place = torch.arange(length, device=query.device)
        distance = place[:, None] - place
        visible = (distance >= 0) & (distance < (window or length))
    return _attention(query, key, value, visible, scoring, causal=True)


def attention_to_all(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Compute attention of the last ``Q`` of ``K`` tokens, which see each other and all before them within their window.

    ``query [b, heads, Q, head_dim]``; keys and values ``[b, kv_heads, K, head_dim]`` may have fewer heads.
    """
    place = torch.arange(key.shape[2], device=query.device)
    visible = None
    if scoring.window is not None or not scoring.plain:
        visible = place > place[-query.shape[2] :, None] - (scoring.window or len(place) + 1)
    return _attention(query, key, value, visible, scoring, causal=False)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scoring: Scoring, *, causal: bool
) -> Tensor:
    """Compute attention with a mask, which a plain scoring needs only where it is not ``causal`` or hides nothing."""
    groups = query.shape[1] // key.shape[1]
    if scoring.plain:
        with without_cudnn(query.device):
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=visible,
                is_causal=causal and visible is None,
                dropout_p=scoring.dropout,
                scale=scoring.scale,
                enable_gqa=groups > 1,
            )
    assert visible is not None
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    probabilities = attention_probabilities(query @ key.transpose(-1, -2), ~visible, scoring).to(value.dtype)
    return F.dropout(probabilities, scoring.dropout) @ value


def without_cudnn(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Keep torch from choosing cuDNN's attention on CUDA: it builds a plan for every new shape, which takes longer than the call."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def attention_probabilities(scores: Tensor, hidden: Tensor, scoring: Scoring) -> Tensor:
    """Turn raw scores ``[b, heads, Q, K]`` into probabilities: scale, softcap, mask (``hidden`` is True there), sinks, softmax."""
    scores = scores.float() * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(hidden, float("-inf"))
    if scoring.sinks is None:
        return scores.softmax(-1)
    sinks = scoring.sinks.float().view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
