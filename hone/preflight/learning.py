"""Rules about settings that work, but are usually a mistake."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hone.config.derived import RunSpec, longest_sequence
from hone.config.dtypes import DtypeKey, dtype_keys, is_narrow
from hone.config.tree import RLConfig
from hone.config.trees import TREES, AnyConfig, model_block
from hone.preflight.device import computes_bfloat16, on_cpu
from hone.preflight.reading import read_json
from hone.preflight.rules import Finding, error, rule, warning

ACTOR = "actor_rollout_ref.actor"
_REF_BUDGET = "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"
_SMALL_LR = 5e-6
_FORWARD_RATIO = 4
_KL_PLACES = {"grpo": "loss", "reinforce_plus_plus": "reward"}


@rule("R24", RLConfig)
def reference_is_the_start(config: RLConfig) -> Iterator[Finding]:
    """The reference is the policy that training starts from, and an adapter belongs to the configured model."""
    model = config.actor_rollout_ref.model
    if model.lora_adapter_path is None:
        return
    ref = config.actor_rollout_ref.ref
    if RunSpec(config).reference.value and ref.adapter == "start" and ref.enable_resource_pool:
        yield error(
            f"the reference has devices of its own, and there no adapter, but training starts from '{model.lora_adapter_path}'",
            why="the KL penalty would pull the policy back to the model before the adapter was trained",
            fix="actor_rollout_ref.ref.enable_resource_pool=false, or actor_rollout_ref.ref.adapter=off",
            where="actor_rollout_ref.ref.enable_resource_pool",
        )
    base = read_json(Path(model.lora_adapter_path) / "adapter_config.json").get("base_model_name_or_path")
    if isinstance(base, str) and base and model.path and Path(base).name != Path(model.path).name:
        yield warning(
            f"the adapter was trained on '{base}', but model.path={model.path}",
            why="an adapter is only valid for its base model",
            fix=f"actor_rollout_ref.model.path={base}, unless both are the same weights",
            where="actor_rollout_ref.model.lora_adapter_path",
        )


@rule("R25", RLConfig)
def kl_in_its_usual_place(config: RLConfig) -> Iterator[Finding]:
    """The KL penalty is in the place (reward or loss) that the estimator's paper uses."""
    name, actor = config.algorithm.adv_estimator, config.actor_rollout_ref.actor
    usual = _KL_PLACES.get(name)
    if usual == "loss" and config.algorithm.use_kl_in_reward and not actor.use_kl_loss:
        yield warning(
            f"adv_estimator={name} usually has its KL penalty in the loss, but use_kl_in_reward=true",
            why="group normalisation divides the penalty by the standard deviation of the rewards",
            fix=f"algorithm.use_kl_in_reward=false {ACTOR}.use_kl_loss=true",
            where="algorithm.use_kl_in_reward",
        )
    if usual == "reward" and actor.use_kl_loss and not config.algorithm.use_kl_in_reward:
        yield warning(
            f"adv_estimator={name} usually has its KL penalty in the reward, but use_kl_loss=true",
            why="its returns include the penalty of every token",
            fix=f"algorithm.use_kl_in_reward=true {ACTOR}.use_kl_loss=false",
            where=f"{ACTOR}.use_kl_loss",
        )


@rule("R27", RLConfig)
def engine_log_probs_match_the_update(config: RLConfig) -> Iterator[Finding]:
    """With the engine's log-probs as the old ones, rounding to bfloat16 does not move the ratio of an on-policy update."""
    spec, actor = RunSpec(config), config.actor_rollout_ref.actor
    key = "algorithm.rollout_correction.bypass_mode"
    if not (spec.on_policy and spec.bypass):
        return
    rounded = [entry for entry in dtype_keys(config) if _rounds(entry, config) and not entry.key.startswith("critic.")]
    if rounded:
        yield warning(
            f"{' and '.join(f'{entry.key}={entry.value}' for entry in rounded)} with bypass_mode=true: the engine computes the old log-probs "
            f"token by token, and the update computes its log-probs for up to {actor.ppo_max_token_len_per_gpu} tokens at once",
            why="in bfloat16 the two differ by about 0.01 per token, and in float16 by an eighth of that, so the ratio of the on-policy update is not exactly 1",
            fix=f"{key}=false (the update computes the old log-probs), or {' '.join(f'{entry.key}=float32' for entry in rounded)}",
            where=key,
        )


