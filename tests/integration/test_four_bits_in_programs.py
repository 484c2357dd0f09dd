"""A base in 4 or 8 bits in every program that trains: a resumed run is exact, and what was trained is evaluated and exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_runs import offline_words, rl_words
from typer.testing import CliRunner

from hone.cli.main import app

pytestmark = pytest.mark.application("hone/models", "hone/training")
pytest.importorskip("bitsandbytes")

LENGTH = ("trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.max_ckpt_to_keep=2")
RL_MODEL = "actor_rollout_ref.model"


def words(program: str, method: str, tiny: Path, run: Path, *extra: str) -> list[str]:
    """The command of four steps on a packed base."""
    block = RL_MODEL if program == "train" else "model"
    settings = (f"{block}.quantization={method}", f"{block}.lora_rank=4", *LENGTH, *extra)
    if program == "train":
        kl = ("actor_rollout_ref.actor.use_kl_loss=true", "algorithm.rollout_correction.bypass_mode=false")
        return rl_words(tiny, run, *kl, *settings)
    return offline_words(program, tiny, run, *settings)


def run(arguments: list[str]) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, f"{result.output}\n{result.exception}"
    return result.output


def saved(run_directory: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by file and name."""
    folder = run_directory / "checkpoints" / f"step_{step}"
    files = sorted(folder.rglob("*.safetensors"))
    return {f"{f.relative_to(folder)}:{name}": value for f in files for name, value in load_file(f).items()}


@pytest.mark.parametrize(
    ("program", "method"),
    [("train", "nf4"), ("sft", "nf4"), ("prefer", "nf4"), ("reward-model", "nf4"), ("train", "int8")],
)
def test_a_resumed_run_is_the_uninterrupted_one(program: str, method: str, tiny: Path, tmp_path: Path) -> None:
    run(words(program, method, tiny, tmp_path / "whole"))
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/whole/checkpoints/step_2")
    run(words(program, method, tiny, tmp_path / "resumed", *resume))
    expected, found = saved(tmp_path / "whole", 4), saved(tmp_path / "resumed", 4)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    actor = [name for name in expected if name.startswith("actor/")]
    assert actor and all("adapter_model" in name for name in actor), "the base is not saved"
    if program == "train":
        lines = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
        assert max(line["training/rollout_log_probs_diff_max"] for line in lines) < 1e-5


@pytest.mark.parametrize("method", ["nf4", "int8"])
def test_a_run_is_generated_from_and_exported_as_it_was_trained(method: str, tiny: Path, tmp_path: Path) -> None:
    run(words("sft", method, tiny, tmp_path / "run"))
    ask = ["What is 1 + 1?", "--max-tokens", "8", "--temperature", "0"]
    answer = run(["generate", str(tmp_path / "run"), *ask])
    said = run(["export", str(tmp_path / "run"), "--out", str(tmp_path / "merged")])
    assert method in said
    assert run(["generate", str(tmp_path / "merged"), *ask]) == answer
    run(["export", str(tmp_path / "run"), "--out", str(tmp_path / "adapter"), "--no-merge"])
    assert (tmp_path / "adapter/base_quantization.json").is_file()


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_engines_of_this_process_sample_from_the_packed_base(engine: str, tiny: Path, tmp_path: Path) -> None:
    run(
        words(
            "train",
            "nf4",
            tiny,
            tmp_path / "run",
            f"actor_rollout_ref.rollout.name={engine}",
            LENGTH[0].replace("4", "1"),
        )
    )
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert line["training/rollout_log_probs_diff_max"] < 1e-5
