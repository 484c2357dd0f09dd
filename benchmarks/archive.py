"""Measure the rollout archive: `python benchmarks/archive.py`.

The quickstart's run (8 x 8 answers of up to 24 tokens by a Qwen3 of 1 million random parameters) and a run of long answers
(8 x 8 of 256 tokens) step with every sequence of every step stored, the dearest setting. Printed are

- processor seconds of a step, and of the archive as a share of them: in the step itself, and in the thread that writes the file while
  the next step runs,
- bytes of the file per response token.

The bound is 2 % of a step. Processor seconds do not count the time in which other programs hold the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from grpo_step import machine
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from hone.config import RLConfig, load_config
from hone.insight.archive.read import open_archive
from hone.insight.archive.write import BackgroundWriter, step_file
from hone.models.init import init_model
from hone.trainers.archiving import Archiving
from hone.trainers.rl import RLTrainer

HERE = Path(__file__).resolve().parent
WORDS, PROMPTS, N = 512, 8, 8
SHAPES = {"quickstart": 24, "long answers": 256}


def make_files(directory: Path) -> None:
    """Write a tokenizer of one word per token, `model/` and `prompts.jsonl`."""
    vocabulary = {**{str(i): i for i in range(WORDS - 2)}, "<end>": WORDS - 2, "<pad>": WORDS - 1}
    words = Tokenizer(models.WordLevel(vocabulary, "0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>").save_pretrained(
        directory / "words"
    )
    init_model("qwen3", "1m", directory / "words", directory / "model", seed=0, context=1024)
    draw = random.Random(1)
    with (directory / "prompts.jsonl").open("w") as file:
        for _ in range(PROMPTS):
            prompt = " ".join(str(draw.randrange(WORDS - 2)) for _ in range(32))
            row = {"prompt": prompt, "data_source": "even", "reward_model": {"ground_truth": ""}}
            file.write(json.dumps(row) + "\n")


def make_trainer(files: Path, run: Path, length: int, steps: int, threads: int) -> RLTrainer:
    """Return a trainer that stores every sequence."""
    settings = [
        f"data.train_files={files}/prompts.jsonl",
        "data.max_prompt_length=32",
        f"data.max_response_length={length}",
        f"data.train_batch_size={PROMPTS}",
        "data.shuffle=false",
        f"actor_rollout_ref.model.path={files}/model",
        f"actor_rollout_ref.rollout.n={N}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
        f"custom_reward_function.path={HERE}/even_reward.py",
        "custom_reward_function.name=even_share",
        "reward.num_workers=1",
        f"trainer.total_training_steps={steps + 1}",
        f"trainer.default_local_dir={run}",
        "trainer.rollout_dump_freq=1",
        f"trainer.num_threads={threads}",
        "trainer.save_freq=0",
        "trainer.logger=[]",
    ]
    return RLTrainer(load_config(RLConfig, overrides=settings))


class Timed:
    """Processor seconds of the archive: in the step and in the thread."""

    def __init__(self) -> None:
        self.in_step: list[float] = []
        self.in_thread: list[float] = []
        write, submit = Archiving.write, BackgroundWriter.submit

        async def timed_write(archive: Archiving, *arguments: Any) -> None:
            begun = time.thread_time()
            await write(archive, *arguments)
            self.in_step.append(time.thread_time() - begun)

        def timed_submit(writer: BackgroundWriter, job: Any) -> None:
            def run() -> object:
                begun = time.thread_time()
                try:
                    return job()
                finally:
                    self.in_thread.append(time.thread_time() - begun)

            submit(writer, run)

        Archiving.write, BackgroundWriter.submit = timed_write, timed_submit  # type: ignore[method-assign]


async def measure(trainer: RLTrainer, timed: Timed, steps: int) -> tuple[float, float, float]:
    """Return medians over the steps after the first: processor seconds of a step, of the archive in it, and in the thread."""
    seconds = []
    with trainer.session.running(steps + 1, steps + 1):
        for step in range(1, steps + 2):
            trainer.step = step
            begun = time.process_time()
            await trainer.train_step()
            seconds.append(time.process_time() - begun)
        await trainer.archive.wait()
        trainer.session.completed(trainer.step, {})
    parts = (seconds[1:], timed.in_step[-steps:], timed.in_thread[-steps:])
    step_seconds, in_step, in_thread = map(statistics.median, parts)
    return step_seconds, in_step, in_thread


def main() -> None:
    """Run the shapes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="timed steps")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of torch")
    arguments = parser.parse_args()
    steps, threads = arguments.steps, arguments.threads
    disable_progress_bar()
    print(machine(threads))
    print(f"{'shape':<14}{'cpu s/step':>11}{'archive':>10}{'share':>9}{'thread':>10}{'share':>9}{'bytes/token':>13}")
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder)
        make_files(files)
        timed = Timed()
        for name, length in SHAPES.items():
            run = files / name.replace(" ", "_")
            trainer = make_trainer(files, run, length, steps, threads)
            try:
                step_seconds, in_step, in_thread = asyncio.run(measure(trainer, timed, steps))
            finally:
                trainer.close()
            archive = open_archive(run)
            step = archive.steps()[-1]
            tokens = sum(len(record["response_ids"]) for record in archive.records(step, ["response_ids"]))
            size = step_file(archive.folder, step).stat().st_size
            shares = (in_step / step_seconds, in_thread / step_seconds)
            print(
                f"{name:<14}{step_seconds:>11.3f}{in_step * 1000:>8.1f}ms{shares[0]:>9.2%}"
                f"{in_thread * 1000:>8.1f}ms{shares[1]:>9.2%}{size / tokens:>13.1f}"
            )


if __name__ == "__main__":
    main()
