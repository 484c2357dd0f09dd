#!/usr/bin/env bash
# One node of a run on several machines. Run it on every node at once: the first starts Ray's head and then the command, with
# ray.address added; the others join, and leave when the first is done.
#
#   node.sh RANK NODES HEAD COMMAND...       rank from 0, number of nodes, name or address of node 0
#
# Environment: RAY_AUTH_TOKEN, a secret that is the same on all nodes, keeps others out of the cluster; RAY_PORT (6379) is
# the head's port; RAY_OPTIONS are further options of `ray start`; NODE_PATIENCE (300) is the number of seconds that nodes wait for
# each other.
set -euo pipefail
rank=$1 nodes=$2 head=$3
shift 3
address=$head:${RAY_PORT:-6379}
patience=${NODE_PATIENCE:-300}
export RAY_AUTH_MODE=token RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=5
read -ra options <<<"${RAY_OPTIONS:-}"

head_answers() {
  (exec 3<>"/dev/tcp/$head/${RAY_PORT:-6379}") 2>/dev/null
}

leave() { # end Ray on this node; its own `ray start` ends what it started
  kill "$ray" 2>/dev/null || true
  wait "$ray" || true
}

if [ "$rank" -gt 0 ]; then
  until head_answers; do
    [ "$SECONDS" -lt "$patience" ] || { echo "node.sh: no head at $address after $patience s" >&2; exit 1; }
    sleep 1
  done
  ray start --address="$address" --disable-usage-stats --block "${options[@]}" &
  ray=$!
  trap leave EXIT
  while head_answers; do
    kill -0 "$ray" 2>/dev/null || { echo "node.sh: Ray ended on node $rank" >&2; exit 1; }
    sleep 2
  done
  exit 0
fi

ray start --head --node-ip-address="$head" --port="${RAY_PORT:-6379}" --include-dashboard=false --disable-usage-stats \
  --block "${options[@]}" &
ray=$!
trap leave EXIT
python - "$address" "$nodes" "$patience" <<'PYTHON'
import sys, time
import ray

address, nodes, patience = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
end = time.monotonic() + patience
while True:
    try:
        if not ray.is_initialized():
            ray.init(address, logging_level="ERROR", log_to_driver=False)
        alive = sum(node["Alive"] for node in ray.nodes())
    except ConnectionError:
        alive = 0
    if alive >= nodes:
        sys.exit(0)
    if time.monotonic() > end:
        sys.exit(f"node.sh: {alive} of {nodes} nodes came within {patience:.0f} s")
    time.sleep(1)
PYTHON
"$@" "ray.address=$address"
