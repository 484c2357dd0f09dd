#!/usr/bin/env bash
# What SageMaker runs on every instance of a training job (launch_sagemaker.py starts one). It reads the toolkit's SM_* variables:
# hosts and rank for node.sh, channels `model` and `data`, and hyperparameters, which are keys of hone train.
# Runs are written to /opt/ml/checkpoints, which SageMaker copies to S3 and gives back to a restarted job; the job then resumes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
mapfile -t hosts < <(python -c 'import json, os; print(*json.loads(os.environ["SM_HOSTS"]), sep="\n")')
mapfile -t keys < <(python -c 'import json, os; [print(f"{k}={v}") for k, v in json.loads(os.environ.get("SM_HPS", "{}")).items()]')
rank=${SM_CURRENT_HOST_RANK:-}
if [ -z "$rank" ]; then
  for rank in "${!hosts[@]}"; do [ "${hosts[$rank]}" != "$SM_CURRENT_HOST" ] || break; done
fi
run=${HONE_CHECKPOINTS:-/opt/ml/checkpoints}/run

bash ./node.sh "$rank" "${#hosts[@]}" "${hosts[0]}" \
  hone train --config-path . --config-name grpo \
  actor_rollout_ref.model.path="$SM_CHANNEL_MODEL" data.train_files="$SM_CHANNEL_DATA/train.parquet" data.val_files="$SM_CHANNEL_DATA/val.parquet" \
  trainer.nnodes="${#hosts[@]}" trainer.n_gpus_per_node="$SM_NUM_GPUS" \
  trainer.default_local_dir="$run" "${keys[@]}"
[ "$rank" -gt 0 ] || hone export "$run" --out "$SM_MODEL_DIR" # what the job leaves as its model
