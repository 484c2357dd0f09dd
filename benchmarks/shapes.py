"""A model that reads images learns to describe them, by imitation and then from a reward: `python benchmarks/shapes.py`.

An image has one shape of three, in one colour of three, in one of four corners; the answer is like "red circle top left". The model is
a random Qwen3-VL with a decoder of 1 million parameters and a vision tower, trained in two stages with the same prompts:

    sft     300 steps of 32 demonstrations, learning rate 1e-3
    grpo    250 steps of 16 prompts with 8 answers each, reward 1 for the exact answer, learning rate 3e-4

The curve is the share of exact greedy answers to 128 held-out images. Runs that are complete in `--work` are not repeated. The script
draws `shapes.png` into `--out` and prints the table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[1]
SFT_STEPS, SFT_EVERY, RL_STEPS, RL_EVERY = 300, 50, 250, 25
QUIET = ("trainer.num_threads=1", "trainer.logger=[]", "trainer.device=cpu")


def hone(*words: object) -> str:
    """Run a `hone` command in a process of its own and return its output.

    Raises:
        SystemExit: it failed; its output is shown.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "hone.cli.main", *map(str, words)]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{ended.stdout[-2000:]}{ended.stderr[-4000:]}")
    return ended.stdout


def make_data(work: Path) -> None:
    """Make the images and the tokenizer."""
    if not (work / "tokenizer").is_dir():
        shutil.rmtree(work / "data", ignore_errors=True)
        hone(
            "data",
            "make",
            "shapes",
            "kind=describe",
            "drawn=1",
            "--out",
            work / "data",
            "--size",
            8000,
            "--val-size",
            128,
        )
        hone("data", "tokenizer", "--files", work / "data/train.parquet", "--out", work / "tokenizer")


def imitate(work: Path, seed: int) -> Path:
    """Train a new model on demonstrations unless its run is complete; return the run's folder."""
    run, model = work / f"sft-{seed}", work / f"model-{seed}"
    if not (run / f"checkpoints/step_{SFT_STEPS}/actor").is_dir():
        shutil.rmtree(run, ignore_errors=True)
        shutil.rmtree(model, ignore_errors=True)
        sizes = ("--arch", "qwen3_vl", "--size", "1m", "--seed", seed)
        hone("init", *sizes, "--tokenizer", work / "tokenizer", "--out", model)
        hone(
            *("sft", f"model.path={model}", f"data.train_files={work}/data/train.parquet", f"trainer.seed={seed}"),
            *(
                "data.train_batch_size=32",
                "optim.lr=1e-3",
                "optim.lr_scheduler_type=constant",
                "optim.lr_warmup_steps=10",
            ),
            *(f"trainer.total_training_steps={SFT_STEPS}", f"trainer.save_freq={SFT_EVERY}"),
            *("trainer.max_ckpt_to_keep=null", f"trainer.default_local_dir={run}", *QUIET),
        )
    return run


def reinforce(work: Path, start: Path, seed: int) -> Path:
    """Train from the reward unless the run is complete; return the run's folder."""
    run = work / f"grpo-{seed}"
    if not (run / f"checkpoints/step_{RL_STEPS}").is_dir():
        shutil.rmtree(run, ignore_errors=True)
        hone(
            *("train", "--preset=grpo", f"actor_rollout_ref.model.path={start}", f"trainer.seed={seed}"),
            *(f"data.train_files={work}/data/train.parquet", f"data.val_files={work}/data/val.parquet"),
            *("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16"),
            *("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.optim.lr=3e-4"),
            *("data.max_prompt_length=64", "data.max_response_length=12", "trainer.rollout_dump_freq=0"),
            *(f"trainer.total_training_steps={RL_STEPS}", f"trainer.test_freq={RL_EVERY}"),
            *(f"trainer.default_local_dir={run}", *QUIET),
        )
    return run


def sft_curve(work: Path, run: Path, seed: int) -> list[float]:
    """Return the share of exact answers of the new model and of each checkpoint of a run of imitation."""
    shares = []
    for step in range(0, SFT_STEPS + 1, SFT_EVERY):
        model, out = run / f"checkpoints/step_{step}/actor", run / f"eval-{step}.json"
        if not out.is_file():
            model = model if step else work / f"model-{seed}"
            data = work / "data/val.parquet"
            out.write_text(hone("eval", model, "--data", data, "--max-response-length", 12, "--json"))
        shares.append(json.loads(out.read_text())["val-core/shapes/acc/mean@1"])
    return shares


def rl_curve(run: Path) -> list[float]:
    """Return the share of exact answers before training and at each evaluation of a run of GRPO."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [step["val-core/shapes/acc/mean@1"] for step in steps if "val-core/shapes/acc/mean@1" in step]


def draw(curves: list[tuple[list[float], list[float]]], file: Path) -> None:
    """Draw mean and range over the seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    stages = (
        ("SFT", list(range(0, SFT_STEPS + 1, SFT_EVERY)), [sft for sft, _ in curves]),
        ("GRPO", [SFT_STEPS + step for step in range(0, RL_STEPS + 1, RL_EVERY)], [rl for _, rl in curves]),
    )
    for label, steps, runs in stages:
        points = list(zip(*runs, strict=True))
        axes.fill_between(steps, [min(p) for p in points], [max(p) for p in points], alpha=0.2, linewidth=0)
        axes.plot(steps, [fmean(p) for p in points], label=label, linewidth=1.6)
    axes.set_xlabel("step")
    axes.set_ylabel("exact answers, greedy, held out")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(file, format="png")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, measure, draw and tabulate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--work", type=Path, default=Path("/tmp/hone-shapes"), help="folder of data and runs")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images", help="folder of the picture")
    given = parser.parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    make_data(given.work)
    curves = []
    for seed in given.seeds:
        run = imitate(given.work, seed)
        start = run / f"checkpoints/step_{SFT_STEPS}/actor"
        curve = (sft_curve(given.work, run, seed), rl_curve(reinforce(given.work, start, seed)))
        print(f"seed {seed}: sft {curve[0]}, grpo {curve[1]}", flush=True)
        curves.append(curve)
    given.out.mkdir(parents=True, exist_ok=True)
    draw(curves, given.out / "shapes.png")
    for label, place in (("sft", 0), ("grpo", 1)):
        last = [curve[place][-1] for curve in curves]
        print(f"| `{label}` | {fmean(last):.3f} | {min(last):.3f} |")


if __name__ == "__main__":
    main()
