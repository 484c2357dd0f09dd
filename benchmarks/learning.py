"""Let Hone and TRL learn the same five tasks from the same model with the same settings: `python benchmarks/learning.py`.

Tasks: reversed text, and four of reasoning-gym (`spell_backward`, `letter_counting`, `basic_arithmetic`, `countdown`), each with the
verifier of that package: right or wrong (`learning_reward.py`). The start of a task is a Qwen3 of 1 million parameters that has
imitated answers, of which three in ten were those to another problem. Both trainers see the same prompts in the same order, 16 a step
with 8 answers each, and make one update of GRPO a step by the settings below. What is left to differ is the code, and the random
numbers of sampling.

Reward by step decides; reward by second is of one machine. Held-out problems are answered greedily by `hone eval` with either model.
TRL has an environment of its own, `.venv-trl`, made on the first call. Each run is one process with one thread, and `--jobs` of them
run at a time. A finished run is a line of `--records` and is not repeated, also on another machine: there both trainers share a start
that may differ in its last bits. `--out` gets `learning.png`, the table goes to standard output.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from grpo_step import TRL_ENV, ensure_trl

HERE = Path(__file__).resolve().parent
SETTINGS = {"prompts": 16, "n": 8, "length": 24, "lr": 5e-4, "clip": 0.2, "steps": 40, "threads": 1}
"""What both trainers are told. Weight decay 0, no warm-up, no KL term, gradients clipped to norm 1, temperature 1."""
CARE, PROMPT = 0.7, 256
"""The share of demonstrations that are right, and the longest prompt in tokens."""
IMITATION = {"spell_backward": 1200, "basic_arithmetic": 1200, "countdown": 1200}
"""Steps of imitation of a task; 400 elsewhere. With 400, sums and countdown began at 0.04 and neither trainer learned."""
VOCABULARY = {"countdown": 400}
"""Tokens of a task's tokenizer; elsewhere 270, which are characters but for the words of the template."""
TASKS: dict[str, dict[str, Any]] = {
    "reversed_text": {},
    "spell_backward": {"min_word_len": 3, "max_word_len": 4},
    "letter_counting": {"min_words": 2, "max_words": 4},
    "basic_arithmetic": {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 2,
        "operators": ("+", "-"),
        "allow_parentheses": False,
        "allow_negation": False,
    },
    "countdown": {
        "min_numbers": 2,
        "max_numbers": 2,
        "min_value": 1,
        "max_value": 20,
        "min_target": 1,
        "max_target": 40,
        "operators": ("+", "-"),
    },
}
TRAIN, HELD_OUT = 1024, 256
IMITATED = {"basic_arithmetic": 12_000, "countdown": 12_000}
"""Problems of each task: for reinforcement, held out, and imitated (3,000 elsewhere), drawn apart; none is held out."""
STUDENT_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Two-sided 95 % quantiles of Student's t by the number of seeds."""
Curve = dict[str, Any]
Curves = dict[tuple[str, str, int], Curve]


