"""`hone config`: show, explain, diff, check and schema, on the real trees."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.patience import SOON
from typer.testing import CliRunner

from hone.cli.config import app, json_schema
from hone.config import TREES, RLConfig, documentation, load_config, to_yaml
from hone.config.keys import leaf_values
from hone.config.load import preset_names
from hone.config.trees import PRESET_KINDS
from hone.errors import ConfigError


def invoke(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


def fails(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    return caught.value.render()


def test_show_why_names_the_source_of_every_value(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("data: {train_batch_size: 48}\n")
    arguments = ["--preset", "grpo", "--config-path", str(tmp_path), "--config-name", "mine", "data.seed=3"]
    rows = json.loads(invoke("show", "--why", "--json", *arguments))
    assert list(rows) == [key.path for key in documentation(RLConfig)]
    assert rows["data.seed"] == {"value": 3, "from": "command line"}
    assert rows["data.train_batch_size"] == {"value": 48, "from": f"file {tmp_path / 'mine.yaml'}"}
    assert rows["actor_rollout_ref.rollout.n"] == {"value": 8, "from": "preset grpo"}
    assert rows["data.shuffle"] == {"value": True, "from": "default"}
    derived = "derived from runs/${trainer.project_name}/${trainer.experiment_name}"
    assert rows["trainer.default_local_dir"] == {"value": "runs/hone/default", "from": derived}
    changed = invoke("show", "--changed", *arguments).splitlines()
    assert any(line.split("#")[0].strip() == "data.seed=3" and "command line" in line for line in changed)
    assert not any(line.startswith("data.shuffle") for line in changed)
    both = json.loads(invoke("show", "--why", "--changed", "--json", *arguments))
    assert set(both) == {line.partition("=")[0] for line in changed}


def test_show_prints_the_tree() -> None:
    assert json.loads(invoke("show", "--json", "data.seed=3"))["data"]["seed"] == 3
    assert "seed: 3" in invoke("show", "data.seed=3")


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["batch", "size"], "data.train_batch_size"),
        (["batch size"], "data.train_batch_size"),
        (["rollout.n"], "actor_rollout_ref.rollout.n"),
        (["kl", "coefficient"], "algorithm.kl_ctrl.kl_coef"),
        (["learning rate"], "actor_rollout_ref.actor.optim.lr"),
        (["temperature"], "actor_rollout_ref.rollout.temperature"),
        (["algorithm.kl_ctrl"], "algorithm.kl_ctrl.type"),
        (["+trainer.val_before_train=False"], "trainer.val_before_train"),
        (["overlong"], "data.filter_overlong_prompts"),
    ],
)
def test_explain_finds_keys(words: list[str], first: str) -> None:
    answers = json.loads(invoke("explain", "--of", "train", "--json", *words))
    assert answers[0]["key"] == first


def test_explain_shows_related_keys() -> None:
    (entry,) = json.loads(invoke("explain", "actor_rollout_ref.actor.ppo_mini_batch_size", "--of", "train", "--json"))
    assert entry["mentions"] == ["data.train_batch_size"] and entry["default"] == 64
    text = invoke("explain", "actor_rollout_ref.actor.ppo_mini_batch_size", "--of", "train")
    assert "data.train_batch_size" in text and ">= 1. Default: 64" in text


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("reward_model.reward_manager", "Taken as reward.reward_manager"),
        ("reward_model.timeout", "Another name of reward.timeout"),
        ("actor_rollout_ref.actor.qat.enable", "Not supported yet"),
        ("actor_rollout_ref.actor.megatron.sequence_parallel", "No meaning here: a setting of Megatron"),
        ("data.return_raw_chat", "Always so here"),
    ],
)
def test_explain_knows_keys_of_verl(key: str, words: str) -> None:
    assert words in " ".join(invoke("explain", key).split())


def test_explain_suggests() -> None:
    assert "actor_rollout_ref.actor.ppo_mini_batch_size" in fails("explain", "ppo_minibatch_sise")
    assert "unknown key" in fails("explain", "flux", "compensator")


def test_diff_of_presets_files_and_runs(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("data: {seed: 3}\n")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(load_config(RLConfig, ["data.seed=4"])))
    assert json.loads(invoke("diff", str(tmp_path / "a.yaml"), str(run), "--json")) == {"data.seed": {"a": 3, "b": 4}}
    assert invoke("diff", str(run), str(run)) == "no difference\n"
    lines = invoke("diff", "grpo", "dapo").splitlines()
    assert "actor_rollout_ref.actor.use_kl_loss: true -> false" in lines
    assert "grpo" in fails("diff", "gprpo", "dapo")


def test_check_says_all_and_ends_with_2(tmp_path: Path) -> None:
    out = invoke("check", "--keys-only", "--preset", "grpo", "actor_rollout_ref.actor.kl_loss_coef=0.002")
    assert out.endswith("0 errors, 0 warnings\n")
    out = invoke("check", "data.train_batch_size=10", "actor_rollout_ref.actor.ppo_mini_batch_size=3", code=2)
    assert "R14" in out and "R42" in out and "ppo_mini_batch_size=2" in out
    report = json.loads(
        invoke("check", "--keys-only", "--json", "actor_rollout_ref.actor.ppo_mini_batch_size=48", code=2)
    )
    assert [finding["code"] for finding in report["findings"]] == ["R13"]


@pytest.mark.parametrize("tree", TREES.values())
def test_schema_accepts_what_the_tree_accepts(tree: type) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json_schema(tree)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for preset in [None, *preset_names(PRESET_KINDS[tree])]:
        config: Any = json.loads(json.dumps(_nested(load_config(tree, preset=preset))))
        assert [error.message for error in validator.iter_errors(config)] == []
    for key in documentation(tree):  # every key is described, with its default
        assert key.doc == _at(schema, key.path)["description"] and _at(schema, key.path)["default"] == key.default


@pytest.mark.parametrize(
    "wrong",
    [
        {"data": {"train_batch_size": 0}},
        {"data": {"truncation": "top"}},
        {"data": {"sede": 1}},
        {"data": {"shuffle": 3}},
    ]
    + [{"critic": {"optim": {"betas": [0.9]}}}, {"algorithm": {"gamma": 2}}, {"trainer": {"logger": "console"}}],
)
def test_schema_refuses_what_the_tree_refuses(wrong: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    assert list(jsonschema.Draft202012Validator(json_schema(RLConfig)).iter_errors(wrong))


def test_schema_lets_interpolations_stand() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    tree = {"data": {"max_response_length": "${data.max_prompt_length}"}, "defaults": ["/presets/rl/grpo@_global_"]}
    assert not list(jsonschema.Draft202012Validator(json_schema(RLConfig)).iter_errors(tree))
    assert json.loads(invoke("schema", "--of", "sft"))["title"] == "Hone: SFTConfig"


def completed(script: Path, *words: str) -> list[str]:
    """What bash offers for the last of the words; it splits them at the equals sign."""
    line = " ".join(f"'{word}'" for word in words)
    source = f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _hone; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    shell = subprocess.run(["bash", "-c", source], capture_output=True, text=True, timeout=SOON, check=True)
    return shell.stdout.split()


def test_completion_in_bash(tmp_path: Path) -> None:
    script = tmp_path / "hone.bash"
    script.write_text(invoke("completion", "bash"))
    assert "train" in completed(script, "hone", "tr")
    assert completed(script, "hone", "train", "data.train_b") == ["data.train_batch_size="]
    assert completed(script, "hone", "sft", "data.messages") == ["data.messages_key="]
    assert completed(script, "hone", "train", "data.shuffle", "=", "f") == ["false"]
    assert completed(script, "hone", "train", "trainer.resume_mode", "=") == ["auto", "disable", "resume_path"]
    assert "grpo" in completed(script, "hone", "train", "--preset", "gr")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_knows_every_key(shell: str) -> None:
    script = invoke("completion", shell)
    assert [key.path for tree in TREES.values() for key in documentation(tree) if f"{key.path}=" not in script] == []


def _nested(config: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in leaf_values(config):
        *blocks, last = path.split(".")
        inner = tree
        for block in blocks:
            inner = inner.setdefault(block, {})
        inner[last] = value
    return tree


def _at(schema: dict[str, Any], path: str) -> dict[str, Any]:
    for part in path.split("."):
        schema = schema["properties"][part]
    return schema
