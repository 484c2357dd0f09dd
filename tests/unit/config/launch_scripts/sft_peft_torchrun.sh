# LoRA on questions and answers, by the older trainer
set -x

if [ "$#" -lt 2 ]; then
    echo "usage: $0 PROCESSES FOLDER [key=value ...]"
    exit 1
fi
processes=$1
folder=$2
shift 2

torchrun --standalone --nnodes=1 --nproc_per_node=$processes \
    -m verl.trainer.fsdp_sft_trainer \
    data.train_files=$HOME/data/gsm8k/train.parquet \
    data.val_files=$HOME/data/gsm8k/test.parquet \
    data.prompt_key=extra_info \
    data.response_key=extra_info \
    +data.prompt_dict_keys=['question'] \
    +data.response_dict_keys=['answer'] \
    data.micro_batch_size_per_gpu=4 \
    data.max_length=2048 \
    data.truncation=right \
    optim.lr=1e-4 \
    model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct \
    model.fsdp_config.model_dtype=bf16 \
    model.use_liger=True \
    model.lora_rank=32 \
    model.lora_alpha=16 \
    model.target_modules=[q_proj,v_proj] \
    ulysses_sequence_parallel_size=2 \
    use_remove_padding=true \
    trainer.default_local_dir=$folder \
    trainer.project_name=gsm8k-sft \
    trainer.experiment_name=qwen-0.5b-lora \
    trainer.logger=['console'] \
    trainer.total_epochs=3 \
    trainer.default_hdfs_dir=null $@
