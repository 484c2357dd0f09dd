"""A run in the numbers that memory and time follow from; the same record for RL, SFT, preferences and reward models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from hone.config.derived import OldLogProbs, RunSpec, longest_sequence
from hone.config.distillation import is_address
from hone.config.dtypes import is_narrow, resolve_dtype
from hone.config.limits import PACKED_BYTES, micro_batch_tokens
from hone.config.model import ModelConfig, OptimConfig
from hone.config.offline import SFTConfig
from hone.config.pools import Pool, check_layouts
from hone.config.rollout import RolloutConfig
from hone.config.specs import OfflineSpec
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig, model_block
from hone.models.registry import family_of
from hone.preflight.plan.model import ModelShape, Passes, frozen_parameters, shape_of
from hone.preflight.reading import read_json

TEACHER = "teacher"  # name of the shapes of teachers, with a number from 0


@dataclass(frozen=True)
class TrainedModel:
    """A model, and how it is trained."""

    shape: ModelShape
    optim: OptimConfig
    bf16: bool
    max_tokens: int  # most tokens of a micro-batch
    mini_batch: int  # prompts per update, over all ranks
    epochs: int
    checkpointing: bool
    value: bool = False  # whether it predicts values instead of log-probs
    lora_rank: int = 0
    keeps_attention: bool = False
    on_host: bool = False  # whether its activations wait in the host's memory
    frozen: int = 0  # parameters of a vision tower that is not trained
    packed: float = 0.0  # bytes of a number in the matrices of its layers; 0 if they are not packed

    @property
    def trained_parameters(self) -> int:
        return self.shape.adapter(self.lora_rank) if self.lora_rank else self.shape.parameters - self.frozen

    @property
    def parameters(self) -> int:
        return self.shape.parameters + self.shape.adapter(self.lora_rank)


class MicroBatch(NamedTuple):
    """Rows and tokens (a prompt counts once) of the largest micro-batch, and micro-batches of a rank's share of a mini-batch."""

    rows: int
    tokens: int
    per_update: int


@dataclass(frozen=True)
class Work:
    """A run in numbers."""

    config: AnyConfig
    on_cpu: bool
    actor: TrainedModel
    reference: bool
    pools: tuple[Pool, ...]  # of devices, the actor's first
    prompt: int  # longest one, in tokens
    response: int  # longest one, in tokens
    samples: int  # rows that share a prompt
    batch: int  # prompts per step
    critic: TrainedModel | None = None
    reward_model: TrainedModel | None = None
    teachers: tuple[TrainedModel, ...] = ()  # frozen models of distillation with weights of their own
    activation_scale: float = 1.0  # measured activations divided by those of the closed form

    @property
    def main(self) -> Pool:
        return self.pools[0]

    @cached_property
    def spec(self) -> RunSpec | None:
        return RunSpec(self.config) if isinstance(self.config, RLConfig) else None

    @property
    def rollout(self) -> RolloutConfig | None:
        """Configuration of the rollout; None where nothing is generated."""
        return self.config.actor_rollout_ref.rollout if isinstance(self.config, RLConfig) else None

    @property
    def served(self) -> bool:
        from hone.generation import is_served

        return self.rollout is not None and is_served(self.rollout)

    @property
    def rollout_bf16(self) -> bool:
        dtype = "" if self.rollout is None else self.rollout.dtype
        return is_narrow(dtype) or (dtype == "auto" and self.actor.bf16)

    @property
    def old_log_probs(self) -> bool:
        return self.spec is not None and self.spec.old_log_probs.value is OldLogProbs.OWN_PASS

    def pool_of(self, role: str) -> Pool:
        """Return the pool that has a role; the main pool when none has it."""
        return next((pool for pool in self.pools if role in pool.roles), self.main)

    def narrows_frozen(self, model: TrainedModel, pool: Pool) -> bool:
        """Return whether frozen matrices are held in bfloat16 (:func:`hone.models.loading.narrow_frozen_matrices`)."""
        return model.bf16 and not (self.on_cpu or pool.divided) and family_of(model.shape.kind).llama_shaped

    def passes(self, model: TrainedModel, pool: Pool) -> Passes:
        """Return the passes of a model over its largest micro-batch, in a process of ``pool``."""
        micro, block, layout = self.micro_batch(model, pool), model_block(self.config)[1], pool.layout
        return Passes(
            model.shape,
            self.on_cpu,
            model.bf16,
            tokens=micro.tokens / layout.ranks_a_row,
            responses=micro.rows * self.response / layout.ranks_a_row,
            packed=bool(model.packed),
            gathered=model.bf16 and (pool.divided or (model.lora_rank > 0 and self.narrows_frozen(model, pool))),
            divided=pool.divided,
            lora_rank=model.lora_rank,
            checkpointing=model.checkpointing,
            keeps_attention=model.keeps_attention,
            tiles=block.tiled_mlp.num_shards if block.tiled_mlp.enabled else 1,
            tensor=layout.tensor,
            on_host=model.on_host and not self.on_cpu,
            prompt_copies=micro.rows * (self.prompt + self.response) / micro.tokens,
            scale=self.activation_scale,
            ring=layout.context,
        )

    def micro_batch(self, model: TrainedModel, pool: Pool, max_tokens: int | None = None) -> MicroBatch:
        """Return the largest micro-batch of an update."""
        limit = micro_batch_tokens(max_tokens or model.max_tokens, on_cpu=self.on_cpu)
        rows, most = math.ceil(model.mini_batch * self.samples / pool.layout.dp_size), None
        if isinstance(self.config, RLConfig):
            most = self.config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
        return largest_micro_batch(rows, self.samples, self.prompt, self.response, limit, most)


