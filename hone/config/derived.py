"""Facts derived from a configuration: roles, pools, and the source of each quantity of a step.

The trainer, the cluster, preflight, the memory plan and failure messages all read :class:`RunSpec`, so they cannot disagree. It
does not import torch. ``hone config show --derived`` prints it.

Every fact is computed when it is read. A fact that depends on an unknown method raises :class:`~hone.errors.UnknownMethod`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

from hone.config.actor import RouterReplayConfig, policy_loss_name
from hone.config.algorithm import RolloutCorrectionConfig, corrects
from hone.config.dtypes import dtype_keys
from hone.config.limits import CPU_MICRO_BATCH_TOKENS, REPORT_SUPPORT, micro_batch_tokens
from hone.config.model import ModelConfig
from hone.config.parallel import ParallelConfig
from hone.config.pools import MAIN_POOL, POOL_BLOCKS, Pool, check_engines, engine_devices, own_pools
from hone.config.rollout import RolloutConfig
from hone.config.run import AsyncConfig, OwnPoolConfig
from hone.config.tree import ActorRolloutRefConfig, RLConfig
from hone.config.trees import AnyConfig
from hone.errors import ConfigError, HoneError, UnknownMethod, did_you_mean
from hone.methods import (
    COMPARES_ACROSS_MINI_BATCH,
    ESTIMATOR_INPUTS,
    PREFERENCE_LOSS_NEEDS,
    ROLLOUT_CORRECTION_PRESETS,
    EstimatorInputs,
)


def correction_settings(config: RolloutCorrectionConfig) -> dict[str, Any]:
    """Return the value of every key of the block except ``preset``.

    A key at its default gets the preset's value; other keys keep theirs.

    Raises UnknownMethod: the preset does not exist.
    """
    settings = {name: value for name, value in vars(config).items() if name != "preset"}
    if config.preset is None:
        return settings
    if config.preset not in ROLLOUT_CORRECTION_PRESETS:
        raise UnknownMethod(
            f"unknown rollout correction '{config.preset}'",
            where="algorithm.rollout_correction.preset",
            fix=did_you_mean(config.preset, ROLLOUT_CORRECTION_PRESETS),
        )
    named, defaults = ROLLOUT_CORRECTION_PRESETS[config.preset], vars(RolloutCorrectionConfig())
    return {name: named[name] if value == defaults[name] else value for name, value in settings.items()}


T = TypeVar("T")

_ACTOR = "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"
_ROLLOUT = "actor_rollout_ref.rollout"
HALF_A_GPU = 0.5  # largest ``ray.device_fraction`` at which two workers can have the same GPU


@dataclass(frozen=True)
class Decision(Generic[T]):
    """A derived value, and the configuration that led to it."""

    value: T
    reason: str


class OldLogProbs(Enum):
    """Source of the old log-probs: those of the policy before this step's updates; in bypass mode the engine's."""

    OWN_PASS = "own_pass"  # a forward pass of the trainer before the update
    # the forward pass of the single update, before the weights change: the batch has no old log-probs then, and the loss takes
    # the pass's own, without gradient (`PolicyObjective.__call__`); the ratio is 1
    UPDATE_PASS = "update_pass"
    ENGINE = "engine"  # the engine that sampled (bypass mode)


@dataclass(frozen=True)
class RoleNeed:
    """A role of the run with a model."""

    name: str  # actor, rollout, reference, critic, reward_model or teacher
    replicated: bool  # whether each process holds a whole model; otherwise the model is sharded over the pool
    reason: str  # why the run needs the role


class Derived(NamedTuple):
    """One line of ``hone config show --derived``."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class RunSpec:
    """Facts derived from the configuration of an RL run.

    >>> spec = RunSpec(RLConfig())
    >>> spec.critic.value, spec.old_log_probs.value
    (False, <OldLogProbs.UPDATE_PASS: 'update_pass'>)
    """

    config: RLConfig

    # methods ---------------------------------------------------------------------------------------------------------

    @cached_property
    def estimator(self) -> EstimatorInputs:
        """Inputs that the advantage estimator needs and uses."""
        name = self.config.algorithm.adv_estimator
        if name in ESTIMATOR_INPUTS:
            return ESTIMATOR_INPUTS[name]
        from hone.algorithms import advantage_estimators  # a custom method: its module imports torch

        custom = advantage_estimators.get(name)
        return EstimatorInputs(custom.needs, custom.uses)

    @cached_property
    def correction(self) -> dict[str, Any]:
        """Every key of ``algorithm.rollout_correction`` except ``preset``, with the preset applied."""
        return correction_settings(self.config.algorithm.rollout_correction)

    @property
    def bypass(self) -> bool:
        return self.correction["bypass_mode"]

    @property
    def corrects(self) -> bool:
        """True when rollout correction changes the update: by weights, rejection or veto."""
        return corrects(self.correction)

    @property
    def policy_loss(self) -> str:
        return policy_loss_name(self.config.actor_rollout_ref.actor.policy_loss.loss_mode, self.correction)

    @cached_property
    def loss_compares_mini_batch(self) -> bool:
        """True when the policy loss compares tokens across the whole mini-batch before the update."""
        if self.policy_loss in COMPARES_ACROSS_MINI_BATCH:
            return COMPARES_ACROSS_MINI_BATCH[self.policy_loss]
        from hone.algorithms import policy_losses

        return policy_losses.get(self.policy_loss).needs_preparation

    @property
    def learns_from_reward(self) -> bool:
        """True when rewards change the policy; otherwise it learns from teachers alone, and needs no scorer."""
        return not self.config.distillation.enable or self.config.distillation.task_weight > 0

    @property
    def asynchronous(self) -> bool:
        """True when groups are generated while the policy trains."""
        return self.config.trainer.async_training.max_staleness > 0 or self.streams

    @property
    def streams(self) -> bool:
        """True when the groups of a batch are trained on as they finish, with the weights that sampled them."""
        keys = self.config.trainer.async_training
        return keys.stream and keys.max_staleness == 0

    # quantities of a step --------------------------------------------------------------------------------------------

    @property
    def updates_per_batch(self) -> int:
        actor = self.config.actor_rollout_ref.actor
        return math.ceil(self.config.data.train_batch_size / actor.ppo_mini_batch_size) * actor.ppo_epochs

    @property
    def on_policy(self) -> bool:
        """True when each batch has one update, so that the trained policy is the one that sampled."""
        actor = self.config.actor_rollout_ref.actor
        return actor.ppo_mini_batch_size == self.config.data.train_batch_size and actor.ppo_epochs == 1

    @property
    def sum_pi_squared(self) -> bool:
        """True when sums of squared probabilities are computed with the old log-probs."""
        requested = self.config.actor_rollout_ref.actor.calculate_sum_pi_squared
        return "sum_pi_squared" in self.estimator.needs if requested is None else requested

    @cached_property
    def critic(self) -> Decision[bool]:
        """Decision to train a critic."""
        enable, name = self.config.critic.enable, self.config.algorithm.adv_estimator
        if enable is not None:
            return Decision(enable, f"critic.enable={str(enable).lower()}")
        if self.rewards_process:
            return Decision(True, f"adv_estimator={name} needs process rewards")
        needed = "values" in self.estimator.needs
        return Decision(needed, f"adv_estimator={name} {'needs' if needed else 'does not need'} values")

    @property
    def rewards_process(self) -> bool:
        """True when the critic is a language model whose log-ratio to the reference rewards each token (PRIME)."""
        return "process_rewards" in self.estimator.needs

    @cached_property
    def reference(self) -> Decision[bool]:
        """Decision to compare log-probs with a reference policy."""
        actor = self.config.actor_rollout_ref.actor
        pairs = actor.preference_loss.loss_mode
        reasons = {
            "algorithm.use_kl_in_reward=true": self.config.algorithm.use_kl_in_reward,
            f"{_ACTOR}.use_kl_loss=true": actor.use_kl_loss,
            f"preference_loss.loss_mode={pairs} compares with it": _loss_takes_reference(pairs),
            f"adv_estimator={self.config.algorithm.adv_estimator} rewards the log-ratio to it": self.rewards_process,
        }
        return _first_true(reasons, "no KL term and no loss that compares with a reference")

    @cached_property
    def keeps_support(self) -> Decision[bool]:
        """Decision to renormalise log-probs over the tokens that top-k, top-p and min-p left."""
        rollout = self.config.actor_rollout_ref.rollout
        obstacles = {
            "every token can be sampled": not (rollout.top_k > 0 or rollout.top_p < 1 or rollout.min_p > 0),
            f"{_ROLLOUT}.keep_support=false": rollout.keep_support is False,
            f"engine {rollout.name} does not report which tokens could be sampled": rollout.name not in REPORT_SUPPORT,
            f"{_ROLLOUT}.repetition_penalty={rollout.repetition_penalty:g} changes probabilities": rollout.repetition_penalty
            != 1,
            f"{_ROLLOUT}.temperature=0": rollout.temperature == 0,
        }
        obstacle = _first_true(obstacles, "the engine reports which tokens could be sampled")
        return Decision(not obstacle.value, obstacle.reason)

    @property
    def follows_engine_experts(self) -> bool:
        return self.config.actor_rollout_ref.actor.router_replay.mode == "R3"

    @cached_property
    def old_log_probs(self) -> Decision[OldLogProbs]:
        """Source of the old log-probs.

        With one update per batch and no earlier use, the forward pass of the update computes them, because its policy is the
        one that sampled.
        """
        algorithm, actor = self.config.algorithm, self.config.actor_rollout_ref.actor
        distillation = self.config.distillation
        if self.bypass:
            return Decision(OldLogProbs.ENGINE, f"{_CORRECTION}.bypass_mode=true")
        reasons = {
            f"{_ACTOR}.recompute_old_log_probs=true": actor.recompute_old_log_probs,
            f"{self.updates_per_batch} updates per batch": self.updates_per_batch > 1,
            f"policy loss {self.policy_loss} compares tokens across the mini-batch": self.loss_compares_mini_batch,
            f"{_CORRECTION} weights or rejects tokens": self.corrects,
            "algorithm.use_kl_in_reward=true": algorithm.use_kl_in_reward,
            "algorithm.use_pf_ppo=true": algorithm.use_pf_ppo,
            "algorithm.top_entropy_share chooses tokens by entropies": algorithm.top_entropy_share is not None,
            f"distillation.loss_mode={distillation.loss_mode} makes advantages of them": distillation.enable
            and distillation.by_advantage,
            "preference_loss.loss_mode is set": actor.preference_loss.loss_mode is not None,
            f"{_ACTOR}.calculate_sum_pi_squared=true": bool(actor.calculate_sum_pi_squared),
            f"adv_estimator={algorithm.adv_estimator} uses them": not {"old_log_probs", "sum_pi_squared"}.isdisjoint(
                self.estimator.needs | self.estimator.uses
            ),
        }
        before_update = _first_true(reasons, "one update per batch, and nothing needs them before it")
        source = OldLogProbs.OWN_PASS if before_update.value else OldLogProbs.UPDATE_PASS
        return Decision(source, before_update.reason)

    def micro_batch_tokens(self, *, on_cpu: bool) -> int:
        return micro_batch_tokens(self.config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu, on_cpu=on_cpu)

    @property
    def reference_parallel(self) -> ParallelConfig:
        """Sharding of the reference: the actor's, with an offloading setting of its own."""
        shared = self.config.actor_rollout_ref
        offload = shared.ref.fsdp_config.param_offload
        if offload is None:
            return shared.actor
        fsdp = dataclasses.replace(shared.actor.fsdp_config, param_offload=offload)
        return dataclasses.replace(shared.actor, fsdp_config=fsdp)

    # roles and devices -----------------------------------------------------------------------------------------------

    @cached_property
    def roles(self) -> tuple[RoleNeed, ...]:
        """Roles with a model, in order of creation."""
        roles = [RoleNeed("actor", False, "every run"), RoleNeed("rollout", True, "every run")]
        if self.reference.value:
            roles.append(RoleNeed("reference", False, self.reference.reason))
        if self.critic.value:
            roles.append(RoleNeed("critic", False, self.critic.reason))
        if self.config.reward.reward_model.enable:
            roles.append(RoleNeed("reward_model", True, "reward.reward_model.enable=true"))
        if self.config.distillation.enable and self.config.distillation.has_local:
            roles.append(RoleNeed("teacher", False, "distillation.enable=true"))
        return tuple(roles)

    @cached_property
    def judge(self) -> RLConfig | None:
        """Configuration whose policy is the reward model, to build engines from as for the policy; None if no engine judges.

        :func:`as_judge` turns its keys, where messages have them, into those of ``reward.reward_model``.
        """
        config, settings = self.config, self.config.reward.reward_model
        if not settings.enable or (settings.kind != "generative" and settings.rollout.name == "native"):
            return None
        pool = {key.name: getattr(settings, key.name) for key in dataclasses.fields(OwnPoolConfig)}
        actor = dataclasses.replace(config.actor_rollout_ref.actor, router_replay=RouterReplayConfig())
        model = ModelConfig(path=settings.path, trust_remote_code=config.actor_rollout_ref.model.trust_remote_code)
        trainer = dataclasses.replace(
            config.trainer,
            default_local_dir=f"{config.trainer.default_local_dir}/judge",
            async_training=AsyncConfig(),
        )
        rollout = RolloutConfig(**pool, **vars(settings.rollout), free_cache_engine=False)
        if settings.kind == "discriminative" and rollout.name == "vllm":
            given = rollout.engine_kwargs
            rollout.engine_kwargs = {**given, "vllm": {"runner": "pooling", **(given.get("vllm") or {})}}
        return RLConfig(
            actor_rollout_ref=ActorRolloutRefConfig(model=model, actor=actor, rollout=rollout), trainer=trainer
        )

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        """Pools of devices, the actor's first."""
        trainer, parallel = self.config.trainer, self.config.actor_rollout_ref.actor
        separate = own_pools(self.config)
        shared = tuple(role for role in self.roles if role.name not in separate)
        replicated = all(role.replicated for role in shared)
        names = tuple(role.name for role in shared)
        pools = [Pool(MAIN_POOL, "trainer", trainer.nnodes, trainer.n_gpus_per_node, names, replicated, parallel)]
        for role in self.roles:
            if role.name in separate:
                keys, block = separate[role.name], POOL_BLOCKS[role.name]
                size = keys.nnodes, keys.n_gpus_per_node
                pools.append(Pool(role.name, block, *size, (role.name,), role.replicated, parallel))
        return tuple(pools)

    @property
    def engines_take_turns(self) -> bool:
        """True when engines share devices with training and never generate while it computes."""
        return not self.asynchronous and not self.config.actor_rollout_ref.rollout.enable_resource_pool

    def between_workers(self, *, on_cpu: bool) -> Decision[str | None]:
        """Return the way of weights from the actor to rollout workers with devices of their own; None if there are none."""
        rollout, fraction = self.config.actor_rollout_ref.rollout, self.config.ray.device_fraction
        if self.config.trainer.runtime != "ray" or not rollout.enable_resource_pool:
            return Decision(None, "engines share the actor's devices")
        chosen = rollout.checkpoint_engine.between_workers
        if chosen != "auto":
            return Decision(chosen, f"checkpoint_engine.between_workers={chosen}")
        if on_cpu:
            return Decision("object_store", "the workers are on CPUs, whose processes share memory")
        if fraction <= HALF_A_GPU:
            return Decision(
                "object_store", f"ray.device_fraction={fraction:g} lets workers share a GPU, which NCCL refuses"
            )
        return Decision("broadcast", "every worker has a GPU of its own")

    # display ---------------------------------------------------------------------------------------------------------

    def lines(self) -> Iterator[Derived]:
        """Yield every derived fact with its reason."""
        data, rollout = self.config.data, self.config.actor_rollout_ref.rollout
        actor = self.config.actor_rollout_ref.actor
        yield Derived(
            "sequences per step",
            str(data.train_batch_size * rollout.n),
            f"data.train_batch_size={data.train_batch_size} x rollout.n={rollout.n}",
        )
        yield Derived(
            "updates per step",
            str(self.updates_per_batch),
            f"ppo_mini_batch_size={actor.ppo_mini_batch_size}, ppo_epochs={actor.ppo_epochs}",
        )
        yield micro_batch_line(self.config, actor.ppo_max_token_len_per_gpu, f"{_ACTOR}.ppo_max_token_len_per_gpu")
        yield dtype_line(self.config)
        if rollout.top_k > 0 or rollout.top_p < 1 or rollout.min_p > 0:
            over = "the tokens that could be sampled" if self.keeps_support.value else "the whole vocabulary"
            yield Derived("log-probs normalised over", over, self.keeps_support.reason)
        yield Derived("old log-probs", self.old_log_probs.value.value, self.old_log_probs.reason)
        preset = self.config.algorithm.rollout_correction.preset
        mode = "bypass" if self.bypass else "decoupled" if self.corrects else "measured only"
        yield Derived("rollout correction", mode, f"{_CORRECTION}.preset={preset or 'null'} and its other keys")
        yield Derived("policy loss", self.policy_loss, f"{_ACTOR}.policy_loss.loss_mode={actor.policy_loss.loss_mode}")
        for role in self.roles:
            yield Derived(f"role {role.name}", "a model per process" if role.replicated else "one model", role.reason)
        for name, decision in (("reference", self.reference), ("critic", self.critic)):
            if not decision.value:
                yield Derived(f"role {name}", "none", decision.reason)
        for pool in self.pools:
            yield pool_line(pool)
            if "rollout" in pool.roles and engine_devices(self.config) > 1:
                yield Derived(
                    "engines",
                    f"{pool.world // engine_devices(self.config)} of {engine_devices(self.config)} devices",
                    f"tensor_model_parallel_size={rollout.tensor_model_parallel_size} x "
                    f"data_parallel_size={rollout.data_parallel_size}",
                )
        yield from self._between_workers_line()

    def _between_workers_line(self) -> Iterator[Derived]:
        """Yield the line about weights for rollout workers; ``trainer.device=auto`` shows both devices."""
        device = self.config.trainer.device
        on_cpu, on_gpu = self.between_workers(on_cpu=True), self.between_workers(on_cpu=False)
        shown = on_cpu if device == "cpu" else on_gpu
        if shown.value is None:
            return
        value = shown.value
        if device == "auto" and on_cpu.value != on_gpu.value:
            value = f"{on_gpu.value} between GPUs, {on_cpu.value} between CPUs"
        yield Derived("weights to rollout workers", value, shown.reason)


