"""Train an agent whose sandbox dies in 30 % of the calls: `python benchmarks/noisy_sandbox.py WORKDIR [--seeds 3] [--png FILE]`.

Questions like `Is 17*24 over 90?` have the answer yes in 75 % of the cases. A model of a million parameters imitates two kinds of
demonstrations equally often: one asks a tool and is always right, one answers at once, with yes in 95 % of the cases. GRPO can teach it to
ask. Three arms, each with the same seeds:

    quiet        the tool always answers
    no verdict   a call in three or so (30 %) dies: the tool raises NoVerdict, the episode is played again once, then left out
    zero         the same, but an episode in which a call died gets the reward 0, as where a failed sandbox counts as a wrong answer

With zero, asking earns at most 0.70 and guessing 0.73: a failing sandbox teaches that calls are bad. All arms are validated on a sandbox that
works. The table and the picture have the share of right greedy answers to held-out questions. What WORKDIR already has is not trained again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

from hone.agents.tasks.demonstrations import calls, result, says
from hone.agents.tools.base import ToolError
from hone.agents.tools.calculator import Calculator, calculate
from hone.errors import NoVerdict

HERE = Path(__file__).resolve().parent
ARMS = ("quiet", "no verdict", "zero")
DIES, OVER, YES, GUESS = 0.3, 90, 0.75, 0.95
"""Share of calls that die, threshold of the questions, shares of questions and of demonstrated guesses whose answer is yes."""
STEPS = 30


class DyingComparison(Calculator):
    """Comparison of an expression with the threshold, in a sandbox that may die.

    Args:
        config: settings of the tool file; with ``zero`` a dead sandbox is an error that the model reads, instead of no verdict.
        tool_schema: not used.
    """

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Any = None) -> None:
        super().__init__()
        self.zero, self.retries = bool((config or {}).get("zero")), 0
        self._draw = random.Random(7)

    async def execute(self, state: Any, arguments: Mapping[str, Any], *, dies: float = 0.0, **kwargs: Any) -> str:
        """Return yes or no, or die with probability ``dies``, which comes from the row."""
        if self._draw.random() < dies:
            raise ToolError("the sandbox died") if self.zero else NoVerdict("the sandbox died")
        return "yes" if float(calculate(arguments["expression"])) > OVER else "no"


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Return 1 for the right answer; 0 if a call died."""
    died = any("the sandbox died" in call["result"] for call in extra_info.get("episode", {}).get("tool_calls", []))
    right = solution_str.rpartition("####")[2].strip() == ground_truth
    return {"score": float(right and not died), "acc": right and not died}


def question(draw: random.Random) -> tuple[str, str]:
    """Return an expression and its answer; the shares of answers are those of :data:`YES`."""
    wanted = "yes" if draw.random() < YES else "no"
    while True:
        expression = f"{draw.randint(2, 30)}{draw.choice('+*')}{draw.randint(2, 30)}"
        if (answer := "yes" if int(calculate(expression)) > OVER else "no") == wanted:
            return expression, answer


def rows(seed: int, count: int, dies: float) -> list[dict[str, Any]]:
    """Return rows with demonstrations."""
    draw, made = random.Random(seed), []
    for index in range(count):
        expression, answer = question(draw)
        prompt = [{"role": "user", "content": f"Is {expression} over {OVER}?"}]
        guess = "yes" if draw.random() < GUESS else "no"
        called = [calls("calculator", expression=expression), result("calculator", answer), says(f"#### {answer}")]
        shown = called if draw.random() < 0.5 else [says(f"#### {guess}")]
        extra = {"index": index, "tools_kwargs": {"calculator": {"execute_kwargs": {"dies": dies}}}}
        made.append(
            {
                "data_source": "over",
                "agent_name": "tool_agent",
                "prompt": prompt,
                "messages": [*prompt, *shown],
                "tools": json.dumps([Calculator().schema]),
                "reward_model": {"style": "rule", "ground_truth": answer},
                "extra_info": extra,
            }
        )
    return made


def write(path: Path, contents: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in contents))


def hone(*arguments: str) -> None:
    """Run a command of Hone; the tool's module is importable."""
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent}:{HERE}"}
    subprocess.run([sys.executable, "-m", "hone.cli.main", *arguments], check=True, env=environment)


