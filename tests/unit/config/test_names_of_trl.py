"""Names of TRL: what each is in Hone, in Python, on the command line and for `hone explain`."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.messages import raises
from typer.testing import CliRunner

from hone.api.settings import ARGUMENTS, takes_names_of_trl
from hone.cli.main import app
from hone.config import PreferenceConfig, RewardModelConfig, RLConfig, SFTConfig, load_config
from hone.config.keys import documentation
from hone.config.migration import Outcome, trl_table
from hone.config.migration.entries import Changed, Renamed
from hone.config.migration.reading import trl_setting
from hone.errors import HoneError

TREES = (RLConfig, SFTConfig, PreferenceConfig, RewardModelConfig)
PAGE = Path(__file__).resolve().parents[3] / "docs/coming-from-trl.md"


def taken(tree: type, **given: Any) -> dict[str, Any]:
    """Return what a function that trains gets for names of TRL."""

    def function(
        model: Any = None, dataset: Any = None, *, reward: Any = None, out: Any = None, steps: Any = None, **keys: Any
    ) -> Any:
        return {key: value for key, value in locals().items() if key != "keys" and value is not None} | keys

    return takes_names_of_trl(tree)(function)(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("tree", TREES)
def test_every_entry_names_keys_of_its_tree(tree: type) -> None:
    keys = {key.path for key in documentation(tree)}
    for name, entry in trl_table(tree).paths().items():
        to = [entry.to] if isinstance(entry, Renamed) else [*entry.to] if isinstance(entry, Changed) else []
        assert set(to) <= keys, name


@pytest.mark.parametrize("tree", TREES)
def test_names_of_both_mean_the_same_key(tree: type) -> None:
    """A short name of Hone that is a name of TRL, too, is taken for another key by nobody."""
    ends = {key.last for key in documentation(tree)}
    both = {name: entry for name, entry in trl_table(tree).paths().items() if name in ends}
    to = {name: entry.to for name, entry in both.items() if isinstance(entry, Renamed)}
    assert all(key.rpartition(".")[2] == name for name, key in to.items())


@pytest.mark.parametrize(
    ("given", "sets"),
    [
        ({"learning_rate": 1e-4}, {"actor_rollout_ref.actor.optim.lr": 1e-4}),
        (
            {"num_generations": 4, "max_completion_length": 9},
            {"actor_rollout_ref.rollout.n": 4, "data.max_response_length": 9},
        ),
        ({"max_steps": 7, "output_dir": "ü b"}, {"steps": 7, "out": "ü b"}),
        ({"max_steps": -1}, {}),
        ({"report_to": "wandb"}, {"trainer.logger": ["console", "wandb"]}),
        ({"bf16": False}, {"actor_rollout_ref.actor.dtype": "float32"}),
        ({"beta": 0.0}, {"actor_rollout_ref.actor.use_kl_loss": False}),
        (
            {"beta": 0.1, "preset": "online_dpo"},
            {"beta": 0.1, "preset": "online_dpo"},
        ),
        (
            {"beta": 0.1, "use_bias_correction_kl": False},
            {"actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.kl_loss_coef": 0.1},
        ),
        (
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 3, "n": 4},
            {"data.train_batch_size": 6, "actor_rollout_ref.actor.ppo_mini_batch_size": 6, "n": 4},
        ),
        ({"temperature": 0.5, "seed": 3, "weight_decay": 0.0}, {"temperature": 0.5, "seed": 3, "weight_decay": 0.0}),
        ({"loss_type": "reinforce"}, {"loss_type": "reinforce"}),
        ({"logging_steps": 5, "save_strategy": "epoch"}, {"trainer.save_freq": "after_each_epoch"}),
        (
            {"warmup_steps": 0.1},
            {
                "actor_rollout_ref.actor.optim.lr_warmup_steps": -1,
                "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.1,
            },
        ),
        (
            {"peft_config": SimpleNamespace(r=4, lora_alpha=8, target_modules={"v_proj", "q_proj"}, lora_dropout=0.0)},
            {
                "actor_rollout_ref.model.lora_rank": 4,
                "actor_rollout_ref.model.lora_alpha": 8,
                "actor_rollout_ref.model.target_modules": ["q_proj", "v_proj"],
            },
        ),
    ],
)
def test_in_python_names_with_the_same_meaning_are_taken(given: dict[str, Any], sets: dict[str, Any]) -> None:
    assert taken(RLConfig, **given) == sets


@pytest.mark.parametrize(
    ("tree", "given", "words"),
    [
        (RLConfig, {"beta": 0.04}, ["use_kl_loss", "kl_loss_coef=0.04", "ratio"]),
        (RLConfig, {"per_device_train_batch_size": 8}, ["num_generations", "train_batch_size"]),
        (RLConfig, {"per_device_train_batch_size": 9, "num_generations": 4}, ["9 completions", "num_generations=4"]),
        (RLConfig, {"loss_type": "cispo"}, ["cispo", "loss_mode"]),
        (RLConfig, {"num_train_epochs": 0.5}, ["0.5", "total_training_steps"]),
        (RLConfig, {"args": object(), "vllm_mode": "server"}, ["args", "vllm_mode", "engine_url"]),
        (
            RLConfig,
            {"peft_config": SimpleNamespace(r=4, lora_alpha=8, target_modules="all-linear", use_dora=True)},
            ["use_dora"],
        ),
        (RLConfig, {"reward_funcs": len, "reward": len}, ["reward", "reward_funcs"]),
        (PreferenceConfig, {"loss_type": ["sigmoid", "sft"]}, ["several losses"]),
        (SFTConfig, {"dataset_text_field": "text"}, ["hone data convert"]),
    ],
)
def test_a_name_that_means_something_else_names_the_key_and_the_difference(
    tree: type, given: dict[str, Any], words: list[str]
) -> None:
    with raises(HoneError, *words):
        taken(tree, **given)


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("learning_rate=1e-3", "actor_rollout_ref.actor.optim.lr=0.001"),
        ("optim.learning_rate=1e-3", "actor_rollout_ref.actor.optim.lr=0.001"),
        ("num_generations=4", "actor_rollout_ref.rollout.n=4"),
        ("max_steps=4", "trainer.total_training_steps=4"),
        ("output_dir=x", "trainer.default_local_dir='x'"),
        ("beta=0.04", "use_kl_loss=true kl_loss_coef=0.04"),
        ("logging_steps=1", "leave it out"),
        ("loss_type=dapo", "token-mean"),
        ("loss_type=vespo", "vespo"),
    ],
)
def test_on_the_command_line_the_error_has_the_key_to_write(word: str, fix: str) -> None:
    with raises(HoneError, "TRL", code="R09") as caught:
        load_config(RLConfig, [word])
    assert fix in caught.value.fix


def test_a_file_with_a_name_of_trl_is_refused_with_the_key(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("learning_rate: 0.001\n", encoding="utf-8")
    with raises(HoneError, "learning_rate", "TRL", code="R09") as caught:
        load_config(SFTConfig, config_path=tmp_path)
    assert "optim.lr=0.001" in caught.value.fix


def test_the_end_of_a_key_is_enough_on_the_command_line() -> None:
    config = load_config(RLConfig, ["lr=1e-3", "n=4", "rollout.temperature=0.5", "critic.optim.lr=1e-2", "top_k=5"])
    assert config.actor_rollout_ref.actor.optim.lr == 1e-3 and config.critic.optim.lr == 1e-2
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.n, rollout.temperature, rollout.top_k) == (4, 0.5, 5)
    assert load_config(SFTConfig, ["lr=1e-3"]).optim.lr == 1e-3
    with raises(HoneError, "unknown key lrr", code="R09"):
        load_config(RLConfig, ["lrr=1"])


def test_a_group_of_the_users_folder_is_no_key(tmp_path: Path) -> None:
    (tmp_path / "lr").mkdir()
    (tmp_path / "lr/high.yaml").write_text("# @package _global_\noptim:\n  lr: 0.5\n", encoding="utf-8")
    (tmp_path / "config.yaml").write_text("defaults: [_self_]\ntrainer: {seed: 4}\n", encoding="utf-8")
    assert load_config(SFTConfig, ["+lr=high"], config_path=tmp_path).optim.lr == 0.5


def test_explain_knows_names_of_trl() -> None:
    shown = CliRunner().invoke(app, ["explain", "num_generations"]).output
    assert "TRL's name" in shown and "actor_rollout_ref.rollout.n" in shown
    assert "use_kl_loss" in CliRunner().invoke(app, ["explain", "beta"]).output


def test_the_script_of_the_page_means_what_its_twin_sets() -> None:
    """The settings of TRL's script, translated by the table, are those that the twin gives by Hone's names."""
    theirs, ours = re.findall(r"^```(?:text|python)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)[-2:]
    calls = {
        call.func.id: call
        for call in ast.walk(ast.parse(theirs))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }
    config = {
        word.arg: ast.literal_eval(word.value) for word in calls["GRPOConfig"].keywords if word.arg != "reward_weights"
    }
    own = {word.arg for word in calls["GRPOTrainer"].keywords} - {"args", "model"}
    assert all(trl_setting(str(name), "x", {}, RLConfig) for name in own)
    (call,) = [c for c in ast.walk(ast.parse(ours)) if isinstance(c, ast.Call) and ast.unparse(c.func) == "hone.train"]
    twin = {
        str(w.arg): ast.literal_eval(w.value) for w in call.keywords if w.arg not in ("reward", "reward_weights", "out")
    }
    translated = {key.rpartition(".")[2]: value for key, value in taken(RLConfig, **config).items() if key != "out"}
    same_as_default = {"loss_agg_mode": "token-mean", "lr_scheduler_type": "constant", "logger": ["console"]}
    assert translated == twin | same_as_default
    assert trl_setting("logging_steps", 1, {}, RLConfig).outcome is Outcome.FOREIGN  # type: ignore[union-attr]
    assert set(ARGUMENTS.values()) >= {"dataset", "reward", "out", "steps", "model"}
