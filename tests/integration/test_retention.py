"""Retention rules on run directories: what goes, and what must stay."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from hone.cli.main import main
from hone.training.checkpoints.store import CheckpointStore
from hone.training.retention import DAY, Rules, delete, surplus_of


def make_run(run: Path, status: str = "finished", replays: tuple[int, ...] = ()) -> Path:
    """Checkpoints 1 to 5, the best of step 2, and samples of five steps that are as many days old."""
    for folder in ("rollouts", "validation", "checkpoints"):
        (run / folder).mkdir(parents=True)
    (run / "config.yaml").write_text(f"trainer: {{save_steps_for_replay: {list(replays)}, best_ckpt_mode: max}}\n")
    (run / "run.json").write_text(
        json.dumps({"status": status, "exit_reason": "", "started": "2026-01-01T00:00:00+00:00"})
    )
    store = CheckpointStore(run / "checkpoints", None, background=False)
    for step in range(1, 6):

        def write(folder: Path) -> None:
            (folder / "actor").mkdir()
            (folder / "actor" / "model.safetensors").write_bytes(b"0" * 1000)

        folder = store.begin(step).local_path
        store.publish(
            step, {"step": step}, {}, lambda folder=folder: write(folder), metric="reward", value=-abs(step - 2)
        )
        file = run / "rollouts" / f"step_{step}.parquet"
        file.write_bytes(b"0" * 10)
        os.utime(file, (0, time.time() - (5.5 - step) * DAY))
    (run / "rollouts" / "vocabulary.parquet").write_bytes(b"0")
    os.utime(run / "rollouts" / "vocabulary.parquet", (0, 0))
    return run


def test_newest_best_and_replayed_checkpoints_stay(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", replays=(4,))
    rules = Rules(checkpoints=1, rollout_days=2)
    surplus = surplus_of(run, rules)
    assert surplus.checkpoints == (1, 4)  # 5 is the newest, 2 the best, 3 comes before the step of a replay
    assert [file.name for file in surplus.rollouts] == ["step_1.parquet", "step_2.parquet", "step_3.parquet"]
    before = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
    delete(surplus, rules)
    after = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
    assert before - after == surplus.size > 2000
    assert CheckpointStore(run / "checkpoints", None).steps() == [2, 3, 5]
    assert sorted(file.name for file in (run / "rollouts").iterdir()) == [
        *("step_4.parquet", "step_5.parquet", "vocabulary.parquet")
    ]
    assert surplus_of(run, rules).size == 0


def test_samples_of_replays_stay(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", replays=(2,))
    assert [file.stem for file in surplus_of(run, Rules(rollout_days=0)).rollouts] == [
        "step_1",
        "step_3",
        "step_4",
        "step_5",
    ]


@pytest.mark.parametrize("status", ["running", "released"])
def test_running_and_released_runs_keep_everything(status: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", status if status == "running" else "finished")
    shelf = tmp_path / "shelf" / "0001"
    shelf.mkdir(parents=True)
    (shelf / "release.json").write_text(json.dumps({"release": 1, "run": {"path": str(run)}}))
    rules = Rules(checkpoints=1, rollout_days=0, shelves=(tmp_path / "shelf",) if status == "released" else ())
    surplus = surplus_of(run, rules)
    assert surplus.kept_because and surplus.size == 0
    delete(surplus, rules)
    assert CheckpointStore(run / "checkpoints", None).steps() == [1, 2, 3, 4, 5]


def test_the_command_deletes_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "runs" / "one")
    words = ["runs", "prune", "--root", str(tmp_path / "runs"), "--keep-checkpoints", "2", "--json"]
    for extra, left in (([], 5), (["--delete"], 3)):
        with pytest.raises(SystemExit) as ended:
            main([*words, *extra])
        assert not ended.value.code
        (record,) = json.loads(capsys.readouterr().out)
        assert record["checkpoints"] == [1, 3] and record["bytes"] > 2000
        assert len(CheckpointStore(run / "checkpoints", None).steps()) == left
    with pytest.raises(SystemExit) as ended:
        main(words[:4])
    assert ended.value.code == 2
