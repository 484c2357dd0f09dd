"""Parts that run Hone's commands, each a fork of this process, so that no command imports its libraries again."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from gpu_check.results import Result

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
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


def hone(*words: object, out: Path | None = None) -> int:
    """Start `hone WORDS` in a fork and return its process; its stdout goes to ``out``."""
    process = os.fork()
    if process:
        return process
    code = 99
    try:
        from hone.cli.main import main

        print("$ hone", *words, flush=True)
        if out is not None:
            os.dup2(os.open(out, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 1)
        sys.argv = ["hone", *map(str, words)]
        main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001  whatever a command raises is its exit code
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def together(result: Result, **commands: tuple[object, ...]) -> None:
    """Run commands at the same time; each must end with exit code 0."""
    running = {name: hone(*words) for name, words in commands.items()}
    for name, process in running.items():
        result.add(f"{name}: exit code", os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), most=0)


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def check_run(result: Result, name: str, run: Path, steps: int) -> list[dict[str, Any]]:
    """Check that a run finished with finite metrics and, on a GPU, used its memory; return the rows."""
    if not (run / "run.json").exists():
        result.problems.append(f"{name}: no run")
        return []
    record, rows = json.loads((run / "run.json").read_text()), rows_of(run)
    if record["status"] != "finished" or not rows or rows[-1]["step"] != steps:
        result.problems.append(f"{name}: {record['status']} at step {rows[-1]['step'] if rows else 0} of {steps}")
    broken = {
        key for row in rows for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)
    }
    if broken:
        result.problems.append(f"{name}: not finite: {', '.join(sorted(broken))}")
    if not result.small:
        memory = max((row.get("perf/max_memory_allocated_gb", 0.0) for row in rows), default=0.0)
        result.add(f"{name}: peak GPU memory", memory, "GB", least=1e-3)
    return rows


def task(result: Result, folder: Path, *, rows: int = 2000, size: str = "1m", slips: int = 0) -> list[str]:
    """Make arithmetic problems, a tokenizer and a model with random weights; return the keys of the data."""
    together(result, data=("data", "make", "arithmetic", "max_number=10", f"slips={slips}", "--out", folder / "data",
                           "--size", rows, "--val-size", 512 if slips else 64))  # fmt: skip
    together(result, tokenizer=("data", "tokenizer", "--files", folder / "data/train.parquet", "--out", folder / "tokenizer",
                                "--vocab-size", 512))  # fmt: skip
    together(
        result,
        init=(
            "init",
            "--arch",
            "qwen3",
            "--size",
            size,
            "--tokenizer",
            folder / "tokenizer",
            "--out",
            folder / "model",
        ),
    )
    return [f"data.train_files={folder}/data/train.parquet", f"data.val_files={folder}/data/val.parquet"]


def programs(result: Result) -> None:
    """Run every program for two steps, several at a time, and compare two updates with float64 by `hone oracle`."""
    folder = Path(tempfile.mkdtemp(prefix="gpu_check_"))
    data = task(result, folder)
    (folder / "brief.py").write_text(BRIEF)
    short = ["trainer.total_training_steps=2", "trainer.test_freq=-1", f"trainer.device={result.device}"]
    model = f"actor_rollout_ref.model.path={folder}/model"
    grpo = ("train", "--config-path", QUICKSTART, "--config-name", "grpo", model, *data, *short, *BATCH,
            f"reward.custom_reward_function.path={folder}/brief.py", "data.max_response_length=16")  # fmt: skip
    narrow, saved = "float32" if result.small else "bfloat16", "trainer.save_microbatch_steps=[2]"
    dtype = "actor_rollout_ref.actor.dtype"

    def at(name: str) -> str:
        return f"trainer.default_local_dir={folder}/{name}"

    together(
        result,
        grpo_float32=(*grpo, f"{dtype}=float32", "trainer.rollout_dump_freq=1", saved, at("grpo_float32")),
        grpo_narrow=(*grpo, f"{dtype}={narrow}", saved, at("grpo_narrow")),
        lora=(*grpo, "actor_rollout_ref.model.lora_rank=8", at("lora")),
        hf=(*grpo, "actor_rollout_ref.rollout.name=hf", at("hf")),
    )
    together(
        result,
        ppo=(*grpo, "algorithm.adv_estimator=gae", "critic.optim.lr=1e-4", f"critic.model.path={folder}/model", at("ppo")),
        served=(*grpo, "actor_rollout_ref.rollout.num_replicas=1", at("served")),
        asynchronous=(*grpo, "actor_rollout_ref.rollout.num_replicas=1", "trainer.async.max_staleness=1", at("asynchronous")),
        sft=("sft", "--config-path", QUICKSTART, "--config-name", "sft", f"model.path={folder}/model", *data, *short,
             "optim.lr_warmup_steps=1", at("sft")),
        pairs=("data", "pairs", folder / "grpo_float32", "--out", folder / "pairs", "--val-share", 0.25, "--as", "tokens"),
    )  # fmt: skip
    pairs = [f"data.train_files={folder}/pairs/train.parquet", f"data.val_files={folder}/pairs/val.parquet", *short,
             "data.train_batch_size=8"]  # fmt: skip
    together(
        result,
        dpo=("prefer", "--preset", "dpo", f"model.path={folder}/model", *pairs, at("dpo")),
        reward_model=("reward-model", f"model.path={folder}/model", *pairs, at("reward_model")),
        eval=("eval", folder / "model", "--data", folder / "data/val.parquet", "--max-response-length", 16),
        generate=("generate", folder / "model", "What is 1+2?", "--max-tokens", 8),
    )
    for name in (
        "grpo_float32",
        "grpo_narrow",
        "lora",
        "hf",
        "ppo",
        "served",
        "asynchronous",
        "sft",
        "dpo",
        "reward_model",
    ):
        rows = check_run(result, name, folder / name, 2)
        gaps = [gap for row in rows if (gap := row.get("training/rollout_log_probs_diff_max")) is not None]
        if gaps:
            result.add(
                f"{name}: engine against trainer, largest", max(gaps), most=AGREE if name == "grpo_float32" else None
            )
    for name in ("grpo_float32", "grpo_narrow"):
        _oracle(result, name, folder)


def _oracle(result: Result, name: str, folder: Path) -> None:
    """Compare the update of a run's second step with float64 on the CPU."""
    os.waitpid(hone("oracle", folder / name, "--step", 2, "--json", out=folder / "oracle.json"), 0)
    try:
        verdict = json.loads((folder / "oracle.json").read_text())
    except ValueError:
        result.problems.append(f"{name}: hone oracle printed no verdict")
        return
    if not verdict["agrees"]:
        result.problems.append(f"{name}: {verdict['verdict']} {' '.join(verdict['hints'])}".rstrip())
    for kind in ("hidden", "log_probs", "gradient"):
        errors = [check["error"] / check["bound"] for check in verdict["checks"] if check["kind"] == kind]
        if errors:
            result.add(f"{name}: largest error of {kind} as a share of its bound", max(errors), most=1.0)


