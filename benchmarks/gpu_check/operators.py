"""Parts that measure operators: what the device reaches, fused operators and attention against float64, the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu_check.measuring import device_seconds, graph_seconds, relative, release
from gpu_check.results import Result
from hone.generation.native.sampler import RowSampling, sample
from hone.generation.protocol import SamplingParams
from hone.models.attention import varlen
from hone.models.attention.context import Scoring
from hone.models.attention.packed import PackedContext
from hone.models.kernels.cuda import gates, heads, norms, pages, vocabulary

COPY, PRODUCTS = "copy", "bfloat16 products"
"""Names of the ceilings."""
_NARROW = 6e-3
"""Largest relative error of results that are rounded to bfloat16."""


def ceilings(result: Result) -> None:
    """Measure what all later rates are shares of: bandwidth, bfloat16 products, and the cost of a launch."""
    device, numbers = result.device, 1 << (20 if result.small else 30)
    source, target = (torch.empty(numbers, dtype=torch.bfloat16, device=device).normal_() for _ in range(2))
    result.add(COPY, 4 * numbers / device_seconds(result, lambda: target.copy_(source)) / 1e9, "GB/s")
    side = 256 if result.small else 8192
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    result.add(PRODUCTS, 2 * side**3 / device_seconds(result, lambda: left @ right) / 1e12, "TFLOP/s")
    counter = torch.zeros(1024, device=device)

    def many() -> None:
        for _ in range(200):
            counter.add_(1.0)

    result.add("an eager launch", device_seconds(result, many) / 200 * 1e6, "us")
    result.add("a small kernel in a graph", graph_seconds(result, lambda: counter.add_(1.0), 200) * 1e6, "us")


def _compare(
    result: Result, name: str, operator: Any, reference: Any, arguments: Sequence[Any], *,
    moved: float = 0.0, operations: float = 0.0, most: float = _NARROW,
) -> None:  # fmt: skip
    """Hold an operator against its own reference in float64 on the same device, and record its rate."""
    wide = [
        value.double() if isinstance(value, Tensor) and value.is_floating_point()
        else torch.float64 if value in (torch.bfloat16, torch.float32) else value
        for value in arguments
    ]  # fmt: skip
    found, wanted = operator(*arguments), reference._init_fn(*wide)
    pairs = zip(*(part if isinstance(part, tuple) else (part,) for part in (found, wanted)), strict=True)
    result.add(f"{name}: error", max(relative(a, b) for a, b in pairs if b.numel()), most=most)
    seconds = device_seconds(result, lambda: operator(*arguments))
    if moved:
        result.add(f"{name}: rate", moved / seconds / 1e9, "GB/s", of=COPY)
    if operations:
        result.add(f"{name}: rate", operations / seconds / 1e12, "TFLOP/s", of=PRODUCTS)


def kernels(result: Result) -> None:
    """Compare every fused operator with float64 at the widths of real models, rows that are one or odd among them."""
    operators, small, narrow = torch.ops.hone, result.small, torch.bfloat16

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=result.device, dtype=dtype)

    for rows, width in ((7, 80),) if small else ((1, 1024), (16383, 1024), (4099, 5120), (4096, 8192)):
        residual, delta, weight = drawn(rows, width), drawn(rows, width, dtype=narrow), drawn(width)
        arguments = (residual, delta, weight, 1e-6, narrow)
        _compare(result, f"add + norm {rows} x {width}", operators.add_rms_norm, norms._add_rms_norm, arguments,
                 moved=12 * rows * width)  # fmt: skip
        total, _, scale = operators.add_rms_norm(*arguments)
        backward = (drawn(rows, width), drawn(rows, width, dtype=narrow), total, weight, scale, narrow)
        _compare(result, f"add + norm backward {rows} x {width}", operators.add_rms_norm_backward,
                 norms._add_rms_norm_backward, backward, moved=16 * rows * width)  # fmt: skip
    shapes = ((4, 2, 16),) if small else ((32, 8, 128), (16, 8, 128), (14, 2, 64), (8, 1, 256), (32, 32, 80))
    for queries, keys, width in shapes:
        for tokens in (5,) if small else (1, 8191):
            joint, weights = drawn(tokens, queries + 2 * keys, width, dtype=narrow), drawn(2, width)
            cos, sin = drawn(tokens, width // 2), drawn(tokens, width // 2)
            name = f"{tokens} x {queries}/{keys} x {width}"
            _compare(result, f"heads {name}", operators.split_heads, heads._split_heads,
                     (joint, weights, cos, sin, 1e-6, queries, keys), moved=4 * joint.numel())  # fmt: skip
            grads = [drawn(tokens, count, width, dtype=narrow) for count in (queries, keys, keys)]
            _compare(result, f"heads backward {name}", operators.split_heads_backward, heads._split_heads_backward,
                     (*grads, joint, weights, cos, sin, 1e-6), moved=6 * joint.numel())  # fmt: skip
    rows, width = (5, 64) if small else (8191, 12288)
    joint, grad = drawn(rows, 2 * width, dtype=narrow), drawn(rows, width, dtype=narrow)
    _compare(result, "SwiGLU", operators.swiglu, gates._swiglu, (joint,), moved=6 * rows * width)
    _compare(result, "SwiGLU backward", operators.swiglu_backward, gates._swiglu_backward, (grad, joint),
             moved=10 * rows * width)  # fmt: skip
    sizes = ((5, 37, 24),) if small else ((1, 151936, 1024), (4095, 151936, 1024), (1023, 262144, 2304))
    for rows, vocab, width in sizes:
        _vocabulary(result, rows, vocab, width)
        release(result)


def _vocabulary(result: Result, rows: int, vocab: int, width: int) -> None:
    operators, narrow, device = torch.ops.hone, torch.bfloat16, result.device
    hidden = torch.randn(rows, width, device=device, dtype=narrow)
    weight = torch.randn(vocab, width, device=device, dtype=narrow) * (3 / width**0.5)
    targets, operations = torch.randint(0, vocab, (rows,), device=device), 2.0 * rows * vocab * width
    for softcap in (None, 30.0):
        name, arguments = f"{rows} x {vocab} x {width}, cap {softcap}", (hidden, weight, None, targets, 0.7, softcap)
        _compare(result, f"vocabulary {name}", operators.vocabulary_statistics, vocabulary._vocabulary_statistics,
                 arguments, operations=operations, most=5e-5)  # fmt: skip
        statistics = operators.vocabulary_statistics(*arguments)
        slopes = (torch.randn(rows, device=device) for _ in range(2))
        _compare(result, f"vocabulary gradient {name}", operators.vocabulary_gradient, vocabulary._vocabulary_gradient,
                 (*arguments[:4], statistics[0], statistics[0] - statistics[2], *slopes, 0.7, softcap),
                 operations=operations)  # fmt: skip
    plain = operations / device_seconds(result, lambda: hidden @ weight.t()) / 1e12
    result.add(f"torch's product {rows} x {vocab} x {width}", plain, "TFLOP/s", of=PRODUCTS)
    grad, total = torch.randn(rows, vocab, device=device, dtype=narrow), torch.zeros(vocab, width, device=device)
    operators.add_matmul_wide(total, grad.t(), hidden)
    result.add(f"added product {rows}: error", relative(total, grad.t().double() @ hidden.double()), most=1e-4)
    for name, run in (
        ("added product", lambda: operators.add_matmul_wide(total, grad.t(), hidden)),
        ("float32 product", lambda: operators.matmul_wide(grad.t(), hidden)),
    ):
        result.add(f"{name} {rows}: rate", operations / device_seconds(result, run) / 1e12, "TFLOP/s", of=PRODUCTS)


# attention ----------------------------------------------------------------------------------------------------------------


def attention(result: Result) -> None:
    """Compare attention of packed sequences and of pages with float64: outputs, gradients, bits of a second run, rates."""
    _pages(result)
    if result.small:
        result.notes.append("attention of packed sequences by the variable-length call needs a GPU")
        result.write()
        return
    for queries, keys, width, window in (
        *((32, 8, 128, None), (14, 2, 64, None), (8, 1, 256, None)),
        *((32, 32, 80, None), (12, 4, 96, 100), (16, 8, 128, 64)),
    ):
        _packed(result, queries, keys, width, window)
    tokens, operations = 16 * 1024, 16 * 32 * 1024 * 1024 * 128 * 2.0
    context = PackedContext.from_lengths([1024] * 16, torch.device(result.device))
    states = [
        torch.randn(tokens, count, 128, device=result.device, dtype=torch.bfloat16, requires_grad=True)
        for count in (32, 8, 8)
    ]
    run = partial(varlen.causal_attention, *states, Scoring(128**-0.5), context.varlen_plan)
    result.add("forward, 16 of 1024", operations / device_seconds(result, run) / 1e12, "TFLOP/s", of=PRODUCTS)
    out = run()
    slope = torch.randn_like(out)
    seconds = device_seconds(result, lambda: torch.autograd.grad(out, states, slope, retain_graph=True))
    result.add("backward, 16 of 1024", 2.5 * operations / seconds / 1e12, "TFLOP/s", of=PRODUCTS)


def _packed(result: Result, queries: int, keys: int, width: int, window: int | None) -> None:
    """Compare five sequences, of which the second and the third begin with 512 tokens of the one before."""
    device, lengths = torch.device(result.device), [517, 1030, 640, 1, 333]
    context = PackedContext.from_lengths(lengths, device, shared=[0, 512, 512, 0, 0])
    tokens, scoring = context.position_ids.shape[1], Scoring(width**-0.5, window)
    states = [
        torch.randn(tokens, count, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        for count in (queries, keys, keys)
    ]
    slope = torch.randn(tokens, queries, width, device=device, dtype=torch.bfloat16)
    name = f"{queries}/{keys} x {width}" + ("" if window is None else f", window {window}")
    query, key, value = states
    if obstacle := varlen.obstacle(query, value, scoring):
        result.problems.append(f"{name}: {obstacle}")
        return

    def once() -> tuple[Tensor, ...]:
        out = varlen.causal_attention(query, key, value, scoring, context.varlen_plan)
        return out, *torch.autograd.grad(out, states, slope)

    first, again = once(), once()
    exact = [state.detach().double().requires_grad_() for state in states]
    wanted, sequences = torch.zeros(tokens, queries, width, device=device, dtype=torch.float64), context.sequences
    for number, length in enumerate(sequences.lengths.tolist()):
        index = sequences.packed_index(torch.full((length,), number), torch.arange(length)).to(device)
        new = int(sequences.suffix_length[number])
        mixed = _exact_attention(exact[0][index], exact[1][index], exact[2][index], scoring)
        wanted = wanted.index_put((index[length - new :],), mixed[length - new :])
    grads = torch.autograd.grad(wanted, exact, slope.double())
    for part, found, exactly in zip(
        ("output", "grad of q", "grad of k", "grad of v"), first, (wanted, *grads), strict=True
    ):
        result.add(f"{name}: {part}", relative(found, exactly), most=_NARROW if part == "output" else 1.5e-2)
    same = sum(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    result.add(f"{name}: tensors of 4 with the same bits in a second run", same)


def _exact_attention(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Return causal attention of a whole sequence, ``[length, heads, d]``."""
    place = torch.arange(len(query), device=query.device)
    seen = place[None, :] <= place[:, None]
    if scoring.window is not None:
        seen &= place[None, :] > place[:, None] - scoring.window
    key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], 1) for states in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scoring.scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)


