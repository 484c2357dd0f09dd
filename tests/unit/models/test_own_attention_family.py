"""Two model families with an attention and a cache of their own, each registered here alone, pass the suite of families.

Linear attention with decay keeps one state a sequence, whatever its length (Katharopoulos et al. 2020, Sun et al. 2023). Multi-head
latent attention keeps one compressed vector a token, which is both key and value (DeepSeek-AI 2024).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.families import SIZES, make_engine, model_of, serve
from support.family_suite import ModelFamilySuite, prompt, request
from support.messages import raises
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hone.errors import ModelError
from hone.models.attention.cache import Entries, KVLayerCache, NewTokens
from hone.models.attention.context import Scoring, require_context
from hone.models.registry import CacheSize, ModelFamily, register_model
from hone.models.routing import use_hone_attention
from hone.training.backends.fsdp2.tensor_parallel import _plan

DECAY = 0.9


# ------------------------------------------------------------------------------------------------------ linear attention


class LinearAttention(nn.Module):
    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.shape = layer_idx, (config.num_attention_heads, config.head_dim)
        width = config.num_attention_heads * config.head_dim
        self.qkv = nn.Linear(config.hidden_size, 3 * width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, context: Any = None, **_: Any) -> tuple[Tensor, None]:
        query, key, value = (part.unflatten(-1, self.shape) for part in self.qkv(hidden_states).chunk(3, -1))
        query, key = nn.functional.elu(query) + 1, nn.functional.elu(key) + 1
        mixed = require_context(self, context).mix(self.layer_idx, mix_whole, query, key, value)
        return self.o_proj(mixed.flatten(-2)), None


def mix_whole(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Whole sequences ``[rows, width, heads, d]``: output i is the mean of values j <= i by ``decay^(i - j) q_i k_j``."""
    place = torch.arange(query.shape[1])
    distance = (place[:, None] - place).clamp(min=0)
    decay = torch.where(place[:, None] >= place, DECAY**distance, 0.0)
    weights = torch.einsum("rihd,rjhd->rhij", query, key) * decay
    return torch.einsum("rhij,rjhd->rihd", weights / weights.sum(-1, keepdim=True), value)


class StateCache:
    """For each row the decayed sum of ``k [v, 1]^T``: ``[rows, heads, d, d + 1]``."""

    per_token = False

    def __init__(self, heads: int, width: int) -> None:
        self._states = torch.empty(0, heads, width, width + 1)

    def resize(self, rows: int, capacity: int, *, used: int, device: torch.device, dtype: torch.dtype) -> None:
        del capacity, dtype
        states = torch.zeros(rows, *self._states.shape[1:], device=device)
        kept = min(used, len(self._states))
        states[:kept] = self._states[:kept]
        self._states = states

    def append(self, tokens: NewTokens, *states: Tensor) -> None:
        _, key, value = (part.float() for part in states)
        extended = torch.cat([value, torch.ones_like(value[..., :1])], -1)
        first = 0
        for row, past, length in zip(tokens.rows.tolist(), tokens.past.tolist(), tokens.lengths.tolist(), strict=True):
            span = slice(first, first + length)
            decay = DECAY ** torch.arange(length - 1, -1, -1.0)[:, None, None]
            added = torch.einsum("nhd,nhe->hde", key[span] * decay, extended[span])
            self._states[row] = added + (DECAY**length * self._states[row] if past else 0.0)
            first += length

    def attend(self, tokens: NewTokens, layer: int, *states: Tensor, scoring: Scoring | None) -> Tensor:
        del layer, scoring
        sums = torch.einsum("rhd,rhde->rhe", states[0].float(), self._states[tokens.rows])
        return (sums[..., :-1] / sums[..., -1:]).to(states[2].dtype)

    def copy_rows(self, sources: Tensor, targets: Tensor, length: int) -> None:
        del length
        self._states[targets] = self._states[sources]

    def read_row(self, row: int, length: int) -> Entries:
        del length
        return (self._states[row].clone(),)

    def write_row(self, row: int, length: int, entries: Entries) -> None:
        del length
        self._states[row] = entries[0]

    def free(self) -> None:
        self._states = self._states[:0].clone()


class LinearConfig(LlamaConfig):
    model_type = "toy_linear"


