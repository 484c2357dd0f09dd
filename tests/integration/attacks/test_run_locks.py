"""Two runs in one directory, and runs that were killed: the second is refused, a lock without a process is taken over."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launch import Command, hone, kill
from support.messages import raises
from support.patience import LONG, SOON
from support.small_sft import make_small_sft, small_sft_settings

from hone.apps.tinker.serve import TrainRequest, serve_training
from hone.errors import HoneError
from hone.insight.run_lock import LOCK, LockOwner, RunLock

STEPS = 12


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_sft(tmp_path_factory.mktemp("small"))


def sft(root: Path, run: Path, *overrides: str) -> list[str]:
    return ["sft", *small_sft_settings(root, run, f"trainer.total_training_steps={STEPS}", *overrides)]


def steps(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
@pytest.mark.application("hone/insight", "hone/trainers/session.py", "hone/training/checkpoints")
@pytest.mark.parametrize("shared", ["run", "checkpoints"])
def test_the_second_run_is_refused_and_the_first_is_undisturbed(root: Path, tmp_path: Path, shared: str) -> None:
    run, other, folder = tmp_path / "run", tmp_path / "other", tmp_path / "checkpoints"
    overrides = [f"trainer.checkpoint_dir={folder}"] if shared == "checkpoints" else []
    first = Command(sft(root, run, *overrides), tmp_path / "first.log")
    assert first.wait_until(lambda: len(steps(run)) > 1), first.log.read_text()
    first.signal(signal.SIGSTOP)
    try:
        second = hone(*sft(root, other if overrides else run, *overrides), log=tmp_path / "second.log")
    finally:
        first.signal(signal.SIGCONT)
    assert second.code == 2, second.output
    for word in ("E-run-in-use", str(first.process.pid), socket.gethostname(), "trainer.default_local_dir="):
        assert word in second.message
    assert "Traceback" not in second.output
    assert first.wait().code == 0, first.log.read_text()
    assert steps(run) == list(range(STEPS + 1))
    assert not list(tmp_path.rglob(LOCK))


@pytest.mark.slow
@pytest.mark.application("hone/insight", "hone/trainers/session.py", "hone/training/checkpoints")
def test_a_killed_run_resumes_at_once(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = Command(sft(root, run, "trainer.watchdog_seconds=60"), tmp_path / "first.log")
    assert first.wait_until(lambda: len(steps(run)) > 2), first.log.read_text()
    assert kill(first) == -signal.SIGKILL
    assert (run / LOCK).exists()
    resumed = hone(*sft(root, run), log=tmp_path / "resumed.log")
    assert resumed.code == 0, resumed.output
    assert f"process {first.process.pid} " in resumed.message
    assert steps(run) == list(range(STEPS + 1)) and not (run / LOCK).exists()


HOLDER = """
import multiprocessing, os, subprocess, sys, time
from hone.insight.run_lock import RunLock
lock = RunLock(sys.argv[1])
pids = [subprocess.Popen(["sleep", "60"], close_fds=False).pid]
if os.fork() == 0:
    time.sleep(60)
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
worker.start()
print("held", flush=True)
time.sleep(60)
"""
RAY_DRIVER = """
import sys, time
from hone.insight.run_lock import RunLock
lock = RunLock(sys.argv[1])
import ray
ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR")
@ray.remote
class Worker:
    def pid(self):
        import os
        return os.getpid()
worker = Worker.remote()
pid = ray.get(worker.pid.remote())
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of ``tmp_path / "run"`` and has children."""
    process = subprocess.Popen(
        [sys.executable, "-c", request.param, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize(
    "holder",
    [
        HOLDER,
        pytest.param(RAY_DRIVER, marks=pytest.mark.long("hone/insight/run_lock.py", "hone/insight/run_directory.py")),
    ],
    ids=["forks", "ray"],
    indirect=True,
)
def test_children_do_not_keep_the_lock_of_a_killed_process(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    with raises(HoneError, str(holder.pid), socket.gethostname(), code="E-run-in-use", where=str(run)):
        RunLock(run)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(LONG)
    children = subprocess.run(["ps", "-o", "pid=", "-s", str(holder.pid)], capture_output=True, text=True, check=False)
    assert len(children.stdout.split()) >= 2, "the children live on"
    with eventually_locked(run):
        assert json.loads((run / LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("holder", [HOLDER], indirect=True)
def test_a_second_training_service_leaves_the_folder_alone(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    """A service at its start removes what a kill left half written; to a second one, that is what the first is writing."""
    run = tmp_path / "run"
    (half := run / "model:train:1" / "weights" / ".new-one").mkdir(parents=True)
    with raises(HoneError, str(holder.pid), code="E-run-in-use", where=str(run)):
        serve_training(TrainRequest(model=str(tmp_path / "none"), out=run))
    assert half.exists()


def eventually_locked(run: Path) -> RunLock:
    """Take the lock soon: a child that was forked at the moment of the kill closes its copy when it runs."""
    deadline = time.monotonic() + SOON
    while True:
        try:
            return RunLock(run)
        except HoneError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def test_a_lock_is_taken_several_times_and_released_with_the_last(tmp_path: Path) -> None:
    outer, inner = RunLock(tmp_path), RunLock(tmp_path / "." / "x" / "..", tmp_path / "checkpoints")
    inner.release()
    inner.release()
    assert (tmp_path / LOCK).exists() and not (tmp_path / "checkpoints" / LOCK).exists()
    attempt = f"from hone.insight.run_lock import RunLock; RunLock({str(tmp_path)!r})"
    refused = subprocess.run([sys.executable, "-c", attempt], capture_output=True, text=True, check=False)
    assert refused.returncode != 0 and "E-run-in-use" in refused.stderr
    outer.release()
    assert not (tmp_path / LOCK).exists()
    assert subprocess.run([sys.executable, "-c", attempt], check=False).returncode == 0


def test_a_process_that_got_the_id_of_a_dead_one_does_not_hold_its_lock(tmp_path: Path) -> None:
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        stale = LockOwner(stranger.pid, socket.gethostname(), "2026-01-01T00:00:00+00:00", 1)
        assert not stale.is_alive()
        (tmp_path / LOCK).write_text(json.dumps(vars(stale)))
        with RunLock(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"pid": "x"}', "\x00" * 100])
def test_a_damaged_lock_is_taken_over(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK).write_text(content)
    with RunLock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_without_flock_the_record_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr("hone.insight.run_lock.fcntl.flock", unsupported)
    other = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True)  # fmt: skip
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with raises(HoneError, str(other.pid), code="E-run-in-use"):
            RunLock(tmp_path)
        other.kill()
        other.wait()
        with RunLock(tmp_path):
            pass
    finally:
        os.killpg(other.pid, signal.SIGKILL)
        other.communicate()


def test_of_many_processes_one_gets_the_lock(tmp_path: Path) -> None:
    program = (
        "import sys, time; from hone.insight.run_lock import RunLock; from hone.errors import HoneError\n"
        "sys.stdin.readline()\n"
        "try: lock = RunLock(sys.argv[1])\n"
        "except HoneError as error: print(error.code)\n"
        "else: print('held', flush=True); sys.stdin.readline(); lock.release()\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]  # fmt: skip
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    lines = [process.stdout.readline().strip() for process in processes if process.stdout is not None]
    for process in processes:
        process.communicate("\n")
    assert sorted(lines) == ["E-run-in-use"] * 5 + ["held"]