_OF_JUDGE = {
    f"{_ROLLOUT}.({'|'.join(key.name for key in dataclasses.fields(OwnPoolConfig))})\\b": r"reward.reward_model.\1",
    rf"\b{_ROLLOUT}\b": "reward.reward_model.rollout",
    r"(?<![.\w])rollout\.": "reward.reward_model.rollout.",
    r"\bactor_rollout_ref\.model\b": "reward.reward_model",
}


def judge_keys(text: str) -> str:
    """Return a text about :attr:`RunSpec.judge` with the keys that the user has."""
    for pattern, key in _OF_JUDGE.items():
        text = re.sub(pattern, key, text)
    return text


def as_judge(error: HoneError) -> HoneError:
    """Return an error about :attr:`RunSpec.judge` with the keys that the user has."""
    what, why, fix, where = map(judge_keys, (error.what, error.why, error.fix, error.where))
    return type(error)(what, why=why, fix=fix, where=where, code=error.code)


def check_judge(config: AnyConfig) -> None:
    """Check that the engines of a reward model have whole workers of a node.

    Raises ConfigError: they have not, or share these workers with other roles.
    """
    judge = RunSpec(config).judge if isinstance(config, RLConfig) else None
    if judge is None or not isinstance(config, RLConfig):
        return
    size, settings = engine_devices(judge), config.reward.reward_model
    if size > 1 and not settings.enable_resource_pool:
        raise ConfigError(
            f"an engine of the reward model takes {size} workers, which other roles share",
            why="an engine needs whole devices, and the other roles in these processes would lose theirs",
            fix="reward.reward_model.enable_resource_pool=true "
            f"reward.reward_model.n_gpus_per_node={size}, or engines of one device",
            where="reward.reward_model.enable_resource_pool",
            code="R79",
        )
    try:
        check_engines(judge)
    except ConfigError as error:
        raise as_judge(error) from error


