"""Triton programs of attention over pages: each page of a row is computed by itself, then the results of a head's pages are merged.

Pages begin at fixed places of a row, and are merged in their order. So neither the batch nor the width of the table changes a bit of
the result, whichever program computes a page. A long row has many pages and so fills the GPU alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS, STAGES = 4, 3
_TILE_BYTES = 1 << 14
"""Bytes of keys, and of values, that a program loads at once; two such pairs are on their way while one is used."""
_MOST_TOKENS = 128
_LEAST = 16
"""Smallest side of a tile that tensor cores multiply."""
_PARTS = 16
"""Pages of a head that are merged at once."""
_PROGRAMS_A_PROCESSOR = 16
"""Programs share the pages of a row unless there are this many without: idle ones cost little, and few would not fill the GPU."""
_PROCESSORS_ELSEWHERE = 2
"""Processors of other devices, as in Triton's interpreter."""


@triton.jit
def seen_pages(lengths, row, width, window, PAGE: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Return the first token of a row that is seen, the end of the row, and its first page and the end of its pages."""
    end = tl.minimum(tl.load(lengths + row), width * PAGE)
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(end - window, 0)
    return start, end, start // PAGE, tl.cdiv(end, PAGE)


@triton.jit(do_not_specialize=["width", "window"])
def pages_parts(
    query,
    keys,
    values,
    tables,
    lengths,
    parts,
    log_sums,
    scale,
    softcap,
    query_row,
    key_page,
    key_token,
    width,
    window,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute some pages of a row for the query heads that share a key head: the mixed values, and the log of the sum of weights."""
    key_head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start, end, first, pages = seen_pages(lengths, row, width, window, PAGE, HAS_WINDOW)
    first += tl.program_id(2)
    if first >= pages:
        return
    member, column, token = tl.arange(0, MEMBERS), tl.arange(0, COLUMNS), tl.arange(0, TOKENS)
    exists = (column < WIDTH)[None, :]
    wanted = (member < GROUP)[:, None] & exists
    within = (key_head * GROUP + member)[:, None] * WIDTH + column[None, :]
    states = tl.load(query + row * query_row + within, mask=wanted, other=0.0)
    if WIDE:
        states = states.to(tl.float32)
    heads = tl.num_programs(0) * GROUP
    part = (row * heads + key_head * GROUP + member) * width
    tile = token[:, None] * key_token + column[None, :]
    for page in range(first, pages, tl.num_programs(2)):
        base = tl.load(tables + row * width + page).to(tl.int64) * key_page + key_head * WIDTH
        before = page * PAGE
        top = tl.full((MEMBERS,), float("-inf"), tl.float32)
        total = tl.zeros((MEMBERS,), tl.float32)
        mixed = tl.zeros((MEMBERS, COLUMNS), tl.float32)
        for at in range(tl.maximum(start - before, 0) // TOKENS * TOKENS, tl.minimum(end - before, PAGE), TOKENS):
            place = before + at + token
            seen = place < end
            if HAS_WINDOW:
                seen &= place >= start
            mask = seen[:, None] & exists
            key = tl.load(keys + base + at * key_token + tile, mask=mask, other=0.0)
            value = tl.load(values + base + at * key_token + tile, mask=mask, other=0.0)
            if WIDE:
                key, value = key.to(tl.float32), value.to(tl.float32)
            scores = tl.dot(states, tl.trans(key), input_precision="ieee") * scale
            if HAS_SOFTCAP:
                scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # tanh
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp(scores - higher[:, None])
            kept = tl.exp(top - higher)
            total = total * kept + tl.sum(weights, 1)
            mixed = tl.dot(weights.to(value.dtype), value, mixed * kept[:, None], input_precision="ieee")
            top = higher
        tl.store(log_sums + part + page, top + tl.log(total), mask=member < GROUP)
        into = parts + (part + page)[:, None] * WIDTH + column[None, :]
        tl.store(into, mixed / total[:, None], mask=wanted)


@triton.jit(do_not_specialize=["width", "window"])
def pages_merge(
    parts,
    log_sums,
    lengths,
    sinks,
    output,
    width,
    window,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge the pages of a row for one head, each with its share of the weights."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, _, first, pages = seen_pages(lengths, row, width, window, PAGE, HAS_WINDOW)
    place, column = row * tl.num_programs(0) + head, tl.arange(0, COLUMNS)
    top, total = float("-inf"), 0.0
    if HAS_SINKS:
        top, total = tl.load(sinks + head).to(tl.float32), 1.0
    mixed = tl.zeros((COLUMNS,), tl.float32)
    for start in range(first, pages, PARTS):
        page = start + tl.arange(0, PARTS)
        inside, part = page < pages, place * width + page
        log_sum = tl.load(log_sums + part, mask=inside, other=float("-inf"))
        wanted = inside[:, None] & (column < WIDTH)[None, :]
        values = tl.load(parts + part[:, None] * WIDTH + column[None, :], mask=wanted, other=0.0)
        higher = tl.maximum(top, tl.max(log_sum, 0))
        share, kept = tl.exp(log_sum - higher), tl.exp(top - higher)
        mixed = mixed * kept + tl.sum(share[:, None] * values, 0)
        total = total * kept + tl.sum(share, 0)
        top = higher
    mixed /= tl.where(pages > first, total, 1.0)
    tl.store(output + place * WIDTH + column, mixed.to(output.dtype.element_ty), mask=column < WIDTH)


def forward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    (rows, heads, width), (_, page, key_heads, _), pages = query.shape, keys.shape, tables.shape[1]
    if query.stride()[1:] != (width, 1):
        query = query.contiguous()
    assert keys.stride() == values.stride() and keys.stride()[2:] == (width, 1), "pages of keys and values differ"
    tables, lengths = tables.contiguous(), lengths.contiguous()
    output = query.new_empty(rows, heads, width)
    parts = query.new_empty(rows, heads, pages, width, dtype=torch.float32)
    log_sums = query.new_empty(rows, heads, pages, dtype=torch.float32)
    wide = query.device.type != "cuda" or query.dtype == torch.float32
    sizes, numbers = shape(heads // key_heads, width, page, query.element_size()), (pages, window or 0)
    states = (query, keys, values, tables, lengths, parts, log_sums)
    strides = (query.stride(0), keys.stride(0), keys.stride(1))
    pages_parts[(key_heads, rows, programs_of_a_row(query.device, rows * key_heads, pages, page, window))](
        *states,
        scale,
        1.0 if softcap is None else softcap,
        *strides,
        *numbers,
        **sizes,
        HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=window is not None,
        WIDE=wide,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    pages_merge[(heads, rows)](
        parts,
        log_sums,
        lengths,
        log_sums if sinks is None else sinks.contiguous(),
        output,
        *numbers,
        **merged(width, page),
        HAS_WINDOW=window is not None,
        HAS_SINKS=sinks is not None,
    )
    return output


def shape(group: int, width: int, page: int, number_bytes: int) -> dict[str, Any]:
    """Return the sizes of the first program; they depend on the model and its dtype alone."""
    columns = max(_LEAST, triton.next_power_of_2(width))
    tokens = max(_LEAST, min(_MOST_TOKENS, page, _TILE_BYTES // (columns * number_bytes)))
    assert page % tokens == 0, f"pages have {page} tokens, not a multiple of {tokens}"
    members = max(_LEAST, triton.next_power_of_2(group))
    names = ("GROUP", "MEMBERS", "WIDTH", "COLUMNS", "PAGE", "TOKENS")
    return dict(zip(names, (group, members, width, columns, page, tokens), strict=True))


def merged(width: int, page: int) -> dict[str, int]:
    return {"WIDTH": width, "COLUMNS": triton.next_power_of_2(width), "PAGE": page, "PARTS": _PARTS}


def programs_of_a_row(device: torch.device, groups: int, pages: int, page: int, window: int | None) -> int:
    """Return the number of programs that share the pages of a row and key head; ``groups`` is rows times key heads."""
    processors = _PROCESSORS_ELSEWHERE
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    if window is not None:
        pages = min(pages, triton.cdiv(window, page) + 1)
    return max(1, min(pages, triton.cdiv(processors * _PROGRAMS_A_PROCESSOR, groups)))
