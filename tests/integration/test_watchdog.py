"""The watchdog over real processes: ranks in a collective, a stopped process, a wait with a limit of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.patience import SOON
from support.services import free_port

from hone.cluster.watchdog import Culprit, Hang, Watchdog
from hone.errors import EXIT_FAILED
from hone.insight import activity

pytestmark = pytest.mark.long("hone/cluster/watchdog.py", "hone/cluster/watcher.py", "hone/cluster/watcher.py")

RANK = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
from hone.insight import activity

folder, rank, port = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def a_loop_that_never_ends():
    while True:
        time.sleep(0.01)

activity.begin(folder, "actor", rank)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
total = torch.ones(4)
with activity.doing("update_actor"):
    for micro_batch in range(5):
        if rank == 1 and micro_batch == 3:
            a_loop_that_never_ends()
        dist.all_reduce(total)
        activity.tick()
"""


class Seen:
    """Collects what the watchdog reports; the run goes on."""

    def __init__(self) -> None:
        self.hangs: list[Hang] = []

    def __call__(self, hang: Hang) -> bool:
        self.hangs.append(hang)
        return True

    def wait(self, seconds: float = SOON) -> Hang:
        end = time.monotonic() + seconds
        while not self.hangs and time.monotonic() < end:
            time.sleep(0.05)
        assert self.hangs, "nothing was reported"
        return self.hangs[-1]


@pytest.fixture
def run(tmp_path: Path):
    """A run directory in which this process is the driver."""
    activity.begin(tmp_path / activity.FOLDER, "driver")
    yield tmp_path
    activity.end()


def start(program: str, *arguments: object) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)])


def test_the_hung_rank_is_named_before_the_collective_gives_up(run: Path):
    port = free_port()
    ranks = [start(RANK, run / activity.FOLDER, rank, port) for rank in range(2)]
    seen = Seen()
    while len([r for r in activity.read_records(run / activity.FOLDER) if r.stage == "update_actor"]) < 2:
        assert all(rank.poll() is None for rank in ranks)
        time.sleep(0.05)
    watchdog = Watchdog(run, 2.0, seen)
    try:
        with activity.waiting("update_actor", on=["actor"], limit=None):
            hang = seen.wait()
            seen.hangs.clear()
            assert seen.wait().culprits == hang.culprits, "a hang that continues is reported again"
    finally:
        watchdog.close()
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert hang.culprits == (Culprit("actor[1]", ranks[1].pid, os.uname().nodename),)
    assert "a_loop_that_never_ends" in hang.summary
    assert "actor[0]  [update_actor] waits in all_reduce of torch.distributed -> actor[1]" in hang.summary
    report = Path(hang.report).read_text()
    for name in ("driver", "actor[0]", "actor[1]"):
        assert f"--- stacks of {name}" in report
    assert "in all_reduce" in report.split("--- stacks of actor[0]")[1].split("--- stacks of actor[1]")[0]


WORKER = """
import sys, time
from pathlib import Path
from hone.insight import activity
activity.begin(Path(sys.argv[1]), "rollout", 0)
with activity.doing("generate"):
    while True:
        time.sleep(0.05)
        activity.tick()
"""


def test_a_stopped_process_is_named_and_one_that_ticks_is_not(run: Path):
    worker, seen = start(WORKER, run / activity.FOLDER), Seen()
    watchdog = Watchdog(run, 10.0, seen)
    try:
        with activity.waiting("generate", on=["rollout[0]"]):
            while not [record for record in activity.read_records(run / activity.FOLDER) if record.role == "rollout"]:
                time.sleep(0.02)
            seen.hangs.clear()
            time.sleep(12.0)
            assert seen.hangs == [], "it ticks"
            os.kill(worker.pid, signal.SIGSTOP)
            hang = seen.wait()
    finally:
        watchdog.close()
        worker.kill()
        worker.wait()
    assert [culprit.name for culprit in hang.culprits] == ["rollout[0]"]
    assert (
        "stopped" in hang.reason or "time.sleep" in hang.reason or "<string>" in hang.reason
    )  # py-spy may see into it


def test_a_wait_with_a_limit_of_its_own_is_no_hang_before_that(run: Path):
    seen = Seen()
    watchdog = Watchdog(run, 0.5, seen)
    try:
        with activity.waiting("scores", on=["reward worker"], limit=20.0):
            time.sleep(2.0)
            assert seen.hangs == []
            hang = seen.wait()
    finally:
        watchdog.close()
    assert hang.culprits[0].name == "driver" and "reward worker" in hang.reason


DRIVER = """
import json, os, re, sys, time
from pathlib import Path
from hone.cluster.watchdog import Watchdog
from hone.insight import activity


run = Path(sys.argv[1])
(run / "run.json").write_text(json.dumps({"pid": os.getpid(), "status": "running"}))
activity.begin(run / activity.FOLDER, "driver")
watchdog = Watchdog(run, 1.0)
with activity.doing("reward"):
    exec(sys.argv[2])
"""
HOLDS_THE_INTERPRETER = 're.match(r"(a+)+$", "a" * 60 + "b")'


def drive(run: Path, work: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", DRIVER, run, work], stderr=subprocess.PIPE, text=True, timeout=SOON, check=False
    )


def test_a_run_that_hangs_ends_with_its_own_code(tmp_path: Path):
    ended = drive(tmp_path, "time.sleep(600)")
    assert ended.returncode == EXIT_FAILED, ended.stderr
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["status"] == "failed" and str(tmp_path / "hangs") in record["exit_reason"]


def test_a_run_that_hangs_is_ended_where_its_end_cannot_be_written(tmp_path: Path):
    ended = drive(tmp_path, "(run / f'.run.json.{os.getpid()}.tmp').mkdir(); time.sleep(600)")
    assert ended.returncode == EXIT_FAILED, ended.stderr
    assert "[Errno 21] Is a directory" in ended.stderr


def test_a_run_that_hangs_is_ended_where_no_report_can_be_written(tmp_path: Path):
    (tmp_path / "hangs").touch()  # no folder
    ended = drive(tmp_path, HOLDS_THE_INTERPRETER)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert "--- stacks of driver" in ended.stderr and "E-run-directory" in ended.stderr
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["status"] == "failed" and "the output of the run" in record["exit_reason"]


def test_a_run_that_ends_is_watched_no_more(run: Path):
    watchdog = Watchdog(run, 600.0)
    watcher = watchdog._process
    watchdog.close()
    assert watcher.returncode == 0
    watchdog.close()  # twice is once


def test_a_driver_that_died_before_its_watcher_started_is_reported(tmp_path: Path) -> None:
    driver = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    born = activity.birth(driver.pid)
    (tmp_path / "run.json").write_text(json.dumps({"pid": driver.pid, "status": "running"}))
    driver.kill()
    driver.wait()
    watched = {"run": str(tmp_path), "seconds": 60.0, "driver": driver.pid, "born": born}
    program = "from hone.cluster.watcher import main; main()"
    said = subprocess.run(
        [sys.executable, "-c", program, json.dumps(watched)], input="", capture_output=True, text=True, timeout=SOON
    )
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["status"] == "failed" and "killed" in record["exit_reason"]
    assert f"the process {driver.pid} was killed" in said.stderr