@rule("R27", RLConfig)
def float16_on_both_sides(config: RLConfig) -> Iterator[Finding]:
    """Updates and generation share float16, so that their log-probs round alike."""
    entries = {entry.key: entry for entry in dtype_keys(config)}
    actor, rollout = entries[f"{ACTOR}.dtype"], entries.get("actor_rollout_ref.rollout.dtype")
    if rollout is None:
        return
    bfloat16 = computes_bfloat16(config)
    dtypes = {actor.resolved(bfloat16=bfloat16), rollout.resolved(bfloat16=bfloat16)}
    if len(dtypes) == 2 and "float16" in dtypes:
        yield warning(
            f"{rollout.key}={rollout.value}, but updates compute in {actor.resolved(bfloat16=bfloat16)}",
            why="the log-probs of engine and trainer differ by the rounding of two dtypes, where one float16 would round both alike",
            fix=f"{actor.key}=float16 {rollout.key}=auto",
            where=rollout.key,
        )


@rule("R27", RLConfig)
def reference_log_probs_match_the_policy(config: RLConfig) -> Iterator[Finding]:
    """In bfloat16 on a GPU, the reference and the policy use micro-batches of the same size."""
    actor, budget = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu
    if budget in (None, actor.ppo_max_token_len_per_gpu) or not RunSpec(config).reference.value:
        return
    if not on_cpu(config) and _rounds(dtype_keys(config)[0], config):
        yield warning(
            f"the reference uses micro-batches of {budget} tokens and the policy of {actor.ppo_max_token_len_per_gpu}, both in "
            "bfloat16",
            why="a GPU selects kernels by the shape of the micro-batch, which moves bfloat16 log-probs by up to 0.01: "
            "the KL divergence is not 0 at the first step, although both models are equal",
            fix=f"{_REF_BUDGET}=null (the actor's), or {ACTOR}.dtype=float32",
            where=_REF_BUDGET,
        )


@rule("R29", RLConfig)
def budget_for_two_sequences(config: RLConfig) -> Iterator[Finding]:
    """A micro-batch fits at least two sequences of maximum length."""
    budget, longest = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu, longest_sequence(config)
    if longest <= budget < 2 * longest:
        yield warning(
            f"ppo_max_token_len_per_gpu={budget} tokens is less than two sequences of {longest}",
            why="most micro-batches would hold a single sequence, which is slow",
            fix=f"{ACTOR}.ppo_max_token_len_per_gpu={2 * longest} if memory allows",
            where=f"{ACTOR}.ppo_max_token_len_per_gpu",
        )


@rule("R60", *TREES.values())
def adapter_learning_rate(config: AnyConfig) -> Iterator[Finding]:
    """An adapter gets a larger learning rate than full weights."""
    model = model_block(config)[1]
    rl = isinstance(config, RLConfig)
    optim, key = (config.actor_rollout_ref.actor.optim, f"{ACTOR}.optim.lr") if rl else (config.optim, "optim.lr")
    if (model.lora_rank > 0 or model.lora_adapter_path is not None) and 0 < optim.lr < _SMALL_LR:
        yield warning(
            f"LoRA with lr={optim.lr:g}, which is a learning rate for full fine-tuning",
            why="adapters need about 10 times as much; at this rate the reward hardly changes",
            fix=f"{key}={10 * optim.lr:g} or more (1e-5 to 1e-4 are usual)",
            where=key,
        )


@rule("R63", RLConfig)
def reference_keeps_up(config: RLConfig) -> Iterator[Finding]:
    """The reference uses micro-batches of about the size of the update's."""
    budget = config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu
    actor = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    if budget is not None and RunSpec(config).reference.value and budget * _FORWARD_RATIO < actor:
        yield warning(
            f"ref.log_prob_max_token_len_per_gpu={budget} tokens needs {actor / budget:.0f} forward passes for one of the update "
            f"({actor} tokens)",
            why="a forward pass needs less memory than an update; small micro-batches only make it slow",
            fix=f"{_REF_BUDGET}={actor} or null",
            where=_REF_BUDGET,
        )


def _rounds(entry: DtypeKey, config: RLConfig) -> bool:
    """Return whether a dtype key means bfloat16 or float16 on the device of the run."""
    return is_narrow(entry.resolved(bfloat16=computes_bfloat16(config)))
