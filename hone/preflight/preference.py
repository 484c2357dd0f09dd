"""Rules about preference training and reward models."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.check import yaml_value
from hone.config.feedback import RewardModelUseConfig
from hone.config.preference import PreferenceConfig, RewardModelConfig
from hone.config.tree import RLConfig
from hone.errors import HoneError, did_you_mean
from hone.preflight.files import weights
from hone.preflight.reading import file_list, read_model
from hone.preflight.rules import Finding, error, rule, warning


@rule("R42", PreferenceConfig, RewardModelConfig)
def preference_columns_exist(config: PreferenceConfig | RewardModelConfig) -> Iterator[Finding]:
    """The first row of every file holds a pair, or a labelled response if the loss supports labels."""
    from hone.algorithms import preference_losses
    from hone.data.files import read_rows
    from hone.data.preferences import holds_pairs, preference_columns

    margin = config.loss.margin_key if isinstance(config, RewardModelConfig) else None
    columns = preference_columns(config.data, margin)
    name = config.loss.name if isinstance(config, PreferenceConfig) else None
    for file in [*file_list(config.data.train_files), *file_list(config.data.val_files)]:
        try:
            (row,) = read_rows(
                file,
                required=(margin,) if margin else (),
                optional=list(filter(None, vars(columns).values())),
                max_rows=1,
            )
            paired = holds_pairs(row, columns)
        except HoneError as problem:
            yield Finding(problem, stops=True)
            continue
        if not paired and (
            name is None or (name in preference_losses and "pairs" in preference_losses.get(name).needs)
        ):
            what = "a reward model" if name is None else f"loss.name={name}"
            yield error(
                f"'{file}' holds single labelled responses, but {what} needs pairs",
                why="a comparison needs a chosen and a rejected response to the same prompt",
                fix=("" if name is None else "loss.name=kto, or ") + "data with columns chosen and rejected",
                where="data.train_files",
            )


@rule("R11", PreferenceConfig)
def preference_loss_options(config: PreferenceConfig) -> Iterator[Finding]:
    """The loss is registered and has every option that is set."""
    from hone.algorithms import preference_losses

    if config.loss.name not in preference_losses:
        yield error(
            f"unknown preference loss '{config.loss.name}'",
            where="loss.name",
            fix=did_you_mean(config.loss.name, preference_losses),
        )
        return
    loss = preference_losses.get(config.loss.name)
    for option, value in vars(config.loss).items():
        if option != "name" and value is not None and option not in loss.options:
            names = [name for name in preference_losses if option in preference_losses.get(name).options]
            yield error(
                f"{option}={value} is set, but loss.name={config.loss.name} does not have this option",
                why="it would have no effect",
                fix=f"loss.{option}=null, or loss.name={' or '.join(names)}",
                where=f"loss.{option}",
            )


@rule("R24", PreferenceConfig)
def reference_fits(config: PreferenceConfig) -> Iterator[Finding]:
    """The mode of the reference is possible, and the loss uses a reference."""
    from hone.algorithms import preference_losses

    if config.loss.name not in preference_losses:
        return
    needs, ref = preference_losses.get(config.loss.name).needs, config.ref
    if "reference" not in needs:
        if ref.mode != "auto" or ref.model_path is not None:
            yield warning(
                f"a reference is configured, but loss.name={config.loss.name} does not use one",
                why="the reference would not be loaded",
                fix="ref.mode=auto ref.model_path=null, or loss.name=dpo",
                where="ref.mode",
            )
        return
    lora = config.model.lora_rank > 0 or config.model.lora_adapter_path is not None
    if ref.mode == "adapter_off" and (not lora or ref.model_path is not None):
        yield error(
            "ref.mode=adapter_off needs a LoRA adapter to switch off, but model.lora_rank=0"
            if not lora
            else f"ref.mode=adapter_off uses the base model, but ref.model_path={ref.model_path} is set",
            fix="model.lora_rank=32, or ref.mode=copy" if not lora else "ref.mode=copy, or ref.model_path=null",
            where="ref.mode",
        )
    if ref.mode == "precompute" and "kl" in needs:
        yield error(
            f"ref.mode=precompute, but loss.name={config.loss.name} needs reference log-probs of responses to other prompts",
            why="the pairing depends on the batch, so these log-probs cannot be precomputed",
            fix="ref.mode=copy, or ref.mode=adapter_off with LoRA",
            where="ref.mode",
        )
    if "kl" in needs and config.data.train_batch_size < 2:
        yield error(
            f"loss.name={config.loss.name} with data.train_batch_size=1",
            why="it estimates a KL from responses after the prompts of other rows of the batch",
            fix="data.train_batch_size=64",
            where="data.train_batch_size",
        )


@rule("R11", RLConfig)
def online_preference_loss(config: RLConfig) -> Iterator[Finding]:
    """The preference loss of an RL run is registered, learns from pairs, and is the only loss of the update."""
    from hone.algorithms import preference_losses

    actor, block = config.actor_rollout_ref.actor, "actor_rollout_ref.actor.preference_loss"
    name = actor.preference_loss.loss_mode
    if name is None:
        for option, value in (("beta", actor.preference_loss.beta), ("margin", actor.preference_loss.margin or None)):
            if value is not None:
                yield error(
                    f"{option}={value} is set, but {block}.loss_mode=null",
                    why="the run trains on advantages and makes no pairs",
                    fix=f"{block}.loss_mode=dpo, or remove {block}.{option}",
                    where=f"{block}.{option}",
                )
        return
    if name not in preference_losses:
        yield error(
            f"unknown preference loss '{name}'", where=f"{block}.loss_mode", fix=did_you_mean(name, preference_losses)
        )
        return
    if "pairs" not in preference_losses.get(name).needs:
        yield error(
            f"{block}.loss_mode={name} learns from labels, but a run makes pairs of answers",
            fix=f"{block}.loss_mode=dpo",
            where=f"{block}.loss_mode",
        )
    if config.actor_rollout_ref.rollout.n < 2:
        yield error(
            f"actor_rollout_ref.rollout.n={config.actor_rollout_ref.rollout.n}, but a pair needs 2 answers",
            fix="actor_rollout_ref.rollout.n=8",
            where="actor_rollout_ref.rollout.n",
        )
    correction = config.algorithm.rollout_correction
    claims = {
        "actor_rollout_ref.actor.entropy_coeff=0": actor.entropy_coeff > 0,
        "actor_rollout_ref.actor.use_kl_loss=false": actor.use_kl_loss,
        "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla": actor.policy_loss.loss_mode != "vanilla",
        "algorithm.use_pf_ppo=false": config.algorithm.use_pf_ppo,
        "algorithm.rollout_correction.preset=null": correction.preset is not None,
        "algorithm.rollout_correction.rollout_is=null": correction.rollout_is is not None,
        "algorithm.rollout_correction.rollout_rs=null": correction.rollout_rs is not None,
        "algorithm.rollout_correction.rollout_token_veto_threshold=null": correction.rollout_token_veto_threshold
        is not None,
    }
    for fix, claimed in claims.items():
        if claimed:
            yield error(
                f"{fix.partition('=')[0]} is set, but {block}.loss_mode={name} replaces the policy loss",
                why="it would have no effect, or split pairs",
                fix=f"{fix}, or {block}.loss_mode=null",
                where=fix.partition("=")[0],
            )


@rule("R08", RLConfig)
def reward_model_directory(config: RLConfig) -> Iterator[Finding]:
    """The reward model has a directory, the right kind, and positions for the longest sequence."""
    settings = config.reward.reward_model
    if not settings.enable:
        return
    key = "reward.reward_model.path"
    if settings.path is None:
        yield error(
            f"reward.reward_model.enable=true, but {key} is not set",
            fix=f"{key}=DIR, for example RUN/checkpoints/step_N/actor of `hone reward-model`",
            where=key,
        )
        return
    yield from weights(key, settings.path)
    saved = read_model(settings.path)
    kinds, judges = " ".join(saved.get("architectures") or []), settings.kind == "generative"
    if saved and judges and "Classification" in kinds:
        yield error(
            f"'{settings.path}' holds a {kinds}, which cannot generate a judgement",
            why="reward.reward_model.kind=generative reads the score from generated text",
            fix="reward.reward_model.kind=discriminative, or the directory of a causal language model",
            where=key,
        )
    elif saved and not judges and "Classification" not in kinds:
        yield error(
            f"'{settings.path}' holds a {kinds or 'model of unknown kind'}, not a scalar reward model",
            why="its score would come from an untrained output layer",
            fix=f"train one with `hone reward-model model.path={settings.path} data.train_files=PAIRS.parquet`; or "
            "reward.reward_model.kind=generative",
            where=key,
        )
    needed, positions = (
        config.data.max_prompt_length + config.data.max_response_length,
        saved.get("max_position_embeddings"),
    )
    if isinstance(positions, int) and positions < needed:
        yield error(
            f"data.max_prompt_length + data.max_response_length = {needed} tokens, but the reward model has "
            f"max_position_embeddings={positions}",
            why="scores are meaningless beyond the model's positions",
            fix=f"shorter sequences, at most {positions} tokens in total, or another reward model",
            where=key,
        )


@rule("R23", RLConfig)
def reward_model_switched_off(config: RLConfig) -> Iterator[Finding]:
    """Settings of a reward model are used only when it is enabled."""
    settings, defaults = vars(config.reward.reward_model), vars(RewardModelUseConfig())
    if settings["enable"]:
        return
    for name, value in settings.items():
        if value != defaults[name]:
            yield error(
                f"{name}={value} is set, but reward.reward_model.enable=false",
                why="no reward model would score",
                fix=f"reward.reward_model.enable=true, or reward.reward_model.{name}={yaml_value(defaults[name])}",
                where=f"reward.reward_model.{name}",
            )
