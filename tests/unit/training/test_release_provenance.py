"""A release names the data of its run from any folder, and says what is missing."""

import hashlib
import logging

import yaml

from hone.insight.run_directory import RunDirectory
from hone.insight.run_files import read_run
from hone.training.releases import provenance


def started(folder, monkeypatch, files, commits=("a1",)):
    """The checkpointed actor of a run that began in ``folder``, once with each commit."""
    monkeypatch.chdir(folder)
    for number, commit in enumerate(commits):
        monkeypatch.setattr("hone.insight.environment.git_state", lambda _, commit=commit: {"commit": commit})
        text = yaml.safe_dump({"data": {"train_files": files}})
        run = RunDirectory(folder / "run")
        run.start(seed=1, config_yaml=text, command=["hone", "train"], last_step=number or None)
    actor = folder / "run/checkpoints/step_3/actor"
    actor.mkdir(parents=True)
    return actor


def test_data_are_found_from_another_folder_and_missing_ones_are_said(tmp_path, monkeypatch, caplog):
    (tmp_path / "began").mkdir()
    (tmp_path / "began/train.jsonl").write_text("rows")
    actor = started(tmp_path / "began", monkeypatch, ["train.jsonl", "gone.jsonl"])
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING, "hone"):
        run = provenance(actor)["run"]
    file, gone = (str(tmp_path / "began" / name) for name in ("train.jsonl", "gone.jsonl"))
    assert run["data_sha256"] == {file: hashlib.sha256(b"rows").hexdigest()}
    assert run["data_missing"] == [gone] and gone in caplog.text


def test_a_model_of_no_run_is_said(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "hone"):
        assert provenance(tmp_path / "actor")["run"] is None
    assert str(tmp_path / "actor") in caplog.text


def test_a_resume_under_another_commit_keeps_the_first(tmp_path, monkeypatch):
    started(tmp_path, monkeypatch, [], commits=("a1", "b2"))
    record = read_run(tmp_path / "run")
    assert [start["git"]["commit"] for start in record["starts"]] == ["a1", "b2"]
    assert record["git"] == {"commit": "b2"} and {start["cwd"] for start in record["starts"]} == {str(tmp_path)}
