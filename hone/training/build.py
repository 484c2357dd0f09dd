"""From a model directory to an engine: whole in one process, or divided over those of a layout."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from hone.config.model import ModelConfig, OptimConfig
from hone.config.parallel import ParallelConfig
from hone.training.engine import TrainEngine
from hone.training.heads import Head
from hone.training.layout import Meshes
from hone.training.model import (
    VALUE_SETTINGS,
    as_policy,
    causal_lm,
    load_empty,
    load_policy,
    load_value_model,
    prepare,
    value_head,
)
from hone.training.sharded import ShardedEngine
from hone.training.sharding import shard_model
from hone.training.streaming import WeightFiles, fill, materialise

Kind = Literal["policy", "frozen", "value"]


def build_engine(
    kind: Kind,
    config: ModelConfig,
    head: Head,
    *,
    parallel: ParallelConfig,
    meshes: Meshes | None,
    seed: int,
    device: torch.device,
    optim: OptimConfig | None = None,
    dtype: str = "float32",
    **settings: Any,
) -> TrainEngine:
    """Load a model and make an engine around it.

    Args:
        kind: a ``policy`` that is trained (with adapters where the config wants them), a ``frozen`` one, or a ``value`` model.
        config: which model.
        head: what is computed of each response token.
        parallel: how the model is divided.
        meshes: the process groups, or None to keep the model whole in this process. With them the call is collective.
        seed: run seed.
        optim: None for a model that is never updated.
        settings: further arguments of :class:`TrainEngine`.

    Raises:
        ModelError: the model cannot be loaded, or not be divided so.
    """
    offload: dict[str, Any] = {"offload_activations": config.enable_activation_offload}
    engine = {"optim": optim, "device": device, "dtype": dtype} | offload | settings
    if meshes is None:
        if kind == "value":
            model = load_value_model(config, device=device)
        else:
            model = load_policy(config, device=device, seed=seed, trainable=kind == "policy")
        return TrainEngine(model, head, **engine)
    model, files = _empty(kind, config, seed)
    fsdp = parallel.fsdp_config
    sharded = shard_model(model, meshes, fsdp, dtype)
    materialise(sharded.computation, torch.device("cpu") if fsdp.offload_policy else device)
    fill(causal_lm(model), files, fresh=("score.", "classifier.") if kind == "value" else ())
    return ShardedEngine(sharded, head, fsdp=fsdp, **engine)


def _empty(kind: Kind, config: ModelConfig, seed: int) -> tuple[nn.Module, WeightFiles]:
    if kind != "value":
        model, files = load_empty(AutoModelForCausalLM, config)
        return as_policy(model, config, seed=seed, trainable=kind == "policy"), files
    model, files = load_empty(AutoModelForTokenClassification, config, **VALUE_SETTINGS)
    value_head(model)
    prepare(model, config)
    return model, files
