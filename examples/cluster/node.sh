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

restart() { # Ray gives a node 30 s to start, too few for a busy machine
  if kill -0 "$ray" 2>/dev/null || [ "$SECONDS" -ge "$patience" ]; then return 1; fi
  echo "node.sh: Ray ended on node $rank and is started again" >&2
  begin
}

if [ "$rank" -gt 0 ]; then
  begin() {
    ray start --address="$address" --disable-usage-stats --block "${options[@]}" &
    ray=$!
  }
  until head_answers; do
    [ "$SECONDS" -lt "$patience" ] || { echo "node.sh: no head at $address after $patience s" >&2; exit 1; }
    sleep 1
  done
  begin
  trap leave EXIT
  silent=0 # checks; a head that starts again is back after some of them
  while [ "$silent" -lt 5 ]; do
    sleep 2
    if ! head_answers; then
      silent=$((silent + 1))
    elif kill -0 "$ray" 2>/dev/null || restart; then
      silent=0
    else
      echo "node.sh: Ray ended on node $rank" >&2
      exit 1
    fi
  done
  exit 0
fi

begin() {
  ray start --head --node-ip-address="$head" --port="${RAY_PORT:-6379}" --include-dashboard=false --disable-usage-stats \
    --block "${options[@]}" &
  ray=$!
}

nodes_came() {
  python - "$address" "$nodes" "$patience" "$SECONDS" "$ray" <<'PYTHON'
import os, sys, time
import ray

address, nodes, patience, passed, head = sys.argv[1], *map(int, sys.argv[2:])
end = time.monotonic() + patience - passed
while True:
    try:
        os.kill(head, 0)
    except ProcessLookupError:
        sys.exit("node.sh: Ray's head ended")
    try:
        if not ray.is_initialized():
            ray.init(address, logging_level="ERROR", log_to_driver=False)
        alive = sum(node["Alive"] for node in ray.nodes())
    except ConnectionError:
        alive = 0
    if alive >= nodes:
        sys.exit(0)
    if time.monotonic() > end:
        sys.exit(f"node.sh: {alive} of {nodes} nodes came within {patience} s")
    time.sleep(1)
PYTHON
}

begin
trap leave EXIT
until nodes_came; do restart || exit 1; done
"$@" "ray.address=$address"
