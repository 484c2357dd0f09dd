"""Measure the driver's cost in a step of 1,024 sequences: `python benchmarks/driver_overhead.py`.

128 prompts of 32 tokens, n=8, 32 response tokens each, a Qwen3 of 1 million random parameters: many short sequences and
a small model, the hardest case for all work outside the model. The real `RLTrainer` steps. Everything in a step that is not
generation, forward, backward, optimizer or reward counts as overhead (`perf/driver_overhead_ratio`): building and reordering
batches, planning and packing micro-batches, advantages, invariants, metrics. The bound is 5 %.

--profile shows by function where the time outside generation, reward and the model's passes goes.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import random
import statistics
import tempfile
from pathlib import Path

from grpo_step import machine
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from hone.config import RLConfig, load_config
from hone.models.init import init_model
from hone.trainers.rl import RLTrainer

HERE = Path(__file__).resolve().parent
WORDS, PROMPTS, N, PROMPT_LENGTH, RESPONSE_LENGTH = 512, 128, 8, 32, 32


def make_files(directory: Path) -> None:
    """Write a tokenizer of one word per token, `model/` and `prompts.jsonl`."""
    words = Tokenizer(
        models.WordLevel({**{str(i): i for i in range(WORDS - 2)}, "<end>": WORDS - 2, "<pad>": WORDS - 1}, "0")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>").save_pretrained(
        directory / "words"
    )
    init_model("qwen3", "1m", directory / "words", directory / "model", seed=0, context=512)
    draw = random.Random(1)
    with (directory / "prompts.jsonl").open("w") as file:
        for _ in range(PROMPTS):
            prompt = " ".join(str(draw.randrange(WORDS - 2)) for _ in range(PROMPT_LENGTH))
            file.write(
                json.dumps({"prompt": prompt, "data_source": "even", "reward_model": {"ground_truth": ""}}) + "\n"
            )


def make_trainer(files: Path, threads: int, overrides: list[str]) -> RLTrainer:
    """Return the trainer of the benchmark."""
    settings = [
        f"data.train_files={files}/prompts.jsonl",
        f"data.max_prompt_length={PROMPT_LENGTH}",
        f"data.max_response_length={RESPONSE_LENGTH}",
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.model.path={files}/model",
        f"actor_rollout_ref.rollout.n={N}",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "actor_rollout_ref.rollout.max_num_seqs=512",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "algorithm.adv_estimator=grpo",
        f"reward.custom_reward_function.path={HERE}/even_reward.py",
        f"trainer.default_local_dir={files}/run",
        f"trainer.num_threads={threads}",
        "trainer.total_training_steps=1000",
        "trainer.test_freq=0",
        "trainer.rollout_dump_freq=0",
    ]
    return RLTrainer(load_config(RLConfig, [*settings, *overrides]))


async def steps(
    trainer: RLTrainer, warm_up: int, repeats: int, profile: cProfile.Profile | None
) -> list[dict[str, float]]:
    """Return the metrics of the timed steps."""
    seen = []
    for repeat in range(warm_up + repeats):
        trainer.step += 1
        if profile and repeat == warm_up:
            profile.enable()
        metrics = await trainer.train_step()
        if repeat >= warm_up:
            seen.append(metrics)
    if profile:
        profile.disable()
    return seen


def report(seen: list[dict[str, float]]) -> None:
    """Print the split of the median step."""
    whole = statistics.median(metrics["perf/time_per_step"] for metrics in seen)
    ratios = [metrics["perf/driver_overhead_ratio"] for metrics in seen]
    names = [name for name in seen[0] if name.startswith("timing_s/")]
    print(f"{PROMPTS * N} sequences, {whole:.3f} s/step")
    stages = 0.0
    for name in names:
        seconds = statistics.median(metrics[name] for metrics in seen)
        stages += seconds
        print(f"  {name.removeprefix('timing_s/'):16} {seconds:8.4f} s   {seconds / whole:6.1%}")
    print(f"  {'between stages':16} {whole - stages:8.4f} s   {(whole - stages) / whole:6.1%}")
    overhead = statistics.median(ratios)
    print(f"driver overhead {overhead:.2%} (from {min(ratios):.2%} to {max(ratios):.2%}); the bound is 5 %")


def main() -> None:
    """Parse options, make the files, step, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timed steps, after two to warm up")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--profile", action="store_true", help="profile the timed steps by function (slows them)")
    parser.add_argument("overrides", nargs="*", help="key=value for the trainer")
    arguments = parser.parse_args()
    disable_progress_bar()
    print(machine(arguments.threads), flush=True)
    profile = cProfile.Profile() if arguments.profile else None
    with tempfile.TemporaryDirectory() as directory:
        make_files(Path(directory))
        trainer = make_trainer(Path(directory), arguments.threads, arguments.overrides)
        try:
            report(asyncio.run(steps(trainer, 2, arguments.repeats, profile)))
        finally:
            trainer.close()
    if profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
