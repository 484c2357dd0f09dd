"""Loading of this process's shards from a model directory, without the whole model in any process."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForTokenClassification

from hone.config.model import ModelConfig
from hone.config.parallel import FsdpConfig
from hone.models.images import attach_processor
from hone.models.loading import (
    REWARD_SETTINGS,
    VALUE_SETTINGS,
    as_policy,
    as_reward_model,
    causal_lm,
    image_processor,
    load_empty,
    policy_factory,
    prepare,
    reward_factory,
    value_head,
)
from hone.models.padding import set_model_padding
from hone.models.streaming import WeightFiles, fill, materialise
from hone.training.backends.fsdp2.sharding import Sharded, shard_model
from hone.training.backends.protocol import ModelKind
from hone.training.engine import TrainSettings
from hone.training.layout import Meshes


def load_sharded(
    kind: ModelKind, config: ModelConfig, settings: TrainSettings, *, fsdp: FsdpConfig, meshes: Meshes, seed: int
) -> Sharded:
    """Create parameters without storage, shard them, and load the shards one tensor at a time. Collective.

    Raises:
        ModelError: the model cannot be loaded or sharded with this layout.
    """
    model, files = _empty(kind, config, seed)
    sharded = shard_model(model, meshes, fsdp, settings.dtype, settings.compile_layers)
    materialise(sharded.computation, torch.device("cpu") if fsdp.offload_policy else settings.device)
    fill(causal_lm(model), files, fresh=("score.", "classifier.") if kind in ("value", "reward") else ())
    return sharded


def _empty(kind: ModelKind, config: ModelConfig, seed: int) -> tuple[nn.Module, WeightFiles]:
    if kind == "reward":
        factory = reward_factory(config)
        model, files = load_empty(factory, config, **REWARD_SETTINGS)
        ready = as_reward_model(model, factory, config, seed=seed, trainable=True)
        set_model_padding(ready, config)
        return ready, files
    if kind != "value":
        model, files = load_empty(policy_factory(config), config)
        attach_processor(model, image_processor(config))
        return as_policy(model, config, seed=seed, trainable=kind == "policy"), files
    model, files = load_empty(AutoModelForTokenClassification, config, **VALUE_SETTINGS)
    value_head(model)
    prepare(model, config)
    return model, files
