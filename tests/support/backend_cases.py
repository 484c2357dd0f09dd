"""Short trainings on any backend: what a rank does in the tests of training backends, on its share of the rows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.image_models import random_rows
from support.models import VOCABULARY, random_batch
from support.prefix_trees import tree_batch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from hone.config.actor import ActorConfig
from hone.config.algorithm import RolloutCorrectionConfig
from hone.config.derived import correction_settings
from hone.config.model import ModelConfig, OptimConfig
from hone.config.parallel import FsdpConfig, Layout, MixedPrecisionConfig, ParallelConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.models.heads import PolicyHead, ValueHead
from hone.training.backends.protocol import ModelKind, TrainBackend
from hone.training.backends.registry import build_train_backend
from hone.training.engine import TrainSettings
from hone.training.layout import build_meshes
from hone.training.objectives import PolicyObjective, value_objective

CPU = torch.device("cpu")
TEMPERATURE = 0.9
SEED = 7
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
        parallel: strategy, sizes and FSDP's settings, as in the configuration.
        updates: optimizer updates, each on other rows.
        rows: of a mini-batch.
        budget: tokens of a micro-batch.
        model_settings: keys of the model block.
        device: of the computation.
        trees: whether rows share prefixes at any depth, sampled tokens included; otherwise at most their prompts.
        replayed: whether the tokens of a mixture of experts (two layers, two of four experts) come with experts to follow.
        images: whether rows have images, for a model that reads them.
        balance: weight of the balance loss of a mixture of experts.
        restricted: whether every other response token was sampled from a support.
        dtype: of the computation.
        shift: added to the old and the reference log-probs, as if the policy's own were off by as much.
    """

    model: Path
    kind: ModelKind = "policy"
    parallel: dict[str, Any] = field(default_factory=dict)
    updates: int = 3
    rows: int = 8
    seed: int = 0
    budget: int = 64
    model_settings: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    loss_agg_mode: str = "token-mean"
    loss_mode: str = "vanilla"
    device: str = "cpu"
    trees: bool = False
    replayed: bool = False
    restricted: bool = False
    dtype: str = "float32"
    shift: float = 0.0
    images: bool = False
    balance: float = 0.0

    def model_config(self) -> ModelConfig:
        """The model block."""
        return ModelConfig(path=str(self.model), **self.model_settings)

    def optim_config(self) -> OptimConfig:
        """The optimizer block."""
        return OptimConfig(**OPTIM | self.optim)


@dataclass
class Outcome:
    """What a training leaves: per update loss and gradient norm, afterwards weights and log-probs (or values)."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    columns: dict[str, Tensor]


def save_model(directory: Path, arch: str, *, seed: int = 0, **changes: Any) -> Path:
    """A tiny random model on disk, with distributions far from uniform."""
    torch.manual_seed(seed)
    shape = SHAPE | (EXPERTS if arch in ("qwen3_moe", "gpt_oss", "mixtral") else {}) | changes
    config = AutoConfig.for_model(arch, **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            torch.nn.init.normal_(buffer)
    model.save_pretrained(directory)
    return directory


def backend_of(case: Case) -> tuple[TrainBackend, Layout]:
    """The backend of ``case`` in this process, which is one of a group's or alone."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    sizes = dict(case.parallel)
    fsdp = dict(sizes.pop("fsdp_config", {}))
    precision = MixedPrecisionConfig(**fsdp.pop("mixed_precision", {}))
    parallel = ParallelConfig(**sizes, fsdp_config=FsdpConfig(**fsdp, mixed_precision=precision))
    layout = Layout.plan(world, parallel)
    optim = None if case.kind == "frozen" else case.optim_config()
    backend = build_train_backend(
        case.kind,
        case.model_config(),
        ValueHead() if case.kind == "value" else PolicyHead(TEMPERATURE),
        TrainSettings(
            torch.device(case.device),
            optim=optim,
            dtype=case.dtype,
            max_tokens=case.budget,
            total_steps=10,
            balances_experts=case.balance > 0,
        ),
        parallel=parallel,
        meshes=build_meshes(layout, case.device) if dist.is_initialized() else None,
        seed=SEED,
    )
    return backend, layout


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
    actor.policy_loss.loss_mode, actor.router_aux_loss_coef = case.loss_mode, case.balance
    actor.policy_loss.clip_cov_ratio = actor.policy_loss.kl_cov_ratio = 0.2
    return PolicyObjective(actor, correction_settings(RolloutCorrectionConfig()), max_response_length=16)


