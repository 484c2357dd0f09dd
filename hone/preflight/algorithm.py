"""Rules about the algorithm: parts that need each other, exclude each other, or do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hone.config.check import yaml_value
from hone.config.keys import documentation, leaf_values
from hone.config.preference import PreferenceConfig, RewardModelConfig
from hone.config.tree import RLConfig, SFTConfig
from hone.config.trees import AnyConfig
from hone.preflight.needs import estimator, needs_critic
from hone.preflight.rules import Finding, error, rule, warning


@rule("R19", RLConfig)
def groups_of_one(config: RLConfig) -> Iterator[Finding]:
    """An estimator that compares the answers to one prompt gets at least two."""
    chosen, n = estimator(config), config.actor_rollout_ref.rollout.n
    if chosen is not None and "groups" in chosen.needs and n < 2:
        yield error(
            f"adv_estimator={config.algorithm.adv_estimator} compares the answers to one prompt, "
            f"and actor_rollout_ref.rollout.n={n}",
            why=f"in a group of one: {chosen.group_of_one or 'there is nothing to compare with'}",
            fix="actor_rollout_ref.rollout.n=8 (4 to 16 are usual)",
            where="actor_rollout_ref.rollout.n",
        )


@rule("R21", RLConfig)
def critic_matches_estimator(config: RLConfig) -> Iterator[Finding]:
    """A critic is trained exactly when the estimator needs values."""
    chosen, enabled, name = estimator(config), config.critic.enable, config.algorithm.adv_estimator
    if chosen is None:
        return
    if "values" in chosen.needs and enabled is False:
        yield error(
            f"adv_estimator={name} needs values, and critic.enable=false",
            why="without a critic there is no baseline to compare a token with",
            fix="critic.enable=true, or algorithm.adv_estimator=grpo",
            where="critic.enable",
        )
    if "values" not in chosen.needs and enabled:
        yield warning(
            f"a critic is trained, and adv_estimator={name} does not use it",
            why="it costs a second model and its optimizer for nothing",
            fix="critic.enable=null, or algorithm.adv_estimator=gae",
            where="critic.enable",
        )


@rule("R22", RLConfig)
def kl_twice(config: RLConfig) -> Iterator[Finding]:
    """The KL penalty is in the reward or in the loss."""
    coefficient, loss = config.algorithm.kl_ctrl.kl_coef, config.actor_rollout_ref.actor
    if config.algorithm.use_kl_in_reward and loss.use_kl_loss:
        yield warning(
            f"the KL penalty is applied twice: {coefficient:g} in the reward and {loss.kl_loss_coef:g} in the loss",
            why="the policy is held to the reference more than either number says",
            fix="algorithm.use_kl_in_reward=false or actor_rollout_ref.actor.use_kl_loss=false",
            where="algorithm.use_kl_in_reward",
        )


@rule("R32", RLConfig)
def sampling(config: RLConfig) -> Iterator[Finding]:
    """Training samples are random, and drawn from the distribution that is trained."""
    rollout = config.actor_rollout_ref.rollout
    where = "actor_rollout_ref.rollout"
    if rollout.temperature == 0:
        yield error(
            f"temperature=0 gives {rollout.n} identical answers a prompt"
            if rollout.n > 1
            else "temperature=0 takes the likeliest token always",
            why="reinforcement learns from the difference between tries",
            fix=f"{where}.temperature=1.0",
            where=f"{where}.temperature",
        )
    if rollout.val_kwargs.n > 1 and rollout.val_kwargs.temperature == 0:
        yield error(
            f"validation draws {rollout.val_kwargs.n} answers a prompt at temperature=0, all identical",
            why="best@n and maj@n would say nothing",
            fix=f"{where}.val_kwargs.temperature=1.0 or {where}.val_kwargs.n=1",
            where=f"{where}.val_kwargs.n",
        )
    changed = {
        "top_k": rollout.top_k > 0,
        "top_p": rollout.top_p < 1,
        "min_p": rollout.min_p > 0,
        "repetition_penalty": rollout.repetition_penalty != 1,
    }
    names = [name for name, is_changed in changed.items() if is_changed]
    if names:
        yield warning(
            f"training samples are drawn with {', '.join(f'{name}={getattr(rollout, name):g}' for name in names)}",
            why="the trainer's log-probs are those of the whole distribution: the ratio is biased",
            fix=" ".join(f"{where}.{name}={_default(f'{where}.{name}')}" for name in names),
            where=where,
        )


# ------------------------------------------------------------------------------------------- set, and without effect


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
    chosen = estimator(config)
    options = chosen.options if chosen else frozenset({"gamma", "lam", "norm_adv_by_std_in_grpo"})
    name = algorithm.adv_estimator
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
        *(
            Switch((f"algorithm.{option}",), option in options, f"adv_estimator={name} has no such option", "")
            for option in ("gamma", "lam", "norm_adv_by_std_in_grpo")
        ),
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
        *_reward_switches(config),
        *_shared_switches(config, "actor_rollout_ref.model", "actor_rollout_ref.actor.optim"),
    ]
    yield from _without_effect(config, switches)


@rule("R23", SFTConfig, PreferenceConfig, RewardModelConfig)
def effectless_sft_keys(config: SFTConfig | PreferenceConfig | RewardModelConfig) -> Iterator[Finding]:
    """A key that differs from its default does something."""
    yield from _without_effect(config, _shared_switches(config, "model", "optim"))


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


def _default(path: str) -> str:
    return next(yaml_value(key.default) for key in documentation(RLConfig) if key.path == path)
