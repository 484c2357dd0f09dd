"""What a forward pass keeps for the backward pass, and what exists only for a moment: bytes a token, counted as the code computes.

    residual stream  float32, before attention and before the feed-forward part
    inputs           of the projections: one tensor that they share in float32, a copy for each in bfloat16 (autocast)
    heads            queries and keys in float32, values, the mixed values
    inner            four tensors of the feed-forward part's width: gate, its activation, up, their product

On a CPU the layers of Llama-shaped models are computed by :mod:`hone.training.fused`, everything else by the model's own module.
Tests hold these counts against what autograd really keeps, byte by byte.
"""

from __future__ import annotations

from dataclasses import dataclass

from hone.preflight.plan.model import ModelShape

WIDE, NARROW = 4, 2
"""Bytes of a float32 and of a bfloat16 number."""
LOGIT_ROWS = 2048
"""Rows of logits that exist at a time (:func:`hone.algorithms.logits.chunked_log_probs`)."""


@dataclass(frozen=True)
class Computation:
    """How a model's passes are computed on one device.

    Attributes:
        on_cpu: whether on a CPU.
        narrow: whether products are made in bfloat16 (autocast).
        gathered: whether FSDP gathers parameters in bfloat16, so that no product makes a copy of its weight.
        adapter_rank: of LoRA adapters on a frozen base, 0 without.
        recompute: gradient checkpointing.
        tiles: pieces of the feed-forward part, 1 without tiling.
        tensor: ranks that share every matrix.
        on_host: whether what is kept goes to the host's memory.
        spread: tokens in attention for each token in the matrices: on a GPU each response brings its prompt along.
    """

    on_cpu: bool
    narrow: bool
    gathered: bool = False
    adapter_rank: int = 0
    recompute: bool = False
    tiles: int = 1
    tensor: int = 1
    on_host: bool = False
    spread: float = 1.0

    def fused(self, shape: ModelShape) -> bool:
        """Whether :mod:`hone.training.fused` computes the layers: nothing stands in place of their parts."""
        plain = not (self.adapter_rank or self.gathered) and self.tensor == 1
        return self.on_cpu and plain and shape.llama_shaped

    @property
    def bytes(self) -> int:
        """Of a number that a product gives."""
        return NARROW if self.narrow else WIDE


@dataclass(frozen=True)
class Held:
    """Bytes: ``a_token`` times tokens, and ``weights`` whatever the tokens (copies of parameters in another dtype or order)."""

    a_token: float
    weights: float = 0.0

    def __add__(self, other: Held) -> Held:
        return Held(self.a_token + other.a_token, self.weights + other.weights)

    def times(self, count: float) -> Held:
        """Several of it."""
        return Held(self.a_token * count, self.weights * count)

    def of(self, tokens: float) -> float:
        """Bytes for so many tokens."""
        return self.a_token * tokens + self.weights


def layer_inside(shape: ModelShape, how: Computation) -> Held:
    """All that the backward pass of one layer needs, as if it were not recomputed."""
    fused, size, hidden = how.fused(shape), how.bytes, shape.hidden
    queries, keys, heads = shape.queries / how.tensor, shape.keys / how.tensor, _all_heads(shape) / how.tensor
    width = shape.width * max(1, shape.chosen) / how.tensor
    kept = 2 * hidden * WIDE + 2 * WIDE  # residual stream, and the norms' scales
    kept += _inputs(hidden, how, fused) + queries * size
    if how.on_cpu:
        kept += (queries + keys) * WIDE + keys * size
    else:  # the kernel keeps its inputs, its output and a number a head
        kept += how.spread * ((2 * queries + 2 * keys) * size + heads * WIDE)
    if fused:
        kept += (queries + 2 * keys) * size + heads * WIDE * shape.head_norms
    elif shape.head_norms:
        kept += (queries + keys) * (WIDE + (0 if how.adapter_rank else size)) + heads * WIDE
    if not fused and not how.adapter_rank:
        kept += 2 * hidden * WIDE  # the states as a norm with a trained weight leaves them
    kept += 7 * how.adapter_rank * size
    if how.tiles == 1:
        kept += 4 * width * size
    return Held(kept, _weight_copies(shape, how, fused))


