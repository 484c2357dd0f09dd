#!/bin/bash
#SBATCH --job-name=rl
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
nodes_array=($nodes)
head_node=${nodes_array[0]}
head_node_ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)
port=6379
ip_head=$head_node_ip:$port
export ip_head
srun --nodes=1 --ntasks=1 -w "$head_node" \
    docker exec "$CONTAINER" \
    ray start --head --node-ip-address="$head_node_ip" --port=$port --block &
sleep 10
worker_num=$((SLURM_JOB_NUM_NODES - 1))
for ((i = 1; i <= worker_num; i++)); do
    node_i=${nodes_array[$i]}
    srun --nodes=1 --ntasks=1 -w "$node_i" ray start --address "$ip_head" --block &
    sleep 5
done

PYTHONUNBUFFERED=1 srun --overlap --nodes=1 --ntasks=1 -w "$head_node" \
    docker exec "$CONTAINER" \
    python3 -u -m verl.trainer.main_ppo \
    algorithm.adv_estimator=reinforce_plus_plus_baseline \
    data.train_files=$train_files data.val_files=$val_files \
    data.train_batch_size=1024 \
    data.max_prompt_length=1024 \
    data.max_response_length=3000 \
    data.seed=7 \
    actor_rollout_ref.model.path=$MODEL_PATH \
    actor_rollout_ref.model.use_liger=False \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.optim.lr=3e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=1024 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_type=mse \
    actor_rollout_ref.actor.use_torch_compile=False \
    actor_rollout_ref.actor.fsdp_config.dtype=bfloat16 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.calculate_log_probs=True \
    actor_rollout_ref.actor.tis_imp_ratio_cap=2.0 \
    algorithm.use_kl_in_reward=False \
    trainer.logger=console \
    trainer.rollout_data_dir=/tmp/rollouts \
    trainer.nnodes=$SLURM_JOB_NUM_NODES \
    trainer.n_gpus_per_node=8 \
    trainer.max_actor_ckpt_to_keep=2 \
    trainer.max_critic_ckpt_to_keep=2 \
    trainer.save_freq=-1 trainer.test_freq=-1 trainer.total_epochs=1 \
    ray_kwargs.ray_init.num_cpus=64
