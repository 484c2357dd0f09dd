"""Secrets in the environment, on the command line and in values of every form: none reaches a file or a printed configuration."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import yaml
from support.launch import Command, set_environment
from support.messages import raises
from support.preflight import change
from support.small_sft import make_small_sft, small_sft_settings

from hone.config import RLConfig, documentation, load_config, to_yaml
from hone.config.offline import SFTConfig
from hone.config.trees import TREES
from hone.errors import CheckpointError, ConfigError
from hone.insight.redaction import HIDDEN, is_secret_name, redact_command, redact_text, redact_tree
from hone.trainers.sft import SFTTrainer
from hone.training.checkpoints.checkpoint import find_checkpoint

SECRET = "correct-horse-battery-7"
KWARGS = "data.apply_chat_template_kwargs"
FROM_ENVIRONMENT = (
    f"++{KWARGS}.note='${{oc.env:HONE_TEST_SECRET}}'",
    f"++{KWARGS}.api_key='${{oc.env:HONE_TEST_SECRET}}'",
    f"++{KWARGS}.header='Bearer ${{oc.env:HONE_TEST_SECRET}}'",
    f"++{KWARGS}.through='x-${{{KWARGS}.note}}'",
    f"++{KWARGS}.relative='${{.note}}'",
    f"++{KWARGS}.listed=[a,'${{oc.env:HONE_TEST_SECRET}}']",
    "trainer.experiment_name='${oc.env:HONE_TEST_SECRET}'",
    "trainer.logger=[console,tensorboard]",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_sft(tmp_path_factory.mktemp("small"))


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HONE_TEST_SECRET", SECRET)


def trainer(root: Path, run: Path, steps: int, *overrides: str) -> SFTTrainer:
    settings = small_sft_settings(root, run, f"trainer.total_training_steps={steps}", *overrides)
    config = load_config(SFTConfig, settings)
    return SFTTrainer(config)


def files_with(folder: Path, text: str) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_values_of_variables_are_in_no_file_and_a_resumed_run_has_them(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert trainer(root, run, 2, *FROM_ENVIRONMENT).fit() == 0
    assert files_with(run, SECRET) == []
    assert any("events.out" in name for name in files_with(run, "oc.env:HONE_TEST_SECRET"))
    for written in (run / "config.yaml", run / "checkpoints" / "step_2" / "config.yaml"):
        kwargs = yaml.safe_load(written.read_text())["data"]["apply_chat_template_kwargs"]
        assert kwargs["api_key"] == kwargs["note"] == "${oc.env:HONE_TEST_SECRET}"
    again = load_config(SFTConfig, config_path=run)
    kwargs = again.data.apply_chat_template_kwargs
    assert kwargs["api_key"] == kwargs["note"] == kwargs["relative"] == kwargs["listed"][1] == SECRET
    assert (kwargs["header"], kwargs["through"]) == (f"Bearer {SECRET}", f"x-{SECRET}")
    assert again.trainer.experiment_name == SECRET
    resumed = trainer(root, run, 3, *FROM_ENVIRONMENT)
    assert resumed.step == 2 and resumed.config.data.apply_chat_template_kwargs["note"] == SECRET
    assert resumed.fit() == 0
    assert files_with(run, SECRET) == []


def test_an_unset_variable_is_named(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HONE_TEST_SECRET")
    with raises(ConfigError, "HONE_TEST_SECRET", "export HONE_TEST_SECRET=..."):
        load_config(SFTConfig, FROM_ENVIRONMENT)


def test_the_reason_of_a_failure_names_the_variable(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    run = tmp_path / "run"
    failing = trainer(root, run, 2, *FROM_ENVIRONMENT)
    monkeypatch.setattr(failing, "train_step", _fail)
    with pytest.raises(RuntimeError):
        failing.fit()
    assert json.loads((run / "run.json").read_text())["exit_reason"].endswith("at ${oc.env:HONE_TEST_SECRET}")


def _fail() -> None:
    raise RuntimeError(f"no answer at {SECRET}")


def test_another_model_from_the_environment_is_another_run(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    run, path = tmp_path / "run", "model.path='${oc.env:HONE_TEST_MODEL}'"
    monkeypatch.setenv("HONE_TEST_MODEL", f"{root}/model")
    assert trainer(root, run, 1, path).fit() == 0
    assert find_checkpoint(run).config["model"]["path"] == "${oc.env:HONE_TEST_MODEL}"
    assert trainer(root, run, 2, path).step == 1
    assert trainer(root, run, 2).step == 1, "the same path, written out"
    monkeypatch.setenv("HONE_TEST_MODEL", str(shutil.copytree(root / "model", tmp_path / "model")))
    with raises(CheckpointError, "model.path", code="R55"):
        trainer(root, run, 2, path)


def test_a_checkpoint_with_values_in_place_of_variables_resumes(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("HONE_TEST_MODEL", f"{root}/model")
    assert trainer(root, tmp_path / "run", 1).fit() == 0
    assert trainer(root, tmp_path / "run", 2, "model.path='${oc.env:HONE_TEST_MODEL}'").step == 1


def test_a_run_whose_checkpoint_directory_comes_from_the_environment_is_found(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("HONE_TEST_PLACE", str(tmp_path / "elsewhere"))
    assert trainer(root, tmp_path / "run", 1, "trainer.checkpoint_dir='${oc.env:HONE_TEST_PLACE}/x'").fit() == 0
    assert find_checkpoint(tmp_path / "run").storage.local_path == tmp_path / "elsewhere" / "x" / "step_1"
    monkeypatch.delenv("HONE_TEST_PLACE")
    with raises(ConfigError, "HONE_TEST_PLACE"):
        find_checkpoint(tmp_path / "run")


def test_a_value_changed_after_loading_is_written(tmp_path: Path) -> None:
    config = load_config(SFTConfig, ["trainer.project_name='${oc.env:HONE_TEST_SECRET}'"])
    assert "${oc.env:HONE_TEST_SECRET}" in to_yaml(config) and SECRET not in to_yaml(config)
    change(config, {"trainer.project_name": "other"})
    assert yaml.safe_load(to_yaml(config))["trainer"]["project_name"] == "other"


@pytest.mark.parametrize("options", [(), ("--json",), ("--changed",), ("--why", "--json"), ("--why",)])
def test_a_printed_configuration_has_no_secret(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "mine.yaml").write_text("reward:\n  custom_reward_function:\n    reward_kwargs: {judge: '${oc.env:HONE_TEST_SECRET}'}\n")  # fmt: skip
    words = ["config", "show", "--config-path", tmp_path, "--config-name", "mine", *options]
    literal = "++reward.custom_reward_function.reward_kwargs.openai_key=hunter22"
    environment = partial(set_environment, {"HONE_TEST_SECRET": SECRET})
    ended = Command([*words, literal], tmp_path / "log", prepare=environment).wait()
    assert ended.code == 0, ended.output
    assert SECRET not in ended.output and "hunter22" not in ended.output
    assert "oc.env:HONE_TEST_SECRET" in ended.output


TOKEN = "AbCd1234EfGh5678IjKl9012MnOp3456"
VALUES = [
    *(f"glpat-{TOKEN[:20]}", f"AIza{TOKEN}xyz", f"gho_{TOKEN}abcd", f"github_pat_{TOKEN}", f"hf_{TOKEN}", f"sk-proj-{TOKEN}"),
    *(f"sk-ant-api03-{TOKEN}", f"ASIA{TOKEN[:16].upper()}", f"ya29.{TOKEN}", f"xoxb-12345-{TOKEN}", f"npm_{TOKEN}abcd"),
    *(f"nvapi-{TOKEN}", f"gsk_{TOKEN}", f"r8_{TOKEN}", f"pypi-{TOKEN}", f"dckr_pat_{TOKEN}", "dapi" + "0123456789abcdef" * 2),
    *(f"SG.{TOKEN[:22]}.{TOKEN}", f"LTAI{TOKEN[:20]}", f"wandb_v1_{TOKEN}", f"123456789:AAF{TOKEN}", f"tvly-{TOKEN}"),
    f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.{TOKEN}",
    f"-----BEGIN RSA PRIVATE KEY-----\n{TOKEN}\n-----END RSA PRIVATE KEY-----",
]  # fmt: skip
TEXTS = [
    *(f"Authorization: Bearer {TOKEN}", f"curl -H 'authorization: bearer {TOKEN}'", f"Proxy-Authorization: Basic {TOKEN}=="),
    *(f"https://{TOKEN}@host/x", f"https://user:{TOKEN}@host/x", f"https://user:p@{TOKEN}@host/x", f"redis://:{TOKEN}@host:1"),
    *(f"https://host/x?token={TOKEN}&n=1", f"https://host/x?n=1&api_key={TOKEN}", f"https://host/?key={TOKEN}#top"),
    *(f"https://host/x?X-Amz-Signature={TOKEN}", f"https://host/x?a=1&sig={TOKEN}", f"wss://host/?access_token={TOKEN}"),
    *(f"OPENAI_API_KEY={TOKEN} python judge.py", f"AccountName=x;AccountKey={TOKEN}aa==;Suffix=y"),
    f"https://hooks.slack.com/services/T00000000/B00000000/{TOKEN}",
]  # fmt: skip
NAMES = [
    *("openai_key", "pwd", "bearer", "OPENAI_KEY", "anthropicKey", "azure-key", "x-api-key", "apikey", "secretkey", "authtoken"),
    *("db_pass", "SMTP_PASS", "passcode", "jwt", "cookie", "session_token", "id_token", "client_key", "connection_string"),
    *("judge.openrouter_key", "wandb_key", "gitlab_token", "slack_token", "sas", "userpassword", "client-secret", "creds"),
]  # fmt: skip


@pytest.mark.parametrize("value", [*VALUES, *TEXTS], ids=lambda text: text[:25])
def test_forms_of_values(value: str) -> None:
    body = value.replace("\n", "")[-20:] if value in VALUES and "BEGIN" not in value else TOKEN
    for written in (redact_text(value), redact_tree({"note": value})["note"], *redact_command(["run", f"note={value}"]),
                    redact_text(f"failed at {value!r}."), redact_tree(["a", value])[1]):  # fmt: skip
        assert body not in written and TOKEN not in written
    assert HIDDEN in redact_text(value)


@pytest.mark.parametrize("name", NAMES)
def test_forms_of_names(name: str) -> None:
    assert is_secret_name(name)
    assert redact_tree({"kwargs": {name: "abc", "n": 1}}) == {"kwargs": {name: HIDDEN, "n": 1}}
    assert redact_command([f"++a.b.{name}=abc", f"--{name}", "abc"]) == [f"++a.b.{name}={HIDDEN}", f"--{name}", HIDDEN]
    assert redact_text(f"{{{name}: abc}}") == f"{{{name}: {HIDDEN}}}"
    assert redact_tree(["serve", f"--{name}", "abc", f"{name}=abc"]) == [
        "serve",
        f"--{name}",
        HIDDEN,
        f"{name}={HIDDEN}",
    ]


ORDINARY = [
    *("https://host:80/x?a=b&page=2", "ssh://git@github.com/x", "s3://bucket/a@b", "mail me@example.org", "loss=token-mean"),
    *("basic training-data 2024", "the bearer of good news-paper", "task-based-evaluation-of-language-models", "{{ message }}"),
    *("<|im_start|>user\nYour secret: think", "risk-averse-policies-for-agents", "Qwen/Qwen2.5-0.5B", "key: value", "step_10"),
]  # fmt: skip


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_values_stay(text: str) -> None:
    assert redact_tree({"prompt": text, "list": [text, text]}) == {"prompt": text, "list": [text, text]}


def test_no_key_of_the_configuration_is_taken_for_a_secret() -> None:
    paths = {key.path for tree in TREES.values() for key in documentation(tree) if is_secret_name(key.path)}
    assert paths == {"insight.webhook"}  # who has the address can write into the channel


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("${oc.env:KEY}", "${oc.env:KEY}"),
        ("Bearer ${oc.env:KEY}", "Bearer ${oc.env:KEY}"),
        ("${oc.env:KEY,null}", "${oc.env:KEY,null}"),
        ("${oc.env:KEY,hunter2}", f"${{oc.env:KEY,{HIDDEN}}}"),
        ("${oc.decode:${oc.env:KEY}}", "${oc.decode:${oc.env:KEY}}"),
        ("hunter2${oc.env:KEY}", HIDDEN),
    ],
)
def test_interpolations_of_secrets(text: str, written: str) -> None:
    assert redact_tree({"password": text}) == {"password": written}
    assert redact_command([f"a.password={text}"]) == [f"a.password={written}"]


def test_a_secret_from_the_environment_is_no_finding() -> None:
    from hone.preflight.lifecycle import no_secrets_in_the_configuration as rule

    key = "++reward.custom_reward_function.reward_kwargs.api_key"
    from_environment = load_config(RLConfig, [f"{key}='${{oc.env:HONE_TEST_SECRET}}'"])
    literal = load_config(RLConfig, [f"{key}=hunter2"])
    assert list(rule(from_environment)) == []
    (finding,) = rule(literal)
    assert finding.error.where.endswith("reward_kwargs") and "${oc.env:NAME}" in finding.error.fix