class LinearForCausalLM(LlamaForCausalLM):
    config_class = LinearConfig

    def __init__(self, config: LinearConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = LinearAttention(config, index)
        self.post_init()


register_model(
    ModelFamily(
        "toy_linear",
        own_attention=True,
        layer_cache=lambda config, layer: StateCache(config.num_attention_heads, config.head_dim),
        cache_size=lambda s: CacheSize(
            0, s["num_hidden_layers"] * s["num_attention_heads"] * s["head_dim"] * (s["head_dim"] + 1)
        ),
        tensor_plan={},
    ),
    config_class=LinearConfig,
    model_class=LinearForCausalLM,
)


# ------------------------------------------------------------------------------------------------------ latent attention


class LatentAttention(nn.Module):
    """Queries are projected into the space of the latents, so that attention has one key head, whose values are its keys."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.shape = layer_idx, (config.num_attention_heads, config.head_dim)
        width = config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down = nn.Linear(config.hidden_size, config.latent, bias=False)
        self.up_key = nn.Parameter(torch.empty(*self.shape, config.latent))
        self.up_value = nn.Parameter(torch.empty(*self.shape, config.latent))
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, context: Any = None, **_: Any) -> tuple[Tensor, None]:
        query = torch.einsum("blhd,hdr->bhlr", self.q_proj(hidden_states).unflatten(-1, self.shape), self.up_key)
        latent = self.down(hidden_states)[:, None]  # [batch, 1, length, latent]
        scoring = Scoring(self.shape[1] ** -0.5)
        mixed = require_context(self, context).attend(self.layer_idx, query, latent, latent, scoring)
        return self.o_proj(torch.einsum("blhr,hdr->blhd", mixed, self.up_value).flatten(-2)), None


class LatentCache(KVLayerCache):
    """One tensor of latents, which are keys and values."""

    def append(self, tokens: NewTokens, *states: Tensor) -> None:
        query, latent, _ = states
        super().append(tokens, query, latent)


class LatentConfig(LlamaConfig):
    model_type = "toy_latent"
    latent: int = 12


class LatentForCausalLM(LlamaForCausalLM):
    config_class = LatentConfig

    def __init__(self, config: LatentConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = LatentAttention(config, index)
        self.post_init()


register_model(
    ModelFamily(
        "toy_latent",
        own_attention=True,
        layer_cache=lambda config, layer: LatentCache(),
        cache_size=lambda s: CacheSize(s["num_hidden_layers"] * s["latent"]),
        tensor_plan={"layers.*.mlp.up_proj": "colwise"},
    ),
    config_class=LatentConfig,
    model_class=LatentForCausalLM,
)


# ------------------------------------------------------------------------------------------------------------------ tests


class TestLinearAttention(ModelFamilySuite):
    @pytest.fixture
    def model(self):
        return model_of(LinearConfig(**SIZES))


class TestLatentAttention(ModelFamilySuite):
    @pytest.fixture
    def model(self):
        return model_of(LatentConfig(**SIZES))


def test_a_row_that_is_one_state_resumes_only_whole_turns():
    engine: Any = make_engine(model_of(LinearConfig(**SIZES)))
    ids = prompt(1, 9)
    answer = serve(engine, [request("a", ids, session="s")])["a"].token_ids
    serve(engine, [request("b", [*ids, *answer[:3], 5, 6], session="s")])
    assert engine.describe().stats["session_hits"] == 0
    serve(engine, [request("c", [*ids, *answer, 5, 6], session="t"), request("d", [*ids, *answer, 5], session="s")])
    assert engine.describe().stats["session_hits"] == 0, "b has replaced the turn that d continues"


def test_the_tensor_parallel_plan_of_a_family_comes_first():
    assert _plan(model_of(LatentConfig(**SIZES)), 2) == {"layers.*.mlp.up_proj": "colwise"}
    with raises(ModelError, "tensor_model_parallel_size=1"):
        _plan(model_of(LinearConfig(**SIZES)), 2)


def test_its_attention_needs_a_context():
    model = model_of(LatentConfig(**SIZES))
    use_hone_attention(model)
    with pytest.raises(ModelError, match="without a context"):
        model(input_ids=torch.ones(1, 3, dtype=torch.long), use_cache=False)
