"""Registry of model families: one entry a family, read by loading, attention, the native engine and the plan.

A family without an entry works as long as its attention goes through transformers' attention interface; :func:`family_of`
then returns the default entry. An entry is needed for what transformers does not say: a layer that Hone computes itself, an
attention of the family's own with its KV cache, a tensor-parallel plan, or random initialisation by ``hone init``.

Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hone.registry import Registry

if TYPE_CHECKING:
    from hone.models.attention.cache import LayerCache


TOWERS = ("visual", "vision_model", "vision_tower")
"""Names of the vision tower in modules of transformers, in Qwen-VL, Idefics3 and Gemma."""


ARCHITECTURES: Registry[RandomInit] = Registry("architecture", key="--arch")
"""Families that ``hone init`` can initialise."""
_FAMILIES: dict[str, ModelFamily] = {}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model to initialise."""

    layers: int
    hidden: int
    width: int
    head: int

    @property
    def heads(self) -> int:
        return self.hidden // self.head

    @property
    def key_value_heads(self) -> int:
        """Half the attention heads if their number is even, else all of them."""
        return self.heads // 2 if self.heads % 2 == 0 else self.heads


@dataclass(frozen=True)
class RandomInit:
    """Settings by which ``hone init`` configures a family."""

    name: str  # value of ``--arch``
    model_type: str  # of the transformers config
    tied: bool  # whether input and output embeddings are one matrix
    # further keys of the config, from the shape and the context length
    settings: Callable[[Shape, int], dict[str, Any]] = field(default=lambda shape, context: {})


@dataclass(frozen=True)
class CacheSize:
    """Numbers that a model's KV cache holds, summed over its layers."""

    per_token: int
    per_sequence: int = 0  # for every sequence, whatever its length (the state of linear attention)


STATE_LAYERS = frozenset({"linear_attention", "conv"})
"""Kinds of layers that keep a state instead of keys and values."""
STATE_KINDS = STATE_LAYERS | {"hybrid", "hybrid_sliding"}
"""The same, and layers that keep both."""


def layer_kinds(settings: Any) -> list[str]:
    """Kinds of the layers of a model, from its config or the content of its ``config.json``; empty if it does not name them."""
    if not isinstance(settings, Mapping):
        return list(getattr(settings, "layer_types", None) or ())
    model_type = str(settings.get("model_type"))
    if settings.get("layer_types") or model_type in _FAMILIES:
        return list(settings.get("layer_types") or ())
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return []
    given = {name: value for name, value in settings.items() if name != "model_type"}
    try:
        return layer_kinds(CONFIG_MAPPING[model_type](**given))
    except Exception:  # noqa: BLE001 - loading the model says what is wrong with its config
        return []


def keeps_states(settings: Any) -> bool:
    """Return whether layers of a model keep one state a sequence (:mod:`hone.models.recurrent`)."""
    return not STATE_KINDS.isdisjoint(layer_kinds(settings))


def entries_per_token(config: Any) -> bool:
    """Return whether the caches of all layers have an entry for each token, so that a sequence can be shortened and shared."""
    new_layer = family_of(config.model_type).layer_cache
    entries = all(new_layer(config, layer).per_token for layer in range(config.num_hidden_layers))
    return entries and not keeps_states(config)


def keys_and_values_size(settings: Mapping[str, Any]) -> CacheSize:
    """Size of a cache of keys and values, and of the states of layers that keep them, from the content of a ``config.json``."""
    if not keeps_states(settings):
        twice = settings.get("model_type") == "longcat_flash"  # attends twice in a layer
        layers = 2 * settings["num_layers"] if twice else settings["num_hidden_layers"]
        return CacheSize(layers * _keys_and_values(settings))
    from hone.models.recurrent import states_size

    attention = sum(kind not in STATE_LAYERS for kind in layer_kinds(settings))
    return CacheSize(attention * _keys_and_values(settings) if attention else 0, states_size(settings))


def _keys_and_values(settings: Mapping[str, Any]) -> int:
    heads = settings["num_attention_heads"]
    if "kv_lora_rank" in settings:  # latent attention; the cache has the keys and values of each head
        return heads * (settings["qk_nope_head_dim"] + settings["qk_rope_head_dim"] + settings["v_head_dim"])
    width = settings.get("head_dim") or settings["hidden_size"] // heads
    return 2 * (settings.get("num_key_value_heads") or heads) * width


