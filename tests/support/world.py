"""The smallest world in which training can be watched: a task, a tokenizer, and a model that knows the format only."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.launch import hone

from hone.insight.metrics import is_timing

PROMPT, RESPONSE = 32, 8
"""Longest prompt and response in tokens."""


@dataclass
class World:
    """Paths of what was made once.

    Attributes:
        train: 12 problems `copy <four binary digits>`.
        val: the other 4.
        conversations: 512 such problems, each answered with a random number of random digits.
        tokenizer: small byte-level one.
        blank: model with random weights.
        model: the same after imitating ``conversations``: it answers with digits, right ones by chance (reward 0.07).
    """

    root: Path
    train: Path
    val: Path
    conversations: Path
    tokenizer: Path
    blank: Path
    model: Path


def world_in(root: Path) -> World:
    """The world that :func:`make_world` makes there."""
    return World(
        root,
        root / "data/train.parquet",
        root / "data/val.parquet",
        root / "conversations.jsonl",
        root / "tokenizer",
        root / "blank",
        root / "sft/checkpoints/step_60/actor",
    )


def make_world(root: Path) -> None:
    """Make it with the commands that a user has."""
    world = world_in(root)
    draw = random.Random(0)
    with world.conversations.open("w") as file:
        for _ in range(512):
            question = "copy " + "".join(draw.choice("01") for _ in range(4))
            answer = "".join(draw.choice("0123456789") for _ in range(draw.randint(1, 7)))
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
    for number, arguments in enumerate(
        [
            ("data", "make", "digit_sequence", "length=4", "digits=2", "--out", root / "data", "--size", 12, "--val-size", 4),
            ("data", "tokenizer", "--files", world.conversations, "--out", world.tokenizer, "--vocab-size", 300),
            ("init", "--arch", "qwen3", "--size", "200k", "--tokenizer", world.tokenizer, "--out", world.blank),
            sft_command(world, root / "sft", "trainer.total_training_steps=60", "optim.lr=4e-3", "data.train_batch_size=64",
                        "optim.lr_scheduler_type=cosine"),
        ]
    ):  # fmt: skip
        ended = hone(*arguments, log=root / f"make{number}.log")
        assert ended.code == 0, ended.output


def sft_command(world: World, run: Path, *overrides: str) -> list[str]:
    """`hone sft` over the conversations, from the blank model."""
    return [
        "sft",
        f"model.path={world.blank}",
        f"data.train_files={world.conversations}",
        "data.max_length=64",
        f"trainer.default_local_dir={run}",
        "trainer.num_threads=1",
        "trainer.device=cpu",
        *overrides,
    ]


def rl_command(world: World, run: Path, preset: str, *overrides: str) -> list[str]:
    """`hone train` on the task: all 12 prompts a step, 4 answers each."""
    return [
        "train",
        f"--preset={preset}",
        f"actor_rollout_ref.model.path={world.model}",
        f"data.train_files={world.train}",
        "data.train_batch_size=12",
        f"data.max_prompt_length={PROMPT}",
        f"data.max_response_length={RESPONSE}",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=6",
        f"trainer.default_local_dir={run}",
        "trainer.num_threads=1",
        "trainer.device=cpu",
        *overrides,
    ]


def metrics(run: Path, *, timing: bool = False) -> list[dict[str, Any]]:
    """The steps of metrics.jsonl, unless ``timing`` without those fields that measure time or memory."""
    rows: dict[int, dict[str, Any]] = {}
    written = (run / "metrics.jsonl").read_text()
    for line in written[: written.rfind("\n") + 1].splitlines():  # a run that goes on may be writing the last one
        row = json.loads(line)
        rows.setdefault(row["step"], {}).update(row)  # a validation during training has a line of its own
    return [{name: value for name, value in row.items() if timing or not is_timing(name)} for row in rows.values()]


def curve(run: Path, name: str = "critic/score/mean") -> list[float]:
    """A metric over the steps that have it."""
    return [row[name] for row in metrics(run) if name in row]


def run_record(run: Path) -> dict[str, Any]:
    """run.json."""
    return json.loads((run / "run.json").read_text())


def steps_saved(run: Path) -> list[int]:
    """Steps with a checkpoint."""
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*"))


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)
