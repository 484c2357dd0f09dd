"""The rule about keys that have no effect because the feature that they belong to is off or not selected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hone.config.derived import RunSpec, judge_keys
from hone.config.distillation import TOP_K_MODES
from hone.config.keys import documentation, leaf_values, yaml_value
from hone.config.migration.entries import expand
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig, model_block
from hone.preflight.rules import Findings, error, rule, warning

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


class Switch(NamedTuple):
    """Keys that have an effect only when a feature is on."""

    keys: str  # pattern with braces; a block stands for its keys
    on: str = ""  # overrides that switch the feature on
    is_on: bool | None = None  # None: if the configuration has the values of ``on``
    reason: str = ""  # why the keys have no effect; by default the present values of the keys in ``on``
    stops: bool = False


@rule("R23")
def effectless_keys(config: AnyConfig) -> Findings:
    """A key that differs from its default has an effect."""
    defaults, values = {key.path: key.default for key in documentation(type(config))}, dict(leaf_values(config))
    changed = [key for key in values if values[key] != defaults[key]]
    switches = [*_shared(config), *(_rl(config) if isinstance(config, RLConfig) else ())]
    for keys, on, is_on, reason, stops in switches:
        wanted = [word.split("=", 1) for word in on.split()]
        missing = [f"{key}={yaml_value(values[key])}" for key, value in wanted if yaml_value(values[key]) != value]
        if not missing if is_on is None else is_on:
            continue
        blocks = expand(keys)
        for key in changed:
            if any(f"{key}.".startswith(f"{block}.") for block in blocks):
                back = f"{key}={yaml_value(defaults[key])}"
                yield (error if stops else warning)(
                    f"{key.rpartition('.')[2]}={yaml_value(values[key])} has no effect: {reason or ', '.join(missing)}",
                    why="the run would not do what its configuration says",
                    fix=f"{on}, or {back} (the default)" if on else f"{back} (the default)",
                    where=key,
                )


def _shared(config: AnyConfig) -> Iterator[Switch]:
    path, model = model_block(config)
    rl = isinstance(config, RLConfig)
    optim, block = (config.actor_rollout_ref.actor.optim, f"{ACTOR}.optim") if rl else (config.optim, "optim")
    scheduler = optim.lr_scheduler_type
    yield Switch(
        f"{path}.{{lora_alpha,target_modules}}",
        f"{path}.lora_rank=32" if model.lora_adapter_path is None else "",
        model.lora_rank > 0 and model.lora_adapter_path is None,
        "no new LoRA adapter is created" if model.lora_adapter_path is None else "the loaded adapter has its own",
    )
    yield Switch(f"{block}.min_lr_ratio", f"{block}.lr_scheduler_type=cosine", scheduler != "constant")
    yield Switch(f"{block}.lr_wsd_decay_{{style,steps,steps_ratio}}", f"{block}.lr_scheduler_type=wsd")
    decays = optim.lr_wsd_decay_steps >= 0 and scheduler == "wsd"
    yield Switch(f"{block}.lr_wsd_decay_steps_ratio", f"{block}.lr_wsd_decay_steps=-1", not decays)
    yield Switch(f"{block}.lr_warmup_steps_ratio", f"{block}.lr_warmup_steps=-1", optim.lr_warmup_steps < 0)
    yield Switch("trainer.resume_from_path", "trainer.resume_mode=resume_path", stops=True)
    yield Switch("ray", "trainer.runtime=ray")


def _rl(config: RLConfig) -> Iterator[Switch]:
    algorithm, reward, spec = config.algorithm, config.reward, RunSpec(config)
    name, correction = algorithm.adv_estimator, "algorithm.rollout_correction"
    yield Switch("actor_rollout_ref.actor.{kl_loss_coef,kl_loss_type}", f"{ACTOR}.use_kl_loss=true", stops=True)
    follows = config.actor_rollout_ref.actor.entropy_target is not None
    yield Switch(f"{ACTOR}.{{entropy_coeff_delta,entropy_coeff_max}}", f"{ACTOR}.entropy_target=0.2", follows)
    in_reward = "algorithm.use_kl_in_reward=true"
    yield Switch("algorithm.{kl_penalty,kl_ctrl.kl_coef,kl_ctrl.type}", in_reward, stops=True)
    yield Switch("algorithm.kl_ctrl.{target_kl,horizon}", f"{in_reward} algorithm.kl_ctrl.type=adaptive")
    bypass = "the old log-probs come from the engine (bypass_mode=true)"
    yield Switch(f"{ACTOR}.recompute_old_log_probs", f"{correction}.bypass_mode=false", not spec.bypass, bypass)
    yield from _methods(config)
    yield Switch(
        "algorithm.filter_groups.{metric,max_num_gen_batches}", "algorithm.filter_groups.enable=true", stops=True
    )
    yield Switch("algorithm.pf_ppo", "algorithm.use_pf_ppo=true", stops=True)
    if algorithm.use_pf_ppo:
        yield Switch("algorithm.pf_ppo.weight_pow", "algorithm.pf_ppo.reweight_method=pow")
    yield Switch(
        f"{correction}.rollout_is_threshold",
        f"{correction}.rollout_is=token",
        spec.correction["rollout_is"] is not None,
        stops=True,
    )
    overlong = reward.overlong_buffer.enable or reward.reward_manager == "dapo"
    yield Switch(
        "reward.overlong_buffer.{len,penalty_factor,log}", "reward.overlong_buffer.enable=true", overlong, stops=True
    )
    yield from _engines(config)
    block = f"{ROLLOUT}.speculative"
    method, native = config.actor_rollout_ref.rollout.speculative.method, f"{ROLLOUT}.name=native"
    yield Switch(f"{block}.num_speculative_tokens", f"{block}.method=ngram", method is not None)
    yield Switch(f"{block}.prompt_lookup_{{min,max}}", f"{block}.method=ngram")
    yield Switch(f"{block}.{{model,draft_lr}}", f"{block}.method=draft_model")
    yield Switch(f"{block}.disable_by_batch_size", f"{block}.method=ngram" if method is None else native)
    yield Switch(f"{ACTOR}.loss_scale_factor", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm")
    without_critic = f"no critic is trained (adv_estimator={name})"
    others = ",".join(vars(config.critic).keys() - {"enable"})
    yield Switch(f"critic.{{{others}}}", "critic.enable=true", spec.critic.value, without_critic)
    yield Switch("critic.beta", "algorithm.adv_estimator=prime", spec.rewards_process)
    learns_outcomes = "a process reward model learns from right and wrong alone"
    yield Switch("critic.{cliprange_value,loss_agg_mode}", "", not spec.rewards_process, learns_outcomes)
    yield Switch("trainer.critic_warmup", "algorithm.adv_estimator=gae", spec.critic.value, without_critic)
    yield from _order(config)
    yield from _asynchronous(config, asynchronous=spec.asynchronous)
    custom = "reward.custom_reward_function"
    is_custom = reward.custom_reward_function.path is not None
    yield Switch(f"{custom}.{{name,reward_kwargs}}", f"{custom}.path=FILE.py", is_custom, stops=True)
    yield Switch("reward.scorer_kwargs", f"{custom}.path=null")
    judge, generative = spec.judge, "reward.reward_model.kind=generative"
    yield Switch("reward.reward_model", "reward.reward_model.enable=true", stops=True)
    if judge is not None:
        of_judge = (
            switch._replace(keys=judge_keys(switch.keys), on=judge_keys(switch.on)) for switch in _engines(judge)
        )
        yield from (switch._replace(reason=judge_keys(switch.reason)) for switch in of_judge)
    elif reward.reward_model.enable:
        yield Switch("reward.reward_model.rollout", generative, is_on=False, reason="no engine judges", stops=True)
    yield from _distillation(config)


def _methods(config: RLConfig) -> Iterator[Switch]:
    """Yield the keys that are options of other estimators and losses than the chosen ones."""
    from hone.algorithms import advantage_estimators, policy_losses

    actor, name = config.actor_rollout_ref.actor, config.algorithm.adv_estimator
    loss = policy_losses.get(RunSpec(config).policy_loss)
    of_loss = f"loss_mode={actor.policy_loss.loss_mode}"
    for block, owner, chosen, registry, method in (
        ("algorithm", config.algorithm, advantage_estimators.get(name), advantage_estimators, f"adv_estimator={name}"),
        (ACTOR, actor, loss, policy_losses, of_loss),
        (f"{ACTOR}.policy_loss", actor.policy_loss, loss, policy_losses, of_loss),
    ):
        of_any = {option for other in registry for option in registry.get(other).options}
        for option in sorted(of_any & set(vars(owner)) - chosen.options):
            yield Switch(f"{block}.{option}", is_on=False, reason=f"{method} has no such option")
    clips = {"clip_ratio_low", "clip_ratio_high"} & loss.options
    if not clips:
        yield Switch(f"{ACTOR}.clip_ratio", is_on=False, reason=f"{of_loss} has no such option")
    elif len(clips) == 2 and actor.clip_ratio_low is not None and actor.clip_ratio_high is not None:
        yield Switch(f"{ACTOR}.clip_ratio", is_on=False, reason="clip_ratio_low and clip_ratio_high are both set")


def _engines(config: RLConfig) -> Iterator[Switch]:
    from hone.generation import SERVED, is_served

    rollout, local = config.actor_rollout_ref.rollout, config.trainer.runtime == "local"
    served, attached, turns = is_served(rollout), rollout.engine_url is not None, RunSpec(config).engines_take_turns
    reason, on = "the engine at engine_url is already running", f"{ROLLOUT}.engine_url=null"
    if not served:
        reason, on = f"engine '{rollout.name}' runs in Hone's own process", f"{ROLLOUT}.name=vllm"
    elif rollout.name not in SERVED:
        reason, on = f"engine '{rollout.name}' has no such key", f"{ROLLOUT}.name=vllm"
    started = served and not attached
    external = started and rollout.name in SERVED
    has_pages = rollout.name == "native" and not served and config.trainer.device != "cpu"
    yield Switch(
        "actor_rollout_ref.rollout.{engine_env,engine_kwargs,merge_lora,tensor_model_parallel_size,data_parallel_size,"
        "expert_parallel_size,max_num_batched_tokens,enforce_eager,enable_chunked_prefill,enable_prefix_caching}",
        *(on, external, reason),
    )
    yield Switch(f"{ROLLOUT}.gpu_memory_utilization", on, external or has_pages, reason)
    yield Switch(f"{ROLLOUT}.engine_start_seconds", on, started, reason)
    of_workers = reason if local else "on Ray every engine has the GPUs of its workers"
    yield Switch(f"{ROLLOUT}.devices", "", started and local, of_workers)
    at_work = reason if turns else "engines generate while the policy trains, or have GPUs of their own"
    yield Switch(f"{ROLLOUT}.free_cache_engine", "", turns and not attached, at_work)
    pool = f"{ROLLOUT}.enable_resource_pool=true"
    on_ray = pool if not local else f"trainer.runtime=ray {pool}"
    on_pool = not local and rollout.enable_resource_pool
    yield Switch(f"{ROLLOUT}.checkpoint_engine.between_workers", on_ray, on_pool)
    copies = "actor_rollout_ref.rollout.{engine_url,checkpoint_engine.backend,checkpoint_engine.delta,server_pool}"
    yield Switch(copies, f"{ROLLOUT}.num_replicas=1", served, reason)


def _order(config: RLConfig) -> Iterator[Switch]:
    """Yield the keys of the order of prompts; a sampler class of the user receives all of them."""
    sampler, key = config.data.sampler, "data.sampler"
    if sampler.class_path is not None:
        return
    by_level = sampler.name == "difficulty" or (sampler.name, sampler.pass_rate_of) == ("pass_rate", "difficulty")
    yield Switch(f"{key}.class_name", f"{key}.class_path=FILE.py", stops=True)
    yield Switch(f"{key}.weights", f"{key}.name=mixture", stops=True)
    yield Switch(f"{key}.difficulty_key", f"{key}.name=difficulty", by_level, stops=True)
    yield Switch(f"{key}.pass_rate_of", f"{key}.name=pass_rate", stops=True)
    yield Switch(f"{key}.{{stages,keep_earlier}}", f"{key}.name=stages", stops=True)
    yield Switch("data.shuffle", f"{key}.name=epoch")


def _asynchronous(config: RLConfig, *, asynchronous: bool) -> Iterator[Switch]:
    """Yield the keys of asynchronous training without it, and of validation without validation rows."""
    block = "trainer.async_training"
    stale, turns = config.trainer.async_training.max_staleness > 0, f"{block}.max_staleness=0 takes turns"
    yield Switch(f"{block}.stream", f"{block}.max_staleness=0")
    yield Switch(f"{block}.partial_rollouts", f"{block}.max_staleness=1", stale)
    yield Switch(f"{block}.interrupted_cache", f"{block}.partial_rollouts=true")
    yield Switch(
        "trainer.async_training.{order,engine_threads,validation_share}",
        f"{block}.max_staleness=1",
        asynchronous,
        turns,
    )
    if asynchronous:
        yield Switch(f"{block}.engine_threads", "trainer.runtime=local")
    validation, rows = (
        [f"{ROLLOUT}.val_kwargs", "trainer.log_val_generations", "data.val_batch_size"],
        bool(config.data.val_files),
    )
    yield Switch(f"{{{','.join(validation)}}}", "data.val_files=FILE", rows)
    if asynchronous:
        yield Switch(f"{block}.validation_share", "data.val_files=FILE", rows or bool(config.trainer.val_suites))
    yield Switch("trainer.suite_python", "trainer.val_suites=[lm-eval:TASK]", bool(config.trainer.val_suites))


def _distillation(config: RLConfig) -> Iterator[Switch]:
    settings, block = config.distillation, "distillation"
    mode, itself = settings.loss_mode, settings.path is None and not settings.teachers
    yield Switch(
        "distillation.{path,teachers,teacher_prompt,loss_mode,use_policy_gradient,coef,task_weight}",
        f"{block}.enable=true",
        stops=True,
    )
    yield Switch(f"{block}.{{topk,tail_bucket}}", f"{block}.loss_mode=reverse_kl_topk", mode in TOP_K_MODES)
    yield Switch(f"{block}.beta", f"{block}.loss_mode=jsd", mode.startswith("jsd"))
    served = "every teacher is behind a server"
    local_keys = f"{block}.{{enable_resource_pool,log_prob_max_token_len_per_gpu}}"
    yield Switch(local_keys, f"{block}.path=DIR", settings.has_local, served)
    address = f"{block}.path=http://HOST:PORT/v1"
    yield Switch(f"{block}.server", address, bool(settings.addresses), "no teacher is behind a server")
    yield Switch(f"{block}.self_teacher", f"{block}.path=null", itself, "the policy is not its own teacher")
