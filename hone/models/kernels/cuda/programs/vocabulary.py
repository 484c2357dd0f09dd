"""Triton programs of the output layer with its softmax: a program computes one tile of logits.

Tiles are computed in bands of rows, so that the tiles of the weight that one band reads stay in the GPU's cache for its rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ON_A_GPU: dict[str, Any] = {"ROWS": 128, "COLUMNS": 128, "DEPTH": 64, "BAND": 16, "num_warps": 8, "num_stages": 4}
COMBINED = {"BLOCK": 32, "TILES": 64}
_ELSEWHERE: dict[str, Any] = {"ROWS": 16, "COLUMNS": 32, "DEPTH": 16, "BAND": 2}
"""Small tiles for Triton's interpreter."""


@triton.jit
def tile_of_logits(
    hidden,
    weight,
    bias,
    rows,
    vocabulary,
    width,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
):
    """Return the rows and columns of this program's tile, its logits before the temperature, and the derivative of the soft cap."""
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(vocabulary, COLUMNS)
    program = tl.program_id(0)
    first = program // (BAND * column_tiles) * BAND
    height = tl.minimum(row_tiles - first, BAND)
    within = program % (BAND * column_tiles)
    row = ((first + within % height) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column_tile = within // height
    column = (column_tile * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    depth = tl.arange(0, DEPTH)
    left = hidden + row[:, None] * width + depth[None, :]
    right = weight + column[None, :] * width + depth[:, None]
    logits = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, width, DEPTH):
        inside = start + depth < width
        states = tl.load(left + start, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        weights = tl.load(right + start, mask=(column < vocabulary)[None, :] & inside[:, None], other=0.0)
        if WIDE:  # the interpreter multiplies bfloat16 numbers wrongly
            states, weights = states.to(tl.float32), weights.to(tl.float32)
        logits = tl.dot(states, weights, logits, input_precision="ieee")
    if HAS_BIAS:
        logits += tl.load(bias + column, mask=column < vocabulary, other=0.0).to(tl.float32)[None, :]
    slope = 1.0
    if HAS_SOFTCAP:
        capped = 2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0  # tanh
        logits = softcap * capped
        slope = 1.0 - capped * capped
    return row, column, column_tile, logits, slope


@triton.jit
def vocabulary_statistics(
    hidden,
    weight,
    bias,
    targets,
    partial,
    chosen,
    rows,
    vocabulary,
    width,
    inverse_temperature,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
):
    row, column, column_tile, logits, _ = tile_of_logits(
        hidden,
        weight,
        bias,
        rows,
        vocabulary,
        width,
        softcap,
        HAS_BIAS,
        HAS_SOFTCAP,
        WIDE,
        ROWS,
        COLUMNS,
        DEPTH,
        BAND,
    )
    exists = (column < vocabulary)[None, :]
    logits *= inverse_temperature
    target = tl.load(targets + row, mask=row < rows, other=-1)
    hit = column[None, :] == target[:, None]
    here = (target >= column_tile * COLUMNS) & (target < tl.minimum((column_tile + 1) * COLUMNS, vocabulary))
    tl.store(chosen + row, tl.sum(tl.where(hit, logits, 0.0), 1), mask=(row < rows) & here)
    largest = tl.max(tl.where(exists, logits, float("-inf")), 1)
    logits -= largest[:, None]
    weights = tl.where(exists, tl.exp(logits), 0.0)
    into = partial + column_tile.to(tl.int64) * rows + row
    tiles = tl.cdiv(vocabulary, COLUMNS).to(tl.int64)
    tl.store(into, largest, mask=row < rows)
    tl.store(into + tiles * rows, tl.sum(weights, 1), mask=row < rows)
    tl.store(into + 2 * tiles * rows, tl.sum(weights * logits, 1), mask=row < rows)


@triton.jit
def vocabulary_combine(partial, chosen, out, rows, tiles, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """Put the statistics of all tiles of some rows together: largest logit, sum and mean of the exponentials relative to it."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    top = tl.full((BLOCK,), -1e30, tl.float32)
    total, mean = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    step = tl.cast(tiles, tl.int64) * rows
    for start in range(0, tiles, TILES):
        tile = (start + tl.arange(0, TILES)).to(tl.int64)
        place = tile[:, None] * rows + row[None, :]
        inside = (tile < tiles)[:, None] & (row < rows)[None, :]
        largest = tl.load(partial + place, mask=inside, other=-1e30)
        sums = tl.load(partial + place + step, mask=inside, other=0.0)
        means = tl.load(partial + place + 2 * step, mask=inside, other=0.0)
        higher = tl.maximum(top, tl.max(largest, 0))
        above, before = largest - higher[None, :], top - higher
        share, kept = tl.exp(above), tl.exp(before)
        mean = kept * (mean + total * before) + tl.sum(share * (means + sums * above), 0)
        total = kept * total + tl.sum(share * sums, 0)
        top = higher
    total = tl.where(row < rows, total, 1.0)
    tl.store(out + row, top + tl.log(total), mask=row < rows)
    tl.store(out + rows + row, tl.load(chosen + row, mask=row < rows, other=0.0), mask=row < rows)
    tl.store(out + 2 * rows + row, top + mean / total, mask=row < rows)


@triton.jit
def vocabulary_gradient(
    hidden,
    weight,
    bias,
    targets,
    log_sum,
    entropy,
    grad_log_probs,
    grad_entropy,
    grad_logits,
    rows,
    vocabulary,
    width,
    inverse_temperature,
    softcap,
    HAS_ENTROPY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
):
    row, column, _, logits, slope = tile_of_logits(
        hidden,
        weight,
        bias,
        rows,
        vocabulary,
        width,
        softcap,
        HAS_BIAS,
        HAS_SOFTCAP,
        WIDE,
        ROWS,
        COLUMNS,
        DEPTH,
        BAND,
    )
    is_row = row < rows
    log_p = logits * inverse_temperature - tl.load(log_sum + row, mask=is_row, other=0.0)[:, None]
    of_log_prob = tl.load(grad_log_probs + row, mask=is_row, other=0.0)
    factor = -of_log_prob[:, None]
    if HAS_ENTROPY:
        of_entropy = tl.load(grad_entropy + row, mask=is_row, other=0.0)
        factor = factor - of_entropy[:, None] * (log_p + tl.load(entropy + row, mask=is_row, other=0.0)[:, None])
    target = tl.load(targets + row, mask=is_row, other=-1)
    grad = tl.exp(log_p) * factor
    grad += tl.where(column[None, :] == target[:, None], of_log_prob[:, None], 0.0)
    grad *= inverse_temperature * slope
    place = row[:, None] * vocabulary + column[None, :]
    wanted = is_row[:, None] & (column < vocabulary)[None, :]
    tl.store(grad_logits + place, grad.to(grad_logits.dtype.element_ty), mask=wanted)


def statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    softcap: float | None,
) -> Tensor:
    hidden, weight, shape = hidden.contiguous(), weight.contiguous(), _shape(hidden.device)
    (rows, width), vocabulary = hidden.shape, len(weight)
    partial = hidden.new_empty(3, triton.cdiv(vocabulary, shape["COLUMNS"]), rows, dtype=torch.float32)
    chosen = hidden.new_zeros(rows, dtype=torch.float32)
    vocabulary_statistics[_tiles(rows, vocabulary, shape)](
        hidden,
        weight,
        weight if bias is None else bias,
        targets,
        partial,
        chosen,
        rows,
        vocabulary,
        width,
        1.0 / temperature,
        softcap or 1.0,
        bias is not None,
        softcap is not None,
        hidden.device.type != "cuda",
        **shape,
    )
    out = hidden.new_empty(3, rows, dtype=torch.float32)
    vocabulary_combine[(triton.cdiv(rows, COMBINED["BLOCK"]),)](
        partial, chosen, out, rows, partial.shape[1], **COMBINED
    )
    return out


def gradient(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    log_sum: Tensor,
    entropy: Tensor | None,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
    softcap: float | None,
) -> Tensor:
    hidden, weight, shape = hidden.contiguous(), weight.contiguous(), _shape(hidden.device)
    (rows, width), vocabulary = hidden.shape, len(weight)
    grad_logits = weight.new_empty(rows, vocabulary)
    vocabulary_gradient[_tiles(rows, vocabulary, shape)](
        hidden,
        weight,
        weight if bias is None else bias,
        targets,
        log_sum.contiguous(),
        log_sum if entropy is None else entropy.contiguous(),
        grad_log_probs.contiguous(),
        log_sum if grad_entropy is None else grad_entropy.contiguous(),
        grad_logits,
        rows,
        vocabulary,
        width,
        1.0 / temperature,
        softcap or 1.0,
        entropy is not None and grad_entropy is not None,
        bias is not None,
        softcap is not None,
        hidden.device.type != "cuda",
        **shape,
    )
    return grad_logits


def _shape(device: torch.device) -> dict[str, Any]:
    return ON_A_GPU if device.type == "cuda" else _ELSEWHERE


def _tiles(rows: int, vocabulary: int, shape: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(rows, shape["ROWS"]) * triton.cdiv(vocabulary, shape["COLUMNS"]),)
