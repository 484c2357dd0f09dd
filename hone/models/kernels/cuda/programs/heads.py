"""Triton programs of QK norm with RoPE: a program handles all heads of a token, in blocks."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.models.kernels.cuda.programs import summing_programs

HEADS = 8
"""Heads of a block."""


@triton.jit
def heads_forward(
    joint,
    norms,
    cos,
    sin,
    query,
    key,
    value,
    epsilon,
    queries,
    keys,
    heads,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)
    inside = (head < heads)[:, None] & (column < HALF)[None, :]
    place = (token * heads + head)[:, None] * (2 * HALF) + column[None, :]
    first = tl.load(joint + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(joint + place + HALF, mask=inside, other=0.0).to(tl.float32)
    is_query, is_value = head < queries, head >= queries + keys

    wanted = inside & is_value[:, None]
    into = (token * (heads - queries - keys) + head - queries - keys)[:, None] * (2 * HALF) + column[None, :]
    tl.store(value + into, first.to(value.dtype.element_ty), mask=wanted)
    tl.store(value + into + HALF, second.to(value.dtype.element_ty), mask=wanted)

    if HAS_NORM:
        inverse = 1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + epsilon)
        row = tl.where(is_query, 0, 2 * HALF)[:, None] + column[None, :]
        first *= inverse[:, None] * tl.load(norms + row, mask=inside, other=0.0).to(tl.float32)
        second *= inverse[:, None] * tl.load(norms + row + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = token * HALF + column
    cosine = tl.load(cos + angle, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + angle, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    left, right = first * cosine - second * sine, second * cosine + first * sine

    wanted = inside & is_query[:, None]
    into = (token * queries + head)[:, None] * (2 * HALF) + column[None, :]
    tl.store(query + into, left.to(query.dtype.element_ty), mask=wanted)
    tl.store(query + into + HALF, right.to(query.dtype.element_ty), mask=wanted)
    wanted = inside & ((head >= queries) & (head < queries + keys))[:, None]
    into = (token * keys + head - queries)[:, None] * (2 * HALF) + column[None, :]
    tl.store(key + into, left.to(key.dtype.element_ty), mask=wanted)
    tl.store(key + into + HALF, right.to(key.dtype.element_ty), mask=wanted)


@triton.jit
def heads_backward(
    grad_query,
    grad_key,
    grad_value,
    joint,
    norms,
    cos,
    sin,
    grad_joint,
    grad_norms,
    epsilon,
    tokens,
    queries,
    keys,
    heads,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    of_queries = tl.zeros((2, BLOCK), tl.float32)
    of_keys = tl.zeros((2, BLOCK), tl.float32)
    half = tl.arange(0, 2)
    for index in range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = tl.cast(index, tl.int64)
        angle = token * HALF + column
        cosine = tl.load(cos + angle, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
        sine = tl.load(sin + angle, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
        for start in range(0, heads, HEADS):
            head = start + tl.arange(0, HEADS)
            is_query, is_value = head < queries, head >= queries + keys
            is_key = (head >= queries) & (head < queries + keys)
            inside = (head < heads)[:, None] & (column < HALF)[None, :]
            from_query = (token * queries + head)[:, None] * (2 * HALF) + column[None, :]
            from_key = (token * keys + head - queries)[:, None] * (2 * HALF) + column[None, :]
            from_value = (token * (heads - queries - keys) + head - queries - keys)[:, None] * (2 * HALF)
            from_value += column[None, :]
            left = tl.load(grad_query + from_query, mask=inside & is_query[:, None], other=0.0).to(tl.float32)
            right = tl.load(grad_query + from_query + HALF, mask=inside & is_query[:, None], other=0.0).to(tl.float32)
            left += tl.load(grad_key + from_key, mask=inside & is_key[:, None], other=0.0).to(tl.float32)
            right += tl.load(grad_key + from_key + HALF, mask=inside & is_key[:, None], other=0.0).to(tl.float32)
            grad_first, grad_second = left * cosine + right * sine, right * cosine - left * sine
            place = (token * heads + head)[:, None] * (2 * HALF) + column[None, :]
            if HAS_NORM:
                first = tl.load(joint + place, mask=inside, other=0.0).to(tl.float32)
                second = tl.load(joint + place + HALF, mask=inside, other=0.0).to(tl.float32)
                squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
                inverse = 1.0 / tl.sqrt(squares / (2 * HALF) + epsilon)
                first *= inverse[:, None]
                second *= inverse[:, None]
                along_first, along_second = grad_first * first, grad_second * second
                chosen = is_query[:, None]
                one = tl.sum(tl.where(chosen, along_first, 0.0), 0)[None, :]
                two = tl.sum(tl.where(chosen, along_second, 0.0), 0)[None, :]
                of_queries += tl.where(half[:, None] == 0, one, two)
                chosen = is_key[:, None]
                one = tl.sum(tl.where(chosen, along_first, 0.0), 0)[None, :]
                two = tl.sum(tl.where(chosen, along_second, 0.0), 0)[None, :]
                of_keys += tl.where(half[:, None] == 0, one, two)
                row = tl.where(is_query, 0, 2 * HALF)[:, None] + column[None, :]
                grad_first *= tl.load(norms + row, mask=inside, other=0.0).to(tl.float32)
                grad_second *= tl.load(norms + row + HALF, mask=inside, other=0.0).to(tl.float32)
                along = (tl.sum(grad_first * first, 1) + tl.sum(grad_second * second, 1)) / (2 * HALF)
                grad_first = inverse[:, None] * (grad_first - first * along[:, None])
                grad_second = inverse[:, None] * (grad_second - second * along[:, None])
            wanted = inside & is_value[:, None]
            grad_first += tl.load(grad_value + from_value, mask=wanted, other=0.0).to(tl.float32)
            grad_second += tl.load(grad_value + from_value + HALF, mask=wanted, other=0.0).to(tl.float32)
            tl.store(grad_joint + place, grad_first.to(grad_joint.dtype.element_ty), mask=inside)
            tl.store(grad_joint + place + HALF, grad_second.to(grad_joint.dtype.element_ty), mask=inside)
    if HAS_NORM:
        into = tl.program_id(0).to(tl.int64) * (4 * HALF) + half[:, None] * HALF + column[None, :]
        wanted = (half < 2)[:, None] & (column < HALF)[None, :]
        tl.store(grad_norms + into, of_queries, mask=wanted)
        tl.store(grad_norms + into + 2 * HALF, of_keys, mask=wanted)


def forward(
    joint: Tensor, norms: Tensor | None, cos: Tensor, sin: Tensor, epsilon: float, queries: int, keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    joint, cos, sin = joint.contiguous(), cos.contiguous(), sin.contiguous()
    tokens, heads, width = joint.shape
    counts = (queries, keys, heads - queries - keys)
    query, key, value = (joint.new_empty(tokens, count, width) for count in counts)
    weights = joint if norms is None else norms.contiguous()
    heads_forward[(tokens, triton.cdiv(heads, HEADS))](
        joint, weights, cos, sin, query, key, value, epsilon, queries, keys, heads, **_shape(width, norms)
    )
    return query, key, value


def backward(
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    joint: Tensor,
    norms: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    joint, cos, sin = joint.contiguous(), cos.contiguous(), sin.contiguous()
    tokens, heads, width = joint.shape
    programs = summing_programs(joint.device, tokens)
    grad_joint = torch.empty_like(joint)
    grad_norms = joint.new_empty(programs if norms is not None else 0, 2, width, dtype=torch.float32)
    weights = joint if norms is None else norms.contiguous()
    counts = (tokens, grad_query.shape[1], grad_key.shape[1], heads)
    states = (grad_query, grad_key, grad_value, joint, weights, cos, sin, grad_joint, grad_norms)
    heads_backward[(programs,)](*states, epsilon, *counts, **_shape(width, norms))
    return grad_joint, cos.new_empty(0) if norms is None else grad_norms.sum(0).to(norms.dtype)


def _shape(width: int, norms: Tensor | None) -> dict[str, Any]:
    half = width // 2
    return {"HALF": half, "HAS_NORM": norms is not None, "HEADS": HEADS, "BLOCK": triton.next_power_of_2(half)}
