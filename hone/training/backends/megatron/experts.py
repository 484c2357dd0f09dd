"""Megatron's layer of experts for micro-batches whose number of tokens differs between ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

if not hasattr(moe_utils, "te_general_gemm"):  # without Transformer Engine Megatron reads a name that it has not set
    moe_utils.te_general_gemm = None  # pyright: ignore[reportAttributeAccessIssue]


class Router(TopKRouter):
    """Router without biases of experts, which Megatron would update in a compiled function."""

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        del routing_map, padding_mask


class PaddedExperts(MoELayer):
    """Experts of which each rank of a group has some; every rank computes the tokens of all ranks for its own.

    Megatron gathers the same number of tokens from each rank, so that fewer are padded with zeros, which change nothing: experts have no
    biases, and the padding's outputs are dropped.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if parallel_state._GLOBAL_MEMORY_BUFFER is None:
            parallel_state._set_global_memory_buffer()  # gathered tokens are stored in it

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Compute the experts: ``[N, 1, H]`` to ``[N, 1, H]``."""
        tokens = len(hidden_states)
        largest = torch.tensor(tokens, device=hidden_states.device)
        if self.ep_group.size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.ep_group)
        padded = F.pad(hidden_states, (0, 0, 0, 0, 0, int(largest) - tokens))
        outputs: Any = super().forward(padded, *args, **kwargs)
        output, bias = outputs
        return output[:tokens], bias
