"""A small dataset, a model directory with tiny weights, and a simulated machine without problems."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.preflight import SMALL_MODEL, SOUND_MACHINE, rows, safetensors_head, write_rows

from hone.config import RLConfig, SFTConfig
from hone.config.run import RunConfig
from hone.preflight import machine


@pytest.fixture(autouse=True)
def sound_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine, so that results do not depend on the real one."""
    monkeypatch.setattr(machine, "look", lambda: SOUND_MACHINE)
    monkeypatch.setattr(machine, "bfloat16_cost", lambda: 1.0)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer with the chatml template."""
    from hone.apps.lab.data.inspection import train_tokenizer

    folder = tmp_path_factory.mktemp("preflight")
    (folder / "text.jsonl").write_text(json.dumps({"prompt": "What is 1 + 1?"}) + "\n")
    train_tokenizer([folder / "text.jsonl"], folder / "tokenizer", vocab_size=300, template="chatml")
    return folder / "tokenizer"


@pytest.fixture
def model(tmp_path: Path, tokenizer: Path) -> Path:
    """A model directory with all files."""
    directory = tmp_path / "model"
    shutil.copytree(tokenizer, directory)
    (directory / "config.json").write_text(json.dumps(SMALL_MODEL))
    (directory / "model.safetensors").write_bytes(safetensors_head({"w": [10, 10]}))
    return directory


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Ten training rows."""
    return write_rows(tmp_path / "train.jsonl", rows())


def prepare_trainer(trainer: RunConfig, folder: Path) -> None:
    trainer.default_local_dir = str(folder / "run")
    trainer.device = "cpu"


@pytest.fixture
def rl(model: Path, data: Path, tmp_path: Path) -> RLConfig:
    """A configuration of `hone train` without problems."""
    config = RLConfig()
    config.data.train_files = str(data)
    config.data.train_batch_size = config.actor_rollout_ref.actor.ppo_mini_batch_size = 8
    config.actor_rollout_ref.model.path = str(model)
    config.actor_rollout_ref.rollout.n = 4
    prepare_trainer(config.trainer, tmp_path)
    return config


@pytest.fixture
def sft(model: Path, data: Path, tmp_path: Path) -> SFTConfig:
    """A configuration of `hone sft` without problems."""
    config = SFTConfig()
    config.data.train_files = str(data)
    config.data.train_batch_size = 2
    config.model.path = str(model)
    prepare_trainer(config.trainer, tmp_path)
    return config
