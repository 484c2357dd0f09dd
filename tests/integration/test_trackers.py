"""Trackers against the real packages: what is logged can be read back."""

import json
import math
import sqlite3
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from support.archives import archive
from support.patience import SOON

from hone.insight.run_directory import RunDirectory
from hone.insight.trackers import build_trackers

NAME = "val-core/x/acc/mean@1"


COLUMNS = ["step", "uid", "index", "prompt", "answer", "expected", "score", "terms", "advantage", "end"]
ALERT = {
    "detector": "zero_reward",
    "severity": "error",
    "what": "the reward is 0",
    "why": "nothing is learned",
    "causes": ["scorer. Fix: look"],
    "fix": "look",
    "samples": [],
}


def show_all(name, path):
    """Log three steps with a curve, the rollouts of step 2, and an alert."""
    run = RunDirectory(path)
    run.start(seed=1, config_yaml="a: 1\n", command=["hone"])
    trackers = build_trackers(
        [name], run_dir=run, project="p", experiment="e", config_yaml="a: 1\n", total_steps=3, samples=2
    )
    trackers.log(1, {"critic/rewards/mean": 0.1})
    record = {"uid": "a", "prompt": "2+2", "ground_truth": "4", "score": 0.5, "terms": {"format": 1.0}}
    advantage = {"loss_mask": [1, 1], "advantages": [0.25, 0.75], "stop_reason": "stop"}
    archive(path, 2, [{**record, **advantage, "index": n, "text": f"answer {n}"} for n in range(4)])
    trackers.log(2, {"critic/rewards/mean": 0.2})
    trackers.alerts(2, [ALERT])
    trackers.log(3, {"critic/rewards/mean": 0.3})
    trackers.finish("finished")
    run.close()
    assert trackers.errors == {}
    return run


ROWS = [[2, "a", n, "2+2", f"answer {n}", "4", 0.5, "format 1", 0.5, "stop"] for n in (0, 2)]


def log_twice(name, path, pause=0.0):
    """Log steps 1 to 4, then resume from the checkpoint of step 2 and log steps 3 to 5 with other values."""
    config = "a: {b: 1}\nreward: {api_key: hunter2}\n"
    for resumed_from, steps, value in ((None, range(1, 5), 1.0), (2, range(3, 6), 2.0)):
        run = RunDirectory(path)
        run.start(seed=1, config_yaml=config, command=["hone"], last_step=resumed_from)
        run.rewind(-1 if resumed_from is None else resumed_from)
        trackers = build_trackers([name], run_dir=run, project="p", experiment="e", config_yaml=config, total_steps=5)
        for step in steps:
            metrics = {NAME: value * step, "actor/grad_norm": math.nan if step == 5 else 0.5}
            trackers.log(step, metrics)
        trackers.finish("interrupted" if resumed_from is None else "finished")
        run.close()
        assert trackers.errors == {}
        time.sleep(pause)
    return run