def problems(task: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield endless problems of a task, each with question, answer and metadata."""
    if task == "reversed_text":
        draw = random.Random(seed)
        while True:
            text = "".join(draw.choice("abcdef") for _ in range(draw.randint(4, 7)))
            yield {"question": f"Reverse this text: {text}", "answer": text[::-1], "metadata": {}}
    from reasoning_gym import create_dataset

    for part in itertools.count():
        yield from create_dataset(task, seed=seed + 1000 * part, size=1000, **TASKS[task])


def distinct(task: str, seed: int, size: int, but: set[str]) -> list[dict[str, Any]]:
    """Return ``size`` problems with different questions, none of them in ``but``."""
    fresh: dict[str, dict[str, Any]] = {}
    for problem in problems(task, seed):
        if problem["question"] not in but:
            fresh.setdefault(problem["question"], problem)
        if len(fresh) == size:
            break
    return list(fresh.values())


def prompt_of(problem: dict[str, Any]) -> str:
    """Return what a model is shown: the first line of the question. Only countdown has more, rules of the form of an answer."""
    return problem["question"].splitlines()[0]


def as_row(task: str, problem: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a data file."""
    return {
        "data_source": task,
        "prompt": [{"role": "user", "content": prompt_of(problem)}],
        "reward_model": {"ground_truth": problem["answer"]},
        "extra_info": {"entry": json.dumps(problem)},
    }


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(*words: object) -> None:
    """Run a command in a process with one thread.

    Raises:
        SystemExit: it failed; the end of its output is shown.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [str(word) for word in words]
    ended = subprocess.run(command, env=environment, cwd=HERE, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{ended.stdout[-2000:]}{ended.stderr[-4000:]}")


def hone(*words: object) -> None:
    """Run a `hone` command."""
    run(sys.executable, "-m", "hone.cli.main", *words)


def make_start(task: str, work: Path) -> Path:
    """Make a task's problems, its tokenizer and its start model in ``work``; return the model's directory."""
    home, steps = work / task, IMITATION.get(task, 400)
    start = home / f"sft/checkpoints/step_{steps}/actor"
    if start.is_dir():
        return start
    home.mkdir(parents=True, exist_ok=True)
    draw, chats = random.Random(0), []
    held_out = distinct(task, 1, HELD_OUT, set())
    seen = {problem["question"] for problem in held_out}
    write(home / "val.jsonl", [as_row(task, problem) for problem in held_out])
    write(home / "train.jsonl", [as_row(task, problem) for problem in distinct(task, 2, TRAIN, seen)])
    shown = list(
        itertools.islice((p for p in problems(task, 3) if p["question"] not in seen), IMITATED.get(task, 3000))
    )
    for problem in shown:
        answer = problem["answer"] if draw.random() < CARE else draw.choice(shown)["answer"]
        turns = [{"role": "user", "content": prompt_of(problem)}, {"role": "assistant", "content": answer}]
        chats.append({"messages": turns})
    write(home / "chats.jsonl", chats)
    vocabulary = ("--vocab-size", VOCABULARY.get(task, 270))
    hone("data", "tokenizer", "--files", home / "chats.jsonl", "--out", home / "tokenizer", *vocabulary)
    hone("init", "--arch", "qwen3", "--size", "1m", "--tokenizer", home / "tokenizer", "--out", home / "blank")
    hone(
        "sft",
        f"model.path={home}/blank",
        f"data.train_files={home}/chats.jsonl",
        f"data.max_length={PROMPT + 32}",
        "data.train_batch_size=64",
        "optim.lr=2e-3",
        "optim.lr_scheduler_type=cosine",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={home}/sft",
        "trainer.num_threads=1",
        "trainer.device=cpu",
    )
    return start


def train_hone(start: Path, task: str, seed: int, work: Path, out: Path) -> Curve:
    """Train by Hone; return rewards and seconds by step."""
    actor = "actor_rollout_ref.actor"
    hone(
        "train",
        f"actor_rollout_ref.model.path={start}",
        f"data.train_files={work}/{task}/train.jsonl",
        "data.shuffle=false",
        f"data.train_batch_size={SETTINGS['prompts']}",
        f"data.max_prompt_length={PROMPT}",
        f"data.max_response_length={SETTINGS['length']}",
        f"reward.custom_reward_function.path={HERE}/learning_reward.py",
        "algorithm.adv_estimator=grpo",
        "algorithm.adv_kwargs={epsilon: 1e-4}",  # as TRL has it
        f"actor_rollout_ref.rollout.n={SETTINGS['n']}",
        f"{actor}.ppo_mini_batch_size={SETTINGS['prompts']}",
        f"{actor}.clip_ratio={SETTINGS['clip']}",
        f"{actor}.loss_agg_mode=token-mean",
        f"{actor}.optim.lr={SETTINGS['lr']}",
        f"{actor}.optim.weight_decay=0",
        f"trainer.seed={seed}",
        f"trainer.total_training_steps={SETTINGS['steps']}",
        f"trainer.num_threads={SETTINGS['threads']}",
        "trainer.device=cpu",
        f"trainer.default_local_dir={out}/run",
    )
    rows = [json.loads(line) for line in (out / "run/metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "critic/rewards/mean" in row]
    shutil.copytree(out / f"run/checkpoints/step_{SETTINGS['steps']}/actor", out / "model")
    return {
        "rewards": [row["critic/rewards/mean"] for row in rows],
        "seconds": [row["timing_s/step"] for row in rows],
    }


def train_trl(start: Path, task: str, seed: int, work: Path, out: Path) -> Curve:
    """Train by TRL; return rewards and seconds by step."""
    told = {"model": str(start), "rows": str(work / task / "train.jsonl"), "out": str(out), "seed": seed, **SETTINGS}
    run(TRL_ENV / "bin/python", HERE / "learning_trl.py", json.dumps(told))
    return json.loads((out / "curve.json").read_text())


TRAINERS = {"Hone": train_hone, "TRL": train_trl}


def accuracy(model: Path, task: str, work: Path, answers: Path) -> float:
    """Return the share of held-out problems that a model answers right, greedily."""
    hone(
        *("eval", model, "--data", work / task / "val.jsonl", "--max-prompt-length", PROMPT, "--show", 0),
        *("--max-response-length", SETTINGS["length"], "--output", answers),
        *("--reward", f"{HERE}/learning_reward.py:compute_score"),
    )
    return fmean(json.loads(line)["score"] for line in answers.read_text().splitlines())


def one(trainer: str, task: str, seed: int, before: float, work: Path, records: Path) -> Curve:
    """Make a run, and add its line to the records."""
    out = work / f"{trainer}-{task}-{seed}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    trained = TRAINERS[trainer](make_start(task, work), task, seed, work, out)
    curve: Curve = {name: [round(value, 4) for value in trained[name]] for name in ("rewards", "seconds")}
    curve["held_out"] = accuracy(out / "model", task, work, out / "answers.jsonl")
    shutil.rmtree(out)
    line = {"trainer": trainer, "task": task, "seed": seed, "machine": machine(), "before": before, **curve}
    with records.open("a") as file:
        file.write(json.dumps(line) + "\n")
    first, last = fmean(curve["rewards"][:5]), fmean(curve["rewards"][-5:])
    print(
        f"{trainer:5} {task:17} seed {seed}: reward {first:.3f} -> {last:.3f}, held out {curve['held_out']:.3f}, "
        f"{sum(curve['seconds']):.0f} s of steps",
        flush=True,
    )
    return line


def machine() -> str:
    """Return the name of the processor, and whether it multiplies bfloat16 by itself."""
    facts = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    name = next((line.partition(":")[2].strip() for line in facts.splitlines() if line.startswith("model name")), "?")
    return f"{name}, {'with' if 'avx512_bf16' in facts else 'without'} AVX-512 BF16"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval (Student's t over the seeds)."""
    if len(values) < 2:
        return fmean(values), 0.0
    return fmean(values), STUDENT_95.get(len(values), 2.0) * stdev(values) / len(values) ** 0.5


def table(curves: Curves, before: dict[str, float], seeds: Sequence[int]) -> str:
    """Return the table in Markdown: held-out accuracy, area under the curve of reward by step, seconds a step."""
    lines = [
        "| Task | Before | Hone, held out | TRL, held out | Hone, mean reward | TRL, mean reward | Hone - TRL, held out, by seed "
        "| Hone, s/step | TRL, s/step |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for task in before:
        own, others = ([curves[trainer, task, seed] for seed in seeds] for trainer in TRAINERS)
        cells = [
            f"{mean:.3f} ± {half:.3f}"
            for values in (
                [curve["held_out"] for curve in own],
                [curve["held_out"] for curve in others],
                [fmean(curve["rewards"]) for curve in own],
                [fmean(curve["rewards"]) for curve in others],
                [a["held_out"] - b["held_out"] for a, b in zip(own, others, strict=True)],
            )
            for mean, half in [interval(values)]
        ]
        cells += [f"{fmean(sum(c['seconds']) / len(c['seconds']) for c in each):.2f}" for each in (own, others)]
        lines.append(f"| `{task}` | {before[task]:.3f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(curves: Curves, tasks: Sequence[str], seeds: Sequence[int], file: Path) -> None:
    """Draw reward by step above reward by second, one column a task: means of five steps, and their 95 % interval."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.6 * len(tasks) + 0.6, 4.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, len(tasks), sharey=True, squeeze=False)
    for column, task in enumerate(tasks):
        for trainer, colour in zip(TRAINERS, ("#2f6f9f", "#c8743c"), strict=True):
            runs = [curves[trainer, task, seed] for seed in seeds]
            windows = range(0, SETTINGS["steps"] - 4, 5)
            points = [interval([fmean(run["rewards"][at : at + 5]) for run in runs]) for at in windows]
            means, halves = [mean for mean, _ in points], [half for _, half in points]
            steps = [at + 5 for at in windows]
            seconds = [fmean(sum(run["seconds"][:step]) for run in runs) for step in steps]
            for axes, across in ((grid[0][column], steps), (grid[1][column], seconds)):
                axes.plot(across, means, color=colour, linewidth=1.5, label=trainer)
                axes.fill_between(
                    across,
                    [m - h for m, h in points],
                    [m + h for m, h in zip(means, halves, strict=True)],
                    color=colour,
                    alpha=0.2,
                    linewidth=0,
                )
        grid[0][column].set_title(task, fontsize=9, loc="left")
        grid[0][column].set_xlabel("step", fontsize=8)
        grid[1][column].set_xlabel("seconds of steps", fontsize=8)
        for axes in (grid[0][column], grid[1][column]):
            axes.tick_params(labelsize=7)
            axes.grid(alpha=0.25, linewidth=0.5)
            axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].legend(fontsize=8, frameon=False)
    figure.supylabel("training reward", fontsize=9)
    figure.savefig(file, format="png")


def main() -> None:
    """Train what is missing, then draw and tabulate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS), metavar="TASK")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--work", type=Path, default=HERE.parent / "runs/learning", help="problems, start model, runs")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs/assets")
    parser.add_argument("--records", type=Path, default=HERE / "learning.jsonl", help="finished runs")
    options = parser.parse_args()
    work = options.work.resolve()
    lines = options.records.read_text().splitlines() if options.records.is_file() else []
    curves: Curves = {(run["trainer"], run["task"], run["seed"]): run for run in map(json.loads, lines)}
    keys = [(trainer, task, seed) for seed in options.seeds for task in options.tasks for trainer in TRAINERS]
    missing = [key for key in keys if key not in curves]
    if missing:
        ensure_trl()
        tasks = list(dict.fromkeys(task for _, task, _ in missing))
        with ThreadPoolExecutor(options.jobs) as pool:
            starts = dict(zip(tasks, pool.map(lambda task: make_start(task, work), tasks), strict=True))
        shares = {task: accuracy(starts[task], task, work, work / task / "before.jsonl") for task in tasks}
        print("before:", ", ".join(f"{task} {share:.3f}" for task, share in shares.items()), flush=True)
        with ThreadPoolExecutor(options.jobs) as pool:
            jobs = {pool.submit(one, *key, shares[key[1]], work, options.records): key for key in missing}
            for job in as_completed(jobs):
                if job.exception() is not None:
                    pool.shutdown(wait=False, cancel_futures=True)
                curves[jobs[job]] = job.result()
    before = {
        task: fmean(curves[trainer, task, seed]["before"] for trainer in TRAINERS for seed in options.seeds)
        for task in options.tasks
    }
    options.out.mkdir(parents=True, exist_ok=True)
    draw(curves, options.tasks, options.seeds, options.out / "learning.png")
    print(table(curves, before, options.seeds))


if __name__ == "__main__":
    main()
