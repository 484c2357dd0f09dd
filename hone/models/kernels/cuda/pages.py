"""Attention of one new token for each row over the keys and values in its pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.algorithms.masked import wide
from hone.models.kernels.cuda.programs import launched_on_cuda

WIDEST_HEAD = 256


@torch.library.custom_op("hone::attend_pages", mutates_args=(), device_types="cpu")
def _attend_pages(
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
    """Return the attention of ``query [R, heads, d]`` over the pages that ``tables [R, W]`` name; see :func:`attend_pages`."""
    tokens = tables.shape[1] * keys.shape[1]
    ends, place = lengths.clamp(max=tokens)[:, None], torch.arange(tokens, device=query.device)
    seen = place < ends
    if window is not None:
        seen &= place >= ends - window
    # A masked value is multiplied by 0, so it has to be a number.
    of_rows = [states[tables.long()].flatten(1, 2).masked_fill(~seen[..., None, None], 0) for states in (keys, values)]
    grouped = wide(query).unflatten(1, (keys.shape[2], -1))
    scores = torch.einsum("rkgd,rtkd->rkgt", grouped, wide(of_rows[0])) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    extra = scores.new_full(grouped.shape[:3], float("-inf"))
    if sinks is not None:
        extra = wide(sinks).view(1, *grouped.shape[1:3]).expand_as(extra)
    weights = torch.cat([scores, extra[..., None]], -1).softmax(-1)[..., :-1]
    mixed = torch.einsum("rkgt,rtkd->rkgd", weights, wide(of_rows[1])).flatten(1, 2)
    return mixed.masked_fill((ends <= 0)[:, :, None], 0.0).to(query.dtype)


@_attend_pages.register_fake
def _shape(query: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape)


launched_on_cuda(_attend_pages, "pages", "forward")


def attend_pages(
    query: Tensor,  # ``[R, heads, d]``; head ``i`` uses key head ``i // (heads / kv_heads)``
    keys: Tensor,  # ``[pages, tokens of a page, kv_heads, d]``
    values: Tensor,  # the same of the values
    tables: Tensor,  # ``[R, W]`` int32, pages of each row in order; those after its end are not read
    # ``[R]`` int32, tokens of each row; a row without tokens gets zeros, and one cannot be longer than its table
    lengths: Tensor,
    *,
    scale: float,  # of the scores
    window: int | None = None,  # the last tokens of a row that are seen; None for all
    softcap: float | None = None,  # scores become ``softcap * tanh(score / softcap)``; None for none
    sinks: Tensor | None = None,  # ``[heads]`` scores that take probability and have no value, or None
) -> Tensor:
    """Return the attention of the last token of each row over the row, ``[R, heads, d]``, in the dtype of the query.

    What a row gets does not depend on other rows, nor on the width of the table, bit for bit on one kind of GPU. The host reads no
    number, so a CUDA graph can repeat the call.
    """
    return torch.ops.hone.attend_pages(query, keys, values, tables, lengths, sinks, scale, window, softcap)
