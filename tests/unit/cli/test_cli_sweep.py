"""`hone sweep` on runs with chosen scores."""

import io
import json
import math
from contextlib import redirect_stdout

import pytest
from support.fake_trials import FakeTrials
from support.messages import raises

from hone.cli import trials
from hone.cli.main import load
from hone.errors import ConfigError, HoneError

RATE = "actor_rollout_ref.actor.optim.lr"
FILES = ("data.train_files=t.jsonl", "data.val_files=v.jsonl")


def score(config, draw):
    rate, count = config.actor_rollout_ref.actor.optim.lr, config.actor_rollout_ref.rollout.n
    return 0.5 - abs(rate - 1e-4) * 1000 + count / 100


def sweep(monkeypatch, out, *words, fake=None, as_json=True):
    fake = fake or FakeTrials(score)
    monkeypatch.setattr(trials, "run_trial", fake)
    command = [*FILES, *map(str, words), "--out", str(out), *(["--json"] if as_json else [])]
    with redirect_stdout(io.StringIO()) as output:
        load("trials:sweep").main(args=command, standalone_mode=False)
    return (json.loads(output.getvalue()) if as_json else output.getvalue()), fake


def test_a_grid_is_trained_and_ranked(monkeypatch, tmp_path):
    result, fake = sweep(monkeypatch, tmp_path, f"{RATE}=1e-5,1e-4,2e-4", "actor_rollout_ref.rollout.n=4,8")
    assert [path.name for path in fake.started] == [f"{n:03d}" for n in range(6)]
    values = [tuple(trial["values"].values()) for trial in result["trials"]]
    assert values[:2] == [("0.0001", "8"), ("0.0001", "4")] and len(set(values)) == 6
    scores = [trial["score"] for trial in result["trials"]]
    assert scores == sorted(scores, reverse=True)
    assert result["lead"]["result"]["difference"] == pytest.approx(0.04) and result["lead"]["result"]["prompts"] == 32
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_more_values_train_only_the_new_trials(monkeypatch, tmp_path):
    sweep(monkeypatch, tmp_path, f"{RATE}=1e-5,1e-4")
    result, fake = sweep(monkeypatch, tmp_path, f"{RATE}=1e-4,2e-4,1e-5")
    assert [path.name for path in fake.started] == ["002"] and len(result["trials"]) == 3
    with raises(HoneError, "--out", code="E-runs"):
        sweep(monkeypatch, tmp_path, f"{RATE}=1e-4,2e-4", "trainer.seed=3")


def test_a_changed_file_is_not_ranked_with_trials_of_the_old_one(monkeypatch, tmp_path):
    file, out = tmp_path / "base.yaml", tmp_path / "out"
    words = (f"{RATE}=1e-5,1e-4", "--config-path", tmp_path, "--config-name", "base")
    file.write_text("actor_rollout_ref: {rollout: {n: 4}}\n")
    sweep(monkeypatch, out, *words)
    fake = FakeTrials(score)
    file.write_text("actor_rollout_ref: {rollout: {n: 4}}\ntrainer: {rollout_dump_freq: 3}\n")
    sweep(monkeypatch, out, *words, fake=fake)
    file.write_text("actor_rollout_ref: {rollout: {n: 8}}\n")
    with raises(HoneError, "trial 000", code="E-runs"):
        sweep(monkeypatch, out, *words, fake=fake)
    assert not fake.started


@pytest.mark.parametrize("bad", ["1e-5", "1e-4", "2e-4"])
def test_a_loss_that_is_not_a_number_ranks_last(monkeypatch, tmp_path, bad):
    def scores(config, draw):
        return math.nan if config.actor_rollout_ref.actor.optim.lr == float(bad) else score(config, draw)

    words = (f"{RATE}=1e-5,1e-4,2e-4", "--metric", "critic/rewards/mean")
    result, _ = sweep(monkeypatch, tmp_path, *words, fake=FakeTrials(scores))
    finite = [float(trial["score"]) for trial in result["trials"][:2]]
    assert finite == sorted(finite, reverse=True) and result["trials"][2]["score"] == "NaN"


def test_random_draws_and_the_table(monkeypatch, tmp_path):
    words = (f"{RATE}=tag(log,interval(1e-5,1e-3))", "--random", 4)
    table, fake = sweep(monkeypatch, tmp_path, *words, as_json=False)
    assert len(fake.started) == 4 and all(f"{n:03d}" in table for n in range(4))


def test_a_failed_trial_does_not_end_the_sweep(monkeypatch, tmp_path):
    whole = FakeTrials(score)

    def breaks(trial):
        if trial.directory.name == "001":
            raise HoneError("the run ended with exit code 2", where=str(trial.directory))
        whole(trial)

    with raises(HoneError, "1 of 3 trials failed", code="E-runs"):
        sweep(monkeypatch, tmp_path, f"{RATE}=1e-5,1e-4,2e-4", fake=breaks)
    assert [path.name for path in whole.started] == ["000", "002"]
    result, fake = sweep(monkeypatch, tmp_path, f"{RATE}=1e-5,1e-4,2e-4")
    assert [path.name for path in fake.started] == ["001"] and len(result["trials"]) == 3


def test_mistakes_are_reported_before_the_first_run(monkeypatch, tmp_path):
    fake = FakeTrials(score)
    with raises(ConfigError, "several values"):
        sweep(monkeypatch, tmp_path, f"{RATE}=1e-5", fake=fake)
    with raises(ConfigError, "optim.rl"):
        sweep(monkeypatch, tmp_path, "actor_rollout_ref.actor.optim.rl=1,2", fake=fake)
    assert not fake.started