def pool_line(pool: Pool) -> Derived:
    """Return the line about a pool of devices and its parallel sizes.

    Raises ConfigError: the parallel sizes do not divide the processes.
    """
    layout = pool.layout
    sizes = {"data": layout.dp_size, "tensor": layout.tensor, "pipeline": layout.pipeline}
    sizes |= {"context": layout.context, "sequence": layout.sequence, "expert": layout.expert}
    cut = ", ".join(f"{kind} {size}" for kind, size in sizes.items() if size > 1)
    return Derived(
        f"pool {pool.name}",
        f"{pool.world} process{'es' if pool.world > 1 else ''}: {', '.join(pool.roles)}",
        f"{pool.block}.nnodes={pool.nodes} x n_gpus_per_node={pool.per_node}" + (f"; {cut}" if cut else ""),
    )


def micro_batch_line(config: AnyConfig, budget: int, key: str) -> Derived:
    """Return the line about the tokens of a micro-batch; ``trainer.device=auto`` shows both devices."""
    bounded = config.trainer.device != "cuda" and budget > CPU_MICRO_BATCH_TOKENS
    value = f"{CPU_MICRO_BATCH_TOKENS} on a CPU" if bounded else str(budget)
    if bounded and config.trainer.device == "auto":
        value += f", {budget} on a GPU"
    reason = f"{key}={budget}" + (f"; a CPU takes at most {CPU_MICRO_BATCH_TOKENS}" if bounded else "")
    return Derived("tokens per micro-batch", value, reason)


