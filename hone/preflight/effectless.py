"""Rules about keys that have no effect because the feature that they belong to is off or not selected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hone.config.check import yaml_value
from hone.config.derived import RunSpec
from hone.config.distillation import TOP_K_MODES
from hone.config.keys import documentation, leaf_values
from hone.config.preference import PreferenceConfig, RewardModelConfig
from hone.config.sft import SFTConfig
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig
from hone.preflight.rules import Finding, error, rule, warning

ACTOR = "actor_rollout_ref.actor"


class Switch(NamedTuple):
    """Keys that have an effect only when a feature is on; ``on`` is the override that switches it on."""

    keys: tuple[str, ...]
    is_on: bool
    reason: str
    on: str
    stops: bool = False


@rule("R23", RLConfig)
def effectless_keys(config: RLConfig) -> Iterator[Finding]:
    """A key that differs from its default has an effect."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    name, spec = algorithm.adv_estimator, RunSpec(config)
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
            not spec.bypass,
            "the old log-probs come from the engine (bypass_mode=true)",
            "algorithm.rollout_correction.bypass_mode=false",
        ),
        *_estimator_switches(config),
        *_loss_switches(config),
        *_sampling_switches(config),
        *_engine_switches(config),
        *_speculative_switches(config),
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
            spec.critic.value,
            f"no critic is trained (adv_estimator={name})",
            "critic.enable=true",
        ),
        Switch(("trainer.critic_warmup",), spec.critic.value, "no critic is trained", "algorithm.adv_estimator=gae"),
        *_order_switches(config),
        *_runtime_switches(config),
        *_reward_switches(config),
        *_distillation_switches(config),
        *_shared_switches(config, "actor_rollout_ref.model", "actor_rollout_ref.actor.optim"),
    ]
    yield from _switched_off_keys(config, switches)


@rule("R23", SFTConfig, PreferenceConfig, RewardModelConfig)
def effectless_sft_keys(config: SFTConfig | PreferenceConfig | RewardModelConfig) -> Iterator[Finding]:
    """A key that differs from its default has an effect."""
    yield from _switched_off_keys(config, [_ray_switch(config), *_shared_switches(config, "model", "optim")])


def _estimator_switches(config: RLConfig) -> Iterator[Switch]:
    """Yield the keys under ``algorithm`` that are options of other estimators than the chosen one."""
    from hone.algorithms import advantage_estimators

    chosen = advantage_estimators.get(config.algorithm.adv_estimator)
    options_of_all = {option for name in advantage_estimators for option in advantage_estimators.get(name).options}
    for option in sorted(options_of_all & set(vars(config.algorithm))):
        reason = f"adv_estimator={config.algorithm.adv_estimator} has no such option"
        yield Switch((f"algorithm.{option}",), option in chosen.options, reason, "")


def _loss_switches(config: RLConfig) -> Iterator[Switch]:
    """Yield the keys under ``actor`` and ``actor.policy_loss`` that are options of other losses than the chosen one."""
    from hone.algorithms import policy_losses

    actor, chosen = config.actor_rollout_ref.actor, policy_losses.get(RunSpec(config).policy_loss)
    options_of_all = {option for name in policy_losses for option in policy_losses.get(name).options}
    reason = f"loss_mode={actor.policy_loss.loss_mode} has no such option"
    for block, owner in ((ACTOR, actor), (f"{ACTOR}.policy_loss", actor.policy_loss)):
        for option in sorted(options_of_all & set(vars(owner))):
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
    reason = "the engine at engine_url is already running"
    switch_on = f"{block}.engine_url=null"
    if not is_served(rollout):
        reason, switch_on = f"engine '{rollout.name}' runs in Hone's own process", f"{block}.name=vllm"
    elif rollout.name not in SERVED:
        reason, switch_on = f"engine '{rollout.name}' has no such key", f"{block}.name=vllm"
    every_engine = {"num_replicas", "server_pool", "engine_url", "engine_start_seconds", "checkpoint_engine"}
    every_engine |= {"devices", "free_cache_engine"}
    local = config.trainer.runtime == "local"
    turns = RunSpec(config).engines_take_turns
    memory, of_served = "gpu_memory_utilization", started and rollout.name in SERVED
    has_pages = rollout.name == "native" and not is_served(rollout) and config.trainer.device != "cpu"
    external = set(EngineConfig.__dataclass_fields__) - set(OwnPoolConfig.__dataclass_fields__) - every_engine
    pool = [key.path for key in documentation(RLConfig) if key.path.startswith(f"{block}.server_pool.")]
    return [
        Switch(tuple(f"{block}.{key}" for key in sorted(external - {memory})), of_served, reason, switch_on),
        Switch((f"{block}.{memory}",), of_served or has_pages, reason, switch_on),
        Switch((f"{block}.engine_start_seconds",), started, reason, switch_on),
        Switch(
            (f"{block}.devices",),
            started and local,
            reason if local else "on Ray every engine has the GPUs of its workers",
            f"{block}.devices=[]",
        ),
        Switch(
            (f"{block}.free_cache_engine",),
            turns and rollout.engine_url is None,
            reason if turns else "engines generate while the policy trains, or have GPUs of their own",
            f"{block}.free_cache_engine=null",
        ),
        Switch(
            (f"{block}.checkpoint_engine.between_workers",),
            not local and rollout.enable_resource_pool,
            "engines have the actor's devices" if not local else "trainer.runtime=local has no other workers",
            f"trainer.runtime=ray {block}.enable_resource_pool=true" if local else f"{block}.enable_resource_pool=true",
        ),
        Switch(
            (f"{block}.engine_url", f"{block}.checkpoint_engine.backend", f"{block}.checkpoint_engine.delta", *pool),
            is_served(rollout),
            reason,
            f"{block}.num_replicas=1",
        ),
    ]


