"""On-policy distillation against SFT on the same budget: `python benchmarks/distillation.py`.

The task is `digit_sequence` (copy six digits from 0 to 3). The teacher, 5 million parameters, has imitated answers whose digits are
right with a chance of three in four, so its greedy answers are right and its samples are not. The student, 1 million parameters, has
imitated worse ones and copies half of the digits. Every arm then gets the same 128 prompts, answers a step, steps and learning rate:

    sft           the cross-entropy of answers that the teacher has sampled, one for each prompt
    forward_kl    on-policy: the whole distributions of teacher and student at each token that the student samples
    reverse_kl    the same, in the other direction
    k1            on-policy: the teacher's log-prob of each token that the student samples is an advantage

The curve is the share of right digits in greedy answers to held-out prompts, measured from the checkpoints in the same way for all
arms. Runs that are complete in `--work` are not repeated. The script draws `distillation.png` into `--out` and prints the table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
LENGTH, DIGITS, PROMPTS, HELD_OUT, BATCH, EVERY = 6, 4, 128, 128, 64, 20
TEACHER_STEPS, START_STEPS, TEACHER_CARE, START_CARE = 240, 250, 0.67, 0.4
"""Steps of imitation, and the share of digits that the demonstrations copy instead of drawing them."""
RATE = "1e-3"
ARMS: dict[str, tuple[str, ...]] = {
    "sft": (),
    "forward_kl": ("distillation.loss_mode=forward_kl",),
    "reverse_kl": ("distillation.loss_mode=reverse_kl",),
    "k1": ("distillation.loss_mode=k1",),
}
QUIET = ("trainer.num_threads=1", "trainer.device=cpu", "trainer.logger=[]", "trainer.val_before_train=false")


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


def chats(file: Path, care: float, seed: int) -> Path:
    """Write 16,384 conversations whose answers copy a digit with probability ``care`` and draw it otherwise."""
    draw = random.Random(seed)
    with file.open("w") as out:
        for _ in range(16384):
            digits = [draw.randrange(DIGITS) for _ in range(LENGTH)]
            answer = [digit if draw.random() < care else draw.randrange(DIGITS) for digit in digits]
            out.write(conversation("".join(map(str, digits)), "".join(map(str, answer))))
    return file


def conversation(digits: str, answer: str) -> str:
    """Return one line of a file for `hone sft`."""
    turns = [{"role": "user", "content": f"copy {digits}"}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns}) + "\n"


def imitate(work: Path, name: str, model: Path, file: Path, steps: int, *words: str, seed: int = 1) -> Path:
    """Train a model on conversations unless its run is complete; return the run's checkpoints."""
    folder = work / name / "checkpoints"
    if not (folder / f"step_{steps}/actor").is_dir():
        shutil.rmtree(work / name, ignore_errors=True)
        hone(
            *("sft", f"model.path={model}", f"data.train_files={file}", "data.max_length=64"),
            *(f"data.train_batch_size={BATCH}", f"trainer.total_training_steps={steps}", f"trainer.seed={seed}"),
            "trainer.total_epochs=1000",
            *(f"trainer.default_local_dir={work}/{name}", *QUIET[:3], *words),
        )
    return folder


def make_models(work: Path) -> tuple[Path, Path]:
    """Make data and tokenizer; return the directories of the teacher and of the student's start."""
    work.mkdir(parents=True, exist_ok=True)
    teacher, start = (work / f"{name}/checkpoints/step_{steps}/actor" for name, steps in _TRAINED)
    if teacher.is_dir() and start.is_dir():
        return teacher, start
    noisy, noisier = chats(work / "noisy.jsonl", TEACHER_CARE, 0), chats(work / "start.jsonl", START_CARE, 1)
    size = ("--size", DIGITS**LENGTH - 2 * HELD_OUT, "--val-size", HELD_OUT)
    hone("data", "make", "digit_sequence", f"length={LENGTH}", f"digits={DIGITS}", "--out", work / "data", *size)
    hone("data", "tokenizer", "--files", noisy, "--out", work / "tokenizer", "--vocab-size", 300)
    for name, parameters in (("blank_teacher", "5m"), ("blank_student", "1m")):
        hone("init", "--arch", "qwen3", "--size", parameters, "--tokenizer", work / "tokenizer", "--out", work / name)
    cosine = ("optim.lr_scheduler_type=cosine", "trainer.save_freq=-1")
    imitate(work, "teacher", work / "blank_teacher", noisy, TEACHER_STEPS, "optim.lr=2e-3", *cosine)
    imitate(work, "start", work / "blank_student", noisier, START_STEPS, "optim.lr=2e-3", *cosine)
    return teacher, start


_TRAINED = (("teacher", TEACHER_STEPS), ("start", START_STEPS))


