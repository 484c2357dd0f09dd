#!/usr/bin/env bash
# Submit a run to an existing Ray cluster; it continues when this terminal is closed.
#
#   RAY_API_SERVER_ADDRESS=http://HEAD:8265 MODEL=/models/my-model DATA=/data/my-task examples/cluster/submit.sh [key=value ...]
#
# Paths are paths on the cluster, where Hone is installed. `ray job logs ID --follow` shows the run, `ray job stop ID` ends it:
# the run saves first, and the same command resumes it.
set -euo pipefail
folder=$(dirname "${BASH_SOURCE[0]}")
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
exec ray job submit --working-dir "$folder" ${SUBMISSION_ID:+--submission-id "$SUBMISSION_ID"} -- \
  hone train --config-path . --config-name grpo \
  actor_rollout_ref.model.path="$MODEL" data.train_files="$DATA/train.parquet" data.val_files="$DATA/val.parquet" \
  ray.address=auto "$@"
