"""Runs and gates that post to a webhook: a real server gets what happened, the address is in no file, and a dead server changes nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.launch import Command, Ended, hone, set_environment
from support.services import refusing_port, serve
from support.tiny_runs import make_tiny_runs, rl_words
from support.world import metrics

from hone.insight.run_files import read_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.application("hone/insight/webhook.py", "hone/trainers/notices.py", "hone/apps/ops"),
]

SECRET = "services/T0/topsecretplace"
REWARDS = """
def nothing(solution_str, **row):
    return 0.0

def raises(solution_str, **row):
    raise RuntimeError("the judge is away")
"""
SUITE = """
checks:
  canaries: {data: prompts.jsonl, reward: 'rewards.py:nothing', at_least: BOUND, max_response_length: 4}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_runs(tmp_path_factory.mktemp("tiny"), rewards=REWARDS)


def trained(tiny: Path, run: Path, url: str | None, *words: str, reward: str = "nothing") -> Ended:
    """A run of four steps; the address is in the environment."""
    rewards = (f"custom_reward_function.path={tiny}/rewards.py", f"custom_reward_function.name={reward}")
    sent = ("insight.webhook=${oc.env:HOOK}",) if url else ()
    more = (*rewards, *sent, "preflight.reward_rows=0", "trainer.total_training_steps=4", *words)
    prepare = partial(set_environment, {"HOOK": f"{url}/{SECRET}"})
    return Command(rl_words(tiny, run, *more), run.with_suffix(".log"), tiny, prepare).wait()


def accepting(path: str, body: Any) -> tuple[int, Any]:
    return 200, "ok"


def files_with(folder: Path, text: str) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and text.encode() in file.read_bytes()]


def test_alerts_and_the_end_are_posted_and_the_address_is_nowhere(tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with serve(accepting) as (url, seen):
        ended = trained(tiny, run, url, "insight.notify_end=true")
    assert ended.code == 0, ended.output
    assert [(path, body["event"]) for path, body, _ in seen] == [(f"/{SECRET}", "alert"), (f"/{SECRET}", "ended")]
    alert, end = (body for _, body, _ in seen)
    assert (alert["detector"], alert["step"], alert["run"]) == ("zero_reward", 3, "/".join(run.parts[-3:]))
    assert "every" in alert["text"] and "Fix:" in alert["text"] and alert["samples"]
    assert (end["status"], end["step"]) == ("finished", 4) and "all 4 steps done" in end["text"]
    assert read_run(run)["webhook"] == {"delivered": 2, "failed": 0}
    assert not files_with(tmp_path, "topsecretplace")  # the log of the command is there, too
    shown = hone("runs", "show", run, log=tmp_path / "show", cwd=tiny)
    assert shown.code == 0 and "2 notices delivered" in shown.output


def test_an_address_in_the_configuration_is_in_no_file_either(tiny: Path, tmp_path: Path) -> None:
    with serve(accepting) as (url, seen):
        ended = trained(tiny, tmp_path / "run", None, f"insight.webhook={url}/{SECRET}")
    assert ended.code == 0 and [body["event"] for _, body, _ in seen] == ["alert"], ended.output
    assert not files_with(tmp_path, "topsecretplace")
    assert "insight.webhook seems to hold a credential" in ended.output


def test_an_error_that_ends_the_run_is_posted(tiny: Path, tmp_path: Path) -> None:
    with serve(accepting) as (url, seen):
        ended = trained(tiny, tmp_path / "run", url, reward="raises")
    assert ended.code not in (0, 4), ended.output
    (body,) = (body for _, body, _ in seen)
    assert body["event"] == "failed" and "verdict" in body["text"] and body["fix"] and body["error"] in ended.output
    record = read_run(tmp_path / "run")
    assert record["status"] == "failed" and record["webhook"] == {"delivered": 1, "failed": 0}


def test_a_dead_server_changes_nothing_but_the_count(tiny: Path, tmp_path: Path) -> None:
    """The curve is that of a run without a webhook."""
    with refusing_port() as port:
        ended = trained(tiny, tmp_path / "run", f"http://127.0.0.1:{port}")
    alone = trained(tiny, tmp_path / "alone", None)
    assert ended.code == alone.code == 0, ended.output
    counts = read_run(tmp_path / "run")["webhook"]
    assert (counts["delivered"], counts["failed"]) == (0, 1) and "refused" in counts["error"]
    assert "webhook: 1 of 1 notices failed" in ended.output and "topsecretplace" not in ended.output
    assert metrics(tmp_path / "run") == metrics(tmp_path / "alone")
    assert "webhook" not in read_run(tmp_path / "alone")


@pytest.mark.parametrize(("bound", "code"), [("0.0", 0), ("0.5", 4)])
def test_verdicts_of_a_gate_are_posted(bound: str, code: int, tiny: Path, tmp_path: Path) -> None:
    suite = tiny / f"suite{code}.yaml"
    suite.write_text(SUITE.replace("BOUND", bound))
    words = ("gate", tiny / "model", "--suite", suite, "--output", tmp_path / "report.json")
    with serve(accepting) as (url, seen):
        ended = hone(*words, "--webhook", f"{url}/{SECRET}", log=tmp_path / "log", cwd=tiny)
    assert ended.code == code, ended.output
    (body,) = (body for _, body, _ in seen)
    assert body["event"] == "gate" and body["passed"] == (code == 0)
    assert ("gate refused: canaries at_least" in body["text"]) == (code == 4)
    assert not files_with(tmp_path, "topsecretplace")


def test_a_gate_without_a_working_webhook_keeps_its_verdict(tiny: Path, tmp_path: Path) -> None:
    suite = tiny / "suite.yaml"
    suite.write_text(SUITE.replace("BOUND", "0.0"))
    words = ("gate", tiny / "model", "--suite", suite, "--webhook")
    with serve(lambda path, body: (404, "")) as (url, _):
        ended = hone(*words, url, log=tmp_path / "log", cwd=tiny)
    assert ended.code == 0 and "not delivered to the webhook: status 404" in ended.output
    wrong = hone(*words, "hooks.example.com/topsecretplace", log=tmp_path / "wrong", cwd=tiny)
    assert wrong.code == 2 and "32 characters" in wrong.output and "topsecretplace" not in wrong.output
