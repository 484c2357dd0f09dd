"""Queries and keys normed (QK norm) and rotated (RoPE; Su et al. 2021), values copied: the three parts of a joint projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.algorithms.masked import wide
from hone.models.kernels.cuda.programs import launched_on_cuda


@torch.library.custom_op("hone::split_heads", mutates_args=(), device_types="cpu")
def _split_heads(
    joint: Tensor, norms: Tensor | None, cos: Tensor, sin: Tensor, epsilon: float, queries: int, keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values; ``norms [2, d]`` are the weights of the QK norm, of queries and of keys."""
    rotated = wide(joint[:, : queries + keys])
    if norms is not None:
        rotated = rotated * _inverse_rms(rotated, epsilon) * _of_heads(norms, queries, keys)
    rotated = _rotate(rotated, cos, sin).to(joint.dtype)
    parts = (*rotated.split([queries, keys], 1), joint[:, queries + keys :])
    query, key, value = (
        part.clone(memory_format=torch.contiguous_format) for part in parts
    )  # one token's parts are contiguous
    return query, key, value


@_split_heads.register_fake
def _shapes(
    joint: Tensor, norms: Tensor | None, cos: Tensor, sin: Tensor, epsilon: float, queries: int, keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    del norms, cos, sin, epsilon
    tokens, heads, width = joint.shape
    counts = (queries, keys, heads - queries - keys)
    query, key, value = (joint.new_empty(tokens, count, width) for count in counts)
    return query, key, value


launched_on_cuda(_split_heads, "heads", "forward")


@torch.library.custom_op("hone::split_heads_backward", mutates_args=(), device_types="cpu")
def _split_heads_backward(
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    joint: Tensor,
    norms: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the joint projection and of the norms (empty without)."""
    queries, keys = grad_query.shape[1], grad_key.shape[1]
    grad = _rotate(wide(torch.cat([grad_query, grad_key], 1)), cos, -sin)
    grad_norms = cos.new_empty(0)
    if norms is not None:
        states = wide(joint[:, : queries + keys])
        inverse = _inverse_rms(states, epsilon)
        normed, scaled = states * inverse, grad * _of_heads(norms, queries, keys)
        parts = (grad * normed).sum(0).split([queries, keys])
        grad_norms = torch.stack([part.sum(0) for part in parts]).to(norms.dtype)
        grad = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return torch.cat([grad.to(joint.dtype), grad_value], 1), grad_norms


@_split_heads_backward.register_fake
def _backward_shapes(*inputs: Any) -> tuple[Tensor, Tensor]:
    *_, joint, norms, cos, _, _ = inputs
    return torch.empty_like(joint), cos.new_empty(0) if norms is None else torch.empty_like(norms)


launched_on_cuda(_split_heads_backward, "heads", "backward")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    del output
    joint, norms, cos, sin, ctx.epsilon, *_ = inputs
    ctx.save_for_backward(joint, norms, cos, sin)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    joint, norms, cos, sin = ctx.saved_tensors
    grad_heads = [grad.contiguous() for grad in grads]
    grad_joint, grad_norms = torch.ops.hone.split_heads_backward(*grad_heads, joint, norms, cos, sin, ctx.epsilon)
    return grad_joint, None if norms is None else grad_norms, None, None, None, None, None


_split_heads.register_autograd(_backward, setup_context=_setup_context)


def _inverse_rms(states: Tensor, epsilon: float) -> Tensor:
    return torch.rsqrt(states.square().mean(-1, keepdim=True) + epsilon)


def _of_heads(norms: Tensor, queries: int, keys: int) -> Tensor:
    """``[2, d]`` to ``[queries + keys, d]``."""
    return torch.cat([wide(norms[0]).expand(queries, -1), wide(norms[1]).expand(keys, -1)])


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def split_heads(
    joint: Tensor,  # queries, keys and values, in this order
    norms: Tensor | None,  # ``[2, d]`` weights of the RMS norm of queries and of keys, or None without QK norm
    rotary: tuple[Tensor, Tensor],  # cosines and sines ``[N, d / 2]`` of each token's angles
    *,
    epsilon: float,  # of the norm
    queries: int,
    keys: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a joint projection ``[N, heads, d]`` into queries, keys and values, contiguous."""
    return torch.ops.hone.split_heads(joint, norms, *rotary, epsilon, queries, keys)
