"""Retention rules on run directories: what goes, and what must stay."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from hone.apps.ops.retention import DAY, Rules, delete, surplus_of
from hone.cli.main import main
from hone.insight.run_lock import RunLock
from hone.training.checkpoints.store import CheckpointStore
from hone.training.releases import model_digest


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


def _contents(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


@pytest.mark.parametrize(
    "way", ["checkpoint_dir", "checkpoints", "step_1", "rollouts", "rollouts/step_1.parquet", "the run"]
)
def test_nothing_outside_the_run_is_deleted(way: str, tmp_path: Path) -> None:
    """A received run names the checkpoints or samples of another one by its configuration or by links."""
    mine, received = make_run(tmp_path / "mine"), make_run(tmp_path / "runs" / "received")
    if way == "checkpoint_dir":
        (received / "config.yaml").write_text(f"trainer: {{checkpoint_dir: {mine / 'checkpoints'}}}\n")
    else:
        replaced = {"step_1": "checkpoints/step_1", "the run": ""}.get(way, way)
        shutil.rmtree(received / replaced) if (received / replaced).is_dir() else (received / replaced).unlink()
        (received / replaced).symlink_to(mine / replaced)
    before = _contents(mine)
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "runs",
                "prune",
                "--root",
                str(tmp_path / "runs"),
                "--keep-checkpoints",
                "1",
                "--keep-rollouts",
                "0",
                "--delete",
            ]
        )
    assert not ended.value.code and _contents(mine) == before


def test_a_checkpoint_folder_elsewhere_is_pruned_where_it_names_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    shutil.move(run / "checkpoints", tmp_path / "elsewhere")
    (run / "config.yaml").write_text(f"trainer: {{checkpoint_dir: {tmp_path / 'elsewhere'}}}\n")
    rules = Rules(checkpoints=1)
    for owner, deleted in ((tmp_path / "other", ()), (run, (1, 3, 4))):
        for file in (tmp_path / "elsewhere").glob("step_*/config.yaml"):
            file.write_text(f"trainer: {{default_local_dir: {owner}}}\n")
        assert surplus_of(run, rules).checkpoints == deleted
        assert bool(surplus_of(run, rules).kept_because) == (not deleted)
    with RunLock(tmp_path / "elsewhere"):
        assert surplus_of(run, rules).kept_because


@pytest.mark.parametrize("lost", ["run", "both"])
def test_a_release_without_its_run_keeps_its_checkpoint(lost: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    actor, shelf = run / "checkpoints" / "step_1" / "actor", tmp_path / "shelf" / "0001"
    shelf.mkdir(parents=True)
    record = {
        "release": 1,
        "run": None,
        "model": str(actor) if lost == "run" else "gone",
        "digest": model_digest(actor),
    }
    (shelf / "release.json").write_text(json.dumps(record))
    kept = surplus_of(run, Rules(checkpoints=1, shelves=(tmp_path / "shelf",))).kept_because
    assert kept.startswith("release ") and kept.endswith("shelf 1 comes from it")


@pytest.mark.parametrize("source", ["another run", "lost"])
def test_a_release_of_another_run_keeps_nothing(source: str, tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "run"), make_run(tmp_path / "other")
    shelf = tmp_path / "shelf" / "0001"
    shelf.mkdir(parents=True)
    record = {"release": 1, "run": {"path": str(other)} if source == "another run" else None, "digest": "0" * 64}
    (shelf / "release.json").write_text(json.dumps(record))
    with_shelf, without = (surplus_of(run, Rules(checkpoints=1, shelves=s)) for s in ((tmp_path / "shelf",), ()))
    assert not with_shelf.kept_because and with_shelf.checkpoints == without.checkpoints != ()


def test_a_damaged_run_keeps_everything_and_the_others_are_pruned(tmp_path: Path) -> None:
    for number, damage in enumerate(("status: [", "- 1", "trainer: 3")):
        (make_run(tmp_path / f"damaged{number}") / "config.yaml").write_text(damage)
    (make_run(tmp_path / "damaged") / "run.json").write_text("{")
    found = [surplus_of(path, Rules(checkpoints=1)) for path in sorted(tmp_path.iterdir())]
    assert all(surplus.kept_because and not surplus.checkpoints for surplus in found)
