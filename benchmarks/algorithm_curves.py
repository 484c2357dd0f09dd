"""Train every preset on the same task from the same start with the same budget: `python benchmarks/algorithm_curves.py`.

The task is `digit_sequence` (copy four digits from 0 to 3; the reward is the share of places with the right digit). The start
is a Qwen3 of 1 million parameters that has imitated answers of random digits: it knows the form of an answer, and is right
by chance. A step is 128 answers for every preset, split into prompts and answers a prompt as the preset does, with the preset's
number of updates. The curve is the mean reward of one sampled answer to each of 64 held-out prompts, measured the same way for
all presets. It does not include what a method filters, shapes or penalises in training.

Each run is one process with one thread, and `--jobs` of them run at a time. Runs already complete in `--work` are not repeated.
The script writes `curves.png` (one panel a preset: mean and range over the seeds) to `--out`. It writes the table of first against
last steps into the `README.md` there, between its two comments "curves:".
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

from hone.config import RLConfig, load_config
from hone.config.load import preset_names

ROOT = Path(__file__).resolve().parents[1]
ANSWERS, HELD_OUT, LENGTH, DIGITS = 128, 64, 4, 4
IMITATION, CARE = 256, 0.4
"""Steps of imitation, and the share of digits that the demonstrations copy instead of drawing."""
METRIC = "val-aux/digit_sequence/reward/mean@1"
ACTOR = "actor_rollout_ref.actor"
OWN: dict[str, tuple[str, ...]] = {
    "dapo": ("reward.overlong_buffer.len=2",),
    "grpo_lora": (f"{ACTOR}.optim.lr=2e-3",),
    "ppo": ("critic.optim.lr=3e-3",),
}
"""Settings of single presets: the buffer must fit the answers, and adapters and value heads start untrained."""
OPENING, CLOSING = "<!-- curves: from here on by benchmarks/algorithm_curves.py -->", "<!-- curves: to here -->"
PICTURE = "![Held-out reward of every preset over the steps: mean and range of the seeds; grey: grpo](curves.png)"
OTHERS = {"online_dpo", "opd", "opsd"}
"""Presets that need more than prompts and a reward."""


def hone(*words: object) -> None:
    """Run a `hone` command in a process of its own.

    Raises:
        SystemExit: it failed; its output is shown.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "hone.cli.main", *map(str, words)]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{ended.stdout[-2000:]}{ended.stderr[-4000:]}")


def make_start(work: Path) -> Path:
    """Make data, tokenizer and the start model in ``work``; return the model's directory."""
    start = work / f"sft/checkpoints/step_{IMITATION}/actor"
    if start.is_dir():
        return start
    draw, chats = random.Random(0), work / "conversations.jsonl"
    work.mkdir(parents=True, exist_ok=True)
    with chats.open("w") as file:
        for _ in range(8192):
            digits = [draw.randrange(DIGITS) for _ in range(LENGTH)]
            copied = [digit if draw.random() < CARE else draw.randrange(DIGITS) for digit in digits]
            texts = ["".join(map(str, sequence)) for sequence in (digits, copied)]
            turns = [{"role": "user", "content": f"copy {texts[0]}"}, {"role": "assistant", "content": texts[1]}]
            file.write(json.dumps({"messages": turns}) + "\n")
    size = ("--size", DIGITS**LENGTH - HELD_OUT, "--val-size", HELD_OUT)
    hone("data", "make", "digit_sequence", f"length={LENGTH}", f"digits={DIGITS}", "--out", work / "data", *size)
    hone("data", "tokenizer", "--files", chats, "--out", work / "tokenizer", "--vocab-size", 300)
    hone("init", "--arch", "qwen3", "--size", "1m", "--tokenizer", work / "tokenizer", "--out", work / "blank")
    hone(
        *(
            "sft",
            f"model.path={work}/blank",
            f"data.train_files={chats}",
            "data.max_length=64",
            "data.train_batch_size=128",
        ),
        *("optim.lr=2e-3", "optim.lr_scheduler_type=cosine", f"trainer.total_training_steps={IMITATION}"),
        *(f"trainer.default_local_dir={work}/sft", "trainer.num_threads=1", "trainer.device=cpu"),
    )
    return start


def overrides(preset: str, seed: int, steps: int, work: Path) -> list[str]:
    """Return the settings of one run: the common budget in the preset's shape."""
    config = load_config(RLConfig, preset=preset)
    n, actor = config.actor_rollout_ref.rollout.n, config.actor_rollout_ref.actor
    prompts, updates = ANSWERS // n, config.data.train_batch_size // actor.ppo_mini_batch_size
    return [
        f"actor_rollout_ref.model.path={make_start(work)}",
        f"data.train_files={work}/data/train.parquet",
        f"data.val_files={work}/data/val.parquet",
        *(f"data.train_batch_size={prompts}", "data.max_prompt_length=32", "data.max_response_length=8"),
        f"{ACTOR}.ppo_mini_batch_size={prompts // updates}",
        f"{ACTOR}.optim.lr={6e-4 if updates == 1 else 2e-4}",  # several updates a step: smaller ones
        f"{ACTOR}.optim.lr_warmup_steps=4",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        *(
            f"trainer.seed={seed}",
            f"trainer.total_training_steps={steps}",
            "trainer.test_freq=1",
            "trainer.save_freq=0",
        ),
        *(
            "trainer.rollout_dump_freq=0",
            "trainer.log_val_generations=0",
            "trainer.num_threads=1",
            "trainer.device=cpu",
        ),
        f"trainer.default_local_dir={run_directory(preset, seed, work)}",
        *OWN.get(preset, ()),
    ]


