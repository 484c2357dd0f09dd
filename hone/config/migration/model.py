"""Keys of models and optimizers, under every role that has one."""

from __future__ import annotations

from typing import Any

from hone.config.migration.entries import Changed, Entry, Foreign, Others, Refused, Renamed, Settled, Unsupported
from hone.config.migration.reasons import KERNELS, MEGATRON

_POLICY = "actor_rollout_ref.model"
_BOTH = "{actor_rollout_ref.model,critic.model,reward_model.model}"
_OPTIMS = "{actor_rollout_ref.actor.optim,critic.optim}"


def scheduler(block: str) -> Changed:
    """The shape of the learning rate under ``block``, by any of its names."""

    def sets(value: Any, others: Others) -> dict[str, Any]:
        if value is None:
            return {}
        if value not in ("constant", "cosine"):
            raise Refused(f"the schedule {value}", "constant or cosine", {f"{block}.lr_scheduler_type": "cosine"})
        return {f"{block}.lr_scheduler_type": value}

    return Changed("constant or cosine", sets, (f"{block}.lr_scheduler_type",))


ENTRIES: dict[str, Entry] = {
    # the model
    f"{_BOTH}.{{use_remove_padding,use_rmpad}}": Settled(
        "sequences are always packed, without padding",
        (True, None),
        "true: padded batches give the same numbers, slower",
    ),
    "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic,reward_model}.use_remove_padding": Settled(
        "sequences are always packed, without padding",
        (True, None),
        "true: padded batches give the same numbers, slower",
    ),
    f"{_BOTH}.{{use_fused_kernels,use_liger}}": Settled(
        "log-probs and entropy are always computed in pieces, without the whole matrix of logits"
    ),
    f"{_BOTH}.fused_kernel_options.**": Foreign(KERNELS),
    f"{_BOTH}.use_shm": Settled("weights are read from their files"),
    f"{_BOTH}.external_lib": Unsupported(
        "importing modules before the model is built",
        "a model that transformers knows, or trust_remote_code",
        (None, ""),
    ),
    f"{_POLICY}.hf_config_path": Unsupported(
        "a config apart from the weights", f"{_POLICY}.path of a complete directory"
    ),
    f"{_POLICY}.exclude_modules": Unsupported(
        "modules left out of LoRA by name", f"{_POLICY}.target_modules=[the modules that get an adapter]"
    ),
    f"{_POLICY}.target_parameters": Unsupported("LoRA on single parameters", f"{_POLICY}.target_modules"),
    f"{_POLICY}.lora.rank": Renamed(f"{_POLICY}.lora_rank"),
    f"{_POLICY}.lora.alpha": Renamed(f"{_POLICY}.lora_alpha"),
    f"{_POLICY}.lora.adapter_path": Renamed(f"{_POLICY}.lora_adapter_path"),
    f"{_POLICY}.lora.merge": Renamed("actor_rollout_ref.rollout.merge_lora"),
    f"{_POLICY}.lora.target_modules": Settled(
        "Megatron's names of the linear layers; actor_rollout_ref.model.target_modules takes those of transformers"
    ),
    f"{_POLICY}.lora.**": Foreign(MEGATRON),
    f"{_POLICY}.mtp.**": Unsupported("prediction of several tokens (MTP)", "leave the extra heads untrained"),
    f"{_POLICY}.override_config.attn_implementation": Settled(
        "attention over packed sequences is part of the trainer; it computes what every implementation computes"
    ),
    f"{_POLICY}.override_config.{{embd_pdrop,resid_pdrop,attn_pdrop}}": Settled(
        "models are loaded without dropout",
        (0, None),
        f"{_POLICY}.override_config.attention_dropout, where the model has it",
    ),
    f"{_POLICY}.override_config.{{model_config,moe_config}}.**": Foreign(MEGATRON),
    "critic.model.tokenizer_path": Settled("the critic reads the tokens of the policy"),
    "critic.model.{trust_remote_code,custom_chat_template}": Settled("as for the policy, actor_rollout_ref.model"),
    "critic.model.override_config.attn_implementation": Settled(
        "attention over packed sequences is part of the trainer"
    ),
    "critic.model.override_config.**": Settled("as for the policy, actor_rollout_ref.model.override_config"),
    "critic.model.lora_rank": Unsupported("LoRA for the critic", "a critic of full weights"),
    "critic.model.{lora_alpha,target_modules,exclude_modules,lora.**}": Settled("the critic trains all its weights"),
    "critic.model.enable_activation_offload": Unsupported(
        "activation offload of the critic", "critic.model.enable_gradient_checkpointing=true"
    ),
    "critic.model.{mtp,tiled_mlp}.**": Settled("the critic's layers are the plain ones"),
    # the optimizer
    "{actor_rollout_ref.actor,critic}.optim.total_training_steps": Settled(
        "the schedule is as long as the run, trainer.total_training_steps or total_epochs"
    ),
    f"{_OPTIMS}.{{zero_indexed_step,num_cycles,optimizer_impl}}": Settled(
        "the schedule counts updates from 0 and the cosine is half a period",
        (True, 0.5, "torch.optim", None),
        "leave it out",
    ),
    f"{_OPTIMS}.{{lr_warmup_init,lr_decay_steps,lr_decay_ratio,weight_decay_incr_style,lr_wsd_decay_style}}": Foreign(
        MEGATRON
    ),
    f"{_OPTIMS}.{{lr_wsd_decay_steps,use_checkpoint_opt_param_scheduler,use_precision_aware_optimizer}}": Foreign(
        MEGATRON
    ),
    f"{_OPTIMS}.{{main_grads_dtype,exp_avg_dtype,exp_avg_sq_dtype,use_layer_wise_distributed_optimizer}}": Foreign(
        MEGATRON
    ),
    f"{_OPTIMS}.{{min_lr,lr_min,lr_start}}": Settled(
        "the cosine ends at min_lr_ratio x lr", (0, 0.0, None), "optim.min_lr_ratio=<smallest rate / lr>"
    ),
    "actor_rollout_ref.actor.optim.{warmup_style,lr_decay_style}": scheduler("actor_rollout_ref.actor.optim"),
    "critic.optim.{warmup_style,lr_decay_style}": scheduler("critic.optim"),
    "actor_rollout_ref.actor.grad_clip": Renamed("actor_rollout_ref.actor.optim.clip_grad"),
    "critic.grad_clip": Renamed("critic.optim.clip_grad"),
}
