"""A small dataset and a model directory without weights worth loading: preflight only looks at files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hone.config import RLConfig, SFTConfig
from hone.config.run import RunConfig


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A complete model directory, as far as files go."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 2048}))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (directory / "model.safetensors").write_bytes(b"")
    return directory


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Ten rows of chat messages that both trainers read."""
    row: dict[str, Any] = {
        "prompt": [{"role": "user", "content": "1 + 1 = ?"}],
        "messages": [{"role": "user", "content": "1 + 1 = ?"}, {"role": "assistant", "content": "2"}],
        "data_source": "exact",
        "reward_model": {"ground_truth": "2"},
    }
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for _ in range(10)))
    return file


def prepare_trainer(trainer: RunConfig, folder: Path) -> None:
    trainer.default_local_dir = str(folder / "run")
    trainer.device = "cpu"


@pytest.fixture
def rl(model: Path, data: Path, tmp_path: Path) -> RLConfig:
    """A configuration of `hone train` with which nothing is wrong."""
    config = RLConfig()
    config.data.train_files = str(data)
    config.data.train_batch_size = config.actor_rollout_ref.actor.ppo_mini_batch_size = 8
    config.actor_rollout_ref.model.path = str(model)
    config.actor_rollout_ref.rollout.n = 4
    prepare_trainer(config.trainer, tmp_path)
    return config


@pytest.fixture
def sft(model: Path, data: Path, tmp_path: Path) -> SFTConfig:
    """A configuration of `hone sft` with which nothing is wrong."""
    config = SFTConfig()
    config.data.train_files = str(data)
    config.data.train_batch_size = 2
    config.model.path = str(model)
    prepare_trainer(config.trainer, tmp_path)
    return config
