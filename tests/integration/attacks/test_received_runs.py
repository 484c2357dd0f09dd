"""Runs that somebody sent: looking at them runs nothing of theirs, and deletes nothing of ours."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from support.launch import hone, set_environment
from support.patience import SOON
from support.viewer_runs import CONFIG, write_run

from hone.apps.lab.compare import run_names, whole_runs
from hone.apps.lab.viewer.api import READS, WRITES, Workspace
from hone.cli.main import main
from hone.errors import HoneError
from hone.insight.archive.read import open_archive

pytestmark = [pytest.mark.slow, pytest.mark.application("hone/config", "hone/insight", "hone/apps/lab", "hone/cli")]

EVIL = "from pathlib import Path\nPath({!r}).touch()\ndef loss(*arguments, **options): ...\n"
NAMES = {
    "an import path": {"algorithm": {"adv_estimator": "received.evil:loss"}},
    "an interpolation": {"algorithm": {"adv_estimator": "${trainer.project_name}:loss"},
                         "trainer": {"project_name": "received.evil"}},
    "a search path": {"hydra": {"searchpath": ["pkg://received.evil"]}, "algorithm": {"adv_estimator": "received.evil:loss"}},
}  # fmt: skip
LOOKS = (["runs", "show", "received"], ["runs", "list", "--root", "."], ["profile", "received"],
         ["config", "show", "--derived", "--config-path", "received", "--config-name", "config"],
         ["what-if", "received", "--no-weights"], ["replay", "received"])  # fmt: skip


@pytest.fixture
def received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose folder holds a module, below the current folder."""
    run = write_run(tmp_path / "received", steps=2, groups=2, n=2, prompts=2)
    (run / "evil.py").write_text(EVIL.format(str(tmp_path / "ran")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return run


def _name(run: Path, more: dict[str, dict[str, str]]) -> None:
    tree = yaml.safe_load(CONFIG)
    for block, values in more.items():
        tree[block] = tree.get(block, {}) | values
    (run / "config.yaml").write_text(yaml.safe_dump(tree))


@pytest.mark.parametrize("more", NAMES.values(), ids=list(NAMES))
def test_looking_runs_no_code_of_a_received_run(
    received: Path, tmp_path: Path, more: dict[str, dict[str, str]]
) -> None:
    _name(received, more)
    for words in LOOKS:
        ended = hone(*words, log=tmp_path / "log", cwd=tmp_path)
        assert not (tmp_path / "ran").exists(), words
        assert ended.code == (2 if words[0] in ("config", "what-if", "replay") else 0), ended.output
        assert any(code in ended.output for code in ("E-trust", "E-config")) == (ended.code == 2)


def test_the_viewer_runs_no_code_of_a_received_run(received: Path, tmp_path: Path) -> None:
    _name(received, NAMES["an import path"])
    workspace = Workspace({"received": received})
    group = READS["groups"](workspace, {})["groups"][0]
    sequence = {"step": str(group["step"]), "uid": group["uid"], "index": "0"}
    assert READS["factors"](workspace, sequence) == [] and READS["tokens"](workspace, sequence)["texts"]
    assert not (tmp_path / "ran").exists()


def test_trust_is_asked_once_until_configuration_or_file_change(received: Path, tmp_path: Path) -> None:
    _name(received, NAMES["an import path"])
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}

    def ran(*more: str) -> bool:
        (tmp_path / "ran").unlink(missing_ok=True)
        words = ("what-if", "received", "--no-weights", *more)
        ended = hone(*words, log=tmp_path / "log", cwd=tmp_path, prepare=partial(set_environment, state))
        assert ("E-trust" in ended.output) != (tmp_path / "ran").exists(), ended.output
        return (tmp_path / "ran").exists()

    assert [ran(), ran("--trust"), ran()] == [False, True, True]
    assert [file.parent.parent for file in (tmp_path / "state").rglob("*") if file.is_file()] == [
        tmp_path / "state/hone"
    ]
    (received / "evil.py").write_text((received / "evil.py").read_text() + "# another\n")
    assert not ran()
    assert ran("--trust") and ran()
    (received / "config.yaml").write_text((received / "config.yaml").read_text() + "# another\n")
    assert not ran()


LAUGHS = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n + 1}: &a{n + 1} {{p: *a{n}, q: *a{n}, r: *a{n}, s: *a{n}}}\n" for n in range(20)
)
DAMAGES = {
    "half": {"run.json": "{"},
    "a list": {"run.json": "[1]"},
    "metrics of other shapes": {"metrics.jsonl": '{"step": 1, "critic/rewards/mean": {"a": 1}}\n{"step": 2}\n'},
    "no step": {"metrics.jsonl": "[]\n[]\n"},
    "aliases": {"config.yaml": LAUGHS},
    "an alias of itself": {"config.yaml": "a: &a {b: *a}\n"},
    "deep": {"run.json": "[" * 100_000},
    "bytes": {"config.yaml": "\x80"},
}