def keys_and_values(config: Any, layer: int) -> LayerCache:
    """Cache of keys and values; it takes its shape from the first keys and values that arrive."""
    from hone.models.attention.cache import KVLayerCache

    return KVLayerCache()


@dataclass(frozen=True)
class ModelFamily:
    """The entry of the models of one ``model_type``.

    Attributes:
        model_type: of the transformers config.
        own_attention: whether the family's attention modules call ``context.attend`` or ``context.mix`` themselves. Otherwise
            attention goes through transformers' attention interface, and models that bypass it are refused.
        layer_cache: makes the cache of one layer, from the model's config and the index of the layer.
        cache_size: size of the caches of all layers, from the content of a ``config.json``; the plan of a run reads it.
        tensor_plan: module pattern below the decoder to style of tensor parallelism; empty refuses it, None means the plan
            of the transformers config.
        llama_shaped: whether :mod:`hone.models.llama` computes the layers.
        qk_norm: whether queries and keys are normalised; the plan of a run reads it.
        init: how ``hone init`` makes such a model; None if it does not.
    """

    model_type: str
    own_attention: bool = False
    layer_cache: Callable[[Any, int], LayerCache] = keys_and_values
    cache_size: Callable[[Mapping[str, Any]], CacheSize] = keys_and_values_size
    tensor_plan: Mapping[str, str] | None = None
    llama_shaped: bool = False
    qk_norm: bool = False
    init: RandomInit | None = None


def register_model(family: ModelFamily, *, config_class: Any = None, model_class: Any = None) -> ModelFamily:
    """Register a family, and its classes with transformers where they are not transformers' own.

    Args:
        family: the entry.
        config_class: a ``PreTrainedConfig`` whose ``model_type`` is the family's, or None.
        model_class: a causal language model for that config, or None.

    Raises:
        ValueError: the model type is registered already.
    """
    if family.model_type in _FAMILIES:
        raise ValueError(f"model family '{family.model_type}' is registered already")
    if config_class is not None:
        from transformers import AutoConfig, AutoModelForCausalLM

        AutoConfig.register(family.model_type, config_class)
        AutoModelForCausalLM.register(config_class, model_class)
    _FAMILIES[family.model_type] = family
    if family.init is not None:
        ARCHITECTURES.register(family.init.name)(family.init)
    return family


def family_of(model_type: str) -> ModelFamily:
    """The entry of a model type, or a default entry for a type that is not registered."""
    return _FAMILIES.get(model_type) or ModelFamily(model_type)


def is_registered(model_type: str) -> bool:
    return model_type in _FAMILIES


EMBEDDING_STYLE = "embedding_rowwise"
"""Style of embeddings in the plans of transformers; Hone shards embedding and output layer of every model itself."""


def tensor_plan_of(model_type: str, config: Any) -> Mapping[str, str] | None:
    """The tensor-parallel plan of the layers: that of the family, else that of its transformers config (class or object).

    From 5.24 on, transformers gives a plan for the embedding to models whose layers have none.
    """
    plan = family_of(model_type).tensor_plan
    if plan is None:
        plan = getattr(config, "base_model_tp_plan", None)
    return plan and {name: style for name, style in plan.items() if style != EMBEDDING_STYLE}


def _experts(shape: Shape, context: int) -> dict[str, Any]:
    return {"moe_intermediate_size": shape.width, "num_experts": 4, "num_experts_per_tok": 2}


def _mixtral(shape: Shape, context: int) -> dict[str, Any]:
    return {"num_local_experts": 4, "num_experts_per_tok": 2}


def _gpt_oss(shape: Shape, context: int) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 150000.0}
    return {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": min(128, context),
        "rope_parameters": rope,
        # The default suits wide models. Without QK norm, a narrow model would start with near-uniform attention and learn to
        # copy slowly.
        "initializer_range": shape.hidden**-0.5,
    }


def _gemma(shape: Shape, context: int) -> dict[str, Any]:
    return {"sliding_window": min(512, context), "query_pre_attn_scalar": shape.head}


