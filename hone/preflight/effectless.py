"""Rules about keys that are set and do nothing, because what they belong to is off or not chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hone.config.check import yaml_value
from hone.config.keys import documentation, leaf_values
from hone.config.preference import PreferenceConfig, RewardModelConfig
from hone.config.sft import SFTConfig
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig
from hone.preflight.needs import correction, estimator, needs_critic, policy_loss
from hone.preflight.rules import Finding, error, rule, warning

ACTOR = "actor_rollout_ref.actor"


class Switch(NamedTuple):
    """Keys that act only when something else is on; ``on`` is how to switch it on."""

    keys: tuple[str, ...]
    is_on: bool
    reason: str
    on: str
    stops: bool = False


@rule("R23", RLConfig)
def effectless_keys(config: RLConfig) -> Iterator[Finding]:
    """A key that differs from its default does something."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    name, settings = algorithm.adv_estimator, correction(config)
    switches = [
        Switch(
            ("actor_rollout_ref.actor.kl_loss_coef", "actor_rollout_ref.actor.kl_loss_type"),
            actor.use_kl_loss,
            "actor_rollout_ref.actor.use_kl_loss=false",
            "actor_rollout_ref.actor.use_kl_loss=true",
            stops=True,
        ),
        Switch(
            ("algorithm.kl_penalty", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_ctrl.type"),
            algorithm.use_kl_in_reward,
            "algorithm.use_kl_in_reward=false",
            "algorithm.use_kl_in_reward=true",
            stops=True,
        ),
        Switch(
            ("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon"),
            algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive",
            "the KL coefficient is not adaptive",
            "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.type=adaptive",
        ),
        Switch(
            (f"{ACTOR}.recompute_old_log_probs",),
            not (settings and settings["bypass_mode"]),
            "the engine's log-probs are the old ones (bypass_mode=true)",
            "algorithm.rollout_correction.bypass_mode=false",
        ),
        *_estimator_switches(config),
        *_loss_switches(config),
        *_sampling_switches(config),
        *_engine_switches(config),
        Switch(
            ("actor_rollout_ref.actor.loss_scale_factor",),
            actor.loss_agg_mode == "seq-mean-token-sum-norm",
            f"loss_agg_mode={actor.loss_agg_mode} has no divisor",
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
        ),
        Switch(
            tuple(
                key.path for key in documentation(RLConfig) if key.path.startswith("critic.") and key.last != "enable"
            ),
            needs_critic(config),
            f"no critic is trained (adv_estimator={name})",
            "critic.enable=true",
        ),
        Switch(("trainer.critic_warmup",), needs_critic(config), "no critic is trained", "algorithm.adv_estimator=gae"),
        *_order_switches(config),
        *_reward_switches(config),
        *_shared_switches(config, "actor_rollout_ref.model", "actor_rollout_ref.actor.optim"),
    ]
    yield from _without_effect(config, switches)


@rule("R23", SFTConfig, PreferenceConfig, RewardModelConfig)
def effectless_sft_keys(config: SFTConfig | PreferenceConfig | RewardModelConfig) -> Iterator[Finding]:
    """A key that differs from its default does something."""
    yield from _without_effect(config, _shared_switches(config, "model", "optim"))


def _estimator_switches(config: RLConfig) -> Iterator[Switch]:
    """Keys under ``algorithm`` that are options of some estimator, and not of the chosen one."""
    from hone.algorithms import advantage_estimators

    chosen = estimator(config)
    if chosen is None:
        return
    known = {option for name in advantage_estimators for option in advantage_estimators.get(name).options}
    for option in sorted(known & set(vars(config.algorithm))):
        reason = f"adv_estimator={config.algorithm.adv_estimator} has no such option"
        yield Switch((f"algorithm.{option}",), option in chosen.options, reason, "")


def _loss_switches(config: RLConfig) -> Iterator[Switch]:
    """Keys under ``actor`` and ``actor.policy_loss`` that are options of some loss, and not of the chosen one."""
    from hone.algorithms import policy_losses

    actor, chosen = config.actor_rollout_ref.actor, policy_loss(config)
    if chosen is None:
        return
    known = {option for name in policy_losses for option in policy_losses.get(name).options}
    reason = f"loss_mode={actor.policy_loss.loss_mode} has no such option"
    for block, owner in ((ACTOR, actor), (f"{ACTOR}.policy_loss", actor.policy_loss)):
        for option in sorted(known & set(vars(owner))):
            yield Switch((f"{block}.{option}",), option in chosen.options, reason, "")
    clips = {"clip_ratio_low", "clip_ratio_high"}
    yield Switch((f"{ACTOR}.clip_ratio",), bool(clips & chosen.options), reason, "")
    if clips <= chosen.options:
        left = actor.clip_ratio_low is None or actor.clip_ratio_high is None
        yield Switch((f"{ACTOR}.clip_ratio",), left, "clip_ratio_low and clip_ratio_high are both set", "")


def _engine_switches(config: RLConfig) -> list[Switch]:
    from hone.config.engines import EngineConfig
    from hone.config.ray import OwnPoolConfig
    from hone.generation import SERVED, is_served

    rollout, block = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    started = is_served(rollout) and rollout.engine_url is None
    here = "the engine at engine_url runs already"
    turn = f"{block}.engine_url=null"
    if not is_served(rollout):
        here, turn = f"engine '{rollout.name}' runs in Hone's own process", f"{block}.name=vllm"
    elif rollout.name not in SERVED:
        here, turn = f"engine '{rollout.name}' has no such key", f"{block}.name=vllm"
    every_engine = {"num_replicas", "server_pool", "engine_url", "engine_start_seconds", "checkpoint_engine"}
    external = set(EngineConfig.__dataclass_fields__) - set(OwnPoolConfig.__dataclass_fields__) - every_engine
    pool = [key.path for key in documentation(RLConfig) if key.path.startswith(f"{block}.server_pool.")]
    return [
        Switch(tuple(f"{block}.{key}" for key in sorted(external)), started and rollout.name in SERVED, here, turn),
        Switch((f"{block}.engine_start_seconds",), started, here, turn),
        Switch(
            (f"{block}.engine_url", f"{block}.checkpoint_engine.backend", f"{block}.checkpoint_engine.delta", *pool),
            is_served(rollout),
            here,
            f"{block}.num_replicas=1",
        ),
    ]


def _sampling_switches(config: RLConfig) -> list[Switch]:
    """Keys of the blocks that decide which samples are learned from, and how much each weighs."""
    settings = correction(config)
    algorithm, overlong = config.algorithm, config.reward.overlong_buffer
    filtering, drawing, buffer = "algorithm.filter_groups", "algorithm.pf_ppo", "reward.overlong_buffer"
    off = "{}=false".format
    return [
        Switch(
            (f"{filtering}.metric", f"{filtering}.max_num_gen_batches"),
            algorithm.filter_groups.enable,
            off(f"{filtering}.enable"),
            f"{filtering}.enable=true",
            stops=True,
        ),
        Switch(
            (f"{drawing}.reweight_method", f"{drawing}.weight_pow"),
            algorithm.use_pf_ppo,
            off("algorithm.use_pf_ppo"),
            "algorithm.use_pf_ppo=true",
            stops=True,
        ),
        Switch(
            (f"{drawing}.weight_pow",),
            not algorithm.use_pf_ppo or algorithm.pf_ppo.reweight_method == "pow",
            f"{drawing}.reweight_method={algorithm.pf_ppo.reweight_method}",
            f"{drawing}.reweight_method=pow",
        ),
        Switch(
            ("algorithm.rollout_correction.rollout_is_threshold",),
            settings is None or settings["rollout_is"] is not None,
            "there are no importance weights",
            "algorithm.rollout_correction.rollout_is=token",
            stops=True,
        ),
        Switch(
            (f"{buffer}.len", f"{buffer}.penalty_factor", f"{buffer}.log"),
            overlong.enable or config.reward.reward_manager == "dapo",
            off(f"{buffer}.enable"),
            f"{buffer}.enable=true",
            stops=True,
        ),
    ]


def _order_switches(config: RLConfig) -> list[Switch]:
    """Keys of the order of prompts."""
    name, key = config.data.sampler.name, "data.sampler"
    reason = f"{key}.name={name}"
    by_level = name == "difficulty" or (name == "pass_rate" and config.data.sampler.pass_rate_of == "difficulty")
    return [
        Switch((f"{key}.weights",), name == "mixture", reason, f"{key}.name=mixture", stops=True),
        Switch((f"{key}.difficulty_key",), by_level, reason, f"{key}.name=difficulty", stops=True),
        Switch((f"{key}.pass_rate_of",), name == "pass_rate", reason, f"{key}.name=pass_rate", stops=True),
        Switch(("data.shuffle",), name == "epoch", f"{reason} draws in an order of its own", f"{key}.name=epoch"),
    ]


def _reward_switches(config: RLConfig) -> list[Switch]:
    custom = config.reward.custom_reward_function.path is not None
    block = "reward.custom_reward_function"
    return [
        Switch(
            (f"{block}.name", f"{block}.reward_kwargs"),
            custom,
            f"{block}.path=null",
            f"{block}.path=FILE.py",
            stops=True,
        ),
        Switch(
            ("reward.scorer_kwargs",),
            not custom,
            "a reward function of your own scores, not the built-in scorer",
            f"{block}.path=null",
        ),
    ]


def _shared_switches(config: AnyConfig, model_block: str, optim_block: str) -> list[Switch]:
    rl = isinstance(config, RLConfig)
    model = config.actor_rollout_ref.model if rl else config.model
    optim = config.actor_rollout_ref.actor.optim if rl else config.optim
    return [
        Switch(
            (f"{model_block}.lora_alpha", f"{model_block}.target_modules"),
            model.lora_rank > 0 and model.lora_adapter_path is None,
            "no new LoRA adapter is made",
            f"{model_block}.lora_rank=32",
        ),
        Switch(
            (f"{optim_block}.min_lr_ratio",),
            optim.lr_scheduler_type == "cosine",
            f"{optim_block}.lr_scheduler_type={optim.lr_scheduler_type}",
            f"{optim_block}.lr_scheduler_type=cosine",
        ),
        Switch(
            (f"{optim_block}.lr_warmup_steps_ratio",),
            optim.lr_warmup_steps < 0,
            f"{optim_block}.lr_warmup_steps={optim.lr_warmup_steps} decides",
            f"{optim_block}.lr_warmup_steps=-1",
        ),
        Switch(
            ("trainer.resume_from_path",),
            config.trainer.resume_mode == "resume_path",
            f"trainer.resume_mode={config.trainer.resume_mode}",
            "trainer.resume_mode=resume_path",
            stops=True,
        ),
    ]


def _without_effect(config: AnyConfig, switches: list[Switch]) -> Iterator[Finding]:
    defaults = {key.path: key.default for key in documentation(type(config))}
    values = dict(leaf_values(config))
    for switch in switches:
        for key in () if switch.is_on else switch.keys:
            if values[key] != defaults[key]:
                found = error if switch.stops else warning
                back = f"{key}={yaml_value(defaults[key])}"
                yield found(
                    f"{key.rpartition('.')[2]}={yaml_value(values[key])} has no effect: {switch.reason}",
                    why="the run would not do what its configuration says",
                    fix=f"{switch.on}, or {back} (the default)" if switch.on else f"{back} (the default)",
                    where=key,
                )