@torch.no_grad()
def answers(model: Path, tokenizer: Path, digits: Sequence[str], *, sample: int | None = None) -> list[str]:
    """Answer prompts greedily, or with the seed ``sample``; all prompts have the same length."""
    known = AutoTokenizer.from_pretrained(tokenizer)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model).eval()
    if sample is not None:
        torch.manual_seed(sample)
    texts: list[str] = []
    for first in range(0, len(digits), 512):
        messages = [[{"role": "user", "content": f"copy {d}"}] for d in digits[first : first + 512]]
        prompts = known.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        options = {"do_sample": True, "top_k": 0} if sample is not None else {"do_sample": False}
        ids = loaded.generate(**prompts, max_new_tokens=LENGTH + 2, pad_token_id=known.pad_token_id, **options)
        texts += known.batch_decode(ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def right(texts: Sequence[str], digits: Sequence[str]) -> float:
    """Return the share of places with the right digit."""
    return fmean(sum(a == b for a, b in zip(t, d, strict=False)) / LENGTH for t, d in zip(texts, digits, strict=True))


def prompts(work: Path, split: str) -> list[str]:
    """Return the digits of every prompt of a split of the data."""
    rows = pq.read_table(work / f"data/{split}.parquet").to_pylist()
    return [row["prompt"][-1]["content"].split()[-1] for row in rows]


def train(arm: str, seed: int, steps: int, work: Path, teacher: Path, start: Path) -> Path:
    """Train one run unless it is complete; return its checkpoints."""
    name, file = f"{arm}-{seed}", work / f"teacher-{seed}.jsonl"
    if arm == "sft":
        if not file.is_file():
            digits = prompts(work, "train")[:PROMPTS]
            texts = answers(teacher, work / "tokenizer", digits, sample=seed)
            file.write_text("".join(map(conversation, digits, texts)))
        words = (f"optim.lr={RATE}", f"trainer.save_freq={EVERY}", "trainer.max_ckpt_to_keep=null")
        return imitate(work, name, start, file, steps, *words, seed=seed)
    folder = work / name / "checkpoints"
    if not (folder / f"step_{steps}/actor").is_dir():
        shutil.rmtree(work / name, ignore_errors=True)
        hone(
            *("train", "--preset=opd", f"actor_rollout_ref.model.path={start}", f"distillation.path={teacher}"),
            *(
                f"data.train_files={work}/data/train.parquet",
                f"data.train_batch_size={BATCH}",
                "data.max_prompt_length=32",
            ),
            *(
                "data.max_response_length=8",
                f"data.train_max_samples={PROMPTS}",
                "trainer.total_epochs=1000",
                "actor_rollout_ref.rollout.n=1",
                f"trainer.seed={seed}",
            ),
            *(f"actor_rollout_ref.actor.optim.lr={RATE}", f"trainer.total_training_steps={steps}"),
            *(f"trainer.save_freq={EVERY}", "trainer.max_ckpt_to_keep=null", "trainer.rollout_dump_freq=0"),
            *(f"trainer.default_local_dir={work}/{name}", *QUIET, *ARMS[arm]),
        )
    return folder


def draw(curves: dict[str, list[list[float]]], teacher: float, file: Path) -> None:
    """Draw mean and range over the seeds of each arm, and the teacher."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for arm, runs in curves.items():
        points = list(zip(*runs, strict=True))
        steps = [EVERY * number for number in range(len(points))]
        axes.fill_between(steps, [min(p) for p in points], [max(p) for p in points], alpha=0.2, linewidth=0)
        axes.plot(steps, [fmean(p) for p in points], label=arm, linewidth=1.6)
    axes.axhline(teacher, color="0.5", linewidth=1, linestyle="--", label="teacher")
    axes.set_xlabel(f"step of {BATCH} answers")
    axes.set_ylabel("right digits, greedy, held out")
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(file, format="png")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, measure, draw and tabulate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=["sft", "forward_kl"], choices=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--work", type=Path, default=ROOT / "runs/distillation", help="data, models and runs")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images")
    options = parser.parse_args(arguments)
    work = options.work.resolve()
    teacher, start = make_models(work)
    digits = prompts(work, "val")
    best = right(answers(teacher, work / "tokenizer", digits), digits)
    sampled = right(answers(teacher, work / "tokenizer", digits, sample=0), digits)
    print(f"teacher: {best:.3f} greedy, {sampled:.3f} sampled", flush=True)
    first = right(answers(start, work / "tokenizer", digits), digits)
    curves: dict[str, list[list[float]]] = {arm: [] for arm in options.arms}
    for seed in options.seeds:
        for arm in options.arms:
            folder = train(arm, seed, options.steps, work, teacher, start)
            models = [folder / f"step_{step}/actor" for step in range(EVERY, options.steps + 1, EVERY)]
            curves[arm].append([first, *(right(answers(m, work / "tokenizer", digits), digits) for m in models)])
            print(f"{arm:12} seed {seed}: " + " ".join(f"{value:.3f}" for value in curves[arm][-1]), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    draw(curves, best, options.out / "distillation.png")
    half = options.steps // EVERY // 2
    print(f"| Arm | Step {half * EVERY} | Step {options.steps} | Lowest seed |\n|---|---:|---:|---:|")
    for arm, runs in curves.items():
        middle, last = fmean(run[half] for run in runs), [run[-1] for run in runs]
        print(f"| `{arm}` | {middle:.3f} | {fmean(last):.3f} | {min(last):.3f} |")


if __name__ == "__main__":
    main()