def _pages(result: Result) -> None:
    """Compare attention over pages with its reference; a row alone has the bits that it has among others."""
    device, size = result.device, 256
    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, _NARROW)):
        for queries, keys, width, window in ((16, 8, 128, None), (7, 1, 80, None), (32, 8, 128, 300)):
            lengths = torch.tensor([1, 255, 256, 257, 1000, 2048], dtype=torch.int32, device=device)
            key, value = (torch.randn(50, size, keys, width, device=device).to(dtype) for _ in range(2))
            tables = torch.randperm(48, device=device).view(6, 8).to(torch.int32) + 1
            query = torch.randn(6, queries, width, device=device).to(dtype)
            options = {"scale": width**-0.5, "window": window}
            found = pages.attend_pages(query, key, value, tables, lengths, **options)
            exact = [states.double() for states in (query, key, value)]
            wanted = pages._attend_pages._init_fn(*exact, tables, lengths, None, width**-0.5, window, None)
            name = f"pages {queries}/{keys} x {width}, {str(dtype)[6:]}" + (
                "" if window is None else f", window {window}"
            )
            result.add(f"{name}: error", relative(found, wanted), most=most)
            wider = torch.cat([tables, torch.zeros_like(tables)], 1)
            alone = [
                pages.attend_pages(query[i : i + 1], key, value, wider[i : i + 1], lengths[i : i + 1], **options)
                for i in range(6)
            ]
            result.add(f"{name}: rows of 6 with other bits alone", sum(not torch.equal(found[i], alone[i][0]) for i in range(6)),
                       most=None if result.small else 0)  # fmt: skip
    if result.small:
        return
    for rows, length, wide in ((1, 16384, 64), (8, 2048, 16), (64, 1024, 16), (256, 1024, 16), (256, 1024, 64)):
        count = -(-length // size)
        pool = [torch.randn(rows * count + 1, size, 8, 128, device=device, dtype=torch.bfloat16) for _ in range(2)]
        tables = torch.zeros(rows, wide, dtype=torch.int32, device=device)
        tables[:, :count] = torch.randperm(rows * count, device=device).view(rows, count).to(torch.int32) + 1
        lengths = torch.full((rows,), length, dtype=torch.int32, device=device)
        query = torch.randn(rows, 16, 128, device=device, dtype=torch.bfloat16)
        run = partial(pages.attend_pages, query, *pool, tables, lengths, scale=0.09)
        rate = 4 * rows * length * 8 * 128 / graph_seconds(result, run) / 1e9
        result.add(f"pages of {rows} rows of {length}, tables of {wide}", rate, "GB/s", of=COPY)
        del pool
        release(result)


def sampler(result: Result) -> None:
    """Time the sampler and the output layer alone; the sampler's bytes, one read of the logits, take 0.1 us a row."""
    vocab, width, device = (512, 64, "cpu") if result.small else (151936, 1024, result.device)
    weight = torch.randn(vocab, width, device=device, dtype=torch.bfloat16)
    ways = {"plain": {}, "top-p": {"top_p": 0.9}, "top-k": {"top_k": 50}, "greedy": {"temperature": 0.0}}
    for rows in (2,) if result.small else (1, 8, 64, 256):
        logits, counters = (
            torch.randn(rows, vocab, device=device).mul_(3),
            torch.zeros(rows, dtype=torch.int64, device=device),
        )
        for name, options in ways.items():
            params = [SamplingParams(max_tokens=9, **options)] * rows  # type: ignore[arg-type]
            sampling = RowSampling.from_params(params, list(range(rows)), torch.device(device))
            seconds = device_seconds(result, lambda s=sampling, x=logits, c=counters: sample(x, s, c, None))
            result.add(f"{rows} rows, {name}", seconds * 1e6, "us")
        states = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
        seconds = device_seconds(result, lambda s=states: torch.ops.hone.matmul_wide(s, weight.t()))
        result.add(f"{rows} rows, float32 logits", seconds * 1e6, "us")
