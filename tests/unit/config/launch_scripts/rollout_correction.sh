#!/usr/bin/env bash
set -e
rollout_is=${ROLLOUT_IS:-"sequence"}
bypass=false
args="algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False"
args="$args data.train_files=train.parquet data.val_files=[val_a.parquet,val_b.parquet]"
args+=" actor_rollout_ref.rollout.n=8"
case "$rollout_is" in
    token) threshold=2.0 ;;
    sequence) threshold=5.0 ;;
    *) echo "unknown level"; exit 1 ;;
esac
CMD="python -m verl.trainer.main_ppo $args \
    algorithm.rollout_correction.rollout_is=$rollout_is \
    algorithm.rollout_correction.rollout_is_threshold=$threshold \
    algorithm.rollout_correction.bypass_mode=$bypass \
    actor_rollout_ref.actor.policy_loss.loss_mode=vanilla \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.model.path=~/models/qwen \
    data.train_batch_size=64 ++trainer.val_only=False trainer.use_v1=True \
    global_profiler.tool=null"
echo "$CMD"
eval $CMD
