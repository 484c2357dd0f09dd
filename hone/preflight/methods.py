"""Rules about estimators, losses, corrections and trackers: names that exist, and settings that require, exclude or ignore each other."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection

from hone.config.derived import RunSpec
from hone.config.keys import documentation, yaml_value
from hone.config.offline import PreferenceConfig, RewardModelConfig
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig
from hone.errors import ConfigError, HoneError, did_you_mean
from hone.extras import install_command
from hone.preflight.evidence import Evidence
from hone.preflight.files import weights
from hone.preflight.reading import read_model
from hone.preflight.rules import Finding, Findings, Stage, error, error_of, rule, warning

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
_TRACKER_PACKAGES = {name: name for name in ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")} | {
    "otel": "opentelemetry"
}


@rule("R19")
def groups_of_one(config: RLConfig) -> Findings:
    """An estimator that compares the answers to one prompt gets at least two answers."""
    from hone.algorithms import advantage_estimators

    chosen, n = advantage_estimators.get(config.algorithm.adv_estimator), config.actor_rollout_ref.rollout.n
    if "groups" in chosen.needs and n < 2:
        yield error(
            f"adv_estimator={config.algorithm.adv_estimator} compares the answers to one prompt, "
            f"but actor_rollout_ref.rollout.n={n}",
            why=f"in a group of one: {chosen.group_of_one or 'there is nothing to compare with'}",
            fix="actor_rollout_ref.rollout.n=8 (4 to 16 are usual)",
        )


@rule("R21")
def critic_matches_estimator(config: RLConfig) -> Findings:
    """A critic is trained exactly when the estimator needs values."""
    needs = RunSpec(config).estimator.needs & {"values", "process_rewards"}
    needs_values, enabled, name = bool(needs), config.critic.enable, config.algorithm.adv_estimator
    if needs_values and enabled is False:
        yield error(
            f"adv_estimator={name} needs {min(needs).replace('_', ' ')}, but critic.enable=false",
            why="without a critic the advantages have no baseline" if "values" in needs else "the critic computes them",
            fix="critic.enable=true, or algorithm.adv_estimator=grpo",
        )
    if not needs_values and enabled:
        yield warning(
            f"critic.enable=true, but adv_estimator={name} does not use a critic",
            why="the critic and its optimizer take memory and time without effect",
            fix="critic.enable=null, or algorithm.adv_estimator=gae",
        )


@rule("R22")
def kl_twice(config: RLConfig) -> Findings:
    """The KL penalty is in the reward or in the loss, not in both."""
    coefficient, loss = config.algorithm.kl_ctrl.kl_coef, config.actor_rollout_ref.actor
    if config.algorithm.use_kl_in_reward and loss.use_kl_loss:
        yield warning(
            f"the KL penalty is applied twice: {coefficient:g} in the reward and {loss.kl_loss_coef:g} in the loss",
            why="the total penalty is larger than either coefficient",
            fix="algorithm.use_kl_in_reward=false or actor_rollout_ref.actor.use_kl_loss=false",
        )
    if config.algorithm.use_kl_in_reward and RunSpec(config).rewards_process:
        yield error(
            "algorithm.use_kl_in_reward=true takes the KL penalty from rewards that adv_estimator=prime learns as right (1) or wrong (0)",
            why="a reward below 0 is not a probability, and the run would end at the first one",
            fix="algorithm.use_kl_in_reward=false, or actor_rollout_ref.actor.use_kl_loss=true for a penalty in the loss",
        )


@rule("R32")
def sampling(config: RLConfig) -> Findings:
    """Training samples are random and drawn from the distribution that is trained."""
    rollout = config.actor_rollout_ref.rollout
    where = "actor_rollout_ref.rollout"
    if rollout.temperature == 0:
        yield error(
            f"temperature=0 gives {rollout.n} identical answers per prompt"
            if rollout.n > 1
            else "temperature=0 always takes the most likely token",
            why="reinforcement learning needs answers that differ",
            fix=f"{where}.temperature=1.0",
        )
    if rollout.val_kwargs.n > 1 and rollout.val_kwargs.temperature == 0:
        yield error(
            f"validation samples {rollout.val_kwargs.n} answers per prompt at temperature=0, which are all identical",
            why="best@n and maj@n would equal the metric of one answer",
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
    if rollout.constraint.kind is not None:
        yield warning(
            f"training samples are drawn with constraint.kind={rollout.constraint.kind}",
            why="the trainer computes log-probs of the full distribution, so the ratio is biased where the constraint leaves few tokens",
            fix=f"{where}.constraint={{kind: null, text: null, file: null}}, unless every answer has to follow the format",
        )
    keeps = RunSpec(config).keeps_support
    if names and not keeps.value:
        yield (error if rollout.keep_support else warning)(
            f"training samples are drawn with {', '.join(f'{name}={getattr(rollout, name):g}' for name in names)}",
            why=f"the trainer computes log-probs of the full distribution, so the ratio is biased ({keeps.reason})",
            fix=" ".join(f"{where}.{name}={_default(f'{where}.{name}')}" for name in names),
            where=where,
        )


def _default(path: str) -> str:
    return next(yaml_value(key.default) for key in documentation(RLConfig) if key.path == path)


@rule("R62")
def known_options(config: RLConfig) -> Findings:
    """Options in adv_kwargs and loss_kwargs exist in the chosen method."""
    from hone.algorithms import advantage_estimators, policy_losses
    from hone.algorithms.policy_losses.base import COMMON_OPTIONS

    chosen = advantage_estimators.get(config.algorithm.adv_estimator)
    loss = policy_losses.get(RunSpec(config).policy_loss)
    policy = config.actor_rollout_ref.actor.policy_loss
    given = [
        ("algorithm.adv_kwargs", config.algorithm.adv_kwargs, chosen, frozenset()),
        (f"{ACTOR}.policy_loss.loss_kwargs", policy.loss_kwargs, loss, COMMON_OPTIONS),
    ]
    for key, options, method, common in given:
        known = method.options | common
        for name in options:
            if name not in known:
                yield error(
                    f"'{method.name}' has no option '{name}'",
                    fix=did_you_mean(name, known) if known else f"{key}={{}}: it has no options",
                    where=f"{key}.{name}",
                )


@rule("R62")
def sum_pi_squared(config: RLConfig) -> Findings:
    """The sums of squared probabilities are computed when the estimator needs them."""
    spec = RunSpec(config)
    key = f"{ACTOR}.calculate_sum_pi_squared"
    wanted = config.actor_rollout_ref.actor.calculate_sum_pi_squared
    needed = "sum_pi_squared" in spec.estimator.needs
    if needed and wanted is False:
        yield error(
            f"adv_estimator={config.algorithm.adv_estimator} needs the sums of squared probabilities",
            why="its baseline weights tokens by them",
            fix=f"{key}=null (computed when needed) or true",
            where=f"{key}=false",
        )
    if (needed or wanted) and spec.bypass:
        yield error(
            "the trainer computes sums of squared probabilities with its old log-probs, which bypass_mode=true skips",
            why=f"adv_estimator={config.algorithm.adv_estimator} needs them" if needed else f"{key}=true requests them",
            fix=f"{CORRECTION}.bypass_mode=false" if needed else f"{key}=null",
            where=f"{CORRECTION}.bypass_mode",
        )


@rule("R62")
def top_entropy(config: RLConfig) -> Findings:
    """Entropies are computed when tokens are chosen by them."""
    if config.algorithm.top_entropy_share is not None and RunSpec(config).bypass:
        yield error(
            "the trainer computes entropies with its old log-probs, which bypass_mode=true skips",
            why="algorithm.top_entropy_share chooses tokens by them",
            fix=f"{CORRECTION}.bypass_mode=false, or algorithm.top_entropy_share=null",
            where=f"{CORRECTION}.bypass_mode",
        )


@rule("R62")
def reward_components(config: RLConfig) -> Findings:
    """An estimator of reward components has their names and weights, and no KL penalty in the reward."""
    algorithm = config.algorithm
    if "reward_components" not in RunSpec(config).estimator.needs:
        return
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if not keys:
        yield error(
            f"adv_estimator={algorithm.adv_estimator} normalises each reward component, but algorithm.gdpo_reward_keys is not set",
            why="it needs the names of the components",
            fix="algorithm.gdpo_reward_keys=[acc,format], the terms that the reward function returns besides the score",
        )
    elif weights is not None and len(weights) != len(keys):
        yield error(
            f"{len(weights)} weights for {len(keys)} reward components ({', '.join(keys)})",
            fix=f"algorithm.gdpo_reward_weights=[{','.join(['1.0'] * len(keys))}]",
        )
    if algorithm.use_kl_in_reward:
        yield error(
            f"use_kl_in_reward=true, but adv_estimator={algorithm.adv_estimator} reads only the reward components",
            why="the KL penalty would have no effect",
            fix=f"algorithm.use_kl_in_reward=false {ACTOR}.use_kl_loss=true",
        )


_ROLES = {
    "self_play": ("rae", "what one seat wins the other loses, so their sum teaches nothing"),
    "proposer_solver": ("hierarchical_grpo", "a hard problem lowers the return of its solvers, whatever they do"),
}
"""Agent loops whose episodes have roles, with an estimator that knows them, and why another does not do."""


@rule("R62", Stage.FILES)
def self_play_has_roles(config: RLConfig, evidence: Evidence) -> Findings:
    """Episodes in which the policy has several roles are credited by role."""
    if RunSpec(config).estimator.needs & {"turn_baselines", "turn_roles"}:
        return
    for loop, (estimator, why) in _ROLES.items():
        if count := sum(evidence.loops.name(row) == loop for row in evidence.train_rows):
            yield error(
                f"{count} rows use the agent loop {loop}, but adv_estimator={config.algorithm.adv_estimator} has one return for "
                "all roles of an episode",
                why=why,
                fix=f"algorithm.adv_estimator={estimator}",
                where="algorithm.adv_estimator",
            )


@rule("R62")
def turns_can_be_forked(config: RLConfig) -> Findings:
    """An estimator that forks turns has an engine with the weights that sampled, entropies, and episodes that can be replayed."""
    spec = RunSpec(config)
    if "turn_values" not in spec.estimator.needs:
        return
    rollout, name = config.actor_rollout_ref.rollout, config.algorithm.adv_estimator
    obstacles = [
        (
            spec.asynchronous,
            "trainer.async_training.max_staleness",
            "0",
            "the weights that sampled an episode continue it",
        ),
        (
            config.algorithm.use_kl_in_reward,
            "algorithm.use_kl_in_reward",
            "false",
            "values of turns are rewards without the KL penalty, so the last turns would pay for all of it",
        ),
        (
            spec.bypass,
            f"{CORRECTION}.bypass_mode",
            "false",
            "turns are chosen by the entropy of the old log-probs' pass",
        ),
        (
            rollout.multi_turn.subagents,
            "actor_rollout_ref.rollout.multi_turn.subagents",
            "false",
            "parallel conversations cannot be replayed",
        ),
        (
            not rollout.multi_turn.enable,
            "actor_rollout_ref.rollout.multi_turn.enable",
            "true",
            "episodes of one turn have nothing to fork",
        ),
    ]
    for holds, key, value, why in obstacles:
        if holds:
            yield error(f"adv_estimator={name} cannot fork turns", why=why, fix=f"{key}={value}")


@rule("R19")
def large_enough_groups(config: RLConfig) -> Findings:
    """Groups are large enough for the estimator and for dynamic sampling."""
    from hone.algorithms import advantage_estimators

    chosen, n = advantage_estimators.get(config.algorithm.adv_estimator), config.actor_rollout_ref.rollout.n
    if 2 <= n < chosen.min_group:
        yield error(
            f"adv_estimator={config.algorithm.adv_estimator} compares {chosen.min_group} answers to one prompt, "
            f"but actor_rollout_ref.rollout.n={n}",
            why="smaller groups have no advantage",
            fix=f"actor_rollout_ref.rollout.n={max(8, chosen.min_group)}",
        )
    if config.algorithm.filter_groups.enable and n < 2 and "groups" not in chosen.needs:
        yield error(
            f"dynamic sampling keeps groups whose answers differ, but actor_rollout_ref.rollout.n={n}",
            why="a group of one answer is never kept",
            fix="actor_rollout_ref.rollout.n=8, or algorithm.filter_groups.enable=false",
            where="algorithm.filter_groups.enable",
        )


@rule("R26")
def rollout_correction(config: RLConfig) -> Findings:
    """The settings of the rollout correction are compatible with each other and the loss."""
    from hone.algorithms import check_rollout_correction

    spec = RunSpec(config)
    try:
        settings = spec.correction
        check_rollout_correction(**settings)
    except ConfigError as problem:  # also an unknown preset, which other rules leave to this one
        yield Finding(problem, stops=True)
        return
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if mode == "bypass_mode" and not settings["bypass_mode"]:
        yield error(
            "policy_loss.loss_mode=bypass_mode needs the engine's log-probs as the old ones, but bypass_mode=false",
            why="the old log-probs would be the trainer's, so nothing would be corrected",
            fix=f"{CORRECTION}.bypass_mode=true (the loss follows from it), or {ACTOR}.policy_loss.loss_mode=vanilla",
            where=f"{ACTOR}.policy_loss.loss_mode",
        )
    acts = spec.corrects or settings["loss_type"] != "ppo_clip"
    if settings["bypass_mode"] and acts and mode not in ("vanilla", "bypass_mode"):
        yield error(
            f"with bypass_mode=true only loss_mode=vanilla can be corrected, not loss_mode={mode}",
            why="the loss computes the importance weights and rejection in this mode, and this loss does not support it",
            fix=f"{ACTOR}.policy_loss.loss_mode=vanilla, or {CORRECTION}.bypass_mode=false",
            where=CORRECTION,
        )


@rule("R29")
def overlong_buffer(config: RLConfig) -> Findings:
    """The buffer of the overlong penalty is not longer than a response."""
    overlong, longest = config.reward.overlong_buffer, config.data.max_response_length
    if overlong.enable and overlong.len > longest:
        yield error(
            f"reward.overlong_buffer.len={overlong.len} tokens > data.max_response_length={longest}",
            why="even an empty response would be penalised",
            fix=f"reward.overlong_buffer.len={max(1, longest // 5)}",
        )


@rule("R11")
def registered_names(config: RLConfig) -> Findings:
    """Estimator, loss, KL estimators and engine are registered."""
    from hone.algorithms import KL_KINDS, advantage_estimators, policy_losses
    from hone.generation import ENGINES, SERVED

    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    chosen: list[tuple[str, str, str | None, Collection[str]]] = [
        ("algorithm.adv_estimator", "advantage estimator", algorithm.adv_estimator, advantage_estimators.names()),
        ("algorithm.kl_penalty", "KL estimator", algorithm.kl_penalty, KL_KINDS),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            "policy loss",
            actor.policy_loss.loss_mode,
            policy_losses.names(),
        ),
        ("actor_rollout_ref.actor.kl_loss_type", "KL estimator", actor.kl_loss_type, KL_KINDS),
        (
            "actor_rollout_ref.rollout.name",
            "engine",
            config.actor_rollout_ref.rollout.name,
            [*ENGINES.names(), *SERVED],
        ),
    ]
    for key, kind, name, known in chosen:
        if name is not None and name not in known and not _is_import_path(name):
            yield error(f"unknown {kind} '{name}'", where=key, fix=did_you_mean(name, known))


@rule("R11")
def reward_terms(config: RLConfig) -> Findings:
    """The reward terms are valid, and the scorers are registered."""
    from hone.rewards.scorers import SCORERS
    from hone.rewards.terms import read_terms

    for name in (config.reward.scorer, *(term.scorer for term in read_terms(config.reward.terms))):
        if name is not None:
            yield from error_of(SCORERS.get, name)


FORM = ("format", "keywords", "language", "length", "tool_format")
"""Scorers that give up to 1 for the form of an answer."""
PENALTIES = ("banned_words", "repetition", "tool_efficiency")
"""Scorers that give at most 0."""


@rule("R97")
def form_earns_less_than_the_result(config: RLConfig) -> Findings:
    """Terms for the form of an answer can earn less together than those for its result."""
    from hone.rewards.terms import read_terms

    try:
        terms = read_terms(config.reward.terms)
    except HoneError:
        return  # R11 reports it
    form = {  # a normalised term has deviation 1, so about the same bound
        term.name: term.weight * (min(1.0, term.clip[1]) if term.clip else 1.0) for term in terms if term.scorer in FORM
    }
    result = sum(term.weight for term in terms if term.scorer not in (*FORM, *PENALTIES))
    if 0 < result <= sum(form.values()):
        yield warning(
            f"the terms for form ({', '.join(form)}) can earn {sum(form.values()):g}, those for the result {result:g}",
            why="a wrong answer in the right form is worth as much as a right one, and form is learned first",
            fix=f"weights of form that add up to {result / 5:g} or less, or a clip of these terms",
            where="reward.terms",
        )


@rule("R11")
def import_paths(config: RLConfig) -> Findings:
    """A custom estimator or loss can be imported."""
    from hone.algorithms import advantage_estimators, policy_losses

    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    for registry, name in ((advantage_estimators, config.algorithm.adv_estimator), (policy_losses, loss_mode)):
        if _is_import_path(name):
            yield from error_of(registry.get, name)


def _is_import_path(name: str) -> bool:
    return ":" in name


@rule("R56")
def trackers(config: AnyConfig) -> Findings:
    """Every tracker exists, and its package is installed."""
    from hone.insight.trackers import TRACKERS

    for name in config.trainer.logger:
        package = _TRACKER_PACKAGES.get(name)
        if name not in TRACKERS:
            yield error(f"unknown tracker '{name}'", where="trainer.logger", fix=did_you_mean(name, TRACKERS))
        elif package and importlib.util.find_spec(package) is None:
            yield error(
                f"tracker '{name}' needs the package {package}, which is not installed",
                where="trainer.logger",
                fix=f"{install_command(name)}, or remove {name} from trainer.logger",
            )


@rule("R42")
def preference_columns_exist(config: PreferenceConfig | RewardModelConfig, evidence: Evidence) -> Findings:
    """The first row of every file holds a pair, or a labelled response if the loss supports labels."""
    from hone.algorithms import preference_losses
    from hone.data.preferences import holds_pairs, preference_columns

    margin = config.loss.margin_key if isinstance(config, RewardModelConfig) else None
    columns = preference_columns(config.data, margin)
    name = config.loss.name if isinstance(config, PreferenceConfig) else None
    optional = list(filter(None, vars(columns).values()))
    for file, row in evidence.first_rows(required=(margin,) if margin else (), optional=optional):
        try:
            if isinstance(row, HoneError):
                raise row
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


@rule("R11")
def preference_loss_options(config: PreferenceConfig) -> Findings:
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
            )


@rule("R24")
def reference_fits(config: PreferenceConfig) -> Findings:
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
        )
    if "kl" in needs and config.data.train_batch_size < 2:
        yield error(
            f"loss.name={config.loss.name} with data.train_batch_size=1",
            why="it estimates a KL from responses after the prompts of other rows of the batch",
            fix="data.train_batch_size=64",
        )


@rule("R11")
def online_preference_loss(config: RLConfig) -> Findings:
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
        )
    if config.actor_rollout_ref.rollout.n < 2:
        yield error(
            f"actor_rollout_ref.rollout.n={config.actor_rollout_ref.rollout.n}, but a pair needs 2 answers",
            fix="actor_rollout_ref.rollout.n=8",
        )
    correction = config.algorithm.rollout_correction
    claims = {
        "actor_rollout_ref.actor.entropy_coeff=0": actor.entropy_coeff > 0,
        "actor_rollout_ref.actor.entropy_target=null": actor.entropy_target is not None,
        "actor_rollout_ref.actor.use_kl_loss=false": actor.use_kl_loss,
        "actor_rollout_ref.actor.router_aux_loss_coef=0": actor.router_aux_loss_coef > 0,
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


@rule("R08")
def reward_model_directory(config: RLConfig) -> Findings:
    """The reward model has a directory, the right kind, and positions for the longest sequence."""
    settings = config.reward.reward_model
    if not settings.enable:
        return
    key = "reward.reward_model.path"
    if settings.path is None:
        yield error(
            f"reward.reward_model.enable=true, but {key} is not set",
            fix=f"{key}=DIR, for example RUN/checkpoints/step_N/actor of `hone reward-model`",
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
    elif saved and "TokenClassification" in kinds and settings.rollout.name != "native":
        yield error(
            f"'{settings.path}' holds a {kinds}, which engine '{settings.rollout.name}' does not score with",
            why="it scores with a model of whole sequences",
            fix="reward.reward_model.rollout.name=native",
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