def imitator(folder: Path, seed: int) -> Path:
    """Make data, tokenizer and the model that imitates the demonstrations, unless it is there."""
    if (folder / "imitator" / "config.json").is_file():
        return folder / "imitator"
    for name, dies in (("quiet", 0.0), ("noisy", DIES)):
        write(folder / f"{name}.jsonl", rows(seed, 1500, dies))
    write(folder / "val.jsonl", rows(seed + 1000, 128, 0.0))
    data, where = str(folder / "quiet.jsonl"), folder / "imitator"
    hone("data", "tokenizer", "--files", data, "--out", str(folder / "tokenizer"), "--vocab-size", "512", "--template", "chatml_tools")  # fmt: skip
    hone("init", "--arch", "qwen3", "--size", "1m", "--tokenizer", str(folder / "tokenizer"), "--out", str(folder / "model"), "--seed", str(seed))  # fmt: skip
    hone("sft", "--config-path", "examples/calculator_agent", "--config-name", "sft", f"model.path={folder}/model",
         f"data.train_files={data}", f"trainer.default_local_dir={folder}/sft", f"trainer.seed={seed}", "trainer.total_training_steps=700")  # fmt: skip
    hone("export", str(folder / "sft"), "--out", str(where))
    return where


def train(folder: Path, arm: str, seed: int, model: Path) -> dict[int, float]:
    """Train one arm; return the share of right answers by step."""
    name = arm.replace(" ", "_")
    where = folder / name
    curve = validations(where)
    if STEPS in curve:
        return curve
    tools = folder / f"{name}.yaml"
    zero = str(arm == "zero").lower()
    tools.write_text(f"tools:\n  - class_name: noisy_sandbox.DyingComparison\n    config: {{zero: {zero}}}\n")
    data = folder / f"{'quiet' if arm == 'quiet' else 'noisy'}.jsonl"
    hone("train", "--config-path", "examples/calculator_agent", "--config-name", "grpo",
         f"actor_rollout_ref.model.path={model}", f"data.train_files={data}", f"data.val_files={folder}/val.jsonl",
         f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tools}", f"trainer.default_local_dir={where}",
         f"reward.custom_reward_function.path={HERE / 'noisy_sandbox.py'}", f"trainer.seed={seed}",
         f"trainer.total_training_steps={STEPS}", "trainer.test_freq=5")  # fmt: skip
    return validations(where)


def validations(run: Path) -> dict[int, float]:
    """Return the share of right answers of a run by step; empty if it has not begun."""
    if not (run / "metrics.jsonl").is_file():
        return {}
    curve = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "val-core/over/acc/mean@1" in row:
            curve[row["step"]] = row["val-core/over/acc/mean@1"]
    return curve


def draw(curves: dict[str, list[dict[int, float]]], file: Path) -> None:
    """Draw mean and range of the seeds of every arm."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for arm, seeds in curves.items():
        steps = sorted(seeds[0])
        values = [[curve[step] for curve in seeds] for step in steps]
        (line,) = axes.plot(steps, [statistics.fmean(v) for v in values], label=arm)
        axes.fill_between(steps, [min(v) for v in values], [max(v) for v in values], alpha=0.2, color=line.get_color())
    axes.set(xlabel="step", ylabel="right answers, held out", ylim=(0.6, 1.02))
    axes.axhline(YES, color="grey", linestyle=":", linewidth=1)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    """Run all arms, print the table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--png", type=Path)
    arguments = parser.parse_args()
    curves: dict[str, list[dict[int, float]]] = {arm: [] for arm in ARMS}
    for seed in range(1, arguments.seeds + 1):
        folder = arguments.workdir.resolve() / f"seed_{seed}"
        model = imitator(folder, seed)
        for arm in ARMS:
            curves[arm].append(train(folder, arm, seed, model))
    for arm, seeds in curves.items():
        for number, curve in enumerate(seeds, 1):
            print(
                f"{arm:10} seed {number}: " + " ".join(f"{step}:{share:.2f}" for step, share in sorted(curve.items()))
            )
    if arguments.png is not None:
        draw(curves, arguments.png)


if __name__ == "__main__":
    main()