def batch_of(case: Case, update: int) -> Batch:
    """Mini-batch ``update``, with old and reference log-probs made up."""
    seed = case.seed + update
    if case.images:
        batch = random_rows(case.model, case.rows, seed)
    else:
        batch = tree_batch(seed, case.rows) if case.trees else random_batch(case.rows, seed, group=2)
    noise = batch.ragged("noise")
    old, ref = (noise.with_values(-4.0 + sign * 0.3 * noise.values + case.shift) for sign in (1, -1))
    columns = ({"expert_ids": experts_of(batch)} if case.replayed else {}) | (
        supports_of(batch) if case.restricted else {}
    )
    return batch.with_columns(old_log_probs=old, ref_log_probs=ref, **columns)


def supports_of(batch: Batch) -> dict[str, Ragged]:
    """Supports of every other response token: the token, and those that differ from it by a multiple of 3."""
    ids, sizes = [], []
    for row in batch.ragged("response_ids").to_lists():
        sets = [[] if place % 2 else list(range(token % 3, VOCABULARY, 3)) for place, token in enumerate(row)]
        ids.append([token for support in sets for token in support])
        sizes.append([len(support) for support in sets])
    return {"support_ids": Ragged.from_rows(ids, torch.int32), "support_sizes": Ragged.from_rows(sizes, torch.int32)}


