#!/usr/bin/env bash
# Quickstart-sized training on a CUDA GPU, the same program as on a CPU: data, tokenizer, model, SFT, then GRPO in float32
# and in bfloat16 with the native engine, and a check that the GPU did the work. No Ray, no server.
#
#   benchmarks/gpu_smoke.sh              installs Hone into .venv when needed (as scripts/quickstart does)
#   HONE_PYTHON=python3 benchmarks/gpu_smoke.sh     uses a Python that already has torch, transformers and the core's packages
#
# Exit codes: 0 trained on the GPU; 1 something in the training is wrong; 2 no CUDA GPU or a missing package.
# HONE_SMOKE_DEVICE=cpu runs the same commands on the CPU; HONE_SMOKE_SFT_STEPS and HONE_SMOKE_RL_STEPS shorten them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
DEVICE="${HONE_SMOKE_DEVICE:-auto}"
SFT_STEPS="${HONE_SMOKE_SFT_STEPS:-60}"
RL_STEPS="${HONE_SMOKE_RL_STEPS:-10}"
OUT="$(mktemp -d)"
trap 'rm -rf "$OUT"' EXIT

if [ -n "${HONE_PYTHON:-}" ]; then
  PYTHON="$HONE_PYTHON"
else
  source scripts/_env.sh
  ensure_env core
  PYTHON="$VENV/bin/python"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

"$PYTHON" - "$DEVICE" <<'PYTHON_END'
import importlib.util
import sys

needed = "torch transformers tokenizers numpy pyarrow hydra omegaconf safetensors jinja2 peft psutil rich typer".split()
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    print(f"{sys.executable} lacks {', '.join(missing)}. Fix: run without HONE_PYTHON, which installs all", file=sys.stderr)
    sys.exit(2)
import torch

if sys.argv[1] != "cpu" and not torch.cuda.is_available():
    reason = "is built without CUDA" if torch.version.cuda is None else "finds no CUDA GPU"
    print(f"torch {torch.__version__} {reason}. Fix: run on a machine with one, or HONE_SMOKE_DEVICE=cpu", file=sys.stderr)
    sys.exit(2)
print(f"torch {torch.__version__}, device {torch.cuda.get_device_name() if sys.argv[1] != 'cpu' else 'cpu'}")
PYTHON_END

hone() {
  echo "\$ hone $*"
  "$PYTHON" -m hone.cli.main "$@"
}

hone data make arithmetic max_number=20 --out "$OUT/data" --size 4000 --val-size 64 --seed 1
hone data tokenizer --files "$OUT/data/train.parquet" --out "$OUT/tokenizer" --vocab-size 512
hone init --arch qwen3 --size 1m --tokenizer "$OUT/tokenizer" --out "$OUT/model" --seed 1
hone sft --config-path examples/quickstart --config-name sft "model.path=$OUT/model" \
  "data.train_files=$OUT/data/train.parquet" "data.val_files=$OUT/data/val.parquet" "trainer.device=$DEVICE" \
  optim.lr_warmup_steps=2 "trainer.total_training_steps=$SFT_STEPS" "trainer.default_local_dir=$OUT/sft"
for dtype in float32 bfloat16; do
  hone train --config-path examples/quickstart --config-name grpo \
    "actor_rollout_ref.model.path=$OUT/sft/checkpoints/step_$SFT_STEPS/actor" "actor_rollout_ref.actor.dtype=$dtype" \
    "data.train_files=$OUT/data/train.parquet" "data.val_files=$OUT/data/val.parquet" "trainer.device=$DEVICE" \
    actor_rollout_ref.actor.optim.lr_warmup_steps=1 "trainer.total_training_steps=$RL_STEPS" trainer.test_freq=-1 "trainer.default_local_dir=$OUT/$dtype"
done

"$PYTHON" - "$OUT" "$DEVICE" "$SFT_STEPS" "$RL_STEPS" <<'PYTHON_END'
import json
import math
import sys
from pathlib import Path

out, device, steps = Path(sys.argv[1]), sys.argv[2], {"sft": int(sys.argv[3]), "float32": int(sys.argv[4])}
steps["bfloat16"] = steps["float32"]
wrong = []
for name, expected in steps.items():
    run = json.loads((out / name / "run.json").read_text())
    rows = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]
    last = rows[-1]
    if run["status"] != "finished" or last["step"] != expected:
        wrong.append(f"{name}: {run['status']} at step {last['step']} of {expected}: {run['exit_reason']}")
    wrong += [f"{name}: step {r['step']}: {k} is {v}" for r in rows for k, v in r.items() if isinstance(v, float) and not math.isfinite(v)]
    if name == "sft":
        continue
    memory = max(row.get("perf/max_memory_allocated_gb", 0.0) for row in rows)
    if device != "cpu" and memory == 0:
        wrong.append(f"{name}: no GPU memory was ever allocated: the training ran on the CPU")
    trained = [row for row in rows if "critic/rewards/mean" in row]
    gap = max(row["training/rollout_log_probs_diff_max"] for row in trained)
    if name == "float32" and gap > 1e-2:
        wrong.append(f"float32: engine and trainer differ by {gap:.2e} in a log-prob")
    speed = sorted(row["perf/throughput"] for row in trained)[len(trained) // 2]
    print(
        f"{name}: {expected} GRPO steps, reward {trained[0]['critic/rewards/mean']:.3f} -> {trained[-1]['critic/rewards/mean']:.3f}, "
        f"{speed:.0f} tokens/s, engine against trainer at most {gap:.1e}, {memory:.2f} GB of GPU memory"
    )
if wrong:
    sys.exit("\n".join(wrong))
print(f"ok: trained on {'cpu' if device == 'cpu' else 'cuda'}")
PYTHON_END
