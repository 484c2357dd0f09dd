"""Explicit settings for defaults of verl that differ from Hone's, so that a translation means the same."""

from __future__ import annotations

from typing import Any

from hone.apps.verl.importing.translation import Translation
from hone.apps.verl.launch import Trouble
from hone.config.keys import documentation
from hone.config.migration import DEFAULTS
from hone.config.trees import TREES

_OLD_SFT_KEYS = {
    "model.partial_pretrain", "optim.lr_scheduler", "optim.warmup_steps_ratio",
    "data.multiturn.enable", "data.multiturn.messages_key", "data.prompt_key", "data.response_key",
}  # fmt: skip
"""Keys that only the older of verl's two trainers for supervised fine-tuning has."""


def complete(translation: Translation) -> None:
    if translation.command == "sft":
        _complete_sft(translation)
        return
    values = translation.values
    _defaults(translation, DEFAULTS["train"])
    batch, mini = values["data.train_batch_size"], values["actor_rollout_ref.actor.ppo_mini_batch_size"]
    if isinstance(batch, int) and isinstance(mini, int) and mini > batch:
        translation.add("actor_rollout_ref.actor.ppo_mini_batch_size", batch, f"{mini} is more than a batch has")
    _placement(translation)
    _token_budgets(translation)
    if values.get("trainer.test_freq", -1) == -1:
        translation.remarks.append(Trouble(0, "trainer.test_freq=-1 validates once, at the end; 0 never does"))
    if values.get("trainer.save_freq", -1) == -1:
        translation.remarks.append(Trouble(0, "trainer.save_freq=-1 saves once, at the end; 0 never does"))


def _defaults(translation: Translation, defaults: dict[str, Any]) -> None:
    for key, value in defaults.items():
        if key not in translation.values:
            translation.add(key, value, "verl's default")


def _complete_sft(translation: Translation) -> None:
    """Complete a translation for supervised fine-tuning, whose two trainers in verl have different defaults."""
    requested = {line.reading.key: line.reading.value for line in translation.lines}
    _defaults(translation, DEFAULTS["fsdp_sft" if requested.keys() & _OLD_SFT_KEYS else "sft"])
    _several_processes(translation)
    values, budget = translation.values, "data.max_token_len_per_gpu"
    longest = values.get("data.max_length", 1024)
    if not isinstance(longest, int):
        return
    micro = requested.get("data.micro_batch_size_per_gpu")
    if (
        isinstance(micro, int)
        and micro > 0
        and budget not in values
        and requested.get("data.use_dynamic_bsz") is not True
    ):
        translation.add(budget, micro * longest, f"{micro} conversations of at most {longest} tokens")
    present = values.get(budget, longest)
    if isinstance(present, int) and present < longest:
        translation.add(budget, longest, f"{present} tokens are less than the longest conversation has, {longest}")


def _placement(translation: Translation) -> None:
    """Select Ray for several devices or a separate pool for generation."""
    values, rollout = translation.values, "actor_rollout_ref.rollout"
    if f"{rollout}.nnodes" in values:
        translation.add(f"{rollout}.enable_resource_pool", True, "generation has separate nodes")
    elif f"{rollout}.n_gpus_per_node" in values:
        translation.leave_out(f"{rollout}.n_gpus_per_node", f"{rollout}.enable_resource_pool=false")
    pools = any(key.endswith(".enable_resource_pool") and value is True for key, value in values.items())
    _several_processes(translation, pools=pools)


def _several_processes(translation: Translation, *, pools: bool = False) -> None:
    """Select Ray for several devices, or where a role has separate ones."""
    values = translation.values
    sizes = [values.get(f"trainer.{name}", 1) for name in ("nnodes", "n_gpus_per_node")]
    if "trainer.runtime" not in values and (pools or any(size != 1 for size in sizes)):
        translation.add("trainer.runtime", "ray", "several devices are several processes")
    if "ray.address" not in values and sizes[0] != 1:
        translation.add("ray.address", "auto", "several nodes need a running cluster")


def _token_budgets(translation: Translation) -> None:
    """Set every token budget to at least the longest sequence, and to the size of a micro-batch of verl."""
    values = translation.values
    defaults = {key.path: key.default for key in documentation(TREES["train"])}
    prompt, response = (
        values.get(key, defaults[key]) for key in ("data.max_prompt_length", "data.max_response_length")
    )
    if not isinstance(prompt, int) or not isinstance(response, int):
        return
    longest, actor = prompt + response, "actor_rollout_ref.actor"
    by_tokens = any(
        line.reading.key == f"{actor}.use_dynamic_bsz" and line.reading.value is True for line in translation.lines
    )
    micro, budget = values.get(f"{actor}.ppo_micro_batch_size_per_gpu"), f"{actor}.ppo_max_token_len_per_gpu"
    if isinstance(micro, int) and not by_tokens:
        translation.add(budget, max(1, micro) * longest, f"{micro} sequences of at most {longest} tokens")
    for key in (budget, "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"):
        present = values.get(key, defaults[key])
        if isinstance(present, int) and present < longest:
            translation.add(key, longest, f"{present} tokens are less than the longest sequence has, {longest}")
