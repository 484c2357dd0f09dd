"""What a run asks of its processes, in plain numbers: one record whatever the command (RL, SFT, preferences, reward models)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hone.cluster.pool_keys import pool_keys
from hone.config.model import ModelConfig, OptimConfig
from hone.config.parallel import FsdpConfig, ParallelConfig
from hone.config.preference import PreferenceConfig
from hone.config.rollout import RolloutConfig
from hone.config.sft import SFTConfig
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig
from hone.preflight.evidence import model_block, read_json
from hone.preflight.needs import needs_critic, needs_old_log_probs, needs_reference
from hone.preflight.plan.activations import Computation
from hone.preflight.plan.model import ModelShape, count_parameters
from hone.training.layout import Layout

CPU_TOKENS = 4608
"""Most tokens of a micro-batch on a CPU (:data:`hone.training.engine.CPU_TOKENS`)."""


@dataclass(frozen=True)
class Process:
    """One process of a pool; all of a pool are alike.

    Attributes:
        pool: name of the pool.
        nodes: that the pool spans.
        per_node: processes on each.
        layout: how they share a model.
        roles: that live in each of them.
    """

    pool: str
    nodes: int
    per_node: int
    layout: Layout
    roles: tuple[str, ...]

    @property
    def world(self) -> int:
        """Processes of the pool."""
        return self.nodes * self.per_node

    @property
    def divided(self) -> bool:
        """Whether its processes hold parts of a model together."""
        return self.world > 1 and not set(self.roles) <= {"rollout", "reward_model"}


@dataclass(frozen=True)
class Trained:
    """A model that is trained, and how.

    Attributes:
        shape: of the model.
        optim: its optimizer.
        narrow: whether it computes in bfloat16.
        budget: most tokens of a micro-batch.
        mini: prompts an update, over all ranks.
        epochs: passes over a batch.
        recompute: gradient checkpointing.
        value: whether it gives values in place of log-probs.
    """

    shape: ModelShape
    optim: OptimConfig
    narrow: bool
    budget: int
    mini: int
    epochs: int
    recompute: bool
    value: bool = False


@dataclass(frozen=True)
class Work:
    """A run in numbers.

    Attributes:
        on_cpu: whether its devices are CPUs.
        model: the block of the trained model.
        actor: the model that is trained.
        critic: the value model, or None.
        reference: whether log-probs of a reference are computed.
        reward_model: its shape, or None.
        parallel: the actor's sizes of each way to divide a model.
        processes: one of each pool.
        rollout: the block of the rollout; None where nothing is generated.
        served: whether its engine lives in processes of its own.
        attached: whether those are somebody else's, perhaps on other machines.
        rollout_narrow: whether generation computes in bfloat16.
        validates: whether validation prompts are answered.
        old_log_probs: whether the log-probs of what was sampled take a forward pass before the update.
        prompt: longest prompt, in tokens.
        response: longest response.
        samples: rows that share a prompt.
        batch: prompts a step.
        most_sequences: rows of a micro-batch, None without a limit.
        saves: whether checkpoints are written.
    """

    on_cpu: bool
    model: ModelConfig
    actor: Trained
    parallel: ParallelConfig
    processes: tuple[Process, ...]
    prompt: int
    response: int
    samples: int
    batch: int
    critic: Trained | None = None
    reference: bool = False
    reward_model: ModelShape | None = None
    rollout: RolloutConfig | None = None
    served: bool = False
    attached: bool = False
    rollout_narrow: bool = False
    validates: bool = False
    old_log_probs: bool = False
    most_sequences: int | None = None
    saves: bool = False

    @property
    def adapters(self) -> bool:
        """Whether only LoRA adapters are trained."""
        return self.model.lora_rank > 0 or self.model.lora_adapter_path is not None

    @property
    def rank(self) -> int:
        """Of the adapters."""
        return adapter_rank(self.model)

    @property
    def fsdp(self) -> FsdpConfig:
        """Sharding and offloading."""
        return self.parallel.fsdp_config

    @property
    def main(self) -> Process:
        """A process of the actor."""
        return self.processes[0]

    def process_of(self, role: str) -> Process | None:
        """The process that holds a role, None when the run has none."""
        return next((process for process in self.processes if role in process.roles), None)

    def computation(self, trained: Trained, process: Process) -> Computation:
        """How passes of a trained model are computed in a process."""
        rank = self.rank if not trained.value and self.adapters else 0
        gathered = process.divided and trained.narrow
        micro = self.micro_batch(trained, process)
        return Computation(
            on_cpu=self.on_cpu,
            narrow=trained.narrow,
            gathered=gathered,
            adapter_rank=rank,
            recompute=trained.recompute,
            tiles=self.model.tiled_mlp.num_shards if self.model.tiled_mlp.enabled else 1,
            tensor=process.layout.tensor,
            on_host=self.model.enable_activation_offload and not self.on_cpu,
            spread=micro.cells / micro.tokens,
        )

    def micro_batch(self, trained: Trained, process: Process, budget: int | None = None) -> MicroBatch:
        """The largest micro-batch of an update."""
        limit = min(budget or trained.budget, CPU_TOKENS) if self.on_cpu else budget or trained.budget
        rows = math.ceil(trained.mini * self.samples / process.layout.dp_size)
        return fill(rows, self.samples, self.prompt, self.response, limit, self.most_sequences)


@dataclass(frozen=True)
class MicroBatch:
    """What goes through a model together when all prompts and responses are as long as they may be.

    Attributes:
        rows: sequences.
        tokens: that go through the matrices; rows of one prompt share it.
        responses: tokens whose log-prob is wanted.
        cells: tokens of all sequences, each with its prompt.
        count: micro-batches of a rank's part of the mini-batch.
    """

    rows: int
    tokens: int
    responses: int
    cells: int
    count: int


def fill(rows: int, samples: int, prompt: int, response: int, budget: int, most_rows: int | None) -> MicroBatch:
    """As :func:`hone.training.packing.plan_micro_batches` fills them: rows of a group stay together, one row at least."""
    budget = max(budget, prompt + response)
    group = prompt + samples * response
    whole, left = divmod(budget, group)
    some = max(0, (left - prompt) // response)
    fits = max(1, whole * samples + min(some, samples - 1))
    fits = min(fits, rows, most_rows or rows)
    tokens = fits * response + math.ceil(fits / samples) * prompt
    return MicroBatch(fits, tokens, fits * response, fits * (prompt + response), math.ceil(rows / fits))


def shape_of(model: ModelConfig, parameters: int | None = None) -> ModelShape | None:
    """The shape of a model directory; None when its config.json is not that of a decoder.

    Args:
        model: names the directory.
        parameters: of the model, where they are known already.
    """
    settings = read_json(Path(model.path or "") / "config.json")
    settings = {**settings, **model.override_config} if settings else {}
    counted = parameters or (count_parameters(model) if settings else None)
    return None if counted is None else ModelShape.of({**settings.get("text_config", {}), **settings}, counted)


def work_of(
    config: AnyConfig, shape: ModelShape, *, on_cpu: bool, others: Mapping[str, ModelShape] | None = None
) -> Work:
    """The numbers of a run.

    Args:
        config: of the run.
        shape: of the trained model.
        on_cpu: whether it runs on CPUs.
        others: shapes of a critic or a reward model where they differ from it.

    Raises:
        ConfigError: the sizes of parallelism do not divide.
    """
    if isinstance(config, RLConfig):
        return _reinforcement(config, shape, on_cpu, dict(others or {}))
    return _update_only(config, shape, on_cpu)


def adapter_rank(model: ModelConfig) -> int:
    """Rank of the adapters; of those that are loaded, what their own configuration says."""
    if model.lora_adapter_path is None:
        return model.lora_rank
    return int(read_json(Path(model.lora_adapter_path) / "adapter_config.json").get("r", model.lora_rank or 8))


def _reinforcement(config: RLConfig, shape: ModelShape, on_cpu: bool, others: dict[str, ModelShape]) -> Work:
    from hone.generation import is_served

    roles, data, critic = config.actor_rollout_ref, config.data, config.critic
    actor, rollout = roles.actor, roles.rollout
    policy = Trained(
        shape,
        actor.optim,
        actor.dtype == "bfloat16",
        actor.ppo_max_token_len_per_gpu,
        min(actor.ppo_mini_batch_size, data.train_batch_size),
        actor.ppo_epochs,
        roles.model.enable_gradient_checkpointing,
    )
    values = None
    if needs_critic(config):
        values = Trained(
            others.get("critic", shape),
            critic.optim,
            (critic.dtype or actor.dtype) == "bfloat16",
            critic.ppo_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu,
            min(critic.ppo_mini_batch_size or actor.ppo_mini_batch_size, data.train_batch_size),
            critic.ppo_epochs or actor.ppo_epochs,
            critic.model.enable_gradient_checkpointing,
            value=True,
        )
    reward = others.get("reward_model", shape) if config.reward.reward_model.enable else None
    return Work(
        on_cpu=on_cpu,
        model=roles.model,
        actor=policy,
        parallel=actor,
        processes=_processes(config, values is not None, reward is not None),
        prompt=data.max_prompt_length,
        response=data.max_response_length,
        samples=rollout.n,
        batch=data.train_batch_size,
        critic=values,
        reference=needs_reference(config),
        reward_model=reward,
        rollout=rollout,
        served=is_served(rollout),
        attached=rollout.engine_url is not None,
        rollout_narrow="bfloat16" in (rollout.dtype, actor.dtype if rollout.dtype == "auto" else ""),
        validates=bool(data.val_files) and (config.trainer.test_freq != 0 or config.trainer.val_before_train),
        old_log_probs=needs_old_log_probs(config),
        most_sequences=actor.ppo_micro_batch_size_per_gpu,
        saves=config.trainer.save_freq != 0,
    )


def _processes(config: RLConfig, critic: bool, reward_model: bool) -> tuple[Process, ...]:
    roles = ["actor", "rollout"] + ["reference"] * needs_reference(config) + ["critic"] * critic
    roles += ["reward_model"] * reward_model
    apart = {role: keys for role, keys in pool_keys(config).items() if keys.enable_resource_pool and role in roles}
    sizes = [("main", config.trainer.nnodes, config.trainer.n_gpus_per_node, tuple(r for r in roles if r not in apart))]
    sizes += [(role, keys.nnodes, keys.n_gpus_per_node, (role,)) for role, keys in apart.items()]
    found = []
    for pool, nodes, per_node, held in sizes:
        whole = set(held) <= {"rollout", "reward_model"}
        world = nodes * per_node
        layout = Layout(world, dp_shard=world) if whole else Layout.plan(world, config.actor_rollout_ref.actor)
        found.append(Process(pool, nodes, per_node, layout, held))
    return tuple(found)


def _update_only(config: AnyConfig, shape: ModelShape, on_cpu: bool) -> Work:
    """SFT, preferences and reward models: one process that updates, with pairs that share their prompt where there are some."""
    assert not isinstance(config, RLConfig)
    block, data = model_block(config)[1], config.data
    pairs = not isinstance(config, SFTConfig)
    prompt = data.max_length // 2 if pairs else 1
    trained = Trained(
        shape,
        config.optim,
        config.dtype == "bfloat16",
        data.max_token_len_per_gpu,
        data.train_batch_size,
        1,
        block.enable_gradient_checkpointing,
    )
    return Work(
        on_cpu=on_cpu,
        model=block,
        actor=trained,
        parallel=ParallelConfig(),
        processes=(Process("main", 1, 1, Layout(), ("actor",)),),
        prompt=prompt,
        response=max(1, data.max_length - prompt),
        samples=2 if pairs else 1,
        batch=data.train_batch_size,
        reference=_holds_reference(config),
        saves=config.trainer.save_freq != 0,
    )


def _holds_reference(config: AnyConfig) -> bool:
    """Whether a second copy of the model gives a preference loss its reference."""
    from hone.algorithms import preference_losses

    if not isinstance(config, PreferenceConfig) or config.loss.name not in preference_losses:
        return False
    return "reference" in preference_losses.get(config.loss.name).needs and config.ref.mode in ("auto", "copy")
