"""Fixed limits shared by computation and the memory plan."""

from __future__ import annotations

CPU_MICRO_BATCH_TOKENS = 4608
"""Upper bound on tokens per CPU micro-batch; overrides a larger budget. Larger ones use more memory and are not faster."""

PREFILL_TOKENS = 16384  # prompt tokens in one forward pass of the native engine; a longer prompt gets a separate pass

GATHER_BUCKET_BYTES = 256 * 2**20
"""Bytes of parameters that are all-gathered at a time for export; a larger parameter is gathered alone."""

OFFLOAD_IN_FLIGHT_BYTES = 256 * 2**20
"""Bytes of activations whose copies to or from host memory are under way; a larger one is copied alone."""

BROADCAST_BUFFERS = 2
"""Buckets of weights that each end of a broadcast holds: one travels, the other is packed or loaded."""

FROZEN_BYTES = 4  # bytes per parameter that is only read: float32
PACKED_BLOCK = 64  # packed parameters with one float32 scale
PACKED_BYTES = {"nf4": 0.5 + 4 / PACKED_BLOCK, "int8": 1 + 4 / PACKED_BLOCK}  # bytes of each, by method

GRADIENT_BYTES = 4  # bytes per parameter of its gradient: float32

ADAM_BYTES = 8  # bytes per parameter of Adam's two moments: float32

TRAINED_BYTES = FROZEN_BYTES + GRADIENT_BYTES + ADAM_BYTES
"""Bytes per trained parameter: weight, gradient and Adam's moments."""

ORTHOGONALISED_NUMBERS = 1 << 26
"""Numbers of a stack of experts' matrices that Muon orthogonalises at a time; a larger matrix alone."""


def micro_batch_tokens(budget: int, *, on_cpu: bool) -> int:
    return min(budget, CPU_MICRO_BATCH_TOKENS) if on_cpu else budget


MAX_SUPPORT = 1024  # maximum of tokens in the support of a sampled token, where ``rollout.keep_support`` keeps it
REPORT_SUPPORT = ("native", "hf")  # engines that report which tokens could be sampled
REPORT_EXPERTS = ("native", "vllm", "sglang")  # engines that report which experts computed a token
