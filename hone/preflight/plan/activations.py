"""Activations and logits of one rank in closed form: coefficients times the widths of a model.

The coefficients were read off the tensors that autograd keeps (``saved_tensors_hooks``) in models that differ in one width at a
time. A test repeats that for every row of the table. ``hone plan --measure`` replaces the estimate for the model at hand by
one measured micro-batch (:mod:`hone.preflight.plan.local`): ``scale`` is the measurement divided by the estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from hone.models.registry import family_of
from hone.preflight.plan.model import ModelShape

LOGIT_ROWS = 2048  # rows of logits that exist at a time (:func:`hone.algorithms.logits.chunked_log_probs`)

_KEPT = {
    # (executor, bfloat16): bytes per number of (hidden, queries, keys, feed-forward width), more with query and key norms
    ("llama", False): (16, 8, 8, 16, 0),
    ("llama", True): (14, 4, 4, 8, 0),
    ("cuda", False): (16, 4, 8, 12, 0),
    ("cuda", True): (12, 2, 4, 6, 0),
    ("module", False): (24, 4, 0, 16, 8),
    ("module", True): (26, 2, 0, 8, 6),
    ("adapters", False): (16, 4, 0, 16, 4),
    ("adapters", True): (18, 2, 0, 8, 4),
}
"""What a layer keeps per token until its backward pass, without the inputs of attention."""


@dataclass(frozen=True)
class Passes:
    """The passes of a model on one device, and what they hold in bytes."""

    shape: ModelShape
    on_cpu: bool
    bf16: bool
    tokens: float = 0.0  # tokens in the matmuls of the largest micro-batch, this rank's share
    responses: float = 0.0  # those whose log-prob is computed
    # whether no matmul copies its weight: FSDP gathers parameters in bfloat16, or frozen ones are held so
    gathered: bool = False
    divided: bool = False
    lora_rank: int = 0
    checkpointing: bool = False
    keeps_attention: bool = False
    tiles: int = 1  # chunks of the feed-forward part, 1 without tiling
    tensor: int = 1  # ranks that share every matrix
    on_host: bool = False  # whether kept activations go to the host's memory
    # tokens in attention per token in the matmuls: on a GPU each response brings its prompt along
    prompt_copies: float = 1.0
    scale: float = 1.0
    ring: int = 1  # ranks of ring attention

    @property
    def executor(self) -> str:
        """Name of the code that computes the layers: an executor of :mod:`hone.models.llama`, the model's own module, or adapters."""
        if self.lora_rank:
            return "adapters"
        plain = not (self.divided or self.gathered) and self.tensor == 1
        if not plain or not family_of(self.shape.kind).llama_shaped:
            return "module"
        return "llama" if self.on_cpu else "cuda"

    @property
    def number(self) -> int:
        return 2 if self.bf16 else 4

    # per token -------------------------------------------------------------------------------------------------------

    @property
    def layer_kept(self) -> float:
        """Bytes that one layer keeps of a token until its backward pass."""
        if not self.checkpointing:
            return self._layer
        shape = self.shape
        # an output, and the float32 logarithm of each head's sum; on a CPU attention is not kept
        attention = (self.number * shape.queries + 4 * shape.heads) / self.tensor
        added = self.number * (self.executor == "cuda")  # the fused layer adds the last output itself
        return (4 + added) * shape.hidden + attention * (self.keeps_attention and not self.on_cpu)

    @property
    def _layer(self) -> float:
        hidden, queries, keys, width, norms = _KEPT[self.executor, self.bf16]
        shape, norms = self.shape, norms * family_of(self.shape.kind).qk_norm
        heads = (queries + norms) * shape.queries + (keys + norms) * shape.keys
        if self.on_cpu:
            heads += 4 * (shape.queries + shape.keys) + self.number * shape.keys
            heads += 4 * shape.queries * (self.ring > 1)  # a ring keeps the output too
        else:  # the kernel keeps its inputs and its output; in float32 queries of prompts are computed for each response
            queries_copied = 1.0 if self.bf16 else self.prompt_copies
            heads += 2 * self.number * (queries_copied * shape.queries + self.prompt_copies * shape.keys)
        return self.scale * (hidden * shape.hidden + heads / self.tensor + width * self._width * (self.tiles == 1))

    @property
    def outside_kept(self) -> float:
        """Bytes that the embedding, the rotations and the final norm keep of a token."""
        return 4 * ((2 if self.executor == "module" else 1) * self.shape.hidden + 2 * self.shape.head_dim)

    @property
    def forward_peak(self) -> float:
        """Bytes of a token in a forward pass that keeps nothing: in attention, or in the feed-forward part."""
        shape, number = self.shape, self.number
        projected = (number + 4) * shape.queries + (3 * number + 4) * shape.keys
        attended = 4 * (shape.queries + shape.keys) * (4 if self.on_cpu else number) * self.prompt_copies
        # of a ring: float32 sums of the parts, the blocks that come and go, and keys and values in the order of the queries
        ring = (8 * shape.queries + 8 * number * shape.keys) * (self.ring > 1)
        return 8 * shape.hidden + max(
            (projected + attended + ring) / self.tensor, 3 * self._width * number / self.tiles
        )

    @property
    def backward_peak(self) -> float:
        """Bytes of a token in the backward pass of a feed-forward part, or of ring attention, besides what was kept."""
        tile = (3 if self.tiles == 1 else 7 / self.tiles) * self._width * self.number
        # gradients in float32: of the queries, and of keys and values once added, once sent and once received
        ring = (8 * self.shape.queries + (24 + 8 * self.number) * self.shape.keys) / self.tensor * (self.ring > 1)
        return max(tile, ring) + 8 * self.shape.hidden + (self._layer if self.checkpointing else 0)

    @property
    def _width(self) -> float:
        return self.shape.width * max(1, self.shape.chosen) / self.tensor

    # in all ----------------------------------------------------------------------------------------------------------

    @property
    def weight_copies(self) -> float:
        """Copies of weights in all layers: autocast's in bfloat16, the Llama executors' joint projections in float32."""
        shape = self.shape
        if self.bf16:
            return 0 if self.gathered else shape.layers * 2 * shape.matrices / self.tensor
        joint = {"llama": shape.queries + 2 * shape.keys, "cuda": shape.queries + 2 * shape.keys + 2 * shape.width}
        return shape.layers * 4 * shape.hidden * joint.get(self.executor, 0)

    @property
    def log_probs_kept(self) -> float:
        """Bytes that the log-probs of response tokens keep, and autocast's copy of the output embedding."""
        copy = 2 * self.shape.embedding / self.tensor * self.bf16
        return self.responses * (self.shape.hidden * self.number + 24) + copy

    @property
    def logits(self) -> float:
        """One chunk of logits, in two float32 copies and autocast's."""
        return min(self.responses, LOGIT_ROWS) * self.shape.vocabulary / self.tensor * (10 if self.bf16 else 8)

    @property
    def logits_backward(self) -> float:
        """One chunk of logits, with the gradients of the hidden states and the output embedding."""
        gradient = self.shape.embedding / self.tensor * (6 if self.bf16 else 4) * (not self.lora_rank)
        return self.logits + self.responses * self.shape.hidden * self.number + gradient
