"""The part that measures weights on their way to an engine in a process of its own."""

from __future__ import annotations

from pathlib import Path

from gpu_check.commands import check_run, data_keys, hone, small_task
from gpu_check.results import Result


def weights(result: Result, folder: Path) -> None:
    """Time the weight sync to a native engine in another process of the same device, by turns and asynchronously."""
    size = "5m" if result.device == "cpu" else "600m"
    task = small_task(folder, rows=256)
    hone("init", "--arch", "qwen3", "--size", size, "--tokenizer", task / "tokenizer", "--out", folder / "large")
    common = [f"actor_rollout_ref.model.path={folder}/large", *data_keys(task), f"trainer.device={result.device}",
              "data.max_prompt_length=64", "data.max_response_length=32", "data.train_batch_size=4",
              "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=4",
              f"actor_rollout_ref.actor.dtype={'float32' if result.device == 'cpu' else 'bfloat16'}", "trainer.total_training_steps=3", "trainer.test_freq=-1"]  # fmt: skip
    for name, keys in {"by turns": [], "one update old": ["trainer.async.max_staleness=1"]}.items():
        run = folder / name.replace(" ", "_")
        hone("train", "--preset", "grpo", *common, *keys, "actor_rollout_ref.rollout.num_replicas=1",
             f"trainer.default_local_dir={run}")  # fmt: skip
        rows = check_run(result, name, run, 3)
        result.add(
            f"{name}: seconds of a weight sync",
            min(row["timing_s/update_weights"] for row in rows if "timing_s/update_weights" in row),
            "s",
        )
    result.notes.append("weights travel through host memory: CUDA IPC and NCCL transports do not exist yet")
