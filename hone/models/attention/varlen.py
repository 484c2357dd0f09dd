"""Causal attention of packed sequences on CUDA: one call of PyTorch's variable-length FlashAttention for all of them.

Queries are the packed tokens in the order of the row. Keys are gathered, so that every sequence has its prefix before its suffix;
a prefix that ``B`` sequences share has its queries computed once, and its keys read ``B`` times:

    row, queries    p p p a a | b b b b | c
    keys, values    p p p a a | p p p b b b b | p p p b b c

The kernel aligns the causal mask of a sequence with fewer queries than keys to the last key, so its first query sees the prefix.
"""

from __future__ import annotations

import functools
import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.models.attention.context import Scoring
from hone.models.attention.tiles import Sequences
from hone.models.devices import compute_dtype
from hone.models.gather import Gather

log = logging.getLogger("hone.models.attention")

_FIRST_CAPABILITY = (8, 0)
"""Compute capability of the first GPUs that have FlashAttention (Ampere)."""
_WIDEST_HEAD = 256


@dataclass(frozen=True)
class VarlenPlan:
    """The arguments of a variable-length attention call that depend on the sequences alone."""

    query_ends: Tensor  # ``[B + 1]`` int32, first query of each sequence, and the number of queries
    key_ends: Tensor  # ``[B + 1]`` int32, the same for keys
    longest_query: int  # queries of the sequence that has most
    longest_key: int  # keys of the sequence that has most
    gather: Gather | None  # gathers the keys; None if they are in order already, as without prefixes
    names_groups: bool  # whether the installed torch takes ``enable_gqa``, which says that query heads share key heads

    @classmethod
    def from_sequences(cls, sequences: Sequences, device: torch.device) -> VarlenPlan:
        """Plan ``sequences`` whose suffixes follow one another in the row."""
        gather = _key_gather(sequences, device) if int(sequences.prefix_length.max()) else None
        return cls.from_lengths(sequences.suffix_length, sequences.lengths, device, gather)

    @classmethod
    def from_lengths(
        cls, queries: Tensor, keys: Tensor, device: torch.device, gather: Gather | None = None
    ) -> VarlenPlan:
        """Plan sequences by their numbers of queries and of keys, ``[B]`` each; the last query sees the last key."""
        return cls(
            query_ends=_ends(queries).to(device),
            key_ends=_ends(keys).to(device),
            longest_query=int(queries.max()),
            longest_key=int(keys.max()),
            gather=gather,
            names_groups="enable_gqa" in options_of_varlen(),
        )


def _ends(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def _key_gather(sequences: Sequences, device: torch.device) -> Gather:
    lengths = sequences.lengths
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    position = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return Gather.from_source(sequences.packed_index(sequence, position), int(sequences.suffix_length.sum()), device)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, plan: VarlenPlan) -> Tensor:
    """Compute attention within each sequence in the compute dtype (autocast's, or else the query's); :func:`obstacle` must be None.

    ``query [N, heads, d]`` are the packed tokens; query head ``i`` uses key head ``i // (heads / kv_heads)``.
    """
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (states.to(compute_dtype(query)) for states in (query, key, value))
    if plan.gather is not None:
        key, value = plan.gather(key), plan.gather(value)
    window = scoring.window if scoring.window is not None and scoring.window < plan.longest_key else None
    options: dict[str, Any] = {"scale": scoring.scale, "window_size": (-1 if window is None else window - 1, 0)}
    if plan.names_groups:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    longest = plan.longest_query, plan.longest_key
    return varlen_attn(query, key, value, plan.query_ends, plan.key_ends, *longest, **options)  # type: ignore[return-value]


def obstacle(query: Tensor, value: Tensor, scoring: Scoring) -> str | None:
    """Return why the variable-length kernel cannot compute this attention, or None; the meta device counts as a recent GPU."""
    return states_obstacle(query, value, scoring) or device_obstacle(query.device)


def states_obstacle(query: Tensor, value: Tensor, scoring: Scoring) -> str | None:
    """Return why the variable-length kernel cannot compute attention of such states on any device; see :func:`obstacle`."""
    width, dtype = query.shape[-1], compute_dtype(query)
    if not scoring.plain:
        return "the model caps its scores or has attention sinks"
    if scoring.dropout:
        return "attention dropout is on"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in {str(dtype).removeprefix('torch.')}, not in bfloat16 or float16"
    if width != value.shape[-1] or width > _WIDEST_HEAD or width % 8:
        return f"heads are {width} and {value.shape[-1]} wide, not equal multiples of 8 up to {_WIDEST_HEAD}"
    return None


def device_obstacle(device: torch.device) -> str | None:
    """Return why no attention can be computed by the variable-length kernel on a device, or None if some can."""
    if "window_size" not in options_of_varlen():
        return f"torch {torch.__version__} has no torch.nn.attention.varlen with windows"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        return "the GPU is older than Ampere"
    return None


@functools.cache
def report_padding(reason: str) -> None:
    """Log once for each reason that attention is computed in padded tiles."""
    log.warning("attention runs in padded tiles, slower than one variable-length call: %s", reason)


@functools.cache
def options_of_varlen() -> frozenset[str]:
    """Parameters of the installed torch's ``varlen_attn``; none if torch has no such function."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)