def largest_micro_batch(
    rows: int, samples: int, prompt: int, response: int, max_tokens: int, max_rows: int | None
) -> MicroBatch:
    """Fill a micro-batch as :func:`hone.training.packing.plan_micro_batches` does: groups stay together, one row at least."""
    groups, left = divmod(max(max_tokens, prompt + response), prompt + samples * response)
    further = max(0, (left - prompt) // response)
    filled = min(max(1, groups * samples + min(further, samples - 1)), rows, max_rows or rows)
    return MicroBatch(filled, filled * response + math.ceil(filled / samples) * prompt, math.ceil(rows / filled))


def other_shapes(config: AnyConfig) -> dict[str, ModelShape]:
    """Return the shapes of a critic, a reward model and teachers that have a model directory of their own."""
    if isinstance(config, SFTConfig):
        return _read_shapes({f"{TEACHER}{number}": path for number, path in enumerate(_answer_teachers(config))})
    if not isinstance(config, RLConfig):
        return {}
    paths = {
        "critic": config.critic.model.path if RunSpec(config).critic.value else None,
        "reward_model": config.reward.reward_model.path if config.reward.reward_model.enable else None,
    }
    paths |= {f"{TEACHER}{number}": path for number, path in enumerate(_teachers(config))}
    return _read_shapes(paths)


def _read_shapes(paths: Mapping[str, str | None]) -> dict[str, ModelShape]:
    shapes = {role: shape_of(ModelConfig(path=path)) for role, path in paths.items() if path}
    return {role: shape for role, shape in shapes.items() if shape is not None}


def _answer_teachers(config: SFTConfig) -> list[str]:
    """Return the teacher of stored answers, if the run holds its weights."""
    settings = config.distillation
    return [settings.path] if settings.enable and settings.path and settings.has_local else []


def _teachers(config: RLConfig) -> list[str | None]:
    """Return the teachers with weights of their own; None is a frozen copy of the policy."""
    settings, model = config.distillation, config.actor_rollout_ref.model
    has_adapter = model.lora_rank > 0 or model.lora_adapter_path is not None
    is_actor = (settings.self_teacher == "current" or has_adapter) and not settings.enable_resource_pool
    return [
        path for path in settings.models if settings.enable and not (path is None and is_actor) and not is_address(path)
    ]


def work_of(
    config: AnyConfig,
    shape: ModelShape,
    *,
    on_cpu: bool,
    bfloat16: bool = False,
    others: Mapping[str, ModelShape] | None = None,
) -> Work:
    """Return the numbers of a run.

    Args:
        bfloat16: whether the device is a GPU that computes in it, for ``dtype=auto``.
        others: shapes of a critic, a reward model or teachers where they differ from the trained model's.

    Raises:
        ConfigError: the sizes of parallelism do not divide.
    """
    if isinstance(config, RLConfig):
        return _rl_work(config, shape, on_cpu, bfloat16, others or {})
    data, samples, prompt = config.data, 1, 1
    if not isinstance(config, SFTConfig):  # the sides of a preference share their prompt
        samples, prompt = 2, data.max_length // 2
    batch, spec = data.train_batch_size, OfflineSpec(config)
    check_layouts(spec.pools)
    dtype = resolve_dtype(config.dtype, bfloat16=bfloat16)
    model = _trained(shape, config.optim, dtype, model_block(config)[1], data.max_token_len_per_gpu, batch)
    response = max(1, data.max_length - prompt)
    compares = spec.reference.value and not spec.precomputes_reference
    teachers = ()
    if isinstance(config, SFTConfig):
        shapes = [(others or {}).get(f"{TEACHER}{number}", shape) for number, _ in enumerate(_answer_teachers(config))]
        teachers = tuple(
            dataclasses.replace(model, shape=other, lora_rank=0, checkpointing=False, mini_batch=batch, packed=0.0)
            for other in shapes
        )
    work = Work(config, on_cpu, model, compares, spec.pools, prompt, response, samples, batch)
    return dataclasses.replace(work, teachers=teachers)


def _rl_work(
    config: RLConfig, shape: ModelShape, on_cpu: bool, bfloat16: bool, others: Mapping[str, ModelShape]
) -> Work:
    data, actor, model = config.data, config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    spec, critic, scorer, batch = RunSpec(config), config.critic, config.reward.reward_model, data.train_batch_size
    check_layouts(spec.pools)
    max_tokens, mini_batch = actor.ppo_max_token_len_per_gpu, min(actor.ppo_mini_batch_size, batch)
    dtype = resolve_dtype(actor.dtype, bfloat16=bfloat16)
    policy = _trained(shape, actor.optim, dtype, model, max_tokens, mini_batch, actor.ppo_epochs)
    values = dataclasses.replace(
        policy,
        shape=others.get("critic", shape),
        optim=critic.optim,
        bf16=is_narrow(resolve_dtype(critic.dtype or actor.dtype, bfloat16=bfloat16)),
        max_tokens=critic.ppo_max_token_len_per_gpu or max_tokens,
        mini_batch=min(critic.ppo_mini_batch_size or mini_batch, batch),
        epochs=critic.ppo_epochs or actor.ppo_epochs,
        checkpointing=critic.model.enable_gradient_checkpointing,
        on_host=policy.on_host if (apart := critic.model.enable_activation_offload) is None else apart,
        value=not spec.rewards_process,
        lora_rank=0,
        frozen=0,
        packed=0.0,
    )
    scores = dataclasses.replace(
        policy,
        shape=others.get("reward_model", shape),
        max_tokens=scorer.max_token_len_per_gpu or max_tokens,
        mini_batch=batch,
        checkpointing=False,
        value=True,
        lora_rank=0,
        packed=0.0,
    )
    longest, prompt = longest_sequence(config), data.max_prompt_length
    sizes = prompt, longest - prompt, config.actor_rollout_ref.rollout.n, batch
    teachers = tuple(
        dataclasses.replace(
            policy,
            shape=others.get(f"{TEACHER}{number}", shape),
            checkpointing=False,
            lora_rank=0,
            packed=policy.packed if path is None else 0.0,
        )
        for number, path in enumerate(_teachers(config))
    )
    models = values if spec.critic.value else None, scores if scorer.enable else None, teachers
    return Work(config, on_cpu, policy, spec.reference.value, spec.pools, *sizes, *models)


def _trained(
    shape: ModelShape,
    optim: OptimConfig,
    dtype: str,
    block: ModelConfig,
    max_tokens: int,
    mini_batch: int,
    epochs: int = 1,
) -> TrainedModel:
    bf16, checkpointing = is_narrow(dtype), block.enable_gradient_checkpointing
    adapters = {"lora_rank": _lora_rank(block), "frozen": frozen_parameters(block)}
    kept = {
        "keeps_attention": block.gradient_checkpointing_keeps == "attention",
        "on_host": block.enable_activation_offload,
        "packed": PACKED_BYTES.get(block.quantization, 0.0),
    }
    return TrainedModel(shape, optim, bf16, max_tokens, mini_batch, epochs, checkpointing, **adapters, **kept)


def _lora_rank(model: ModelConfig) -> int:
    """Return the rank of the adapters; of saved ones, the rank in their own configuration."""
    if model.lora_adapter_path is None:
        return model.lora_rank
    return int(read_json(Path(model.lora_adapter_path) / "adapter_config.json").get("r", model.lora_rank or 8))