def learning(result: Result) -> None:
    """Let imitation leave a mistake in most answers, and see whether 25 steps of reinforcement remove it."""
    folder, seed = Path(tempfile.mkdtemp(prefix="gpu_check_")), "trainer.seed=1"
    data = task(result, folder, rows=2000 if result.small else 20000, slips=60)
    device = f"trainer.device={result.device}"
    fewer = ["trainer.total_training_steps=2", "optim.lr_warmup_steps=1"] if result.small else []
    together(result, sft=("sft", "--config-path", QUICKSTART, "--config-name", "sft", f"model.path={folder}/model", *data,
                          seed, device, *fewer, f"trainer.default_local_dir={folder}/sft"))  # fmt: skip
    (actor,) = sorted((folder / "sft/checkpoints").glob("step_*/actor"))[-1:] or [folder]
    steps = 2 if result.small else 25
    short = [*BATCH[:2], BATCH[2]] if result.small else []
    together(result, grpo=("train", "--config-path", QUICKSTART, "--config-name", "grpo", *data, seed, device, *short,
                           f"actor_rollout_ref.model.path={actor}", f"trainer.total_training_steps={steps}",
                           f"trainer.test_freq={steps}", f"trainer.default_local_dir={folder}/grpo"))  # fmt: skip
    rows = check_run(result, "grpo", folder / "grpo", steps)
    names = {name for row in rows for name in row if name.startswith("val-core/")}
    shares = [row[name] for name in names for row in rows if name in row]
    if not shares:
        result.problems.append("no held-out accuracy was recorded")
        return
    result.add("held-out accuracy before", shares[0])
    result.add("held-out accuracy after", shares[-1], least=None if result.small else shares[0] + 0.2)
    speeds = sorted(row["perf/throughput"] for row in rows if "perf/throughput" in row)
    result.add("tokens a second, median step", speeds[len(speeds) // 2])
