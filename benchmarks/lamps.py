"""Train an agent that may look before it answers: `python benchmarks/lamps.py noisy|costs WORKDIR [--seeds 3] [--png FILE]`.

`In the cellar: is lamp 17 on?` A call of the tool `look` gives the answer; without it, yes is right for three in four of the cellar's lamps (three
in five in `costs`), and always in the hall. A model of 200,000 random parameters imitates two kinds of demonstrations equally often: one looks first and is always right, one
says yes at once. GRPO can teach it when to look. All arms begin with the same model of their seed.

`noisy`: 30 % of the calls die, and all lamps are in the cellar. All arms are validated on a sandbox that works.

    quiet        no call dies
    no verdict   a dead call raises NoVerdict: the episode is played again once, then left out
    zero         an episode in which a call died gets the reward 0, as where a failed sandbox counts as a wrong answer

With zero, looking earns 0.70 and guessing 0.75: a failing sandbox teaches that calls are bad.

`costs`: a reward that charges for the tokens that tools return (`episode["tokens"]["given"]`). Half the lamps are in the hall.

    free           only the answer counts
    priced         a look costs 0.2: worth it in the cellar, where guessing earns 0.6, and not in the hall
    priced, std    the same, with advantages divided by the standard deviation of their group

In a group of equal answers the price is the only difference. Divided by its standard deviation it weighs as much as a wrong answer in another
group, so looks disappear in the cellar too.

WORKDIR keeps data, models and runs; what it already has is not trained again.
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
from hone.agents.tools.base import Tool, ToolError
from hone.errors import NoVerdict
from hone.insight.run_files import read_metrics

HERE = Path(__file__).resolve().parent
DIES, YES = 0.3, {"noisy": 0.75, "costs": 0.6}
"""Share of calls that die, and of the cellar's lamps that are on."""
LOOKS_SHOWN = {"noisy": {"cellar": 0.5}, "costs": {"hall": 0.3, "cellar": 0.7}}
"""Share of the demonstrations that look."""
PLACES = {"noisy": ("cellar",), "costs": ("hall", "cellar")}
ARMS = {"noisy": ("quiet", "no verdict", "zero"), "costs": ("free", "priced", "priced, std")}
PRICE = 0.02
"""Price of a token that a tool returns, where looks are priced; a look returns 10, with the marks of the chat template."""
STEPS = 40
ACCURACY, LOOKS = "val-core/{}/acc/mean@1", "val-aux/{}/looks/mean@1"
SCHEMA = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Say whether the lamp is on.",
        "parameters": {"type": "object", "properties": {}},
    },
}
SFT = {
    "data.max_length": 192,
    "data.train_batch_size": 32,
    "optim.lr": 3e-3,
    "optim.lr_warmup_steps": 20,
    "trainer.total_training_steps": 400,
}
GRPO = {
    "data.max_prompt_length": 128,
    "data.max_response_length": 48,
    "data.train_batch_size": 24,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 12,
    "actor_rollout_ref.actor.optim.lr": 3e-4,
    "actor_rollout_ref.actor.optim.lr_warmup_steps": 3,
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.rollout.multi_turn.enable": True,
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 3,
    "trainer.total_training_steps": STEPS,
    "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
    "trainer.test_freq": 5,
}


class Look(Tool):
    """Sight of the row's lamp, in a sandbox that may die.

    Args:
        config: settings of the tool file; with ``zero`` a dead sandbox is an error that the model reads, instead of no verdict.
        tool_schema: not used.
    """

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Any = None) -> None:
        super().__init__(SCHEMA)
        self.zero, self.retries = bool((config or {}).get("zero")), 0
        self._draw = random.Random(7)

    async def execute(self, state: Any, arguments: Mapping[str, Any], *, lamp: str, dies: float, **kwargs: Any) -> str:
        """Return ``lamp``, or die with probability ``dies``; both come from the row."""
        if self._draw.random() < dies:
            raise ToolError("the sandbox died") if self.zero else NoVerdict("the sandbox died")
        return lamp


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], per_token: float = 0.0
) -> dict[str, float]:
    """Return 1 for the right answer, less ``per_token`` for each token that tools returned; 0 if a call died."""
    episode = extra_info.get("episode", {})
    looked = [call["result"] for call in episode.get("tool_calls", [])]
    right = float(
        solution_str.rpartition("####")[2].strip() == ground_truth and not any("died" in text for text in looked)
    )
    given = episode.get("tokens", {}).get("given", 0)
    return {"score": right - per_token * given, "acc": right, "looks": float(len(looked)), "given": float(given)}


