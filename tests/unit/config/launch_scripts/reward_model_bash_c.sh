#!/bin/bash
docker run --gpus all img:latest bash -c "
  cd /workspace && pip install -e . && \
  python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae algorithm.lam=0.95 algorithm.gamma=1.0 \
    data.train_files=/data/hh/train.parquet data.val_files=/data/hh/test.parquet \
    data.train_batch_size=512 data.max_prompt_length=128 data.max_response_length=128 \
    data.return_raw_chat=True \
    actor_rollout_ref.model.path=/models/sft actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.top_k=0 actor_rollout_ref.rollout.do_sample=True \
    critic.model.path=/models/sft critic.ppo_micro_batch_size_per_gpu=8 critic.cliprange_value=0.2 \
    reward_model.enable=True reward_model.model.path=/models/rm reward_model.model.input_tokenizer=/models/sft \
    reward_model.model.use_remove_padding=True reward_model.model.fsdp_config.param_offload=True \
    reward_model.micro_batch_size_per_gpu=32 \
    algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.target_kl=0.05 algorithm.kl_ctrl.horizon=5000 \
    trainer.critic_warmup=5 trainer.logger='[\"console\"]' trainer.total_training_steps=200 \
    trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.val_before_train=False
"
