"""Keys of verl's supervised fine-tuning, in both of its spellings: ``fsdp_sft_trainer`` and ``sft_trainer``."""

from __future__ import annotations

from typing import Any

from hone.config.migration.actor import ALWAYS_WHOLE, contents, precision
from hone.config.migration.entries import Changed, Entry, Foreign, Others, Refused, Renamed, Settled, Unsupported
from hone.config.migration.model import scheduler
from hone.config.migration.reasons import KERNELS, MEGATRON, PACKED, PADDING, PROFILER
from hone.config.migration.values import device, plain, trackers

_IMAGES = "conversations with images, video or sound"
_ONE_PROCESS = "`hone sft` trains in one process: nothing is divided over devices"
_SEVERAL = "supervised fine-tuning over several devices"
_ALONE = "leave it out: one device gives the same numbers, later"
_COLUMNS = "questions and answers in columns of their own"
_CONVERT = "`hone data convert FILE --question COLUMN --answer COLUMN --to messages --out FILE` writes conversations"
_BACKENDS = ("fsdp", "fsdp2", "megatron", "veomni", "torchtitan", "automodel", "hf_model", None)


def _truncation(value: Any, others: Others) -> dict[str, Any]:
    if value == "left":
        raise Refused(
            "cutting the beginning of conversations",
            "data.truncation=truncate cuts their end, drop leaves them out",
            {"data.truncation": "truncate"},
        )
    return {"data.truncation": "truncate" if value == "right" else value}


def _thinking(value: Any, others: Others) -> dict[str, Any]:
    if not isinstance(value, bool):
        return {}
    return {"data.apply_chat_template_kwargs.enable_thinking": value}


def _backend(value: Any, others: Others) -> dict[str, Any]:
    if value in _BACKENDS:
        return {}
    raise Refused(f"the group {value}", "its keys, one by one")


