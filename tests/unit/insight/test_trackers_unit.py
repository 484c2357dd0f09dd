"""Trackers without their services: the console, the composite, what is missing."""

import dataclasses
import io
import logging
import queue
import subprocess
import sys
import threading

import pytest
from rich.console import Console
from support.archives import archive
from support.messages import raises
from support.patience import SOON

from hone.errors import ConfigError
from hone.extras import install_command
from hone.insight import activity
from hone.insight.run_directory import RunDirectory, read_metrics
from hone.insight.trackers import TRACKERS, RunInfo, Tracker, build_trackers
from hone.insight.trackers import base as base_module
from hone.insight.trackers.base import COLUMNS, CompositeTracker, JsonlTracker
from hone.insight.trackers.console import ConsoleTracker, SignsOfLife, current_work
from hone.insight.trackers.mlflow import metric_key
from hone.progress import Lines

METRICS = {
    "critic/rewards/mean": 0.25,
    "actor/ppo_kl": 0.0012,
    "response_length/mean": 52.4,
    "perf/throughput": 2345.6,
    "actor/lr": 1e-6,
}


@pytest.fixture
def info(tmp_path):
    return RunInfo(RunDirectory(tmp_path), "project", "experiment", "a: 1\napi_key: hunter2\n", 10)


def build(names, tmp_path):
    return build_trackers(names, run_dir=tmp_path, project="p", experiment="e", config_yaml="a: 1", total_steps=3)


def console(terminal, width=200):
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None, legacy_windows=False)


def test_plain_output_is_one_line_a_step(info):
    out = console(terminal=False, width=40)  # narrow: lines must not be folded
    tracker = ConsoleTracker(info, out)
    tracker.log(1, METRICS)
    tracker.log(2, METRICS | {"val-core/s/acc/mean@1": 0.5})
    tracker.finish("finished")
    lines = out.file.getvalue().splitlines()
    assert lines[0] == "step 1/10  reward 0.250  kl 1.20e-03  length 52  tokens/s 2,346  ETA -:--"
    assert lines[1].startswith("step 2/10  reward 0.250") and "val-core/s/acc/mean@1 0.5  ETA 0:0" in lines[1]
    assert lines[2].endswith("reward 0.250  kl 1.20e-03  length 52  tokens/s 2,346  val-core/s/acc/mean@1 0.5")
    assert len(lines) == 3 and "\x1b" not in out.file.getvalue()


ANOTHER = """
import sys
from pathlib import Path
from hone.insight import activity
activity.begin(Path(sys.argv[1]), "actor", 1)
with activity.doing("actor.update"):
    activity.tick(3, 8)
    print(flush=True)
    sys.stdin.read()
"""