def rows(seed: int, count: int, experiment: str, dies: float) -> list[dict[str, Any]]:
    """Return rows with demonstrations."""
    draw, made = random.Random(seed), []
    for index in range(count):
        place = draw.choice(PLACES[experiment])
        lamp = "yes" if place == "hall" or draw.random() < YES[experiment] else "no"
        prompt = [{"role": "user", "content": f"In the {place}: is lamp {draw.randrange(1000)} on?"}]
        looked = [calls("look"), result("look", lamp), says(f"#### {lamp}")]
        shown = looked if draw.random() < LOOKS_SHOWN[experiment][place] else [says("#### yes")]
        extra = {"index": index, "tools_kwargs": {"look": {"execute_kwargs": {"dies": dies, "lamp": lamp}}}}
        made.append(
            {
                "data_source": place,
                "agent_name": "tool_agent",
                "prompt": prompt,
                "messages": [*prompt, *shown],
                "tools": json.dumps([SCHEMA]),
                "reward_model": {"style": "rule", "ground_truth": lamp},
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


def imitator(folder: Path, seed: int, experiment: str) -> Path:
    """Make data, tokenizer and the model that imitates the demonstrations, unless it is there."""
    if (folder / "imitator" / "config.json").is_file():
        return folder / "imitator"
    for name, dies in (("quiet", 0.0), ("noisy", DIES)):
        write(folder / f"{name}.jsonl", rows(seed, 1500, experiment, dies))
    write(folder / "val.jsonl", rows(seed + 1000, 256, experiment, 0.0))
    data = str(folder / "quiet.jsonl")
    hone(
        "data",
        "tokenizer",
        "--files",
        data,
        "--out",
        f"{folder}/tokenizer",
        "--vocab-size",
        "400",
        "--template",
        "chatml_tools",
    )
    hone(
        "init",
        "--arch",
        "qwen3",
        "--size",
        "200k",
        "--tokenizer",
        f"{folder}/tokenizer",
        "--out",
        f"{folder}/model",
        "--seed",
        str(seed),
    )
    keys = {**SFT, "model.path": folder / "model", "data.train_files": data, "trainer.seed": seed}
    hone("sft", *(f"{key}={value}" for key, value in keys.items()), f"trainer.default_local_dir={folder}/sft")
    hone("export", f"{folder}/sft", "--out", f"{folder}/imitator")
    return folder / "imitator"


def train(folder: Path, arm: str, seed: int, model: Path) -> list[dict[str, float]]:
    """Train one arm; return its metrics by step."""
    where = folder / arm.replace(" ", "_").replace(",", "")
    metrics = read_metrics(where)
    if metrics and metrics[-1]["step"] == STEPS:
        return metrics
    tools = folder / f"{where.name}.yaml"
    tools.write_text(f"tools:\n  - class_name: lamps.Look\n    config: {{zero: {str(arm == 'zero').lower()}}}\n")
    keys = {
        **GRPO,
        "actor_rollout_ref.model.path": model,
        "data.train_files": folder / f"{'noisy' if arm in ('no verdict', 'zero') else 'quiet'}.jsonl",
        "data.val_files": folder / "val.jsonl",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path": tools,
        "reward.custom_reward_function.path": HERE / "lamps.py",
        "trainer.default_local_dir": where,
        "trainer.seed": seed,
    }
    if arm.startswith("priced"):
        keys["reward.custom_reward_function.reward_kwargs"] = f"{{per_token: {PRICE}}}"
    keys["algorithm.norm_adv_by_std_in_grpo"] = arm.endswith("std")
    hone("train", "--preset", "grpo", *(f"{key}={value}" for key, value in keys.items()))
    return read_metrics(where)


def curves(metrics: list[dict[str, float]], name: str) -> dict[int, float]:
    """Return a validation metric by step."""
    return {int(row["step"]): row[name] for row in metrics if name in row}


def main() -> None:
    """Run all arms, print the table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=list(ARMS))
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--png", type=Path)
    arguments = parser.parse_args()
    places = PLACES[arguments.experiment]
    runs: dict[str, list[list[dict[str, float]]]] = {arm: [] for arm in ARMS[arguments.experiment]}
    for seed in range(1, arguments.seeds + 1):
        folder = arguments.workdir.resolve() / arguments.experiment / f"seed_{seed}"
        model = imitator(folder, seed, arguments.experiment)
        for arm, seeds in runs.items():
            seeds.append(train(folder, arm, seed, model))
    shown = {f"{place}: right": ACCURACY.format(place) for place in places}
    shown |= {f"{place}: looks": LOOKS.format(place) for place in places}
    lines = {
        (arm, what): [curves(metrics, name) for metrics in seeds]
        for arm, seeds in runs.items()
        for what, name in shown.items()
    }
    for (arm, what), seeds in lines.items():
        for number, curve in enumerate(seeds, 1):
            print(
                f"{arm:10} {what:14} seed {number}: "
                + " ".join(f"{step}:{value:.2f}" for step, value in sorted(curve.items()))
            )
    if arguments.png is not None:
        draw(lines, [name for name in shown if arguments.experiment == "costs" or "right" in name], arguments.png)


def draw(lines: dict[tuple[str, str], list[dict[int, float]]], panels: list[str], file: Path) -> None:
    """Draw mean and range of the seeds of every arm, one panel for each quantity."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(3.4 * len(panels) + 2, 3.2), sharey=True, squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        for (arm, what), seeds in lines.items():
            if what == panel:
                steps = sorted(seeds[0])
                values = [[curve[step] for curve in seeds] for step in steps]
                (line,) = axis.plot(steps, [statistics.fmean(v) for v in values], label=arm)
                axis.fill_between(
                    steps, [min(v) for v in values], [max(v) for v in values], alpha=0.2, color=line.get_color()
                )
        axis.set(xlabel="step", title=panel, ylim=(-0.03, 1.05))
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    main()