def _resumed(value: Any, others: Others) -> dict[str, Any]:
    return {} if value is None else {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": value}


_GROUP = Changed("a file of defaults for a training backend; there is one backend", _backend)

ENTRIES: dict[str, Entry] = {
    # conversations
    "data.multiturn.enable": Settled("every row is a conversation", (True, None), _CONVERT),
    "data.multiturn.messages_key": Renamed("data.messages_key"),
    "data.multiturn.tools_key": Renamed("data.tools_key"),
    "data.{prompt_key,response_key,prompt_dict_keys,response_dict_keys}": Unsupported(_COLUMNS, _CONVERT),
    "data.{enable_thinking_key,multiturn.enable_thinking_key}": Settled(
        "the chat template is told the same of every conversation",
        ("enable_thinking", None),
        "data.apply_chat_template_kwargs={enable_thinking: true}",
    ),
    "data.enable_thinking_default": Changed(
        "for all conversations", _thinking, ("data.apply_chat_template_kwargs.enable_thinking",)
    ),
    "data.chat_template": Renamed("model.custom_chat_template"),
    "data.custom_cls.**": Unsupported(
        "a dataset class of your own", "write its rows to a parquet or JSON lines file and name it in data.train_files"
    ),
    "data.{max_prompt_length,max_response_length}": Settled("data.max_length bounds the whole conversation"),
    "data.{micro_batch_size,micro_batch_size_per_gpu,use_dynamic_bsz,val_batch_size}": Settled(
        PACKED.format(budget="data.max_token_len_per_gpu")
    ),
    "data.pad_mode": Foreign(PADDING),
    "data.balance_dp_token": Settled(_ONE_PROCESS),
    "data.ignore_input_ids_mismatch": Settled(
        "a conversation is rendered whole, and the template tells which tokens the assistant wrote"
    ),
    "data.{use_shm,num_workers,cache_dir}": Foreign(
        "rows are read and tokenized once, before the run, in this process"
    ),
    "data.return_raw_chat": Settled("the loss needs the messages, so they are always read"),
    "data.{image_key,video_key,audio_key,image_patch_size,mm_processor_kwargs}": Foreign(f"concerns {_IMAGES}"),
    # the model
    "model.partial_pretrain": Renamed("model.path"),
    "model.lora.rank": Renamed("model.lora_rank"),
    "model.lora.alpha": Renamed("model.lora_alpha"),
    "model.lora.adapter_path": Renamed("model.lora_adapter_path"),
    "model.lora.**": Foreign(MEGATRON),
    "model.exclude_modules": Unsupported(
        "modules left out of LoRA by name", "model.target_modules=[the modules that get an adapter]"
    ),
    "model.target_parameters": Unsupported("LoRA on single parameters", "model.target_modules"),
    "model.hf_config_path": Unsupported("a config apart from the weights", "model.path of a complete directory"),
    "model.external_lib": Unsupported(
        "importing modules before the model is built", "a model that transformers knows, or model.trust_remote_code"
    ),
    "model.mtp.**": Unsupported("prediction of several tokens (MTP)", "leave the extra heads untrained"),
    "{model.use_remove_padding,use_remove_padding,engine.use_remove_padding}": Settled(
        "sequences are always packed, without padding"
    ),
    "model.{use_liger,use_fused_kernels}": Settled(
        "log-probs are always computed in pieces, without the whole matrix of logits"
    ),
    "model.fused_kernel_options.**": Foreign(KERNELS),
    "model.use_shm": Settled("weights are read from their files"),
    "model.override_config.attn_implementation": Settled("attention over packed sequences is part of the trainer"),
    "model.{strategy,fsdp_config.**}": Foreign(_ONE_PROCESS),
    # the optimizer
    "optim.{warmup_steps_ratio,lr_warmup_ratio}": Renamed("optim.lr_warmup_steps_ratio"),
    "optim.{lr_scheduler,warmup_style,lr_decay_style}": scheduler("optim"),
    "optim.grad_clip": Renamed("optim.clip_grad"),
    "optim.total_training_steps": Settled("the schedule is as long as the run"),
    "optim.{zero_indexed_step,num_cycles,optimizer_impl}": Settled(
        "the schedule counts updates from 0 and the cosine is half a period",
        (True, 0.5, "torch.optim", None),
        "leave it out",
    ),
    "optim.{min_lr,lr_min,lr_start}": Settled(
        "the cosine ends at min_lr_ratio x lr", (0, 0.0, None), "optim.min_lr_ratio=<smallest rate / lr>"
    ),
    "optim.{lr_warmup_init,lr_decay_steps,lr_decay_ratio,weight_decay_incr_style,lr_wsd_decay_style,lr_wsd_decay_steps}": Foreign(
        MEGATRON
    ),
    "optim.{use_checkpoint_opt_param_scheduler,use_precision_aware_optimizer,main_grads_dtype,exp_avg_dtype}": Foreign(
        MEGATRON
    ),
    "optim.{exp_avg_sq_dtype,use_layer_wise_distributed_optimizer}": Foreign(MEGATRON),
    # how it is computed
    "{engine,optim,model,model_engine}": _GROUP,
    "engine.{dtype,mixed_precision.param_dtype}": precision("dtype"),
    "engine.{ulysses_sequence_parallel_size,ulysses_parallel_size,tensor_model_parallel_size,context_parallel_size}": Unsupported(
        _SEVERAL, _ALONE, (1, None)
    ),
    "engine.{pipeline_model_parallel_size,virtual_pipeline_model_parallel_size,expert_model_parallel_size}": Unsupported(
        _SEVERAL, _ALONE, (1, None)
    ),
    "ulysses_sequence_parallel_size": Unsupported(_SEVERAL, _ALONE, (1, None)),
    "trainer.{nnodes,n_gpus_per_node}": Unsupported(_SEVERAL, _ALONE, (1, None)),
    "engine.**": Foreign(_ONE_PROCESS),
    # the life of a run
    "{checkpoint,trainer.checkpoint}.{save_contents,load_contents,contents}": Changed(ALWAYS_WHOLE, contents),
    "{checkpoint,trainer.checkpoint}.{strict,mbridge_config.**}": Settled(ALWAYS_WHOLE),
    "{checkpoint,trainer.checkpoint}.async_save": Renamed("trainer.async_save"),
    "trainer.resume_path": Changed("", _resumed, ("trainer.resume_from_path",)),
    "trainer.{default_hdfs_dir,hdfs_dir}": Unsupported(
        "a second copy of checkpoints on HDFS", "trainer.default_local_dir"
    ),
    "trainer.balance_batch": Settled(_ONE_PROCESS),
    "trainer.use_legacy_worker_impl": Settled("there is one trainer"),
    "{trainer.profile_interval,trainer.profiler.**,profiler.**,global_profiler.**}": Foreign(PROFILER),
    "{nccl_timeout,trainer.nccl_timeout}": Foreign("a time limit of NCCL"),
    "trainer.wandb_proxy": Foreign("set the environment variables HTTP_PROXY and HTTPS_PROXY"),
    "{hydra.**,hydra/job_logging,hydra/hydra_logging}": Foreign("the run directory is trainer.default_local_dir"),
}
"""Keys that the tree of `hone sft` does not have."""

VALUES: dict[str, Changed] = {
    "data.truncation": Changed("right is called truncate; left is not supported yet", _truncation),
    "optim.lr_scheduler_type": scheduler("optim"),
    "optim.optimizer": Changed(
        "adam is AdamW", plain("optim.optimizer", {"adam": "AdamW", "adamw": "AdamW", None: "AdamW"})
    ),
    "trainer.logger": Changed("a name is a list of one; metrics.jsonl is always written", trackers),
    "trainer.device": Changed("npu is not supported yet", device),
    "trainer.save_freq": Changed("after_each_epoch is -1", plain("trainer.save_freq", {"after_each_epoch": -1})),
    "trainer.test_freq": Changed("after_each_epoch is -1", plain("trainer.test_freq", {"after_each_epoch": -1})),
}
"""Keys that both configurations have, and that take some values only here or only there."""
