"""This rank's pipeline stage of a model, built from Megatron-core's layers, with Hone's attention and positions.

The process groups of a layout are in the form that Megatron-core takes; no global state of Megatron is used.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import HashStore, ProcessGroup  # pyright: ignore[reportPrivateImportUsage]
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from hone.config.parallel import Layout
from hone.models.activations import checkpointing_arguments
from hone.models.attention.context import AttentionContext, Scoring
from hone.models.heads import Backbone
from hone.models.inputs import PackedSequences
from hone.models.loading import value_head
from hone.training.layout import Meshes, build_meshes


@dataclass(frozen=True)
class Groups:
    """The process groups of one rank."""

    layout: Layout
    tensor: ProcessGroup  # ranks that share every matrix
    pipeline: ProcessGroup  # one rank of each stage
    data: ProcessGroup  # ranks with different rows
    expert: ProcessGroup  # ranks that share the experts of a layer
    expert_data: ProcessGroup  # ranks with the same experts
    collection: ProcessGroupCollection  # the same groups for Megatron

    @property
    def stage(self) -> int:
        return self.pipeline.rank()

    @property
    def first_stage(self) -> bool:
        return self.stage == 0

    @property
    def last_stage(self) -> bool:
        return self.stage == self.pipeline.size() - 1


def build_groups(meshes: Meshes | None, device: torch.device) -> Groups:
    """Return the groups of a layout; None is one process, for which a group of one rank is created. Collective."""
    if meshes is None:
        if not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        meshes = build_meshes(Layout(), device.type)
    alone, tensor, data = meshes.sequence_group, meshes.tensor_group, meshes.data_group
    pipeline = meshes.pipeline_group
    expert, expert_data = alone, data
    if meshes.experts is not None:
        expert, expert_data = meshes.experts.get_group("expert"), meshes.experts.get_group("expert_shard")
    collection = ProcessGroupCollection(
        tp=tensor,
        pp=pipeline,
        cp=alone,
        tp_cp=tensor,
        embd=_embedding_group(meshes.layout, pipeline),
        pos_embd=alone,
        dp=data,
        dp_cp=data,
        intra_dp_cp=data,
        ep=expert,
        expt_tp=alone,
        tp_ep=expert,
        expt_dp=expert_data,
        intra_expt_dp=expert_data,
        tp_dp_cp=data,
    )
    return Groups(meshes.layout, tensor, pipeline, data, expert, expert_data, collection)


def _embedding_group(layout: Layout, pipeline: ProcessGroup) -> ProcessGroup | None:
    """Return the first and the last stage of this rank's pipeline, which share tied embeddings; None in between. Collective."""
    if layout.pipeline <= 2:
        return pipeline
    within: ProcessGroup | None = None
    for first in range(layout.world):
        stage = first // (layout.sequence * layout.tensor) % layout.pipeline
        if stage:
            continue
        ends = [first, first + (layout.pipeline - 1) * layout.sequence * layout.tensor]
        group = dist.new_group(ends)
        if isinstance(group, ProcessGroup):  # this rank is in it
            within = group
    return within


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


