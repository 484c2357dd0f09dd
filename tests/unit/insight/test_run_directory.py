"""The run directory: exact numbers, atomic files, resuming, and what the disk refuses."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.archives import records, table
from support.messages import raises

from hone.data.types import Sample, StopReason, Trajectory
from hone.errors import HoneError
from hone.insight import environment
from hone.insight.archive.read import open_archive
from hone.insight.run_directory import RunDirectory, RunStatus, read_metrics, read_run, trajectory_record

RECORD = {"uid": "b", "index": 0, "part": 0, "text": ""}


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "run")


def start(run, **changes):
    run.start(**({"seed": 3, "config_yaml": "trainer:\n  seed: 3\n", "command": ["hone", "train"]} | changes))


def test_layout(run):
    start(run)
    run.log_metrics(1, {"actor/lr": 1e-6})
    run.write_rollouts(1, table(1, [{}]))
    run.write_validation(1, [RECORD])
    names = {path.relative_to(run.path).as_posix() for path in run.path.rglob("*")}
    assert names == {
        *("config.yaml", "run.json", "metrics.jsonl", "checkpoints"),
        *("rollouts", "rollouts/step_1.parquet", "validation", "validation/step_1.parquet"),
    }


@given(st.floats())
def test_numbers_come_back_to_the_bit(tmp_path_factory, value):
    run = RunDirectory(tmp_path_factory.mktemp("run"))
    run.log_metrics(1, {"a": value})
    (row,) = read_metrics(run.path)
    assert row["a"] == value or (math.isnan(row["a"]) and math.isnan(value))
    assert math.copysign(1, row["a"]) == math.copysign(1, value) or math.isnan(value)
    json.loads(run.metrics_path.read_text(), parse_constant=pytest.fail)  # strict JSON


def test_one_line_per_step(run):
    run.log_metrics(0, {})
    run.log_metrics(3, {})
    for step in (3, 2):
        with raises(ValueError, f"step {step}", "step 3"):
            run.log_metrics(step, {})
    again = RunDirectory(run.path)  # the next process reads it
    assert again.last_step == 3
    with raises(ValueError, "step 3"):
        again.log_metrics(3, {})


def test_a_validation_that_ends_after_its_step_has_a_line_of_its_own(run):
    run.log_metrics(1, {"loss": 2.0})
    run.log_metrics(2, {"loss": 1.0})
    run.log_metrics(2, {"val-core/x/acc/mean@1": 0.5})
    for directory in (run, RunDirectory(run.path)):
        for metrics in ({"loss": 0.9, "other": 1.0}, {"val-core/x/acc/mean@1": 0.4}):
            with raises(ValueError, "step 2"):
                directory.log_metrics(2, metrics)
    run.log_metrics(3, {"loss": 0.7})
    with raises(ValueError, "step 2", "step 3"):
        run.log_metrics(2, {"late": 1.0})
    assert read_metrics(run.path) == [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": 1.0, "val-core/x/acc/mean@1": 0.5},
        {"step": 3, "loss": 0.7},
    ]
    assert run.rewind(1) == 3, "both lines of the step"


def test_rewind_forgets_what_came_after_the_checkpoint(run):
    for step in range(6):
        run.log_metrics(step, {"x": step / 3})
        run.write_rollouts(step, table(step, [{}]))
        run.write_validation(step, [RECORD])
    (run.rollouts / "notes.txt").write_text("mine")
    before = run.metrics_path.read_text().splitlines()[:4]
    assert run.rewind(3) == 2
    assert run.metrics_path.read_text().splitlines() == before
    for folder in (run.rollouts, run.validation):
        assert open_archive(folder).steps() == [0, 1, 2, 3]
    assert (run.rollouts / "notes.txt").exists()
    run.log_metrics(4, {"x": 1})
    assert [row["step"] for row in read_metrics(run.path)] == [0, 1, 2, 3, 4]
    assert run.rewind(-1) == 5 and read_metrics(run.path) == []


@pytest.mark.parametrize("half", ['{"step": 2, "x"', "\x00\x00\x00\n", '{"step": 2}'])
def test_half_a_last_line_is_dropped(run, half):
    run.log_metrics(1, {"x": 1})
    with run.metrics_path.open("a") as file:
        file.write(half)
    assert [row["step"] for row in read_metrics(run.path)] == [1]
    again = RunDirectory(run.path)
    again.log_metrics(2, {"x": 5})
    assert read_metrics(run.path) == [{"step": 1, "x": 1}, {"step": 2, "x": 5}]
    assert again.rewind(1) == 1


def test_a_damaged_line_in_the_middle_is_an_error_with_its_number(run):
    run.metrics_path.write_text('{"step": 1}\nrubbish\n{"step": 3}\n')
    with raises(HoneError, "line 2 of 3", "trainer.experiment_name"):
        run.rewind(3)
    assert "rubbish" in run.metrics_path.read_text()


def test_lines_survive_kill_minus_nine(tmp_path):
    program = (
        "import sys; from hone.insight.run_directory import RunDirectory\n"
        f"run = RunDirectory({str(tmp_path)!r})\n"
        "for step in range(10**9):\n"
        "    run.log_metrics(step, {'x': step / 7})\n"
        "    if step == 50: sys.stdout.write('go'); sys.stdout.flush()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read(2) == b"go"
    process.send_signal(signal.SIGKILL)
    process.wait()
    rows = read_metrics(tmp_path)
    assert len(rows) > 50
    assert rows == [{"step": step, "x": step / 7} for step in range(len(rows))]


def test_run_json_tells_what_ran_where(run):
    start(run)
    record = read_run(run.path)
    assert record["status"] == "running" and record["seed"] == 3 and record["ended"] is None
    assert set(record["versions"]) >= {"python", "hone", "torch", "transformers"}
    assert set(record["hardware"]) >= {"cpu", "cores", "usable_cores", "memory_gb", "gpus"}
    assert record["command"] == ["hone", "train"]
    run.update_status(RunStatus.INTERRUPTED, "SIGINT after step 4", last_step=4)
    record = read_run(run.path)
    assert (record["status"], record["exit_reason"], record["last_step"]) == ("interrupted", "SIGINT after step 4", 4)
    assert record["ended"] >= record["started"]
    with raises(ValueError, "'sleeping'"):
        run.update_status("sleeping")


def test_a_resumed_run_keeps_its_start_and_its_tracker_ids(run):
    start(run)
    run.set_tracker_id("wandb", "abc")
    first = read_run(run.path)["started"]
    start(run, last_step=4)
    start(run, last_step=8)
    record = read_run(run.path)
    assert record["started"] == first and record["status"] == "running"
    assert [entry["from_step"] for entry in record["resumed"]] == [4, 8]
    assert run.tracker_id("wandb") == "abc" and run.tracker_id("mlflow") is None
    start(run)  # from the beginning: another curve, another record
    assert run.tracker_id("wandb") is None and read_run(run.path)["resumed"] == []


def test_secrets_are_not_written_anywhere(run):
    secret = "hunter2-do-not-tell"
    start(
        run,
        config_yaml=f"reward:\n  kwargs: {{api_key: {secret}, pad_token: '<pad>'}}\n",
        command=["hone", "train", f"+reward.kwargs.api_key={secret}", "--hf-token", secret],
    )
    run.update_status("failed", f"ConnectionError: https://me:{secret}@host/x refused, api_key={secret}")
    for path in run.path.rglob("*"):
        assert path.is_dir() or secret not in path.read_text()
    assert "<pad>" in (run.path / "config.yaml").read_text()


def test_a_config_without_secrets_is_written_as_it_is(run):
    text = "# order and comments stay\nb: 1\na: {prompt_key: prompt, max_token_len: 5}\n"
    start(run, config_yaml=text)
    assert (run.path / "config.yaml").read_text() == text


def test_records_of_any_kind_become_json(run):
    record = {
        "ids": np.arange(3),
        "x": np.float32(0.5),
        "s": RunStatus.FAILED,
        "nan": math.nan,
        "o": {1: (2, {3})},
        "p": Path("a"),
    }
    path = run.write_records(run.path / "dumps/ratio.jsonl", [record, {"text": "ä\n"}])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [
        {"ids": [0, 1, 2], "x": 0.5, "s": "failed", "nan": "NaN", "o": {"1": [2, [3]]}, "p": "a"},
        {"text": "ä\n"},
    ]


def test_disk_full_while_appending(run, tmp_path):
    run.log_metrics(1, {})
    run._metrics._file = Path("/dev/full").open("w")  # noqa: SIM115 - the run closes it
    with raises(
        HoneError, "MB", "GB free", "trainer.resume_mode=auto", code="E-disk-full", where=str(run.metrics_path)
    ):
        run.log_metrics(2, {})


def test_lines_that_found_no_space_are_not_written_later(run, monkeypatch):
    """Closing wrote them once more: the run ended with that error and a traceback, or with the lines after those of a resumed run."""
    run.log_metrics(1, {"loss": 1.0})
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(run._metrics, "_file", full)
        with raises(HoneError, code="E-disk-full"):
            run.log_metrics(2, {"loss": 2.0})
        run.close()
    run.log_metrics(2, {"loss": 3.0})
    assert [row["loss"] for row in map(json.loads, run.metrics_path.read_text().splitlines())] == [1.0, 3.0]


def test_disk_full_leaves_the_old_file_and_no_litter(run, monkeypatch):
    run.write_rollouts(1, table(1, [{"text": "good"}]))

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with raises(HoneError, "trainer.default_local_dir", code="E-disk-full"):
        run.write_rollouts(1, table(1, [{"text": "bad"}]))
    assert [path.name for path in run.rollouts.iterdir()] == ["step_1.parquet"]
    assert [record["text"] for record in records(run.path, 1)] == ["good"]


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with raises(HoneError, "trainer.default_local_dir", code="E-run-directory"):
        RunDirectory(tmp_path / "file" / "run")


def test_reading_a_directory_without_a_run(tmp_path):
    with raises(HoneError, where=str(tmp_path / "run.json")):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with raises(HoneError, "JSON", where=str(tmp_path / "run.json")):
        read_run(tmp_path)
    assert read_metrics(tmp_path) == []


def test_a_trajectory_becomes_a_record_with_tokens_text_mask_and_scores(run):
    sample = Sample("u1", [1, 2], None, "gsm8k", ground_truth="18")
    trajectory = Trajectory(
        *("u1", 3, [1, 2], [7, 8], [1, 0], [-0.5, 0.0], [-0.5, 0.0], "hi", StopReason.LENGTH, sample)
    )
    record = trajectory_record(trajectory, score=0.5, terms={"acc": 1.0}, extra={"pred": "18"}, prompt_text="ask")
    run.write_rollouts(1, table(1, [record]))
    (row,) = records(run.path, 1)
    expected = {"uid": "u1", "index": 3, "prompt_ids": [1, 2], "response_ids": [7, 8], "response_mask": [1, 0]}
    expected |= {
        "rollout_log_probs": [-0.5, 0.0],
        "text": "hi",
        "prompt": "ask",
        "stop_reason": "length",
        "error": None,
    }
    expected |= {"score": 0.5, "terms": {"acc": 1.0}, "extra": {"pred": "18"}, "ground_truth": "18"}
    assert row.items() >= expected.items()


def test_a_reward_that_changed_gives_a_warning_on_resume(tmp_path, caplog):
    run = RunDirectory(tmp_path / "run")
    start(run, rewards={"score.py:f": "sha256:1", "gsm8k": "sha256:2"})
    assert read_run(run.path)["rewards"] == {"score.py:f": "sha256:1", "gsm8k": "sha256:2"}
    start(run, rewards={"score.py:f": "sha256:1", "gsm8k": "sha256:2"}, last_step=3)
    assert "score.py:f" not in caplog.text
    start(run, rewards={"score.py:f": "sha256:3", "gsm8k": "sha256:2"}, last_step=3)
    assert "score.py:f" in caplog.text


def test_a_resumed_run_says_which_files_of_data_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = [tmp_path / name for name in ("a.parquet", "b.parquet", "c.parquet")]
    for file in files:
        file.write_bytes(b"rows of " + file.name.encode())
    config = f"data: {{train_files: [{files[0]}, {files[1]}], val_files: {files[2]}}}\n"

    def warned(last_step: int | None) -> list[str]:
        caplog.clear()
        run = RunDirectory(tmp_path / "run")
        run.start(seed=1, config_yaml=config, command=["hone"], last_step=last_step)
        run.close()
        return [name for name in ("a", "b", "c") if f"{name}.parquet" in caplog.text]

    assert warned(None) == [] == warned(1)
    files[1].write_bytes(files[1].read_bytes().replace(b"rows", b"Rows"))  # of the same size
    files[2].unlink()
    assert warned(1) == ["b", "c"]
    assert warned(1) == []  # said once: from here on the run has these
    assert warned(None) == []


def test_a_resumed_run_says_which_code_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = {"commit": "1" * 40, "branch": "main", "dirty": False}
    monkeypatch.setattr(environment, "git_state", lambda folder: started)
    monkeypatch.setattr(environment, "versions", lambda: {"hone": "0.1.0", "torch": "2.13.0"})
    run = RunDirectory(tmp_path / "run")
    run.start(seed=1, config_yaml="{}")
    run.start(seed=1, config_yaml="{}", last_step=3)
    assert not caplog.records
    monkeypatch.setattr(environment, "git_state", lambda folder: started | {"commit": "2" * 40})
    monkeypatch.setattr(environment, "versions", lambda: {"hone": "0.1.0", "torch": "2.14.0"})
    run.start(seed=1, config_yaml="{}", last_step=4)
    said = [record.args for record in caplog.records]
    assert [(new, old) for _, new, old in said] == [("2" * 40, "1" * 40), ("2.14.0", "2.13.0")]
    starts = json.loads((tmp_path / "run/run.json").read_text(encoding="utf-8"))["starts"]
    assert [start["git"]["commit"][0] for start in starts] == ["1", "1", "2"]
