"""The examples with packages of others are trained for a few steps: a coding agent from PyPI, a server of MCP from npm."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.environments import foreign_python, npm_folder
from support.launch import hone
from support.patience import LONG
from support.world import curve

pytestmark = pytest.mark.long("hone/agents/program", "hone/agents/tools", "examples")
EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 2


def prepared(example: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"prepare_{example}", EXAMPLES / example / "prepare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(work: Path, example: str, name: str, steps: int, *overrides: str) -> Path:
    """Make a small imitator from the data in ``work/<name>/data`` and train it as the example's README does."""
    data = f"{name}/data/train.parquet"
    settings = ["--config-path", f"examples/{example}", "--config-name"]
    fast = ["trainer.device=cpu", "trainer.num_threads=1"]
    for number, arguments in enumerate(
        [
            ("data", "tokenizer", "--files", data, "--out", f"{name}/tokenizer", "--vocab-size", 512, "--template",
             "chatml_tools"),
            ("init", "--arch", "qwen3", "--size", "200k", "--tokenizer", f"{name}/tokenizer", "--out", f"{name}/model"),
            ("sft", *settings, "sft", f"model.path={name}/model", f"data.train_files={data}",
             f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={name}/sft", *fast),
            ("export", f"{name}/sft", "--out", f"{name}/imitator"),
            ("train", *settings, "grpo", f"actor_rollout_ref.model.path={name}/imitator", f"data.train_files={data}",
             f"trainer.default_local_dir={name}/grpo", f"trainer.total_training_steps={STEPS}", "trainer.test_freq=0",
             "trainer.val_before_train=false", "trainer.save_freq=0", "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
             *fast, *overrides),
        ]
    ):  # fmt: skip
        ended = hone(*arguments, log=work / f"{number}.log", cwd=work)
        assert ended.code == 0, ended.output
    run = work / name / "grpo"
    assert max(curve(run, "training/rollout_log_probs_diff_max")) < 1e-4, "the tokens trained on are those sampled"
    assert len(curve(run, "actor/grad_norm")) == STEPS
    return run


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    return tmp_path


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="the harness runs its commands by bubblewrap")
def test_a_coding_agent_is_trained_in_its_harness(work: Path) -> None:
    prepare = prepared("coding_agent")
    python = foreign_python("mini-swe-agent", prepare.HARNESS)
    (work / "coder").mkdir()
    (work / "coder" / "environment").symlink_to(Path(python).parents[1])
    made = [sys.executable, str(EXAMPLES / "coding_agent" / "prepare.py"), "data", str(work / "coder" / "data")]
    subprocess.run([*made, "--wrong", "30"], check=True, timeout=LONG)
    small = (
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=4",
    )
    run = train(work, "coding_agent", "coder", 240, *small)
    assert max(curve(run, "episode/fact/calls")) > 1


def test_a_server_of_mcp_from_npm_is_used_in_training(work: Path) -> None:
    prepare = prepared("mcp_server")
    (work / "mcp").mkdir()
    (work / "mcp" / "server").symlink_to(npm_folder("server-everything", prepare.SERVER))
    made = [sys.executable, str(EXAMPLES / "mcp_server" / "prepare.py"), "data", "mcp/data", "--guesses", "30"]
    run_in = functools.partial(subprocess.run, check=True, timeout=LONG, cwd=work)
    run_in([*made, "--size", "200", "--max-number", "9"])
    small = ("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    run = train(work, "mcp_server", "mcp", 120, *small)
    assert max(curve(run, "tool/calls/mean")) > 0 and max(curve(run, "tool/success_rate")) > 0