class PackedAttention(nn.Module):
    """Attention that an :class:`~hone.models.attention.context.AttentionContext` computes; it travels as the attention
    mask.
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


class Stage(Backbone):
    """Embedding, layers and output layer of this rank's pipeline stage.

    Attributes:
        model_type: Megatron's; its schedules read this attribute, and its gradient reduction the next two.
        share_embeddings_and_output_weights: whether the embedding is the output layer too.
        padding: token whose embedding is not trained as an input, or None.
    """

    def __init__(self, skeleton: PreTrainedModel, groups: Groups, device: torch.device, *, valued: bool) -> None:
        super().__init__()
        settings = skeleton.config
        self.config = transformer_config(settings, groups, device)
        self.groups = groups
        embedding: Any = skeleton.get_input_embeddings()
        self.padding: int | None = embedding.padding_idx
        tied = not valued and bool(settings.tie_word_embeddings)
        self.gpt: Any = GPTModel(
            self.config,
            _layer_spec(self.config, groups),
            settings.vocab_size,
            max_sequence_length=settings.max_position_embeddings,
            pre_process=groups.first_stage,
            post_process=groups.last_stage,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="none",
            pg_collection=groups.collection,
        )
        self.model_type, self.pre_process = self.gpt.model_type, groups.first_stage
        self.share_embeddings_and_output_weights = tied
        self.score = None
        if valued and groups.last_stage:
            self.gpt.output_layer = None
            bias = value_head(skeleton).bias is not None
            self.score = nn.Linear(settings.hidden_size, 1, bias=bias, device=device)
        decoder: Any = skeleton.get_decoder()
        self.frequencies: Tensor
        self.register_buffer("frequencies", decoder.rotary_emb.inv_freq.to(device), persistent=False)

    def checkpoint_layers(self, keeps: str) -> None:
        """Recompute each layer in the backward pass; ``keeps`` as in ``model.gradient_checkpointing_keeps``."""
        for layer in self.gpt.decoder.layers:
            layer.forward = functools.partial(checkpoint, layer.forward, **checkpointing_arguments(keeps))

    def set_input_tensor(self, hidden: Any) -> None:
        """Set the hidden states that the stage before sent; Megatron's schedules call it."""
        self.gpt.set_input_tensor(hidden)

    def shared_embedding_or_output_weight(self) -> Tensor:
        """Return the tied embedding of the first or the last stage; Megatron's gradient reduction calls it."""
        return self.gpt.shared_embedding_or_output_weight()

    def forward(self, packed: PackedSequences) -> Tensor:
        """Return the hidden states ``[N, 1, H]`` after this stage's layers, and on the last stage after the norm."""
        positions = packed.context.position_ids
        angles = positions.squeeze(0)[:, None].float() * self.frequencies
        angles = torch.cat([angles, angles], -1)[:, None, None]
        embedded = None
        if self.groups.first_stage:
            embedded = self.gpt.embedding(packed.input_ids, positions)
            if self.padding is not None:  # transformers gives this token's embedding no gradient
                padding = (packed.input_ids == self.padding).transpose(0, 1)[..., None]
                embedded = torch.where(padding, embedded.detach(), embedded)
        return self.gpt.decoder(hidden_states=embedded, attention_mask=packed.context, rotary_pos_emb=angles)

    def hidden_states(self, packed: PackedSequences) -> Tensor:
        """Return the last hidden states ``[U, H]`` at the positions that predict response tokens."""
        return packed.of_outputs(self(packed).squeeze(1))

    def output_weights(self) -> dict[str, Any]:
        """Return this rank's rows of the output layer."""
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        else:
            weight = self.gpt.output_layer.weight
        weights: dict[str, Any] = {"weight": weight, "bias": None, "softcap": None}
        if self.groups.tensor.size() > 1:
            weights |= {"group": self.groups.tensor, "start": self.groups.tensor.rank() * len(weight)}
        return weights

    def value_layer(self) -> nn.Linear:
        assert self.score is not None
        return self.score


def transformer_config(settings: PreTrainedConfig, groups: Groups, device: torch.device) -> TransformerConfig:
    """Return Megatron's configuration of a Hugging Face model."""
    heads, experts = settings.num_attention_heads, {}
    if settings.model_type == "qwen3_moe":
        experts = {
            "num_moe_experts": settings.num_experts,
            "moe_ffn_hidden_size": settings.moe_intermediate_size,
            "moe_router_topk": settings.num_experts_per_tok,
            "moe_router_pre_softmax": not settings.norm_topk_prob,  # over the chosen experts alone, it is normalised
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "allgather",
            "expert_model_parallel_size": groups.layout.expert,
            "expert_tensor_parallel_size": 1,
        }
    layout = groups.layout
    config = TransformerConfig(
        num_layers=settings.num_hidden_layers,
        hidden_size=settings.hidden_size,
        ffn_hidden_size=settings.intermediate_size,
        num_attention_heads=heads,
        num_query_groups=settings.num_key_value_heads,
        kv_channels=getattr(settings, "head_dim", None) or settings.hidden_size // heads,
        normalization="RMSNorm",
        layernorm_epsilon=settings.rms_norm_eps,
        qk_layernorm=settings.model_type in ("qwen3", "qwen3_moe"),
        add_bias_linear=False,
        add_qkv_bias=settings.model_type == "qwen2",
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        deallocate_pipeline_outputs=layout.pipeline > 1,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=True,  # gradients are summed over data-parallel ranks, because losses are shares
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **experts,
    )
    config.variable_seq_lengths = (
        layout.pipeline > 1
    )  # between stages; the constructor refuses it with all-gathered experts
    return config


def _layer_spec(config: TransformerConfig, groups: Groups) -> ModuleSpec:
    """Return the modules of a layer: those of Megatron-core without Transformer Engine, with Hone's attention."""
    spec: Any = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    attention = spec.submodules.self_attention
    attention.submodules = dataclasses.replace(attention.submodules, core_attention=PackedAttention)
    if config.num_moe_experts is not None:
        experts = spec.submodules.mlp
        experts.module, experts.params = PaddedExperts, {"pg_collection": groups.collection}
        experts.submodules = dataclasses.replace(experts.submodules, router=Router)
    return spec
