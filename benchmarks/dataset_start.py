"""Measure how a start grows with its dataset: `python benchmarks/dataset_start.py --rows 300000`.

The rows are word problems of about 100 tokens, as parquet and as JSON lines; the model has 900,000 weights. A run takes one step, first
with an empty cache of tokens, then from the cache. Processor time is that of the command with the processes that it started; memory is
the peak of the largest one.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from config_check import SCHEMA, make_data, measured
from grpo_step import machine

RUN = (
    "trainer.total_training_steps=1", "trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.val_before_train=false",
    "trainer.resume_mode=disable",
)  # fmt: skip


def main() -> None:
    """Make the files, start each program, print time and memory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=300_000)
    options = parser.parse_args()
    print(machine(os.cpu_count() or 1), f"{options.rows} rows")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        make_data(folder / "train.parquet", options.rows)
        with (folder / "train.jsonl").open("w") as lines, pq.ParquetFile(folder / "train.parquet") as file:
            lines.writelines(json.dumps(row) + "\n" for batch in file.iter_batches() for row in batch.to_pylist())
        conversations(folder / "train.parquet", folder / "sft.parquet")
        chats = {"--files": str(folder / "train.parquet"), "--out": str(folder / "tokenizer"), "--vocab-size": "2048"}
        hone(folder, "data", "tokenizer", *(word for pair in chats.items() for word in pair))
        hone(folder, "init", "--arch", "qwen3", "--tokenizer", "tokenizer", "--out", "model", "--size", "900k")
        train = ("train", "actor_rollout_ref.model.path=model", "data.train_batch_size=4")
        train += ("data.max_prompt_length=900", "data.max_response_length=8", "actor_rollout_ref.rollout.n=2")
        train += ("actor_rollout_ref.actor.ppo_mini_batch_size=4", "preflight.reward_rows=0", *RUN)
        sft = ("sft", "model.path=model", "data.max_length=1000", "data.truncation=drop", *RUN)
        for number, (title, words) in enumerate(
            {
                "dry run, parquet": (*train, "data.train_files=train.parquet", "--dry-run"),
                "dry run, JSON lines": (*train, "data.train_files=train.jsonl", "--dry-run"),
                "dry run, 100 of JSON lines": (
                    *train,
                    "data.train_files=train.jsonl",
                    "data.train_max_samples=100",
                    "--dry-run",
                ),
                "train, first": (*train, "data.train_files=train.parquet"),
                "train, cached": (*train, "data.train_files=train.parquet"),
                "sft, first": (*sft, "data.train_files=sft.parquet"),
                "sft, cached": (*sft, "data.train_files=sft.parquet"),
            }.items()
        ):
            wall, processor, memory = hone(folder, *words, f"trainer.experiment_name=run{number}")
            print(
                f"{title}: {wall:.1f} s wall, {processor:.1f} s of processor time, {memory / 2**20:.0f} MiB", flush=True
            )


def conversations(prompts: Path, file: Path) -> None:
    """Write the prompts with an answer as ``messages``."""
    schema = pa.schema({"messages": SCHEMA.field("prompt").type})
    with pq.ParquetFile(prompts) as stored, pq.ParquetWriter(file, schema) as writer:
        for batch in stored.iter_batches():
            rows = batch.to_pylist()
            answers = ({"role": "assistant", "content": f"#### {row['reward_model']['ground_truth']}"} for row in rows)
            chats = [{"messages": [*row["prompt"], answer]} for row, answer in zip(rows, answers, strict=True)]
            writer.write_table(pa.Table.from_pylist(chats, schema))


def hone(folder: Path, *words: str) -> tuple[float, float, int]:
    return measured(["-m", "hone.cli.main", *words], folder)


if __name__ == "__main__":
    main()
