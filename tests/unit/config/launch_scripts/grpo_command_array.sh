#!/usr/bin/env bash
# GRPO of a vision model with router replay and a teacher: the command is an array, and the machine decides about parts of it
set -euo pipefail

DEVICE=${DEVICE:-$(npu-smi info > /dev/null 2>&1 && echo npu || echo gpu)}
BACKEND=${BACKEND:-vllm}
NAME=${NAME:-run_${BACKEND}_$(date +%Y%m%d)}
PROMPT_LENGTH=${PROMPT_LENGTH:-1024}
RESPONSE_LENGTH=2048
BUDGET=${BUDGET:-$(((PROMPT_LENGTH + RESPONSE_LENGTH) * 2))}

case "${DEVICE}" in
    gpu | cuda) GPUS=8 ;;
    npu)
        GPUS=16
        export TASK_QUEUE=2
        ;;
    *)
        echo "unknown device: ${DEVICE}" >&2
        exit 1
        ;;
esac

DATA=(
    data.train_files="${HOME}/data/train.parquet" # one file
    data.val_files="${HOME}/data/test.parquet"
    data.max_prompt_length=${PROMPT_LENGTH}
    data.max_response_length=${RESPONSE_LENGTH}
    data.image_key=images
)
MODEL=(
    algorithm.adv_estimator=grpo
    actor_rollout_ref.model.path=Qwen/Qwen3-VL-8B-Instruct
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${BUDGET}
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.freeze_vision_tower=True
    actor_rollout_ref.actor.router_replay.mode=R3
    actor_rollout_ref.rollout.name="${BACKEND}"
    actor_rollout_ref.rollout.n=5
    distillation.enabled=True
)
TRAINER=(trainer.n_gpus_per_node=${GPUS} trainer.experiment_name="${NAME}" 'trainer.logger=["console"]')
EXTRA=()

LAUNCH=(python3)
RAY=()
if [ "${USE_UV:-1}" != 0 ] && [ "${DEVICE:-gpu}" = gpu ] && { [ "$BACKEND" = vllm ] || [ "$BACKEND" = sglang ]; }; then
    LAUNCH=(uv run --frozen --extra "${BACKEND}" python3)
    RAY=(ray_kwargs.ray_init.runtime_env.py_executable="uv run --extra ${BACKEND}")
fi

"${LAUNCH[@]}" -m verl.trainer.main_ppo \
    "${DATA[@]}" \
    "${MODEL[@]}" \
    "${TRAINER[@]}" \
    ${EXTRA[@]+"${EXTRA[@]}"} \
    "${RAY[@]}" \
    "$@"
