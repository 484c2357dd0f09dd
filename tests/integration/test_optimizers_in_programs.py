"""Muon, parameter groups, wsd, an average of the weights and float16 in every program that trains; a resumed run is exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.messages import raises
from support.tiny_runs import offline_words, rl_words
from typer.testing import CliRunner

from hone.cli.main import app
from hone.errors import CheckpointError
from hone.training.checkpoints.shards import read_index
from hone.training.checkpoints.storage import Storage
from hone.training.export import find_actor

pytestmark = pytest.mark.application("hone/training")

OPTIM = {
    "optimizer": "Muon",
    "ema_decay": "0.8",
    "lr_scheduler_type": "wsd",
    "lr_wsd_decay_steps": "2",
    "lr_wsd_decay_style": "linear",
    "param_groups": "[{params:'norm|lora_B',lr_mult:2,weight_decay:0.1}]",
}
LENGTH = ("trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.max_ckpt_to_keep=2")
RL_MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"


def words(program: str, tiny: Path, run: Path, *extra: str) -> list[str]:
    """The command of four steps with these settings of the optimizer."""
    if program != "train":
        settings = [f"optim.{key}={value}" for key, value in OPTIM.items()]
        return offline_words(program, tiny, run, *LENGTH, *settings, *extra)
    blocks = (f"{ACTOR}.optim", "critic.optim")
    settings = [f"{block}.{key}={value}" for block in blocks for key, value in OPTIM.items()]
    gae = ("algorithm.adv_estimator=gae", "critic.optim.lr=1e-3")
    return rl_words(tiny, run, *gae, *LENGTH, *settings, *extra)


def run(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, f"{result.output}\n{result.exception}"


def saved(run_directory: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by file and name."""
    folder = run_directory / "checkpoints" / f"step_{step}"
    files = sorted(folder.rglob("*.safetensors"))
    return {f"{f.relative_to(folder)}:{name}": value for f in files for name, value in load_file(f).items()}


@pytest.mark.parametrize(
    ("program", "extra"),
    [
        ("train", ()),
        ("train", (f"{RL_MODEL}.lora_rank=4",)),
        ("sft", ("dtype=float16",)),
        ("prefer", ("model.lora_rank=4",)),
        ("reward-model", ()),
    ],
    ids=["train", "train, lora", "sft, float16", "prefer, lora", "reward-model"],
)
def test_a_resumed_run_is_the_uninterrupted_one(
    program: str, extra: tuple[str, ...], tiny: Path, tmp_path: Path
) -> None:
    run(words(program, tiny, tmp_path / "whole", *extra))
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/whole/checkpoints/step_2")
    run(words(program, tiny, tmp_path / "resumed", *extra, *resume))
    expected, found = saved(tmp_path / "whole", 4), saved(tmp_path / "resumed", 4)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    roles = ("actor", "critic") if program == "train" else ("actor",)
    for role in roles:
        weights = {n.partition(":")[2]: v for n, v in expected.items() if n.startswith(f"{role}/")}
        averages = {n.partition(":")[2]: v for n, v in expected.items() if n.startswith(f"{role}_ema/")}
        assert weights.keys() == averages.keys() and any(not torch.equal(averages[n], v) for n, v in weights.items())
        checkpoint = tmp_path / "whole" / "checkpoints" / "step_4"
        index = read_index(Storage(checkpoint / f"{role}_optimizer"))
        assert {name.partition("/")[0] for name in index.tensors} >= {"momentum_buffer", "ema"}
        assert (checkpoint / f"{role}_ema/tokenizer.json").exists() == (checkpoint / f"{role}/tokenizer.json").exists()
    lines = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    rates = [line["actor/lr" if program == "train" else "train/lr"] for line in lines]
    assert rates == pytest.approx([1e-3, 1e-3, 1e-3, 5e-4])


def test_the_average_is_evaluated_and_exported_like_any_model(tiny: Path, tmp_path: Path) -> None:
    run(words("sft", tiny, tmp_path / "run"))
    average = tmp_path / "run" / "checkpoints" / "step_4" / "actor_ema"
    run(["export", str(average), "--out", str(tmp_path / "exported")])
    expected, found = load_file(average / "model.safetensors"), load_file(tmp_path / "exported/model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    run(["generate", str(average), "What is 1 + 1?", "--max-tokens", "3"])
    for place in ("checkpoints/latest/actor_ema", "actor_ema", "checkpoints/step_4/actor_ema"):
        assert find_actor(tmp_path / "run" / place) == average
    assert find_actor(tmp_path / "run") == average.with_name("actor")
    run(words("sft", tiny, tmp_path / "without", "optim.ema_decay=null"))
    with raises(CheckpointError, "actor_ema", "step_4"):
        find_actor(tmp_path / "without" / "actor_ema")