def _speculative_switches(config: RLConfig) -> list[Switch]:
    """Return the keys of speculative decoding by its method, and those that only the native engine has."""
    rollout, block = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout.speculative"
    method, native = rollout.speculative.method, rollout.name == "native"
    reason = f"{block}.method={yaml_value(method)}"
    return [
        Switch((f"{block}.num_speculative_tokens",), method is not None, reason, f"{block}.method=ngram"),
        Switch(
            (f"{block}.prompt_lookup_min", f"{block}.prompt_lookup_max"),
            method == "ngram",
            reason,
            f"{block}.method=ngram",
        ),
        Switch((f"{block}.model", f"{block}.draft_lr"), method == "draft_model", reason, f"{block}.method=draft_model"),
        Switch(
            (f"{block}.disable_by_batch_size",),
            method is not None and native,
            reason if method is None else f"engine '{rollout.name}' has no such limit",
            f"{block}.method=ngram" if method is None else "actor_rollout_ref.rollout.name=native",
        ),
    ]


def _sampling_switches(config: RLConfig) -> list[Switch]:
    """Return the keys that select and weight the training samples."""
    settings = RunSpec(config).correction
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
            settings["rollout_is"] is not None,
            "rollout_is=null, so there are no importance weights",
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
    """Return the keys of the order of prompts; a sampler class of the user receives all of them."""
    if config.data.sampler.class_path is not None:
        return []
    name, key = config.data.sampler.name, "data.sampler"
    reason = f"{key}.name={name}"
    by_level = name == "difficulty" or (name == "pass_rate" and config.data.sampler.pass_rate_of == "difficulty")
    return [
        Switch((f"{key}.class_name",), False, f"{key}.class_path=null", f"{key}.class_path=FILE.py", stops=True),
        Switch((f"{key}.weights",), name == "mixture", reason, f"{key}.name=mixture", stops=True),
        Switch((f"{key}.difficulty_key",), by_level, reason, f"{key}.name=difficulty", stops=True),
        Switch((f"{key}.pass_rate_of",), name == "pass_rate", reason, f"{key}.name=pass_rate", stops=True),
        Switch((f"{key}.stages", f"{key}.keep_earlier"), name == "stages", reason, f"{key}.name=stages", stops=True),
        Switch(("data.shuffle",), name == "epoch", f"{reason} has its own order", f"{key}.name=epoch"),
    ]


def _runtime_switches(config: RLConfig) -> list[Switch]:
    """Keys of Ray without Ray, of asynchronous training without it, and of validation without validation rows."""
    asynchronous, block = RunSpec(config).asynchronous, "trainer.async_training"
    keys = [key.path for key in documentation(RLConfig)]
    sampling = tuple(path for path in keys if path.startswith("actor_rollout_ref.rollout.val_kwargs."))
    validation = (*sampling, "trainer.log_val_generations", "data.val_batch_size")
    if asynchronous:
        validation += (f"{block}.validation_share",)
    return [
        _ray_switch(config),
        Switch(
            (f"{block}.stream",),
            config.trainer.async_training.max_staleness == 0,
            f"{block}.max_staleness={config.trainer.async_training.max_staleness} overlaps whole batches",
            f"{block}.max_staleness=0",
        ),
        Switch(
            (f"{block}.partial_rollouts",),
            config.trainer.async_training.max_staleness > 0,
            f"{block}.max_staleness=0 leaves no response under way",
            f"{block}.max_staleness=1",
        ),
        Switch(
            (f"{block}.interrupted_cache",),
            config.trainer.async_training.partial_rollouts,
            f"{block}.partial_rollouts=false interrupts no response",
            f"{block}.partial_rollouts=true",
        ),
        Switch(
            (f"{block}.order", f"{block}.engine_threads", f"{block}.validation_share"),
            asynchronous,
            f"{block}.max_staleness=0 takes turns",
            f"{block}.max_staleness=1",
        ),
        Switch(
            (f"{block}.engine_threads",),
            not asynchronous or config.trainer.runtime == "local",
            "on Ray an engine process takes the cores of its worker",
            "trainer.runtime=local",
        ),
        Switch(validation, bool(config.data.val_files), "data.val_files=null", "data.val_files=FILE"),
    ]


