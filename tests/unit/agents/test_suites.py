"""Names of suites, their packages, and the files that packages write."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from support.messages import raises
from support.suite_stand_in import VERSION, stand_in

from hone.agents import suites
from hone.agents.suites import PACKAGES, Suite, SuiteError, measure, read_suites
from hone.cli.main import main
from hone.errors import ConfigError


@pytest.mark.parametrize("text", ["", "gsm8k", "lm-evl:gsm8k", "lm-eval:", "lm-eval:,", "inspect:'open"])
def test_texts_that_name_no_suite(text: str) -> None:
    with raises(ConfigError, where="--suite"):
        read_suites([text], {}, "--suite")


def test_tasks_and_options_of_a_suite(tmp_path: Path) -> None:
    python = stand_in(tmp_path)
    (suite,) = read_suites(["lm-eval:arc_easy,tasks/mine.yaml --gen_kwargs 'a=1, b=2'"], {"lm-eval": str(python)}, "x")
    assert suite.tasks == ("arc_easy", "tasks/mine.yaml") and suite.options == ("--gen_kwargs", "a=1, b=2")
    assert (suite.python, suite.version) == (str(python), VERSION)


@pytest.mark.parametrize(
    ("name", "given", "command"),
    [
        ("lm-eval", sys.executable, f"{sys.executable} -m pip install 'lm-eval[api]'"),
        ("inspect", sys.executable, f"{sys.executable} -m pip install inspect-ai openai"),
        ("inspect", None, "/bin/pip install inspect-ai openai"),
    ],
)
def test_a_missing_package_is_named_with_its_command(
    name: str, given: str | None, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites, "ENVIRONMENTS", tmp_path)
    with raises(ConfigError, where="trainer.val_suites") as caught:
        read_suites([f"{name}:task"], {name: given} if given else {}, "trainer.val_suites")
    assert command in caught.value.fix
    with raises(ConfigError, where="trainer.val_suites"):
        read_suites([f"{name}:task"], {name: str(tmp_path / "python")}, "trainer.val_suites")


def test_the_environment_of_a_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "ENVIRONMENTS", tmp_path)
    (tmp_path / "lm-eval/bin").mkdir(parents=True)
    python = stand_in(tmp_path / "lm-eval/bin")
    assert read_suites(["lm-eval:mine"], {}, "x")[0].python == str(python)


@pytest.mark.parametrize(
    "words",
    [
        ["--suite", "lm-eval:gsm8k", "--suite-python", sys.executable],
        ["--suite", "lm-eval:gsm8k", "--data", "rows.jsonl"],
        ["--suite", "lm-eval:gsm8k", "--temperature", "1"],
        ["--data", "rows.jsonl", "--suite-python", sys.executable],
        [],
    ],
)
def test_commands_that_are_refused_before_a_model_is_loaded(words: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["eval", "no/model", *words])
    assert ended.value.code == 2 and "E-config" in capsys.readouterr().err


def test_scores_of_a_group_count_the_samples_of_its_tasks(tmp_path: Path) -> None:
    record = {
        "results": {
            "sums": {"acc,none": 0.5, "acc_stderr,none": 0.25, "alias": "sums"},
            "one": {"acc,none": 1.0, "sample_len": 3, "name": "one"},
            "two": {"acc,none": 0.0, "sample_len": 4},
        },
        "group_subtasks": {"sums": ["half"], "half": ["one", "two"], "one": [], "two": []},
        "versions": {"sums": 2, "one": 1.0, "two": "Yaml"},
        "n-samples": {"one": {"original": 9, "effective": 3}, "two": {"original": 9, "effective": 4}},
    }
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "results_2026-01-01.json").write_text(json.dumps(record))
    read = {task: (version, samples) for task, version, samples, _ in PACKAGES["lm-eval"].read(tmp_path)}
    assert read == {"sums": ("2", 7), "one": ("1.0", 3), "two": ("Yaml", 4)}


@pytest.mark.parametrize(("status", "samples"), [("error", 4), ("cancelled", 4), ("success", 0)])
def test_what_ended_badly_or_measured_nothing_has_no_score(tmp_path: Path, status: str, samples: int) -> None:
    scores = [{"name": "match", "metrics": {"accuracy": {"value": 0.0}}}]
    log = {"status": status, "eval": {"task": "sums/one", "task_version": 0}}
    log["results"] = {"completed_samples": samples, "scores": scores}
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\n"
        f"Path(sys.argv[sys.argv.index('--log-dir') + 1], 'log.json').write_text({json.dumps(log)!r})\n"
    )
    program.chmod(0o755)
    suite = Suite("inspect", ("sums.py@one",), (), str(program), "0.3")
    with raises(SuiteError, code="E-suite"):
        asyncio.run(measure(suite, "http://127.0.0.1:1", 64, tmp_path))
    with raises(SuiteError, code="E-suite"):
        asyncio.run(measure(Suite("inspect", ("a",), (), str(tmp_path / "none"), "0"), "http://x", 64, tmp_path))
