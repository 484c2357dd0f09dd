"""The six programs that train, each so that it saves a checkpoint after every step: what can be killed at any moment."""

from __future__ import annotations

import json
import random
from pathlib import Path

from support.slow_loop import ASYNCHRONOUS, MULTI_TURN, PROMPTS
from support.world import World, rl_command, sft_command


def words_of(program: str, world: World, run: Path, steps: int) -> list[str]:
    """Return the arguments of a program that saves after every step."""
    saved = [
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=1",
        "trainer.max_ckpt_to_keep=2",
        "trainer.logger=[]",
    ]
    learning = [
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"data.train_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ]
    if program == "sync":
        return rl_command(world, run, "grpo", *saved, *learning)
    if program == "agents":
        quick = [word.replace("SlowTool", "QuickTool") for word in MULTI_TURN]
        return rl_command(world, run, "grpo", *saved, *learning, *quick)
    if program == "async":
        return rl_command(world, run, "grpo", *saved, *ASYNCHRONOUS)
    if program == "sft":
        return sft_command(world, run, *saved, "data.train_batch_size=8")
    pairs = world.root / "pairs.jsonl"
    common = [f"model.path={world.model}", f"data.train_files={pairs}", "data.max_length=64", "data.train_batch_size=4",
              f"trainer.default_local_dir={run}", "trainer.num_threads=1", "trainer.device=cpu", "optim.lr=1e-3"]  # fmt: skip
    return [program, *common, *saved]


def make_pairs(world: World) -> None:
    """Write preferences: right digits over others."""
    draw = random.Random(1)
    with (world.root / "pairs.jsonl").open("w") as file:
        for _ in range(64):
            digits = "".join(draw.choice("01") for _ in range(4))
            said = [[{"role": "assistant", "content": text}] for text in (digits, digits[::-1] + "7")]
            prompt = [{"role": "user", "content": f"copy {digits}"}]
            file.write(json.dumps({"prompt": prompt, "chosen": said[0], "rejected": said[1]}) + "\n")