def _distillation_switches(config: RLConfig) -> list[Switch]:
    settings, block = config.distillation, "distillation"
    topk, itself = settings.loss_mode in TOP_K_MODES, settings.path is None and not settings.teachers
    keys = tuple(
        f"{block}.{name}"
        for name in ("path", "teachers", "teacher_prompt", "loss_mode", "use_policy_gradient", "coef", "task_weight")
    )
    return [
        Switch(keys, settings.enable, f"{block}.enable=false", f"{block}.enable=true", stops=True),
        Switch(
            (f"{block}.topk", f"{block}.tail_bucket"),
            topk,
            f"{block}.loss_mode={settings.loss_mode}",
            f"{block}.loss_mode=reverse_kl_topk",
        ),
        Switch(
            (f"{block}.beta",),
            settings.loss_mode.startswith("jsd"),
            f"{block}.loss_mode={settings.loss_mode}",
            f"{block}.loss_mode=jsd",
        ),
        Switch(
            (f"{block}.enable_resource_pool", f"{block}.log_prob_max_token_len_per_gpu"),
            settings.has_local,
            "every teacher is behind a server",
            f"{block}.path=DIR",
        ),
        Switch(
            tuple(f"{block}.server.{name}" for name in ("api_key_env", "max_concurrent", "timeout", "retries")),
            bool(settings.addresses),
            "no teacher is behind a server",
            f"{block}.path=http://HOST:PORT/v1",
        ),
        Switch((f"{block}.self_teacher",), itself, "the policy is not its own teacher", f"{block}.path=null"),
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
            "a custom reward function replaces the built-in scorer",
            f"{block}.path=null",
        ),
    ]


def _ray_switch(config: AnyConfig) -> Switch:
    keys = tuple(key.path for key in documentation(type(config)) if key.path.startswith("ray."))
    runtime = config.trainer.runtime
    return Switch(keys, runtime == "ray", f"trainer.runtime={runtime} starts no Ray", "trainer.runtime=ray")


def _shared_switches(config: AnyConfig, model_block: str, optim_block: str) -> list[Switch]:
    rl = isinstance(config, RLConfig)
    model = config.actor_rollout_ref.model if rl else config.model
    optim = config.actor_rollout_ref.actor.optim if rl else config.optim
    return [
        Switch(
            (f"{model_block}.lora_alpha", f"{model_block}.target_modules"),
            model.lora_rank > 0 and model.lora_adapter_path is None,
            "no new LoRA adapter is created",
            f"{model_block}.lora_rank=32",
        ),
        Switch(
            (f"{optim_block}.min_lr_ratio",),
            optim.lr_scheduler_type != "constant",
            f"{optim_block}.lr_scheduler_type={optim.lr_scheduler_type}",
            f"{optim_block}.lr_scheduler_type=cosine",
        ),
        Switch(
            tuple(f"{optim_block}.lr_wsd_decay_{name}" for name in ("style", "steps", "steps_ratio")),
            optim.lr_scheduler_type == "wsd",
            f"{optim_block}.lr_scheduler_type={optim.lr_scheduler_type}",
            f"{optim_block}.lr_scheduler_type=wsd",
        ),
        Switch(
            (f"{optim_block}.lr_wsd_decay_steps_ratio",),
            optim.lr_wsd_decay_steps < 0 or optim.lr_scheduler_type != "wsd",
            f"{optim_block}.lr_wsd_decay_steps={optim.lr_wsd_decay_steps} takes precedence",
            f"{optim_block}.lr_wsd_decay_steps=-1",
        ),
        Switch(
            (f"{optim_block}.lr_warmup_steps_ratio",),
            optim.lr_warmup_steps < 0,
            f"{optim_block}.lr_warmup_steps={optim.lr_warmup_steps} takes precedence",
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


def _switched_off_keys(config: AnyConfig, switches: list[Switch]) -> Iterator[Finding]:
    defaults = {key.path: key.default for key in documentation(type(config))}
    values = dict(leaf_values(config))
    for switch in switches:
        for key in () if switch.is_on else switch.keys:
            if values[key] != defaults[key]:
                severity = error if switch.stops else warning
                back = f"{key}={yaml_value(defaults[key])}"
                yield severity(
                    f"{key.rpartition('.')[2]}={yaml_value(values[key])} has no effect: {switch.reason}",
                    why="the run would not do what its configuration says",
                    fix=f"{switch.on}, or {back} (the default)" if switch.on else f"{back} (the default)",
                    where=key,
                )
