"""`hone twins` on runs with chosen scores."""

import io
import json
import math
from contextlib import redirect_stdout

import pytest
from support.fake_trials import FakeTrials
from support.messages import raises

from hone.cli import trials
from hone.cli.main import load
from hone.errors import HoneError

pytestmark = pytest.mark.application("hone/insight", "hone/apps/lab", "hone/cli")

CONFIG = (
    "data: {{train_files: [t.jsonl], val_files: [v.jsonl]}}\nactor_rollout_ref: {{actor: {{optim: {{lr: {lr}}}}}}}\n"
)


@pytest.fixture
def files(tmp_path):
    for name, rate in (("a", 1e-5), ("b", 1e-4), ("same", 1e-5)):
        (tmp_path / f"{name}.yaml").write_text(CONFIG.format(lr=rate))
    return tmp_path


def twins(files, monkeypatch, score, first="a", second="b", *words):
    fake = FakeTrials(score)
    monkeypatch.setattr(trials, "run_trial", fake)
    command = [f"{files}/{first}.yaml", f"{files}/{second}.yaml", "--out", f"{files}/out", "--json", *map(str, words)]
    with redirect_stdout(io.StringIO()) as output:
        load("trials:twins").main(args=command, standalone_mode=False)
    return json.loads(output.getvalue()), fake


def by_rate(gain):
    return lambda config, draw: 0.4 + gain * (config.actor_rollout_ref.actor.optim.lr > 5e-5) + draw.gauss(0, 0.005)


def test_a_planted_difference_stops_with_the_better_one(files, monkeypatch):
    result, fake = twins(files, monkeypatch, by_rate(0.1))
    assert result["decision"]["outcome"] == "second better" and result["verdict"].startswith("B better, 9")
    assert result["decision"]["pairs"] == len(result["pairs"]) == 6 and len(fake.started) == 12
    assert result["decision"]["difference"] == pytest.approx(0.1, abs=0.01)
    assert [pair["seed"] for pair in result["pairs"]] == list(range(1, 7))
    assert {path.parent.name for path in fake.started} == {f"seed_{n}" for n in range(1, 7)}


def test_the_other_one_is_better(files, monkeypatch):
    result, _ = twins(files, monkeypatch, by_rate(-0.1), "a", "b", "--first-seed", 5)
    assert result["decision"]["outcome"] == "first better" and result["pairs"][0]["seed"] == 5


def test_equal_configurations_with_noise_stop_with_no_difference(files, monkeypatch):
    result, _ = twins(files, monkeypatch, by_rate(0.1), "a", "same")
    assert result["decision"]["outcome"] == "no difference" and 0.95 <= result["decision"]["confidence"] < 1


def test_equal_configurations_with_identical_runs_need_one_pair(files, monkeypatch):
    result, fake = twins(files, monkeypatch, lambda config, draw: 0.4, "a", "same")
    assert result["decision"] == {"outcome": "no difference", "confidence": 1.0, "pairs": 1, "difference": 0.0}
    assert len(fake.started) == 2


def test_different_configurations_with_identical_runs_are_tested(files, monkeypatch):
    result, _ = twins(files, monkeypatch, lambda config, draw: 0.4)
    assert result["decision"]["outcome"] == "no difference" and result["decision"]["pairs"] == 5


def test_the_last_pair_without_a_decision_says_how_many_more(files, monkeypatch):
    result, _ = twins(files, monkeypatch, by_rate(0.1), "a", "b", "--max-pairs", 3)
    assert result["decision"]["outcome"] == "still noise" and "3 more seeds" in result["verdict"]


def test_an_interrupted_comparison_continues(files, monkeypatch):
    complete, _ = twins(files, monkeypatch, by_rate(0.1), "a", "b", "--max-pairs", 2)
    result, fake = twins(files, monkeypatch, by_rate(0.1), "a", "b", "--max-pairs", 3)
    assert [path.parent.name for path in fake.started] == ["seed_3", "seed_3"]
    assert result["pairs"][:2] == complete["pairs"]
    assert json.loads((files / "out/twins.json").read_text())["verdict"] == result["verdict"]
    with raises(HoneError, "--out", code="E-runs"):
        twins(files, monkeypatch, by_rate(0.1), "a", "same")


def test_one_number_of_a_metric_is_compared(files, monkeypatch):
    result, _ = twins(files, monkeypatch, by_rate(0.1), "a", "b", "--metric", "critic/rewards/mean")
    assert result["decision"]["outcome"] == "second better" and result["pairs"][0]["prompts"] == 1
    with raises(HoneError, "critic/rewards/mean", code="E-runs"):
        twins(files, monkeypatch, by_rate(0.1), "a", "b", "--metric", "critic/reward/mean")


def test_a_score_that_is_not_a_number_ends_the_comparison(files, monkeypatch):
    diverges = lambda config, draw: 0.4 if config.actor_rollout_ref.actor.optim.lr < 5e-5 else math.nan  # noqa: E731
    with raises(HoneError, "seed 1", code="E-runs"):
        twins(files, monkeypatch, diverges, "a", "b", "--metric", "critic/rewards/mean")


def test_bad_input(files, monkeypatch):
    with raises(HoneError, "hone twins A.yaml B.yaml", code="E-runs"):
        twins(files, monkeypatch, by_rate(0), "a", "missing")
    with raises(HoneError, "--margin", code="E-runs"):
        twins(files, monkeypatch, by_rate(0), "a", "b", "--margin", 0)


def test_a_failed_run_shows_its_output_and_is_not_finished(tmp_path):
    trial = trials.Trial(("no-such-command",), tmp_path / "run")
    with raises(HoneError, "no-such-command", code="E-runs"):
        trials.run_trial(trial)
    assert not trial.finished
