"""What a cost-aware reward teaches: `python benchmarks/cost_of_calls.py WORKDIR [--seeds 3] [--png FILE]`.

A model of a million parameters imitates demonstrations that ask a calculator once or, equally often, ask the same again before they answer.
Both are right. Two arms, each with the same seeds:

    right        1 for the right answer
    cost-aware   1 for the right answer, less 0.1 for each call, and less a thousandth for each second that the tools took

The rewards read ``extra_info["episode"]``. The table and the picture have the calls of an episode and the share of right answers in training,
by step. What WORKDIR already has is not trained again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib

from hone.agents.tasks.demonstrations import calls, result, says
from hone.agents.tools.calculator import Calculator, calculate

HERE = Path(__file__).resolve().parent
ARMS = ("right", "cost_aware")
STEPS, PER_CALL, PER_SECOND = 30, 0.1, 0.001
CALLS, RIGHT = "tool/calls/mean", "reward/acc/mean"


def right(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, float]:
    """Return 1 for the right answer."""
    correct = float(solution_str.rpartition("####")[2].strip() == ground_truth)
    return {"score": correct, "acc": correct}


def cost_aware(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, float]:
    """Return 1 for the right answer, less the cost of its calls."""
    correct = right(data_source, solution_str, ground_truth, extra_info)["acc"]
    episode = extra_info.get("episode", {})
    seconds = sum(episode.get("seconds", {}).get("tools", {}).values())
    return {"score": correct - PER_CALL * len(episode.get("tool_calls", [])) - PER_SECOND * seconds, "acc": correct}


def rows(seed: int, count: int) -> list[dict[str, Any]]:
    """Return rows with demonstrations."""
    draw, made = random.Random(seed), []
    for index in range(count):
        expression = f"{draw.randint(2, 99)}{draw.choice('+*-')}{draw.randint(2, 99)}"
        value = calculate(expression)
        prompt = [{"role": "user", "content": f"What is {expression}?"}]
        turns = [
            message
            for number in range(draw.choice((1, 2)))
            for message in (calls("calculator", number, expression=expression), result("calculator", value, number))
        ]
        made.append(
            {
                "data_source": "calls",
                "agent_name": "tool_agent",
                "prompt": prompt,
                "messages": [*prompt, *turns, says(f"#### {value}")],
                "tools": json.dumps([Calculator().schema]),
                "reward_model": {"style": "rule", "ground_truth": value},
                "extra_info": {"index": index},
            }
        )
    return made


def hone(*arguments: str) -> None:
    """Run a command of Hone."""
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent}:{HERE}"}
    subprocess.run([sys.executable, "-m", "hone.cli.main", *arguments], check=True, env=environment)


def imitator(folder: Path, seed: int) -> Path:
    """Make data, tokenizer and the model that imitates the demonstrations, unless it is there."""
    if (folder / "imitator" / "config.json").is_file():
        return folder / "imitator"
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows(seed, 1500)))
    hone("data", "tokenizer", "--files", str(data), "--out", str(folder / "tokenizer"), "--vocab-size", "512", "--template", "chatml_tools")  # fmt: skip
    hone("init", "--arch", "qwen3", "--size", "1m", "--tokenizer", str(folder / "tokenizer"), "--out", str(folder / "model"), "--seed", str(seed))  # fmt: skip
    hone("sft", "--config-path", "examples/calculator_agent", "--config-name", "sft", f"model.path={folder}/model",
         f"data.train_files={data}", f"trainer.default_local_dir={folder}/sft", f"trainer.seed={seed}", "data.max_length=256", "trainer.total_training_steps=700")  # fmt: skip
    hone("export", str(folder / "sft"), "--out", str(folder / "imitator"))
    return folder / "imitator"


def train(folder: Path, arm: str, seed: int, model: Path) -> list[dict[str, float]]:
    """Train one arm; return its metrics by step."""
    where = folder / arm
    if not (where / "metrics.jsonl").is_file():
        hone("train", "--config-path", "examples/calculator_agent", "--config-name", "grpo",
             f"actor_rollout_ref.model.path={model}", f"data.train_files={folder}/train.jsonl", f"trainer.default_local_dir={where}",
             f"reward.custom_reward_function.path={HERE / 'cost_of_calls.py'}", f"reward.custom_reward_function.name={arm}",
             "data.max_response_length=128", "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4",
             f"trainer.seed={seed}", f"trainer.total_training_steps={STEPS}", "trainer.test_freq=-1")  # fmt: skip
    return [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]


def draw(curves: dict[str, list[list[dict[str, float]]]], file: Path) -> None:
    """Draw calls and right answers of every arm: mean and range of the seeds."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, both = pyplot.subplots(1, 2, figsize=(9, 3.5))
    for axes, metric, title in zip(both, (CALLS, RIGHT), ("calls an episode", "right answers"), strict=True):
        for arm, seeds in curves.items():
            steps = [int(row["step"]) for row in seeds[0]]
            values = [[rows[place][metric] for rows in seeds] for place in range(len(steps))]
            (line,) = axes.plot(steps, [statistics.fmean(v) for v in values], label=arm.replace("_", "-"))
            axes.fill_between(
                steps, [min(v) for v in values], [max(v) for v in values], alpha=0.2, color=line.get_color()
            )
        axes.set(xlabel="step", title=title, ylim=(0, None))
    both[0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    """Run both arms, print the table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--png", type=Path)
    arguments = parser.parse_args()
    curves: dict[str, list[list[dict[str, float]]]] = {arm: [] for arm in ARMS}
    for seed in range(1, arguments.seeds + 1):
        folder = arguments.workdir.resolve() / f"seed_{seed}"
        model = imitator(folder, seed)
        for arm in ARMS:
            curves[arm].append(train(folder, arm, seed, model))
    for arm, seeds in curves.items():
        for number, curve in enumerate(seeds, 1):
            shown = [row for row in curve if row["step"] in (1, STEPS // 3, 2 * STEPS // 3, STEPS)]
            print(f"{arm:10} seed {number}: " + "  ".join(f"step {row['step']}: {row[CALLS]:.2f} calls, {row[RIGHT]:.2f} right" for row in shown))  # fmt: skip
    if arguments.png is not None:
        draw(curves, arguments.png)


if __name__ == "__main__":
    main()