def run_directory(preset: str, seed: int, work: Path) -> Path:
    """Return the directory of a run."""
    return work / f"{preset}-{seed}"


def curve(preset: str, seed: int, work: Path) -> list[float]:
    """Return the metric of a run, from before the first step on; empty when there is none."""
    file = run_directory(preset, seed, work) / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [row[METRIC] for row in rows if METRIC in row]


def train(preset: str, seed: int, settings: Sequence[str], work: Path) -> None:
    """Train one run and print its first and last measurement."""
    shutil.rmtree(run_directory(preset, seed, work), ignore_errors=True)
    begun = time.perf_counter()
    hone("train", f"--preset={preset}", *settings)
    rewards = curve(preset, seed, work)
    print(
        f"{preset:30} seed {seed}: {rewards[0]:.3f} -> {rewards[-1]:.3f}  {time.perf_counter() - begun:.0f} s",
        flush=True,
    )


def table(curves: dict[str, list[list[float]]], k: int) -> str:
    """Return Markdown with the means over the first and last k measurements, and the range of the gains over the seeds."""
    steps, seeds = (len(next(iter(curves.values()))[0]) - 1, len(next(iter(curves.values()))))
    lines = [
        f"Held-out reward of each preset on `digit_sequence` (1M parameters, {steps} steps of {ANSWERS} answers, "
        f"{seeds} seeds): mean of the first and of the last {k} measurements.",
        "",
        f"| Preset | First {k} | Last {k} | Gain | Smallest gain of a seed |",
        "|---|---:|---:|---:|---:|",
    ]
    for preset, runs in sorted(curves.items(), key=lambda item: -fmean(fmean(run[-k:]) for run in item[1])):
        first, last = [fmean(run[:k]) for run in runs], [fmean(run[-k:]) for run in runs]
        gains = [b - a for a, b in zip(first, last, strict=True)]
        lines.append(
            f"| `{preset}` | {fmean(first):.3f} | {fmean(last):.3f} | {fmean(gains):+.3f} | {min(gains):+.3f} |"
        )
    return "\n".join(lines) + "\n"


def splice(page: Path, text: str) -> None:
    """Put ``text`` between the comments of a page that mark the place of the curves."""
    before, opening, rest = page.read_text(encoding="utf-8").partition(OPENING)
    _, closing, after = rest.partition(CLOSING)
    if not (opening and closing):
        raise SystemExit(f"{page} has no place for the curves: {OPENING} {CLOSING}")
    page.write_text(f"{before}{opening}\n{text}{closing}{after}", encoding="utf-8")


def draw(curves: dict[str, list[list[float]]], file: Path) -> None:
    """Draw one panel a preset: mean and range over the seeds, with grpo's mean in grey."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(6, len(curves))
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(2.3 * columns + 0.4, 1.9 * rows + 0.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, preset in zip(grid.flat, sorted(curves), strict=False):
        runs = list(zip(*curves[preset], strict=True))
        if "grpo" in curves:
            axes.plot([fmean(values) for values in zip(*curves["grpo"], strict=True)], color="0.75", linewidth=1.2)
        axes.fill_between(range(len(runs)), [min(v) for v in runs], [max(v) for v in runs], alpha=0.25, linewidth=0)
        axes.plot([fmean(values) for values in runs], linewidth=1.5)
        axes.set_title(preset, fontsize=8, loc="left")
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in list(grid.flat)[len(curves) :]:
        axes.set_visible(False)
    figure.supxlabel("step", fontsize=8)
    figure.supylabel("held-out reward", fontsize=8)
    figure.savefig(file, format="png")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, then draw and tabulate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everything = sorted(set(preset_names("rl")) - OTHERS)
    parser.add_argument("--presets", nargs="+", default=everything, choices=everything, metavar="PRESET")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--k", type=int, default=5, help="measurements at either end that the table averages")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/algorithm_curves", help="data, start model and runs")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/algorithms")
    options = parser.parse_args(arguments)
    work = options.work.resolve()
    make_start(work)
    jobs = [
        (preset, seed, overrides(preset, seed, options.steps, work), work)  # here: Hydra composes in one thread only
        for seed in options.seeds
        for preset in options.presets
        if len(curve(preset, seed, work)) != options.steps + 1
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        for future in [pool.submit(train, *job) for job in jobs]:
            future.result()
    curves = {preset: [curve(preset, seed, work) for seed in options.seeds] for preset in options.presets}
    options.out.mkdir(parents=True, exist_ok=True)
    draw(curves, options.out / "curves.png")
    text = table(curves, options.k)
    print(text)
    if (options.out / "README.md").is_file():
        splice(options.out / "README.md", f"{PICTURE}\n\n{text}")


if __name__ == "__main__":
    main()