def _hybrid(shape: Shape, context: int) -> dict[str, Any]:
    """Layers of a gated delta net, and every fourth one of attention, the last included."""
    last = (shape.layers - 1) % 4
    kinds = ["full_attention" if layer % 4 == last else "linear_attention" for layer in range(shape.layers)]
    heads = {"linear_num_key_heads": shape.key_value_heads, "linear_num_value_heads": shape.heads}
    return {"layer_types": kinds, **heads, "linear_key_head_dim": shape.head, "linear_value_head_dim": shape.head}


def _hybrid_experts(shape: Shape, context: int) -> dict[str, Any]:
    return {**_hybrid(shape, context), **_experts(shape, context), "shared_expert_intermediate_size": shape.width}


def _short_convolutions(shape: Shape, context: int) -> dict[str, Any]:
    """Layers of a short convolution, and every second one of attention."""
    kinds = ["full_attention" if layer % 2 else "conv" for layer in range(shape.layers)]
    return {"layer_types": kinds, "block_auto_adjust_ff_dim": False}


def _gemma4(shape: Shape, context: int) -> dict[str, Any]:
    """Every second layer has a window; there are no tables of a token for each layer, which :mod:`hone.models.init` adds."""
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(shape.layers)]
    window = {"sliding_window": min(512, context), "layer_types": kinds, "global_head_dim": shape.head}
    return {**window, "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}


for _family in (
    ModelFamily("qwen3_5_text", init=RandomInit("qwen3_5", "qwen3_5_text", tied=True, settings=_hybrid)),
    ModelFamily("qwen3_next", init=RandomInit("qwen3_next", "qwen3_next", tied=False, settings=_hybrid_experts)),
    ModelFamily("lfm2", init=RandomInit("lfm2", "lfm2", tied=True, settings=_short_convolutions)),
    ModelFamily("qwen3", llama_shaped=True, qk_norm=True, init=RandomInit("qwen3", "qwen3", tied=True)),
    ModelFamily("qwen2", llama_shaped=True, init=RandomInit("qwen2", "qwen2", tied=True)),
    ModelFamily("llama", llama_shaped=True, init=RandomInit("llama", "llama", tied=True)),
    ModelFamily("mistral", llama_shaped=True, init=RandomInit("mistral", "mistral", tied=False)),
    ModelFamily("gemma3_text", qk_norm=True, init=RandomInit("gemma", "gemma3_text", tied=True, settings=_gemma)),
    ModelFamily("gemma2", init=RandomInit("gemma2", "gemma2", tied=True, settings=_gemma)),
    ModelFamily("granite", init=RandomInit("granite", "granite", tied=True)),
    ModelFamily("olmo2", qk_norm=True, init=RandomInit("olmo2", "olmo2", tied=False)),
    ModelFamily("phi3", init=RandomInit("phi3", "phi3", tied=False)),
    ModelFamily("smollm3", init=RandomInit("smollm3", "smollm3", tied=True)),
    ModelFamily("mixtral", init=RandomInit("mixtral", "mixtral", tied=False, settings=_mixtral)),
    ModelFamily("gpt_oss", init=RandomInit("gpt_oss", "gpt_oss", tied=False, settings=_gpt_oss)),
    ModelFamily("qwen2_5_vl", init=RandomInit("qwen2_5_vl", "qwen2", tied=True)),
    ModelFamily("qwen3_vl", qk_norm=True, init=RandomInit("qwen3_vl", "qwen3", tied=True)),
    ModelFamily("smolvlm", init=RandomInit("smolvlm", "llama", tied=False)),
    ModelFamily("qwen3_5", qk_norm=True, init=RandomInit("qwen3_5_vl", "qwen3_5_text", tied=True, settings=_hybrid)),
    ModelFamily(
        "qwen3_5_moe",
        qk_norm=True,
        init=RandomInit("qwen3_5_moe_vl", "qwen3_5_moe_text", tied=False, settings=_hybrid_experts),
    ),
    ModelFamily("gemma3", qk_norm=True, init=RandomInit("gemma3", "gemma3_text", tied=True, settings=_gemma)),
    ModelFamily("gemma4", qk_norm=True, init=RandomInit("gemma4", "gemma4_text", tied=True, settings=_gemma4)),
    ModelFamily("qwen3_moe", qk_norm=True, init=RandomInit("qwen3_moe", "qwen3_moe", tied=False, settings=_experts)),
):
    _ = register_model(_family)
