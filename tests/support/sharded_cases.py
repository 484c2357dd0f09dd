"""What a rank does in the tests of divided models: the same training as one process does, on its share of the rows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.models import VOCABULARY, random_batch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from hone.config.actor import ActorConfig
from hone.config.algorithm import RolloutCorrectionConfig
from hone.config.model import ModelConfig, OptimConfig
from hone.config.parallel import FsdpConfig, MixedPrecisionConfig, ParallelConfig
from hone.data.batch import Batch
from hone.training.build import Kind, build_engine
from hone.training.correction import correction_settings
from hone.training.engine import TrainEngine
from hone.training.heads import PolicyHead, ValueHead
from hone.training.layout import Layout
from hone.training.model import adapter_off
from hone.training.objectives import PolicyObjective, value_objective

SHAPE = {
    "vocab_size": VOCABULARY + 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPTIM = {"lr": 1e-3, "eps": 1e-6}
"""With AdamW's usual eps a gradient of rounding errors alone moves a weight as far as a true one does."""
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Case:
    """A short training.

    Attributes:
        model: directory.
        parallel: sizes and FSDP's settings, as in the configuration.
        updates: optimizer updates, each on other rows.
        rows: of a mini-batch.
        budget: tokens of a micro-batch.
        model_settings: keys of the model block.
    """

    model: Path
    kind: Kind = "policy"
    parallel: dict[str, Any] = field(default_factory=dict)
    updates: int = 3
    rows: int = 8
    seed: int = 0
    budget: int = 64
    model_settings: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    loss_agg_mode: str = "token-mean"
    loss_mode: str = "vanilla"
    shift: float = 0.0
    """Added to the old and the reference log-probs: what a policy does whose own are off by so much."""


@dataclass
class Outcome:
    """What a training leaves: per update loss and gradient norm, afterwards weights and log-probs (or values)."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    columns: dict[str, Tensor]
    parameters: int = 0


def save_model(directory: Path, arch: str, *, seed: int = 0, **changes: Any) -> Path:
    """A tiny random model on disk, with distributions far from uniform."""
    torch.manual_seed(seed)
    shape = SHAPE | (EXPERTS if arch in ("qwen3_moe", "gpt_oss", "mixtral") else {}) | changes
    config = AutoConfig.for_model(arch, **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(directory)
    return directory


def engine_of(case: Case) -> tuple[TrainEngine, Layout]:
    """The engine of ``case`` in this process, which is one of a group's or alone."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    sizes = dict(case.parallel)
    fsdp = dict(sizes.pop("fsdp_config", {}))
    precision = MixedPrecisionConfig(**fsdp.pop("mixed_precision", {}))
    parallel = ParallelConfig(**sizes, fsdp_config=FsdpConfig(**fsdp, mixed_precision=precision))
    layout = Layout.plan(world, parallel)
    engine = build_engine(
        case.kind,
        ModelConfig(path=str(case.model), **case.model_settings),
        ValueHead() if case.kind == "value" else PolicyHead(0.9),
        parallel=parallel,
        meshes=layout.meshes("cpu") if world > 1 else None,
        seed=7,
        device=torch.device("cpu"),
        optim=OptimConfig(**OPTIM | case.optim),
        max_tokens=case.budget,
    )
    return engine, layout


def share_of(batch: Batch, layout: Layout) -> Batch:
    """The rows of this rank: uneven shares, whatever the number of rows."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    share = layout.dp_rank(rank)
    cuts = [
        0,
        *(len(batch) * (i + 1) * (i + 2) // (layout.dp_size * (layout.dp_size + 1)) for i in range(layout.dp_size)),
    ]
    return batch.reorder(list(range(cuts[share], cuts[share + 1])))


def objective_of(case: Case) -> Any:
    """PPO with entropy bonus and KL penalty, or the value loss."""
    if case.kind == "value":
        return value_objective(cliprange_value=0.5, loss_agg_mode=case.loss_agg_mode, loss_scale_factor=16)
    actor = ActorConfig(loss_agg_mode=case.loss_agg_mode, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1)
    actor.policy_loss.loss_mode = case.loss_mode
    actor.policy_loss.clip_cov_ratio = actor.policy_loss.kl_cov_ratio = 0.2
    return PolicyObjective(actor, correction_settings(RolloutCorrectionConfig()), max_response_length=16)


def batch_of(case: Case, update: int) -> Batch:
    """Mini-batch ``update``, with old and reference log-probs made up."""
    batch = random_batch(case.rows, case.seed + update, group=2)
    noise = batch.ragged("noise")
    old, ref = (noise.with_values(-4.0 + sign * 0.3 * noise.values + case.shift) for sign in (1, -1))
    return batch.with_columns(old_log_probs=old, ref_log_probs=ref)


def train(case: Case) -> Outcome:
    """Train as ``case`` says; called on every rank, or in one process."""
    engine, layout = engine_of(case)
    objective, losses, norms = objective_of(case), [], []
    for update in range(case.updates):
        batch = share_of(batch_of(case, update), layout)
        if isinstance(objective, PolicyObjective) and objective.needs_preparation:
            batch = objective.prepare(batch, batch.ragged("ref_log_probs"), engine.whole_batch)
        result = engine.train_batch(batch, objective, step=update, with_entropy=True)
        name = "critic/vf_loss" if case.kind == "value" else "actor/loss"
        pairs = [seen[name] for seen in result.statistics if name in seen]
        losses.append(float(sum(v * w for v, w in pairs) / sum(w for _, w in pairs)))
        norms.append(result.grad_norm)
    columns = engine.infer_batch(batch_of(case, 0), with_entropy=True)
    return Outcome(
        losses,
        norms,
        {name: value.clone() for name, value in engine.export_weights()},
        {name: column.values for name, column in columns.items()},
        sum(_held(parameter) for parameter in engine.model.parameters()),
    )


def _held(parameter: Tensor) -> int:
    """Numbers of a parameter that this process holds."""
    local = getattr(parameter, "to_local", None)
    return (local() if local else parameter).numel()


def alone(case: Case) -> Outcome:
    """The same training in one process."""
    return train(dataclasses.replace(case, parallel={}))


def exported(case: Case, which: str, bucket_bytes: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What is exported after training, by way of buckets and by DTensor's own gathering of each parameter."""
    from hone.training import export_stream

    engine, layout = engine_of(case)
    for update in range(case.updates):
        engine.train_batch(share_of(batch_of(case, update), layout), objective_of(case), step=update, with_entropy=True)
    stream = getattr(export_stream, f"{which}_weights")
    found = {name: value.clone() for name, value in stream(engine.model, bucket_bytes)}
    singly = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in engine.model.named_parameters()
    }
    return found, singly


def reference(case: Case) -> Tensor:
    """Log-probs with the adapter off, after training with it on."""
    engine, layout = engine_of(case)
    for update in range(case.updates):
        engine.train_batch(share_of(batch_of(case, update), layout), objective_of(case), step=update, with_entropy=True)
    with adapter_off(engine.model):
        return engine.infer_batch(batch_of(case, 0))["log_probs"].values


def dtypes(case: Case) -> tuple[Outcome, set[torch.dtype]]:
    """A training, and the dtypes of the shards after it."""
    engine, layout = engine_of(case)
    result = engine.train_batch(share_of(batch_of(case, 0), layout), objective_of(case), step=0, with_entropy=True)
    pairs = [seen["actor/loss"] for seen in result.statistics]
    loss = float(sum(v * w for v, w in pairs) / sum(w for _, w in pairs))
    return Outcome([loss], [result.grad_norm], {}, {}), {parameter.dtype for parameter in engine.model.parameters()}