def layer_kept(shape: ModelShape, how: Computation) -> Held:
    """What one layer keeps until its backward pass."""
    return Held(shape.hidden * WIDE) if how.recompute else layer_inside(shape, how)


def outside_kept(shape: ModelShape, how: Computation) -> Held:
    """What the rest of the model keeps a token: positions, their rotations, the final norm."""
    norm = shape.hidden * WIDE * (1 if how.fused(shape) or how.adapter_rank else 2)
    return Held(norm + 2 * shape.head_dim * WIDE + 3 * WIDE)


def head_kept(shape: ModelShape, how: Computation) -> Held:
    """What the log-prob of a response token keeps."""
    return Held(shape.hidden * how.bytes + 2 * 8 + 2 * WIDE, shape.embedding / how.tensor * NARROW * how.narrow)


def backward_moment(shape: ModelShape, how: Computation) -> float:
    """Bytes a token that exist while the backward pass is in a layer's feed-forward part, beside what was kept."""
    width = shape.width * max(1, shape.chosen) / how.tensor
    inside = layer_inside(shape, how).a_token if how.recompute else 0.0
    tile = 7 * width * how.bytes / how.tiles if how.tiles > 1 else 3 * width * how.bytes
    return inside + tile + 2 * shape.hidden * WIDE


def forward_moment(shape: ModelShape, how: Computation) -> float:
    """Bytes a token that exist at a time in a forward pass that keeps nothing: of attention or of the feed-forward part."""
    size, queries, keys = how.bytes, shape.queries / how.tensor, shape.keys / how.tensor
    width = shape.width * max(1, shape.chosen) / how.tensor
    attention = (queries + 2 * keys) * size + (queries + keys) * WIDE + keys * size  # joint, rotated
    attention += (
        how.spread * ((queries + 2 * keys) * 2 + 2 * queries) * (WIDE if how.on_cpu else size)
    )  # gathered, mixed
    return 2 * shape.hidden * WIDE + max(attention, 3 * width * size / how.tiles)


def logits_moment(shape: ModelShape, how: Computation, rows: float, *, backward: bool) -> float:
    """Bytes of the logits of ``rows`` response tokens: as many at a time as one chunk has, twice; in the backward pass also the
    gradients of the hidden states and of the output embedding.
    """
    vocabulary = shape.vocabulary / how.tensor
    chunk = min(rows, LOGIT_ROWS) * vocabulary * (2 * WIDE + NARROW * how.narrow)
    if not backward:
        return chunk
    gradient = 0 if how.adapter_rank else shape.embedding / how.tensor * (WIDE + NARROW * how.narrow)
    return chunk + rows * shape.hidden * how.bytes + gradient


def _inputs(hidden: int, how: Computation, fused: bool) -> float:
    """Inputs of the projections of attention and of the feed-forward part."""
    if not how.narrow:
        return 2 * hidden * WIDE
    attention = 1 if fused else 3
    return attention * hidden * NARROW + (2 * hidden * NARROW if how.tiles == 1 else hidden * WIDE)


def _weight_copies(shape: ModelShape, how: Computation, fused: bool) -> float:
    joint = shape.hidden * (shape.queries + 2 * shape.keys)
    norms = _all_heads(shape) * shape.head_dim * WIDE * shape.head_norms if fused else 0
    if how.narrow and not how.gathered:
        adapters = shape.adapter(how.adapter_rank) / shape.layers
        return (shape.matrices + adapters) / how.tensor * NARROW + norms
    return joint * WIDE + norms if fused else 0.0


def _all_heads(shape: ModelShape) -> int:
    return shape.heads + shape.key_value_heads
