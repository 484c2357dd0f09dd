"""PyTorch's variable-length attention in plain operations: its kernels for the CPU, where torch has none.

Written from the contract of ``torch.nn.attention.varlen``, one sequence at a time, in float32 or better. After :func:`register`,
``varlen_attn`` runs on CPU tensors through torch's own wrapper and autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from hone.models.attention.varlen import options_of_varlen


@functools.cache
def register() -> None:
    """Register the kernels, once."""
    from torch.nn.attention import varlen

    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output ``[T_q, heads, d]``, the log-sum-exp ``[heads, T_q]`` and an unused random state."""
    assert enable_gqa or query.shape[1] == key.shape[1] or "enable_gqa" not in options_of_varlen()
    assert max_q == int(cu_seq_q.diff().max()) and max_k == int(cu_seq_k.diff().max())
    assert is_causal == (window_size == [-1, 0])
    out, lse = torch.empty_like(query), query.new_empty(query.shape[1], len(query), dtype=torch.float32)
    for queries, keys in _sequences(cu_seq_q, cu_seq_k):
        scores = _scores(query[queries], key[keys], scale, window_size)
        lse[:, queries] = scores.logsumexp(-1).to(lse.dtype)
        mixed = scores.softmax(-1) @ _of_query_heads(value[keys], query)
        out[queries] = mixed.transpose(0, 1).to(out.dtype)
    return out, lse, torch.zeros(2, dtype=torch.uint64)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    for queries, keys in _sequences(cu_seq_q, cu_seq_k):
        scores = _scores(query[queries], key[keys], scale, window_size)
        probabilities = (
            scores - lse[:, queries, None]
        ).exp()  # [heads, Q, K]; of more keys than these, as in the kernel
        outer, mixed = (_wide(part[queries]).transpose(0, 1) for part in (grad_out, out))
        grad_scores = outer @ _of_query_heads(value[keys], query).transpose(1, 2)
        grad_scores = factor * probabilities * (grad_scores - (outer * mixed).sum(-1, keepdim=True))
        grad_query = grad_scores @ _of_query_heads(key[keys], query)
        grad_key = grad_scores.transpose(1, 2) @ _wide(query[queries]).transpose(0, 1)
        grad_value = probabilities.transpose(1, 2) @ outer
        grads[0][queries] = grad_query.transpose(0, 1).to(query.dtype)
        for grad, part in ((grads[1], grad_key), (grads[2], grad_value)):
            grad[keys] = part.unflatten(0, (key.shape[1], -1)).sum(1).transpose(0, 1).to(grad.dtype)
    return grads


def _sequences(query_ends: Tensor, key_ends: Tensor) -> Iterator[tuple[slice, slice]]:
    queries, keys = query_ends.tolist(), key_ends.tolist()
    for index in range(len(queries) - 1):
        yield slice(queries[index], queries[index + 1]), slice(keys[index], keys[index + 1])


def _scores(query: Tensor, key: Tensor, scale: float | None, window_size: list[int] | None) -> Tensor:
    """Masked scores ``[heads, Q, K]``; the last query is aligned with the last key."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = _wide(query).transpose(0, 1) @ _of_query_heads(key, query).transpose(1, 2) * scale
    ahead = torch.arange(len(key)) - torch.arange(len(query))[:, None] - (len(key) - len(query))
    left, right = window_size or [-1, -1]
    for far in ([ahead > right] if right >= 0 else []) + ([-ahead > left] if left >= 0 else []):
        scores = scores.masked_fill(far, float("-inf"))
    return scores


def _of_query_heads(states: Tensor, query: Tensor) -> Tensor:
    """``[K, kv_heads, d]`` to ``[heads, K, d]``."""
    return _wide(states).repeat_interleave(query.shape[1] // states.shape[1], 1).transpose(0, 1)


def _wide(states: Tensor) -> Tensor:
    return states.to(torch.promote_types(states.dtype, torch.float32))