def dtype_line(config: AnyConfig) -> Derived:
    """Return the line about the compute dtype; ``auto`` on a device that may be a GPU shows both cases."""
    key = dtype_keys(config)[0]
    open_choice = key.value == "auto" and config.trainer.device != "cpu"
    value = "bfloat16 on a GPU that computes in it, else float32" if open_choice else key.resolved(bfloat16=False)
    return Derived("compute dtype", value, f"{key.key}={key.value}")


def longest_sequence(config: RLConfig) -> int:
    """Return the maximum number of tokens that the model sees at once: prompt and response, or a conversation that compaction limits."""
    compaction = config.actor_rollout_ref.rollout.multi_turn.compaction
    if compaction.strategy is not None and compaction.context_tokens is not None:
        return compaction.context_tokens
    return config.data.max_prompt_length + config.data.max_response_length


def _loss_takes_reference(name: str | None) -> bool:
    if name is None:
        return False
    if name in PREFERENCE_LOSS_NEEDS:
        return "reference" in PREFERENCE_LOSS_NEEDS[name]
    from hone.algorithms import preference_losses

    return "reference" in preference_losses.get(name).needs


def _first_true(reasons: dict[str, bool], otherwise: str) -> Decision[bool]:
    reason = next((text for text, holds in reasons.items() if holds), None)
    return Decision(reason is not None, reason or otherwise)
