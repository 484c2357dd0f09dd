"""Configurations of LLaMA-Factory: each key is a setting of `hone sft`, or named with what to do instead."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from hone.apps.verl.importing import import_yaml
from hone.cli.main import app
from hone.config import SFTConfig, load_config
from hone.config.keys import documentation
from hone.config.migration import LLAMA_FACTORY, Outcome
from hone.config.migration.entries import Changed, Renamed

LORA = """
model_name_or_path: /models/Qwen3-4B
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: q_proj,v_proj
dataset: identity,alpaca_en_demo
template: qwen3
cutoff_len: 4096
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
output_dir: saves/qwen3
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: wandb
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
deepspeed: examples/deepspeed/ds_z3_config.json
"""
EXPECTED = {
    "model.path": "/models/Qwen3-4B",
    "model.lora_rank": 16,
    "model.lora_alpha": 32,
    "model.target_modules": ["q_proj", "v_proj"],
    "model.enable_gradient_checkpointing": True,
    "data.max_length": 4096,
    "data.truncation": "right",
    "data.train_max_samples": 1000,
    "data.train_batch_size": 16,
    "optim.lr": 1e-4,
    "optim.weight_decay": 0.0,
    "optim.lr_scheduler_type": "cosine",
    "optim.lr_warmup_steps_ratio": 0.1,
    "dtype": "bfloat16",
    "trainer.default_local_dir": "saves/qwen3",
    "trainer.save_freq": 500,
    "trainer.logger": ["console", "wandb"],
    "trainer.total_epochs": 3,
}


def test_a_lora_run_means_the_same():
    translation = import_yaml(LORA)
    assert translation.command == "sft" and not translation.not_understood
    assert {key: translation.values.get(key) for key in EXPECTED} == EXPECTED
    refused = {line.reading.key for line in translation.lines if line.reading.outcome is Outcome.UNSUPPORTED}
    assert refused == {"dataset"}
    config = load_config(SFTConfig, [f"{key}={value}" for key, value in translation.values.items()])
    assert config.data.train_batch_size == 16 and config.model.lora_alpha == 32


@pytest.mark.parametrize(
    ("line", "sets", "outcome"),
    [
        ("num_train_epochs: 2.5", {"trainer.total_epochs": 1}, Outcome.UNSUPPORTED),
        ("max_steps: -1", {}, Outcome.SETTLED),
        ("max_steps: 300", {"trainer.total_training_steps": 300}, Outcome.CHANGED),
        ("lora_target: all", {"model.target_modules": "all-linear"}, Outcome.CHANGED),
        ("lr_scheduler_type: linear", {"optim.lr_scheduler_type": "cosine"}, Outcome.UNSUPPORTED),
        ("stage: dpo", {}, Outcome.UNSUPPORTED),
        ("disable_gradient_checkpointing: true", {"model.enable_gradient_checkpointing": False}, Outcome.CHANGED),
        ("sequence_parallel_size: 4", {"ulysses_sequence_parallel_size": 4}, Outcome.RENAMED),
        ("quantization_bit: 4", {}, Outcome.UNSUPPORTED),
        ("report_to: none", {"trainer.logger": ["console"]}, Outcome.CHANGED),
        ("val_size: 0.1", {}, Outcome.UNSUPPORTED),
    ],
)
def test_single_keys(line: str, sets: dict, outcome: Outcome):
    translation = import_yaml(f"model_name_or_path: /m\n{line}")
    (_, reading) = (entry.reading for entry in translation.lines)
    assert (reading.sets, reading.outcome) == (sets, outcome)


def test_full_training_has_no_adapter_and_an_unknown_key_is_named():
    translation = import_yaml("model_name_or_path: /m\nfinetuning_type: full\nlora_rank: 8\nlerning_rate: 1\n")
    assert "model.lora_rank" not in translation.values
    (trouble,) = translation.not_understood
    assert "lerning_rate" in trouble.what and "learning_rate" in trouble.what


def test_every_key_of_the_table_exists_in_the_tree():
    keys = {key.path for key in documentation(SFTConfig)}
    for path, entry in LLAMA_FACTORY.paths().items():
        targets = [entry.to] if isinstance(entry, Renamed) else entry.to if isinstance(entry, Changed) else ()
        assert set(targets) <= keys, path


def test_the_command_writes_a_file(tmp_path: Path):
    (tmp_path / "lora.yaml").write_text(LORA)
    out = tmp_path / "hone.yaml"
    result = CliRunner().invoke(app, ["config", "import", str(tmp_path / "lora.yaml"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(out.read_text())["data"]["train_batch_size"] == 16
