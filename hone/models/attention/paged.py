"""Causal attention of new tokens over a paged KV cache on CUDA: one call of PyTorch's variable-length FlashAttention.

Keys and values of all sequences are in a pool of pages. A table names the pages of each sequence in order, so sequences may share
pages, and no argument of the call has a shape that depends on their lengths:

    pool, keys    page 0 | page 1 | page 2 | page 3 | page 4
    tables        sequence a: 3, 1    sequence b: 3, 4    (both begin with what is in page 3)

The keys and values of the new tokens are in the pool already. The causal mask is aligned to the last key.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hone.models.attention.context import Scoring
from hone.models.attention.varlen import options_of_varlen

PAGE = 256
"""Tokens of a page; FlashAttention 2 reads pages whose size is a multiple of 256."""
_TOLERANCE = 0.03
"""Largest error of the first call against float32: a few roundings to bfloat16 of numbers around 1."""


@dataclass(frozen=True)
class PagedKeys:
    """The pages that new tokens attend to.

    Attributes:
        tables: ``[R, W]`` int32, pages of each sequence in order; pages after its end are not read.
        lengths: ``[R]`` int32, keys of each sequence, those of its new tokens included.
        query_ends: ``[R + 1]`` int32, first new token of each sequence, and the number of new tokens.
        longest_query: new tokens of the sequence that has most.
    """

    tables: Tensor
    lengths: Tensor
    query_ends: Tensor
    longest_query: int


def paged_attention(query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, pages: PagedKeys) -> Tensor:
    """Compute attention of new tokens over the pages of their sequences; :func:`obstacle` must be None.

    The kernel computes a sequence in one piece, whatever else is in the batch. So its output does not depend on other sequences.

    Args:
        query: ``[N, heads, d]`` of the new tokens, in the dtype of the pool.
        keys: ``[pages, tokens of a page, kv_heads, d]``; query head ``i`` uses key head ``i // (heads / kv_heads)``.
        values: the same of the values.
        scoring: scale and window.
        pages: of the sequences.

    Returns:
        ``[N, heads, d]``.
    """
    return _call(query, keys, values, scoring, pages, with_key_ends=_takes_key_ends(query.device))


def _call(
    query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, pages: PagedKeys, *, with_key_ends: bool
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    window: tuple[int, int] = (-1, 0) if scoring.window is None else (scoring.window - 1, 0)
    if pages.longest_query == 1 and scoring.window is None:
        window = (-1, -1)  # one query sees all keys, and the kernel computes the heads that share keys together
    options: dict[str, Any] = {
        "scale": scoring.scale,
        "window_size": window,
        "enable_gqa": query.shape[1] != keys.shape[2],
        "seqused_k": pages.lengths,
        "block_table": pages.tables,
        "num_splits": 1,
    }
    key_ends = pages.query_ends if with_key_ends else None  # not read: the lengths say where keys end
    most_keys = pages.tables.shape[1] * keys.shape[1]
    return varlen_attn(query, keys, values, pages.query_ends, key_ends, pages.longest_query, most_keys, **options)  # type: ignore[return-value]


@functools.cache
def obstacle(device: torch.device) -> str | None:
    """Return why the kernel cannot read pages on this device, or None if it can. The first call tries it."""
    if not {"block_table", "seqused_k", "num_splits"} <= options_of_varlen():
        return f"torch {torch.__version__} has no torch.nn.attention.varlen with block tables"
    try:
        _takes_key_ends(device)
    except RuntimeError as error:
        return f"torch.nn.attention.varlen does not read pages here: {error}"
    return None


@functools.cache
def _takes_key_ends(device: torch.device) -> bool:
    """Return whether the installed kernel needs ends of keys next to a block table: FlashAttention 2 does, 3 refuses them.

    Raises:
        RuntimeError: it computes neither way, or something else than attention.
    """
    if device.type == "meta":
        return True
    errors = []
    for with_key_ends in (True, False):
        try:
            largest = _error_of_a_call(device, with_key_ends=with_key_ends)
        except (RuntimeError, ValueError) as error:
            errors.append(str(error))
            continue
        if largest < _TOLERANCE:
            return with_key_ends
        errors.append(f"its output differs from attention by {largest:.2g}")
    raise RuntimeError("; ".join(errors))


@torch.inference_mode()
def _error_of_a_call(device: torch.device, *, with_key_ends: bool) -> float:
    """Return the largest error of a small call: two sequences of one and two pages, one and two new tokens."""
    draw, scoring = torch.Generator().manual_seed(0), Scoring(64**-0.5)
    query, keys, values = (
        torch.randn(*shape, generator=draw).to(torch.bfloat16)
        for shape in ((3, 4, 64), (4, PAGE, 2, 64), (4, PAGE, 2, 64))
    )
    lengths, tables, ends = [3, PAGE + 5], [[3, 0], [1, 2]], [0, 1, 3]
    integers = (torch.tensor(x, dtype=torch.int32, device=device) for x in (tables, lengths, ends))
    here = [states.to(device) for states in (query, keys, values)]
    pages_of_call = PagedKeys(*integers, longest_query=2)
    output = _call(here[0], here[1], here[2], scoring, pages_of_call, with_key_ends=with_key_ends)
    largest = 0.0
    for token, (row, length) in enumerate([(0, 3), (1, PAGE + 4), (1, PAGE + 5)]):
        pages = torch.tensor(tables[row])
        mine = [kv[pages].flatten(0, 1)[:length].float().repeat_interleave(2, 1) for kv in (keys, values)]
        scores = torch.einsum("hd,khd->hk", query[token].float(), mine[0]) * scoring.scale
        expected = torch.einsum("hk,khd->hd", scores.softmax(-1), mine[1])
        largest = max(largest, float((output[token].float().cpu() - expected).abs().max()))
    return largest
