"""What a checkpoint was made from may not change unnoticed."""

import contextlib
import json
from pathlib import Path

import pytest

from hone.config import load_config
from hone.config.fields import AFTER_EACH_EPOCH
from hone.config.tree import RLConfig
from hone.errors import HoneError
from hone.insight import stop_requests
from hone.insight.run_files import read_metrics, read_run
from hone.trainers.session import RunSession, changed_keys, completed, redacted


def test_a_key_that_an_older_version_lacked_is_no_change():
    now = redacted(RLConfig())
    older = json.loads(json.dumps(now))
    del older["actor_rollout_ref"]["actor"]["entropy_coeff_delta"], older["distillation"]
    older["actor_rollout_ref"]["rollout"]["engine_kwargs"] = {"a": 1}
    assert changed_keys(completed(older, now), now) == ["actor_rollout_ref.rollout.engine_kwargs.a: 1 -> None"]


def test_changed_keys_names_every_leaf_that_differs():
    old, new = RLConfig(), RLConfig()
    assert changed_keys(redacted(old), redacted(new)) == []
    new.actor_rollout_ref.model.lora_rank = 8
    new.data.train_files = ["a", "b"]
    assert changed_keys(redacted(old), redacted(new)) == [
        "data.train_files: None -> ['a', 'b']",
        "actor_rollout_ref.model.lora_rank: 0 -> 8",
    ]


def test_keys_that_one_side_lacks():
    assert changed_keys({"a": {"x": 1}, "b": 2}, {"a": {"y": 3}, "b": 2}) == ["a.x: 1 -> None", "a.y: None -> 3"]


def test_credentials_never_reach_a_checkpoint():
    config = RLConfig()
    config.reward.custom_reward_function.reward_kwargs = {"api_key": "sk-12345"}
    assert "sk-12345" not in str(redacted(config))


@pytest.mark.parametrize(
    ("frequency", "due"),
    [(0, []), (-1, [10]), (4, [4, 8, 10]), (AFTER_EACH_EPOCH, [3, 6, 9, 10])],
)
def test_frequencies(frequency, due, tmp_path):
    trainer = load_config(RLConfig, [f"trainer.default_local_dir={tmp_path}", f"trainer.save_freq={frequency}"])
    session = RunSession(trainer)
    session.total_steps, session.steps_per_epoch = 10, 3
    assert [step for step in range(1, 11) if session.save_due(step)] == due


def test_alerts_of_a_killed_and_resumed_run_are_those_of_an_undisturbed_one(tmp_path):
    """Scores of 0 from step 2, which last: one alert, also when the run was killed behind it and resumed from before or behind it."""

    def steps(folder, first, last, killed=False):
        words = [f"trainer.default_local_dir={folder}", "trainer.logger=[file]", "trainer.async_save=false"]
        session = RunSession(load_config(RLConfig, words))
        assert (session.resumed_from.step if session.resumed_from else 0) == first - 1
        with contextlib.suppress(KeyboardInterrupt), session.running(last, last):
            for step in range(first, last + 1):
                session.log(step, {"critic/score/min": 0.0, "critic/score/max": float(step == 1)})
                if step % 5 == 0:
                    (Path(session.begin_save(step)) / "weights").touch()
                    session.finish_save(step, {"step": step}, lambda: None)
            if killed:
                raise KeyboardInterrupt
        return {row["step"]: row["insight/alerts"] for row in read_metrics(folder) if "insight/alerts" in row}

    expected = steps(tmp_path / "whole", 1, 20)
    assert list(expected.values()) == [1.0]
    steps(tmp_path / "killed", 1, 7, killed=True)
    steps(tmp_path / "killed", 6, 13, killed=True)
    assert steps(tmp_path / "killed", 11, 20) == expected


@pytest.mark.parametrize(("at_once", "step"), [(False, 1), (True, 1), (False, 2)])
def test_a_request_to_stop_ends_the_run_and_one_at_once_stays(at_once, step, tmp_path, monkeypatch):
    monkeypatch.setattr(stop_requests, "PERIOD", 60.0)  # the step ends before the thread looks
    monkeypatch.setattr("hone.trainers.session.kill_children", lambda: None)  # other tests have processes, too
    words = [f"trainer.default_local_dir={tmp_path}", "trainer.logger=[]", "trainer.save_freq=0"]
    session = RunSession(load_config(RLConfig, words))
    with session.running(2, 2):
        stop_requests.send_stop(tmp_path, stop_requests.StopRequest(at_once, "enough"))
        assert session.stop_requested
        session.completed(step, {})
    record = read_run(tmp_path)
    ended = ("interrupted", 4) if step == 1 else ("finished", 0)
    assert (record["status"], session.exit_code) == ended
    assert (stop_requests.read_stop(tmp_path) is not None) == at_once
    if at_once:
        assert "--clear" in record["exit_reason"]
        with pytest.raises(HoneError, match="E-stopped"):
            RunSession(load_config(RLConfig, words))