def test_tensorboard(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = log_twice("tensorboard", tmp_path)
    events = accumulator.EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    # what the killed process wrote after the checkpoint is purged
    assert [(event.step, event.value) for event in events.Scalars(NAME)] == [(1, 1), (2, 2), (3, 6), (4, 8), (5, 10)]
    assert math.isnan(events.Scalars("actor/grad_norm")[-1].value)
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "b: 1" in text and "<redacted>" in text and "hunter2" not in text


def test_tensorboard_has_hyperparameters_and_samples(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from tensorboard.plugins.hparams import metadata

    config = "algorithm: {adv_estimator: rloo, gamma: 1.0, use_kl_in_reward: true, gone: null}\n"
    run = RunDirectory(tmp_path)
    run.start(seed=1, config_yaml=config, command=["hone"])
    trackers = build_trackers(
        ["tensorboard"], run_dir=run, project="p", experiment="e", config_yaml=config, total_steps=3
    )
    record = {"uid": "a", "ground_truth": "4", "score": 0.5, "prompt": "2 | 2\n<b>"}
    archive(run.path, 2, [{**record, "text": f"answer {n} " + "x" * 4000 * (n == 0)} for n in range(40)])
    run.write_validation(3, [{**record, "text": "four", "index": 0, "part": 0}])
    trackers.log(0, {NAME: 0.1})
    trackers.log(1, {"critic/rewards/mean": 0.1})
    trackers.log(2, {"critic/rewards/mean": 0.2})
    trackers.log(3, {"critic/rewards/mean": 0.3, NAME: 0.5})
    trackers.finish("finished")
    assert trackers.errors == {}
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = events.PluginTagToContent(metadata.PLUGIN_NAME)
    started = metadata.parse_session_start_info_plugin_data(tags[metadata.SESSION_START_INFO_TAG])
    assert started.hparams["algorithm.adv_estimator"].string_value == "rloo"
    assert started.hparams["algorithm.use_kl_in_reward"].number_value == 1 and "algorithm.gone" not in started.hparams
    experiment = metadata.parse_experiment_plugin_data(tags[metadata.EXPERIMENT_TAG])
    assert {metric.name.tag for metric in experiment.metric_infos} >= {"critic/rewards/mean", NAME}
    tables = {tag: events.Tensors(f"samples/{tag}/text_summary") for tag in ("rollouts", "validation")}
    assert [(event.step) for event in tables["rollouts"]] == [2] and [event.step for event in tables["validation"]] == [
        3
    ]
    text = tables["rollouts"][0].tensor_proto.string_val[0].decode()
    assert (
        text.startswith(f"| {' | '.join(COLUMNS)} |")
        and text.count("\n| ") == 8
        and "8 of 40" in text
        and "2 &#124; 2<br>&lt;b&gt;" in text
        and len(text) < 5000
    )


def test_tensorboard_shows_alerts_and_curves(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = show_all("tensorboard", tmp_path)
    events = accumulator.EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    (alert,) = events.Tensors("alerts/zero_reward/text_summary")
    assert alert.step == 2 and "the reward is 0" in alert.tensor_proto.string_val[0].decode()
    (picture,) = events.Images("curves")
    assert picture.step == 3 and picture.encoded_image_string[:4] == b"\x89PNG"
    assert 300 < picture.width < 2000 and 300 < picture.height < 2000


def test_mlflow_shows_rollouts_alerts_and_curves(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = show_all("mlflow", tmp_path)
    client = mlflow.MlflowClient(tracking_uri=(run.path / "mlruns").as_uri())
    record = client.get_run(run.tracker_id("mlflow"))
    file = "samples/rollouts_step_2.json"
    assert json.loads(record.data.tags["mlflow.loggedArtifacts"]) == [{"path": file, "type": "table"}]
    (folder,) = (run.path / "mlruns").glob("*/*/artifacts")
    assert json.loads((folder / file).read_text()) == {"columns": COLUMNS, "data": ROWS}
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert record.data.tags["alert.zero_reward"].startswith("alert, step 2, zero_reward (error): the reward is 0.")


def test_wandb_shows_rollouts_alerts_and_curves(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = show_all("wandb", tmp_path)
    (media,) = (run.path / "wandb").glob("offline-run-*/files/media")
    (table,) = media.rglob("*.table.json")
    stored = json.loads(table.read_text())
    assert stored["columns"] == COLUMNS and stored["data"] == ROWS
    (picture,) = media.rglob("curves*.png")
    assert picture.read_bytes()[:4] == b"\x89PNG"
    (file,) = (run.path / "wandb").glob("offline-run-*/run-*.wandb")
    deadline = time.monotonic() + SOON  # wandb's process writes the file after the run's end
    while b"zero_reward, step 2" not in file.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert b"zero_reward, step 2" in file.read_bytes()


def test_trackio(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    run = log_twice("trackio", tmp_path / "first")
    logged = SQLiteStorage.get_logs("p", run.tracker_id("trackio"))
    values = {(entry["step"], entry[NAME]) for entry in logged if NAME in entry}
    assert values >= {(1, 1), (2, 2), (3, 6), (4, 8), (5, 10)}
    config = SQLiteStorage.get_run_config("p", run.tracker_id("trackio"))
    assert config["a"] == {"b": 1} and config["reward"] == {"api_key": "<redacted>"}
    run = show_all("trackio", tmp_path / "second")
    logged = SQLiteStorage.get_logs("p", run.tracker_id("trackio"))
    (table,) = [entry for entry in logged if "samples/rollouts" in entry]
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in ROWS]
    assert table["step"] == 2 and table["samples/rollouts"]["_value"] == rows
    (picture,) = [entry for entry in logged if "curves" in entry]
    assert picture["step"] == 3 and picture["curves"]["_type"] == "trackio.image"
    (database,) = (tmp_path / "trackio").glob("p*.db")
    alerts = sqlite3.connect(database).execute("select title, level, step from alerts").fetchall()
    assert alerts == [("zero_reward, step 2", "error", 2)]


def test_swanlab_offline(tmp_path, monkeypatch):
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    run = show_all("swanlab", tmp_path / "second")
    (table,) = (run.path / "swanlog").glob("run-*/media/echarts/*.json")
    stored = json.loads(table.read_text())
    assert stored["rowData"] == [dict(zip(COLUMNS, row, strict=True)) for row in ROWS]
    (alert,) = (run.path / "swanlog").glob("run-*/media/text/*.txt")
    assert alert.read_text().startswith("alert, step 2, zero_reward (error): the reward is 0.")
    (picture,) = (run.path / "swanlog").glob("run-*/media/image/*.png")
    assert picture.read_bytes()[:4] == b"\x89PNG"
    run = log_twice("swanlab", tmp_path / "first", pause=1.1)  # SwanLab names its folders by the second
    identity = run.tracker_id("swanlab")
    files = list((run.path / "swanlog").glob(f"run-*-{identity}/run-{identity}.swanlab"))
    assert len(files) == 2 and all(file.read_bytes().count(NAME.encode()) >= 3 for file in files)
    configs = [(file.parent / "files" / "config.yaml").read_text() for file in files]
    assert all("<redacted>" in config and "hunter2" not in config for config in configs)


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = log_twice("mlflow", tmp_path)
    client = mlflow.MlflowClient(tracking_uri=(run.path / "mlruns").as_uri())
    identity = run.tracker_id("mlflow")
    history = client.get_metric_history(identity, "val-core/x/acc/mean_at_1")
    assert {(metric.step, metric.value) for metric in history} >= {(1, 1), (2, 2), (3, 6), (4, 8), (5, 10)}
    record = client.get_run(identity)
    assert record.info.status == "FINISHED" and record.info.run_name == "e"
    assert record.data.params == {"a.b": "1", "reward.api_key": "<redacted>"}


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = log_twice("wandb", tmp_path, pause=1.1)  # wandb names its folders by the second
    identity = run.tracker_id("wandb")
    files = list((run.path / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb"))
    assert len(files) == 2  # both processes wrote to one run
    for file in files:
        content = file.read_bytes()
        assert content.count(NAME.encode()) >= 3 and b"<redacted>" in content and b"hunter2" not in content


def test_otel_sends_to_a_receiver(tmp_path, monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        show_all("otel", tmp_path)
        server.shutdown()
    ((path, request),) = received
    spans = request.resource_spans[0].scope_spans[0].spans
    assert path == "/v1/traces" and [span.name for span in spans] == ["turn 1", "score", "episode"] * 2
