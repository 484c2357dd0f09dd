"""Rules about settings that are allowed, and that experience advises against."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hone.config.tree import RLConfig
from hone.config.trees import TREES, AnyConfig
from hone.preflight.device import dtypes, on_cpu
from hone.preflight.evidence import model_block, read_json
from hone.preflight.needs import correction, needs_reference
from hone.preflight.rules import Finding, rule, warning

ACTOR = "actor_rollout_ref.actor"
_REF_BUDGET = "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"
_SMALL_LR = 5e-6
_FORWARD_RATIO = 4
_KL_PLACES = {"grpo": "loss", "reinforce_plus_plus": "reward"}


@rule("R24", RLConfig)
def reference_is_the_start(config: RLConfig) -> Iterator[Finding]:
    """The reference is the policy that training starts from, and an adapter is of the model named."""
    model = config.actor_rollout_ref.model
    if model.lora_adapter_path is None:
        return
    if needs_reference(config):
        yield warning(
            f"the reference is the model without '{model.lora_adapter_path}', the adapter that training starts from",
            why="the KL penalty pulls the policy back to before the adapter was trained; it is not 0 at the first step",
            fix="merge the adapter first (hone export) and train a fresh one, or no KL term",
            where="actor_rollout_ref.model.lora_adapter_path",
        )
    base = read_json(Path(model.lora_adapter_path) / "adapter_config.json").get("base_model_name_or_path")
    if isinstance(base, str) and base and model.path and Path(base).name != Path(model.path).name:
        yield warning(
            f"the adapter was trained on '{base}', and model.path={model.path}",
            why="on another base model it means nothing",
            fix=f"actor_rollout_ref.model.path={base}, unless both are the same weights",
            where="actor_rollout_ref.model.lora_adapter_path",
        )


@rule("R25", RLConfig)
def kl_in_its_usual_place(config: RLConfig) -> Iterator[Finding]:
    """The KL penalty stands where the estimator's paper has it."""
    name, actor = config.algorithm.adv_estimator, config.actor_rollout_ref.actor
    usual = _KL_PLACES.get(name)
    if usual == "loss" and config.algorithm.use_kl_in_reward and not actor.use_kl_loss:
        yield warning(
            f"{name} is usually run with its KL penalty in the loss, and it is in the reward",
            why="group normalisation divides the penalty by the spread of the rewards",
            fix=f"algorithm.use_kl_in_reward=false {ACTOR}.use_kl_loss=true",
            where="algorithm.use_kl_in_reward",
        )
    if usual == "reward" and actor.use_kl_loss and not config.algorithm.use_kl_in_reward:
        yield warning(
            f"{name} is usually run with its KL penalty in the reward, and it is in the loss",
            why="its returns are meant to hold the penalty token by token",
            fix=f"algorithm.use_kl_in_reward=true {ACTOR}.use_kl_loss=false",
            where=f"{ACTOR}.use_kl_loss",
        )


@rule("R27", RLConfig)
def sampled_log_probs_are_the_updates(config: RLConfig) -> Iterator[Finding]:
    """Where one on-policy update compares with the engine's log-probs, rounding to bfloat16 does not part the two."""
    settings, actor, key = (
        correction(config),
        config.actor_rollout_ref.actor,
        "algorithm.rollout_correction.bypass_mode",
    )
    one_update = actor.ppo_mini_batch_size == config.data.train_batch_size and actor.ppo_epochs == 1
    rounded = [key for key, dtype in dtypes(config).items() if dtype == "bfloat16" and not key.startswith("critic.")]
    if one_update and settings and settings["bypass_mode"] and rounded:
        yield warning(
            f"{' and '.join(f'{name}=bfloat16' for name in rounded)}: the old log-probs are the engine's "
            f"(bypass_mode=true), which reads token by token, and the update reads up to {actor.ppo_max_token_len_per_gpu} "
            "tokens at once",
            why="in bfloat16 two ways to compute the same differ by about 0.01 a token: the ratio of the one on-policy update is "
            "not exactly 1",
            fix=f"{key}=false (the update's own pass gives them), or {' '.join(f'{name}=float32' for name in rounded)}",
            where=key,
        )


@rule("R27", RLConfig)
def reference_log_probs_are_made_alike(config: RLConfig) -> Iterator[Finding]:
    """In bfloat16 on a GPU, the reference and the policy read micro-batches of the same size."""
    actor, budget = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu
    if budget in (None, actor.ppo_max_token_len_per_gpu) or actor.dtype != "bfloat16" or not needs_reference(config):
        return
    if not on_cpu(config):
        yield warning(
            f"the reference reads micro-batches of {budget} tokens and the policy of {actor.ppo_max_token_len_per_gpu}, both in "
            "bfloat16",
            why="a GPU chooses its kernels by the shape of the micro-batch, and in bfloat16 that moves log-probs by up to 0.01: "
            "the KL divergence is not 0 at the first step, where both are the same model",
            fix=f"{_REF_BUDGET}=null (the actor's), or {ACTOR}.dtype=float32",
            where=_REF_BUDGET,
        )


@rule("R29", RLConfig)
def roomy_token_budget(config: RLConfig) -> Iterator[Finding]:
    """A micro-batch has room for more than one long sequence."""
    data, budget = config.data, config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    longest = data.max_prompt_length + data.max_response_length
    if longest <= budget < 2 * longest:
        yield warning(
            f"ppo_max_token_len_per_gpu={budget} tokens is less than two sequences of {longest}",
            why="most micro-batches would hold a single sequence, which packs badly",
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
            f"LoRA with lr={optim.lr:g}, a learning rate of full fine-tuning",
            why="adapters need about ten times as much; at this rate the reward hardly moves",
            fix=f"{key}={10 * optim.lr:g} or more (1e-5 to 1e-4 are usual)",
            where=key,
        )


@rule("R63", RLConfig)
def reference_keeps_up(config: RLConfig) -> Iterator[Finding]:
    """The reference is evaluated in micro-batches of about the update's size."""
    budget = config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu
    actor = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    if budget is not None and needs_reference(config) and budget * _FORWARD_RATIO < actor:
        yield warning(
            f"ref.log_prob_max_token_len_per_gpu={budget} tokens makes {actor / budget:.0f} forward passes for one of the update "
            f"({actor} tokens)",
            why="evaluating needs less memory than training; small micro-batches only make it slow",
            fix=f"{_REF_BUDGET}={actor} or null",
            where=_REF_BUDGET,
        )
