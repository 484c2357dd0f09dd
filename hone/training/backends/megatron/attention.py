"""Hone's attention over packed sequences as the core attention of Megatron's layers."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from hone.models.attention.context import AttentionContext, Scoring


class PackedAttention(nn.Module):
    """Attention that an :class:`~hone.models.attention.context.AttentionContext` computes; it travels as the attention mask.

    Args:
        config: of the model.
        layer_number: of the layer, from 1.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, **_: Any) -> None:
        super().__init__()
        assert config.kv_channels is not None
        self.layer, self.scoring = layer_number - 1, Scoring(config.kv_channels**-0.5)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: AttentionContext, **_: Any) -> Tensor:
        """Compute attention: ``[N, 1, heads, head_dim]`` to ``[N, 1, heads * head_dim]``."""
        by_head = [states.permute(1, 2, 0, 3) for states in (query, key, value)]
        output = attention_mask.attend(self.layer, by_head[0], by_head[1], by_head[2], self.scoring)
        return output.flatten(2).transpose(0, 1)