def test_a_silent_run_shows_what_it_does_and_how_far_its_processes_are(tmp_path):
    assert current_work(tmp_path) is None
    activity.begin(tmp_path, "driver")
    signs = SignsOfLife(tmp_path, print, every=3600, silence=0)
    command = [sys.executable, "-c", ANOTHER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        bar = Lines("validating", 3, io.StringIO())
        signs.heard(bar)
        with activity.doing("step 3"), activity.doing("update_actor"):
            activity.tick(11, 64)
            text = current_work(tmp_path)
            assert text.startswith("step 3 > update_actor for ")
            assert text.endswith(", actor[1]: micro-batch 4 of 8, micro-batch 12 of 64")
            assert signs.due() is None
            bar.close()
            assert "micro-batch 12 of 64" in signs.due()
            shown = queue.Queue()
            thread = SignsOfLife(tmp_path, shown.put, every=0.01, silence=0)
            assert "step 3 > update_actor" in shown.get(timeout=SOON)
            thread.close()
            with activity.doing("sum"):  # work within work has its own count
                assert "of 64" not in current_work(tmp_path)
        assert current_work(tmp_path) is None
        other.stdin.close()
    signs.close()
    activity.end()


@pytest.mark.parametrize("width", [60, 140])
def test_terminal_output_is_a_live_line_that_fits(info, width):
    out = console(terminal=True, width=width)
    tracker = ConsoleTracker(info, out)
    tracker.log(1, METRICS)
    tracker.log(2, METRICS | {"val-core/s/acc/mean@1": 0.5})
    tracker._progress.refresh()
    shown = out.file.getvalue()
    assert "step 2/10" in shown and "ETA" in shown and "reward 0.250" in shown
    assert ("━" in shown) == (width == 140)
    assert ("tokens/s" in shown) == (width == 140)
    assert "step 2/10  val-core/s/acc/mean@1 0.5" in shown
    assert "…" not in shown  # nothing is cut by the terminal
    tracker.finish("interrupted")
    assert "interrupted at step 2/10" in out.file.getvalue()


def test_eta_is_the_pace_times_the_steps_left(info, monkeypatch):
    now = 100.0
    monkeypatch.setattr("hone.insight.trackers.console.time.monotonic", lambda: now)
    out = console(terminal=False)
    tracker = ConsoleTracker(info, out)
    for step in (4, 5, 6):  # a resumed run: the steps before do not count
        tracker.log(step, {})
        now += 2
    assert out.file.getvalue().splitlines()[-1] == "step 6/10  ETA 0:08"


def test_a_name_in_brackets_is_not_markup(info):
    out = console(terminal=True)
    tracker = ConsoleTracker(info, out)
    tracker.log(1, {"val-core/[red]/acc/mean@1": 0.5})
    tracker.finish("finished")
    assert "val-core/[red]/acc/mean@1" in out.file.getvalue()


def test_finishing_before_the_first_step(info):
    out = console(terminal=False)
    ConsoleTracker(info, out).finish("failed")
    assert out.file.getvalue() == "failed at step 0/10\n"


class Broken(Tracker):
    def __init__(self):
        self.seen = []

    def log(self, step, metrics):
        raise ConnectionError(f"no network at step {step}")

    def finish(self, status):
        self.seen.append(status)


class Good(Broken):
    def log(self, step, metrics):
        self.seen.append((step, dict(metrics)))


def test_a_validation_is_shown_with_its_own_step_alone(info):
    out = console(terminal=False)
    tracker = ConsoleTracker(info, out)
    tracker.log(0, {"val/loss": 5.0})
    tracker.log(1, {"train/loss": 4.0})
    tracker.log(2, {"train/loss": 3.0, "val/loss": 3.5})
    tracker.log(3, {"train/loss": 2.0})
    tracker.finish("finished")
    told = [line.partition("  ETA")[0] for line in out.file.getvalue().splitlines()]
    assert told == [
        "step 0/10  val loss 5.0000",
        "step 1/10  loss 4.0000",
        "step 2/10  loss 3.0000  val loss 3.5000",
        "step 3/10  loss 2.0000",
        "finished at step 3/10  loss 2.0000",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_progress_of_a_validation_is_in_the_live_line_or_in_lines(info, terminal, monkeypatch):
    monkeypatch.setattr(Lines.__init__, "__defaults__", (0.0,))
    out = console(terminal=terminal)
    tracker = ConsoleTracker(info, out)
    trackers = CompositeTracker(Good(), {"quiet": Good(), "console": tracker})
    bar = trackers.progress("validating", 60)
    for _ in range(12):
        bar.advance()
    if terminal:
        tracker._progress.refresh()
    bar.close()
    tracker.finish("interrupted")
    assert ("validating 12/60" if terminal else "validating: 12 of 60") in out.file.getvalue()
    bar.advance(100)
    assert bar.done == 60


def test_a_line_comes_while_no_item_ends():
    class Told(io.StringIO):
        came = threading.Event()

        def flush(self):
            self.came.set()

    stream = Told()
    bar = Lines("answers", 60, stream, 0.01)
    assert stream.came.wait(SOON)
    bar.close()
    assert stream.getvalue().startswith("answers: 0 of 60, 0:00 so far\n")


def test_a_resumed_run_that_ends_before_a_step_is_at_the_step_it_resumed_from(info):
    out = console(terminal=False)
    ConsoleTracker(dataclasses.replace(info, first_step=5), out).finish("interrupted")
    assert out.file.getvalue() == "interrupted at step 5/10\n"


def test_a_failing_tracker_does_not_stop_the_others_and_is_counted(caplog):
    good, broken = Good(), Broken()
    record = Good()
    trackers = CompositeTracker(record, {"broken": broken, "good": good})
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            trackers.log(step, {"x": step})
        trackers.finish("finished")
        trackers.finish("finished")
    assert record.seen == good.seen == [(1, {"x": 1}), (2, {"x": 2}), (3, {"x": 3}), "finished"]
    assert broken.seen == ["finished"]
    assert trackers.errors == {"broken": 3}
    tracebacks = [record for record in caplog.records if record.exc_info]
    assert len(tracebacks) == 1 and "no network at step 1" in caplog.text
    assert "broken: 3" in caplog.records[-1].getMessage()


def test_the_record_of_the_run_must_be_written():
    other = Good()
    with pytest.raises(ConnectionError):
        CompositeTracker(Broken(), {"other": other}).log(1, {})
    assert other.seen == []


@pytest.mark.parametrize("names", [[], ["jsonl"], ["jsonl", "jsonl"]])
def test_metrics_jsonl_is_always_written_and_once(names, tmp_path):
    trackers = build(names, tmp_path)
    trackers.log(1, {"actor/lr": 0.1})
    trackers.log(2, {"actor/lr": 0.2})
    trackers.finish("finished")
    assert read_metrics(tmp_path) == [{"step": 1, "actor/lr": 0.1}, {"step": 2, "actor/lr": 0.2}]


class Showing(Good):
    def rollouts(self, rollouts):
        self.seen.append((rollouts.kind, rollouts.step, rollouts.rows(), rollouts.total))

    def alert(self, step, alert):
        self.seen.append((step, dict(alert)))

    def picture(self, file):
        self.seen.append(file.read_bytes()[:8])


ALERT = {"detector": "zero_reward", "severity": "error", "what": "no reward", "why": "w", "fix": "f", "samples": []}
SECRET = "sk-" + "a1" * 12


def test_rollouts_of_a_step_are_shown_once(info, tmp_path):
    advantages = {"loss_mask": [1, 0, 1], "advantages": [1.0, 9.0, 2.0]}
    sample = {"uid": "a", "prompt": "2+2", "ground_truth": "4", "score": 0.5, "terms": {"format": 1.0}, **advantages}
    archive(tmp_path, 1, [sample])
    tracker = Showing()
    trackers = CompositeTracker(JsonlTracker(info), {"x": tracker, "plain": Good()}, info, samples=3)
    trackers.log(2, {"critic/rewards/mean": 0.0})  # the archive has no file of the step yet, and that of step 1 is old
    episode = {"episode": {"end": "tool_calls"}}
    archive(tmp_path, 2, [{**sample, **episode, "index": n, "text": f"{n}" * 2000, "error": None} for n in range(7)])
    info.run_dir.write_validation(2, [{"uid": "b", "index": 0, "part": 0, "text": "no", "stop_reason": "stop"}])
    trackers.log(3, {"critic/rewards/mean": 0.5})
    trackers.log(4, {})
    trackers.finish("finished")
    kinds = [seen[0] for seen in tracker.seen if isinstance(seen, tuple)]
    assert kinds == [2, 3, "rollouts", "validation", 4] and trackers.errors == {}
    _, step, rows, total = tracker.seen[2]
    assert step == 2 and total == 7 and len(rows) == 3
    values = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    assert [row["index"] for row in values] == [0, 2, 4]
    first = values[0]
    assert first["score"] == 0.5 and first["advantage"] == 1.5 and first["end"] == "tool_calls"
    assert first["terms"] == "format 1" and first["prompt"] == "2+2" and first["expected"] == "4"
    assert len(first["answer"]) == 1505 and first["uid"] == "a" and first["step"] == 2
    validation = dict(zip(COLUMNS, tracker.seen[3][2][0], strict=True))
    assert validation["end"] == "stop" and validation["score"] is None and validation["advantage"] is None
    assert tracker.seen[-2:] == [b"\x89PNG\r\n\x1a\n", "finished"]


@pytest.mark.parametrize(("samples", "shown"), [(0, []), (None, [20]), (8, [8])])
def test_the_number_of_samples_is_a_setting(samples, shown, info, tmp_path):
    tracker = Showing()
    trackers = CompositeTracker(JsonlTracker(info), {"x": tracker}, info, samples)
    archive(tmp_path, 1, [{"index": n} for n in range(20)])
    trackers.finish("finished")
    assert [len(seen[2]) for seen in tracker.seen[:-1]] == shown


def test_a_damaged_archive_does_not_end_the_run(info, tmp_path, caplog):
    tracker = Showing()
    trackers = CompositeTracker(JsonlTracker(info), {"x": tracker}, info)
    (tmp_path / "rollouts" / "step_1.parquet").write_bytes(b"no parquet")
    trackers.log(1, {"train/loss": 1.0})
    trackers.log(2, {"train/loss": 0.5})
    assert [seen[0] for seen in tracker.seen] == [1, 2] and caplog.text.count("step_1.parquet") == 1


def test_alerts_are_shown_without_credentials_and_failures_are_counted(info):
    class Failing(Showing):
        def alert(self, step, alert):
            raise ConnectionError

    tracker = Showing()
    trackers = CompositeTracker(JsonlTracker(info), {"bad": Failing(), "x": tracker, "plain": Good()}, info)
    trackers.alerts(5, [{**ALERT, "causes": [f"key {SECRET}"]}])
    assert tracker.seen == [(5, {**ALERT, "causes": ["key <redacted>"]})] and trackers.errors == {"bad": 1}


def test_interrupts_are_not_swallowed():
    class Interrupted(Good):
        def log(self, step, metrics):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CompositeTracker(Good(), {"x": Interrupted()}).log(1, {})


def test_names(tmp_path):
    assert TRACKERS.names() == ["console", "jsonl", "mlflow", "otel", "swanlab", "tensorboard", "trackio", "wandb"]
    with raises(ConfigError, "'tensorbord'", "tensorboard", where="trainer.logger"):
        build(["console", "tensorbord"], tmp_path)
    assert build([], tmp_path).errors == {}


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio", "swanlab", "otel"])
def test_a_missing_package_names_its_extra(name, tmp_path, monkeypatch):
    def missing(module):
        raise ModuleNotFoundError(f"No module named '{module}'")

    TRACKERS.get(name)  # its module is imported; the package is not
    monkeypatch.setattr(base_module.importlib, "import_module", missing)
    with raises(ConfigError, f"'{name}'", install_command(name)):
        build([name], tmp_path)


def test_a_tracker_that_cannot_start_is_a_message(tmp_path, monkeypatch):
    def refuse(info):
        raise ConnectionError("connection refused")

    monkeypatch.setitem(TRACKERS._entries, "wandb", refuse)
    with raises(ConfigError, "'wandb'", "connection refused", "trainer.logger"):
        build(["wandb"], tmp_path)


def test_trackers_are_given_a_config_without_secrets(info):
    assert info.config() == {"a": 1, "api_key": "<redacted>"}


def test_mlflow_keys_are_legal():
    assert metric_key("val-core/a//b/acc/best@8/mean") == "val-core/a/b/acc/best_at_8/mean"
    assert metric_key("x:y(z)") == "x_y_z_"