def experts_of(batch: Batch) -> Ragged:
    """Experts for two layers, two of four each, by the tokens up to and with each token; unknown for some."""
    rows = []
    for row in range(len(batch)):
        digest, experts = hashlib.sha256(), []
        for token in torch.cat([batch.ragged(name).row(row) for name in ("prompt_ids", "response_ids")]).tolist():
            digest.update(bytes([token]))
            first, second, known = digest.digest()[:3]
            pairs = [
                pair for number in (first, second) for pair in (number % 4, (number % 4 + 1 + number // 4 % 3) % 4)
            ]
            experts += pairs if known > 50 else [-1] * 4
        rows.append(torch.tensor(experts, dtype=torch.int16))
    return Ragged.from_rows(rows)


def prepared(case: Case, batch: Batch, objective: Any, backend: TrainBackend) -> Batch:
    """The rows with what a loss settles over the whole mini-batch, if it does."""
    if case.kind == "value" or not objective.needs_preparation:
        return batch
    return objective.prepare(batch, batch.ragged("ref_log_probs"), backend.gather_rows)


def loss_name(case: Case) -> str:
    """The statistic that is the whole loss."""
    return "critic/vf_loss" if case.kind == "value" else "actor/loss"


def trained(case: Case, updates: range) -> tuple[TrainBackend, Layout, list[float], list[float]]:
    """A backend after these updates, with the loss and the gradient norm of each."""
    backend, layout = backend_of(case)
    losses, norms = continued(backend, layout, case, updates)
    return backend, layout, losses, norms


def continued(backend: TrainBackend, layout: Layout, case: Case, updates: range) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of some more updates."""
    objective, losses, norms = objective_of(case), [], []
    for update in updates:
        batch = prepared(case, share_of(batch_of(case, update), layout), objective, backend)
        result = backend.train_batch(batch, objective, step=update, with_entropy=True)
        assert result.applied
        pairs = [one[loss_name(case)] for one in result.statistics if loss_name(case) in one]
        losses.append(float(sum(v * w for v, w in pairs) / sum(w for _, w in pairs)))
        norms.append(result.grad_norm)
    return losses, norms


def train(case: Case) -> Outcome:
    """Train as ``case`` says; called on every rank, or in one process."""
    backend, _, losses, norms = trained(case, range(case.updates))
    columns = backend.infer_batch(batch_of(case, 0), with_entropy=True)
    return Outcome(losses, norms, weights_of(backend), {name: column.values for name, column in columns.items()})


def train_with_prefetch(case: Case) -> Outcome:
    """Train as ``case`` says, with the gathering of neighbours started early as on CUDA."""
    from hone.models.loading import causal_lm, layers_of
    from hone.training.backends.fsdp2.backend import prefetch_neighbours

    backend, layout = backend_of(case)
    prefetch_neighbours(backend._sharded.computation, layers_of(causal_lm(backend.model)))  # type: ignore[attr-defined]
    losses, norms = continued(backend, layout, case, range(case.updates))
    return Outcome(losses, norms, weights_of(backend), {})


def train_with_fused_layers(case: Case) -> Outcome:
    """Train as ``case`` says, the layers computed by the operators for CUDA, whose references run here."""
    from hone.models.llama.cuda import layer_forward
    from hone.models.llama.spec import replace_layer_forwards
    from hone.models.loading import causal_lm

    backend, layout = backend_of(case)
    replace_layer_forwards(causal_lm(backend.model), layer_forward)  # type: ignore[attr-defined]
    losses, norms = continued(backend, layout, case, range(case.updates))
    return Outcome(losses, norms, weights_of(backend), {})


def train_with_compiled_layers(case: Case) -> tuple[Outcome, int, dict[str, str]]:
    """Train as ``case`` says with compiled layers; also returns the number of graphs, and what the compiler refused."""
    from functools import partial
    from unittest.mock import patch

    from torch._dynamo.utils import counters

    from hone.training.backends.fsdp2 import backend as fsdp2

    torch._dynamo.reset()
    counters.clear()
    with patch.object(fsdp2, "compile_layers", partial(fsdp2.compile_layers, compiler="aot_eager")):
        backend, layout = backend_of(case)
    losses, norms = continued(backend, layout, case, range(case.updates))
    compiled = backend._sharded.computation.compiled  # type: ignore[attr-defined]
    return Outcome(losses, norms, weights_of(backend), {}), counters["stats"]["unique_graphs"], compiled.obstacles


def weights_of(backend: TrainBackend, which: Any = "all") -> dict[str, Tensor]:
    """A copy of the weights that a backend exports."""
    return {name: value.detach().clone() for name, value in backend.export_weights(which)}


def averages_of(backend: Any) -> dict[str, Tensor]:
    """A copy of the moving average of the weights, whole; empty without one."""
    average = backend.optimizer.average
    values = {} if average is None else average.values
    return {
        f"ema/{name}": (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in values.items()
    }


def held(case: Case) -> int:
    """How many numbers of the parameters this process holds."""
    return sum(_local(parameter).numel() for parameter in _parameters(backend_of(case)[0]).values())


def bucketed(
    case: Case, which: str, bucket_bytes: int, dtype: torch.dtype | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Exported weights after training, by way of buckets and by DTensor's own gathering of each parameter."""
    from hone.training import export_stream

    backend, *_ = trained(case, range(case.updates))
    stream = getattr(export_stream, f"{which}_weights")
    with mock.patch.object(export_stream, "GATHER_BUCKET_BYTES", bucket_bytes):
        streamed = stream(backend.model, dtype=dtype)  # type: ignore[attr-defined]
        in_buckets = {name: value.clone() for name, value in streamed}
    singly = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in _parameters(backend).items()
    }
    return in_buckets, singly


def dtypes(case: Case) -> tuple[Outcome, set[torch.dtype]]:
    """A training, and the dtypes of the shards after it."""
    backend, _, losses, norms = trained(case, range(1))
    return Outcome(losses, norms, {}, {}), {parameter.dtype for parameter in _parameters(backend).values()}


def _parameters(backend: Any) -> dict[str, Tensor]:
    return dict(backend.model.named_parameters())


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