@pytest.mark.parametrize("files", DAMAGES.values(), ids=list(DAMAGES))
def test_one_damaged_run_does_not_end_the_list(files: dict[str, str], tmp_path: Path) -> None:
    for name in ("bad", "good"):
        write_run(tmp_path / "runs" / name, steps=1, groups=1, n=1, prompts=1)
    for name, text in files.items():
        (tmp_path / "runs" / "bad" / name).write_text(text, encoding="latin-1")
    runs = {run.name: run.status for run in whole_runs(run_names(tmp_path / "runs"))}
    assert runs == {"bad": "damaged", "good": "finished"}
    with pytest.raises(SystemExit) as ended:
        main(["runs", "list", "--root", str(tmp_path / "runs")])
    assert not ended.value.code
    shown = READS["runs"](Workspace({name: tmp_path / "runs" / name for name in runs}), {})["runs"]
    assert {run["name"]: run["status"] for run in shown} == runs


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "config.yaml", "coverage.jsonl", "alerts.jsonl", "notes.jsonl", "labels.jsonl",
                                  "rollouts/step_1.parquet", "rollouts/vocabulary.parquet"])  # fmt: skip
def test_a_pipe_in_a_received_run_is_no_file(name: str, tmp_path: Path) -> None:
    """Whoever opens it waits for ever."""
    run = write_run(tmp_path / "runs" / "received", steps=1, groups=1, n=1, prompts=1)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    for words in (["runs", "list", "--root", "runs"], ["runs", "show", "runs/received"], ["runs", "sheet", "runs/received"],
                  ["runs", "samples", "runs/received"], ["view", "runs/received", "--export", "page.html"]):  # fmt: skip
        assert hone(*words, log=tmp_path / "log", cwd=tmp_path, timeout=SOON).code in (0, 2), words


def test_labels_that_are_a_link_are_neither_read_nor_written(tmp_path: Path) -> None:
    run = write_run(tmp_path / "received", steps=1, groups=1, n=1, prompts=1)
    (tmp_path / "mine").write_text("mine\n")
    (run / "labels.jsonl").symlink_to(tmp_path / "mine")
    workspace = Workspace({"received": run})
    group = READS["groups"](workspace, {})["groups"][0]
    with pytest.raises(HoneError) as refused:
        WRITES["label"](workspace, {"step": group["step"], "uid": group["uid"], "index": 0, "part": 0, "label": "good"})
    assert refused.value.code == "E-view-label" and (tmp_path / "mine").read_text() == "mine\n"
    with pytest.raises(HoneError):
        READS["labels"](workspace, {})


def test_a_small_file_of_samples_that_becomes_gigabytes_is_refused(tmp_path: Path) -> None:
    """One long text in a dictionary, in every row; another that compresses well."""
    run = write_run(tmp_path / "received", steps=1, groups=1, n=4, prompts=1)
    file = run / "rollouts" / "step_1.parquet"
    table = pq.read_table(file)
    long = pa.chunked_array([pa.array(["x" * 2**22]).take(pa.array([0] * 64))])
    rows = table.take(pa.array([0] * 64))
    bomb = rows.set_column(rows.schema.get_field_index("text"), rows.schema.field("text"), long)
    pq.write_table(bomb, file, compression="zstd")
    assert file.stat().st_size < 200_000
    with pytest.raises(HoneError) as refused:
        open_archive(run).table(1, ["text"])
    assert refused.value.code == "E-runs"
    assert len(open_archive(run).table(1, ["uid"])) == 64
