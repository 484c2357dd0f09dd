"""Parts that run Hone's commands: every program on a small model, the oracle of an update, memory, and learning."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from gpu_check.commands import QUICKSTART, ROOT, check_run, data_keys, hone, rows_of, small_task
from gpu_check.results import Result

AGREE = 1e-3
"""Largest gap of a log-prob in float32 between engine and trainer."""
BATCH = (
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=1",
)
"""A small batch: 64 responses."""

BRIEF = """def compute_score(data_source, solution_str, ground_truth, extra_info):
    return 1 / (1 + len(solution_str))
"""
"""A reward that differs between the answers of an untrained model."""


def dtypes_of(result: Result) -> tuple[str, ...]:
    """Return the dtypes to try; a CPU may take many times as long in bfloat16."""
    return ("float32",) if result.device == "cpu" else ("float32", "bfloat16")


def smoke(result: Result, folder: Path) -> None:
    """Run every program for a few steps on a model of a million random weights."""
    task = small_task(folder)
    (folder / "brief.py").write_text(BRIEF)
    device = f"trainer.device={result.device}"
    short = ["trainer.total_training_steps=2", "trainer.test_freq=-1", device]
    common = [*data_keys(task), *short]
    hone("sft", "--config-path", QUICKSTART, "--config-name", "sft", f"model.path={task}/model", *common,
         "optim.lr_warmup_steps=1", f"trainer.default_local_dir={folder}/sft")  # fmt: skip
    check_run(result, "sft", folder / "sft", 2)
    hone("export", folder / "sft", "--out", folder / "imitator")
    variants = {
        "grpo_float32": ["actor_rollout_ref.actor.dtype=float32", "trainer.rollout_dump_freq=1"],
        "grpo_lora": ["actor_rollout_ref.model.lora_rank=8", f"actor_rollout_ref.actor.dtype={dtypes_of(result)[-1]}"],
        "grpo_bfloat16": ["actor_rollout_ref.actor.dtype=bfloat16"],
        "grpo_hf": ["actor_rollout_ref.rollout.name=hf", "data.max_response_length=8"],
        "ppo": ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-4", f"critic.model.path={folder}/imitator"],
    }
    if result.device == "cpu":
        del variants["grpo_bfloat16"]
    for name, keys in variants.items():
        run = folder / name
        hone("train", "--config-path", QUICKSTART, "--config-name", "grpo", f"actor_rollout_ref.model.path={folder}/imitator",
             *common, *BATCH, *keys, f"reward.custom_reward_function.path={folder}/brief.py", f"trainer.default_local_dir={run}")  # fmt: skip
        rows = check_run(result, name, run, 2)
        gap = max(row.get("training/rollout_log_probs_diff_max", 0.0) for row in rows)
        result.add(f"{name}: engine against trainer", gap, most=AGREE if name == "grpo_float32" else None)
    hone("data", "pairs", folder / "grpo_float32", "--out", folder / "pairs", "--val-share", 0.25, "--as", "tokens")
    pairs = [f"data.train_files={folder}/pairs/train.parquet", f"data.val_files={folder}/pairs/val.parquet", *short]
    for command, preset in (("prefer", ["--preset", "dpo"]), ("reward-model", [])):
        run = folder / command
        hone(
            command,
            *preset,
            f"model.path={folder}/imitator",
            *pairs,
            "data.train_batch_size=8",
            f"trainer.default_local_dir={run}",
        )
        check_run(result, command, run, 2)
    hone("eval", folder / "imitator", "--data", task / "data/val.parquet", "--max-response-length", 16)
    hone("generate", folder / "imitator", "What is 1+2?", "--max-tokens", 8)


def oracle(result: Result, folder: Path) -> None:
    """Compare updates on the device with float64 on the CPU, in both dtypes, from saved micro-batches."""
    task = small_task(folder)
    (folder / "brief.py").write_text(BRIEF)
    for dtype in dtypes_of(result):
        run = folder / dtype
        hone("train", "--config-path", QUICKSTART, "--config-name", "grpo", f"actor_rollout_ref.model.path={task}/model",
             *data_keys(task), f"trainer.device={result.device}", f"actor_rollout_ref.actor.dtype={dtype}",
             "trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.save_microbatch_steps=[2]", f"reward.custom_reward_function.path={folder}/brief.py",
             *BATCH, f"trainer.default_local_dir={run}")  # fmt: skip
        verdict = json.loads(hone("oracle", run, "--step", 2, "--json", accepted=(0, 1)))
        if not verdict["agrees"]:
            result.problems.append(f"{dtype}: {verdict['verdict']} {' '.join(verdict['hints'])}".rstrip())
        for kind in ("hidden", "log_probs", "gradient"):
            errors = [check["error"] / check["bound"] for check in verdict["checks"] if check["kind"] == kind]
            if errors:
                result.add(f"{dtype}: largest error of {kind} as a share of its bound", max(errors), most=1.0)


def memory(result: Result, folder: Path) -> None:
    """Compare the peak memory of a run with the prediction of `hone plan`."""
    small = result.device == "cpu"
    task = small_task(folder, rows=256)
    hone(
        "init",
        "--arch",
        "qwen3",
        "--size",
        "5m" if small else "600m",
        "--tokenizer",
        task / "tokenizer",
        "--out",
        folder / "large",
    )
    keys = [f"actor_rollout_ref.model.path={folder}/large", *data_keys(task), f"trainer.device={result.device}",
            "data.max_prompt_length=64", "data.max_response_length=64" if small else "data.max_response_length=1024",
            "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=8",
            f"actor_rollout_ref.actor.dtype={dtypes_of(result)[-1]}", "actor_rollout_ref.rollout.ignore_eos=true",
            "trainer.total_training_steps=2", "trainer.test_freq=-1", f"trainer.default_local_dir={folder}/run"]  # fmt: skip
    hone("train", "--preset", "grpo", *keys)
    rows = check_run(result, "run", folder / "run", 2)
    if small:
        result.notes.append(
            "peak memory is compared on GPUs only; tests/integration/test_plan_memory.py does it on CPUs"
        )
        return
    plan = json.loads(hone("plan", "--preset", "grpo", *keys, "--json", accepted=(0, 2)))
    planned = max(pool["peak"]["total"] for pool in plan["pools"]) / 2**30
    measured = max(row["perf/max_memory_allocated_gb"] for row in rows)
    result.add("planned peak", planned, "GiB")
    result.add("measured over planned", measured / planned, least=0.5, most=1.0)


def learning(result: Result, folder: Path) -> None:
    """Run the quickstart: imitation leaves a mistake in four of ten answers, and reinforcement removes it."""
    steps = ["trainer.total_training_steps=2"] if result.device == "cpu" else []
    command = [sys.executable, str(ROOT / "examples/quickstart/run.py"), "--out", str(folder / "run")]
    ended = subprocess.run([*command, f"trainer.device={result.device}", *steps], cwd=ROOT)
    if ended.returncode:
        result.problems.append(f"the quickstart ended with exit code {ended.returncode}")
        return
    rows = rows_of(folder / "run/grpo")
    (key,) = {name for name in rows[-1] if name.startswith("val-core/")}
    shares = [row[key] for row in rows if key in row]
    result.add("held-out accuracy before", shares[0])
    result.add("held-out accuracy after", shares[-1], least=None if steps else 0.9)
    result.add("tokens per second", sorted(row["perf/throughput"] for row in rows[1:])[len(rows) // 2 - 1])
