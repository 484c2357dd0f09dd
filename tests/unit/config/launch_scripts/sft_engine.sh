#!/usr/bin/env bash
# Conversations of several turns, by the newer trainer, on either backend
set -xeuo pipefail

ENTRYPOINT=${ENTRYPOINT:-"-m verl.trainer.sft_trainer"}
TRAIN_FILES=${HOME}/data/chats/train.parquet
backend=${BACKEND:-fsdp}
SP_SIZE=${SP_SIZE:-2}

FSDP="\
    engine=${backend} \
    optim=${backend} \
    optim.lr=2e-5 \
    optim.lr_warmup_steps_ratio=0.01 \
    optim.weight_decay=0.1 \
    optim.betas="[0.9,0.95]" \
    optim.clip_grad=1.0 \
    optim.min_lr_ratio=0.1 \
    optim.warmup_style=cosine \
    engine.ulysses_sequence_parallel_size=${SP_SIZE} \
    engine.strategy=fsdp2 \
    engine.fsdp_size=-1"
MEGATRON="\
    engine=${backend} \
    optim=${backend} \
    optim.lr=2e-5 \
    optim.lr_decay_style=cosine \
    optim.min_lr=2e-6 \
    engine.tensor_model_parallel_size=${TP_SIZE:-2} \
    engine.use_mbridge=True"

if [ "$backend" = "fsdp" ]; then
    ENGINE="$FSDP"
    name=chats-${backend}-sp${SP_SIZE}
else
    ENGINE="$MEGATRON"
    name=chats-${backend}
fi
mkdir -p "ckpts/${name}"

torchrun --standalone --nnodes=1 --nproc-per-node=${NUM_TRAINERS:-8} ${ENTRYPOINT} \
    data.train_files="${TRAIN_FILES}" \
    data.train_batch_size=96 \
    data.max_length=4096 \
    data.pad_mode=no_padding \
    data.truncation=error \
    data.use_dynamic_bsz=True \
    data.max_token_len_per_gpu=65536 \
    data.messages_key=messages \
    data.tools_key=tools \
    data.enable_thinking_key=enable_thinking \
    data.ignore_input_ids_mismatch=True \
    data.num_workers=4 \
    model.path=/models/Qwen3-4B \
    model.use_remove_padding=True \
    model.enable_gradient_checkpointing=True \
    +model.override_config.attn_implementation=flash_attention_2 \
    ${ENGINE} \
    trainer.test_freq=after_each_epoch \
    trainer.save_freq=4000 \
    trainer.logger=['console','file'] \
    trainer.project_name=sft \
    trainer.experiment_name="${name}" \
    trainer.total_epochs=2 \
    trainer.seed=7 \
    trainer.default_local_dir="ckpts/${name}" \
    trainer.resume_mode=auto \
    trainer.max_ckpt_to_keep=5 \
    trainer.n_gpus_per_node=8 \
    checkpoint.save_contents=[model,optimizer,extra]
