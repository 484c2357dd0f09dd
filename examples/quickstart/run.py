"""Run the quickstart: a small random model learns arithmetic, first by imitation (SFT), then by reinforcement (GRPO).

Six in ten of the worked solutions are one off. Imitation copies that mistake. Reinforcement, which only sees right or wrong,
removes it.

Every step is an ordinary `hone` command, shown before it runs. Options: --seed N, --out DIR, --runtime ray (worker
processes on Ray, with the same numbers), and key=value overrides for the GRPO run (for example `trainer.total_training_steps=40`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
HELD_OUT = 512


def main() -> int:
    """Run all commands, then print and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runtime", choices=["local", "ray"], default="local", help="where the GRPO run's roles run")
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("overrides", nargs="*", help="key=value for the GRPO run")
    arguments = parser.parse_args()
    out, seed = arguments.out, arguments.seed
    if out.exists():
        shutil.rmtree(out)

    say("1. Make word problems whose worked solutions are often wrong, a tokenizer, and a model with random weights")
    make(out, seed)
    say("2. SFT: imitate the worked solutions; the model gets their format, and their mistakes")
    seconds_sft = imitate(out, seed)
    say("3. GRPO: the model tries, a rule scores the answers, and it learns from its own attempts")
    seconds_rl = reinforce(out, seed, [f"trainer.runtime={arguments.runtime}", *arguments.overrides])
    say("4. Before and after, on problems that neither stage has seen")
    compare(out, seed, seconds_sft, seconds_rl)
    return 0


def make(out: Path, seed: int) -> None:
    """Make data, tokenizer and a model with random weights."""
    hone(
        "data", "make", "arithmetic", "max_number=10", "slips=60", "--out", out / "data",
        "--size", 20000, "--val-size", HELD_OUT, "--seed", seed,
    )  # fmt: skip
    hone("data", "tokenizer", "--files", out / "data/train.parquet", "--out", out / "tokenizer", "--vocab-size", 512)
    hone(
        "init", "--arch", "qwen3", "--size", "1m", "--tokenizer", out / "tokenizer", "--out", out / "model",
        "--seed", seed,
    )  # fmt: skip


def imitate(out: Path, seed: int) -> float:
    """Run supervised fine-tuning and return its seconds."""
    return hone(
        "sft", "--config-path", HERE, "--config-name", "sft", f"model.path={out}/model",
        f"data.train_files={out}/data/train.parquet", f"data.val_files={out}/data/val.parquet",
        f"trainer.seed={seed}", f"trainer.default_local_dir={out}/sft",
    )  # fmt: skip


def reinforce(out: Path, seed: int, overrides: list[str]) -> float:
    """Run reinforcement learning from the SFT model and return its seconds."""
    return hone(
        "train", "--config-path", HERE, "--config-name", "grpo",
        f"actor_rollout_ref.model.path={newest_actor(out / 'sft')}",
        f"data.train_files={out}/data/train.parquet", f"data.val_files={out}/data/val.parquet",
        f"trainer.seed={seed}", f"trainer.default_local_dir={out}/grpo", *overrides,
    )  # fmt: skip


def compare(out: Path, seed: int, seconds_sft: float, seconds_rl: float) -> None:
    """Let both models answer the held-out problems; write and print the results."""
    held_out = out / "data/val.parquet"
    before = answers(newest_actor(out / "sft"), held_out, out / "before.jsonl")
    after = answers(newest_actor(out / "grpo"), held_out, out / "after.jsonl")
    rows = [json.loads(line) for line in (out / "grpo/metrics.jsonl").read_text().splitlines()]
    summary = {
        "sft_accuracy": accuracy(before),
        "rl_accuracy": accuracy(after),
        "held_out_problems": len(after),
        "seconds_sft": round(seconds_sft, 1),
        "seconds_rl": round(seconds_rl, 1),
        "steps": max(row["step"] for row in rows),
        "seed": seed,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    draw(rows, summary, out / "learning_curve.png")
    show(before, after, summary, out)


def say(text: str) -> None:
    """Print a heading."""
    print(f"\n== {text}", flush=True)


def hone(*arguments: object) -> float:
    """Run a `hone` command; return its wall time in seconds, or stop with its exit code."""
    words = [str(argument) for argument in arguments]
    print("$ hone " + " ".join(words), flush=True)
    started = time.perf_counter()
    code = subprocess.call([sys.executable, "-m", "hone.cli.main", *words])
    if code != 0:
        sys.exit(code)
    return time.perf_counter() - started


def newest_actor(run: Path) -> Path:
    """Return the model directory of a run's newest checkpoint."""
    steps = sorted((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))
    return steps[-1] / "actor"


def answers(model: Path, data: Path, output: Path) -> list[dict]:
    """Return the greedy answer of ``model`` to every held-out problem."""
    hone(
        "eval", model, "--data", data, "--max-prompt-length", 96, "--max-response-length", 48, "--show", 0,
        "--output", output,
    )  # fmt: skip
    return [json.loads(line) for line in output.read_text().splitlines()]


def accuracy(records: list[dict]) -> float:
    """Return the share of right answers."""
    return sum(record["score"] for record in records) / len(records)


def draw(rows: list[dict], summary: dict, path: Path) -> None:
    """Draw the learning curve: reward of the training batches and accuracy on held-out problems."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    trained = [row for row in rows if "critic/rewards/mean" in row]
    axes.plot(
        [r["step"] for r in trained],
        [r["critic/rewards/mean"] for r in trained],
        color="#4c78a8",
        label="training reward (sampled)",
    )
    name = "val-core/arithmetic/acc/mean@1"
    tested = [row for row in rows if name in row]
    axes.plot(
        [r["step"] for r in tested],
        [r[name] for r in tested],
        "o-",
        color="#e45756",
        label="held-out accuracy (greedy)",
    )
    axes.axhline(summary["sft_accuracy"], color="grey", linestyle=":", label="after SFT")
    axes.set(
        xlabel="GRPO step",
        ylabel="share right",
        ylim=(0, 1.02),
        title="A 1M-parameter model learns arithmetic on a CPU",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=130)


def show(before: list[dict], after: list[dict], summary: dict, out: Path) -> None:
    """Print the table of accuracies and three problems, first those that RL corrected."""
    corrected = [i for i in range(len(after)) if after[i]["score"] > before[i]["score"]]
    others = [i for i in range(len(after)) if i not in corrected]
    for i in (corrected + others)[:3]:
        print(f"\n  {before[i]['prompt']}   (right: {before[i]['ground_truth']})")
        for name, record in (("SFT ", before[i]), ("GRPO", after[i])):
            mark = "right" if record["score"] == 1 else "wrong"
            print(f"    {name} {mark}: {' | '.join(record['text'].split(chr(10)))}")
    print(f"\n  {'':10}{'accuracy':>10}{'seconds':>10}      ({summary['held_out_problems']} held-out problems)")
    print(f"  {'SFT':10}{summary['sft_accuracy']:>10.1%}{summary['seconds_sft']:>10.0f}")
    print(f"  {'GRPO':10}{summary['rl_accuracy']:>10.1%}{summary['seconds_rl']:>10.0f}      ({summary['steps']} steps)")
    print(f"\n  {out}/summary.json and {out}/learning_curve.png are written; `hone runs show {out}/grpo` tells more.")


if __name__ == "__main__":
    sys.exit(main())
