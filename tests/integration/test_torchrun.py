"""Runs whose ranks a launcher starts: the numbers of one process, a killed rank, and mistakes that are one message."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
from support.patience import LONG
from support.small_preferences import make_small_preferences, small_preference_settings
from support.world import metrics, steps_saved

from hone.cluster.torchrun.ranks import LaunchedRank
from hone.cluster.torchrun.runtime import values_of
from hone.config import PreferenceConfig, load_config
from hone.errors import ConfigError
from hone.insight import activity
from hone.trainers import preference

STEPS = 4
OPTIONS = ("loss.beta=0.5", "optim.lr=1e-3", "optim.eps=1e-6")
RANKS = ("trainer.runtime=torchrun", "trainer.n_gpus_per_node=2")
VARIABLES = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_preferences(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def local(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Metrics of the run in one process."""
    where = tmp_path_factory.mktemp("local") / "run"
    words = small_preference_settings(data, where, *OPTIONS, f"trainer.total_training_steps={STEPS}")
    assert preference.train(load_config(PreferenceConfig, words)) == 0
    return metrics(where)


def launch(data: Path, where: Path, log: Path, *launcher: str, steps: int = STEPS) -> subprocess.Popen[bytes]:
    """Start `hone prefer` on two ranks."""
    words = small_preference_settings(data, where, *OPTIONS, *RANKS, f"trainer.total_training_steps={steps}")
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *launcher),
            *("-m", "hone.cli.main", "prefer", "preflight.allow=[R47]", *words),
        ],
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def assert_close(where: Path, expected: list[dict]) -> None:
    rows = [{n: v for n, v in row.items() if not n.startswith("global_seqlen/")} for row in metrics(where)]
    assert [sorted(row) for row in rows] == [sorted(row) for row in expected]
    for row, other in zip(rows, expected, strict=True):
        far = {n: (row[n], v) for n, v in other.items() if abs(row[n] - v) > 1e-5 * max(1.0, abs(v))}
        assert not far, f"step {row['step']}"


@pytest.mark.long("hone/cluster/torchrun", "hone/cluster/runtime.py")
def test_a_killed_rank_is_started_again_by_the_launcher(data: Path, local: list[dict], tmp_path: Path):
    """The launcher ends all ranks when one is killed; started again, they resume from the last checkpoint."""
    where, log = tmp_path / "run", tmp_path / "log"
    run = launch(data, where, log, "--max-restarts=1")
    deadline, killed = time.monotonic() + LONG, False
    while run.poll() is None:
        assert time.monotonic() < deadline, log.read_text()
        records = {record.name: record.pid for record in activity.read_records(where / activity.FOLDER)}
        if not killed and "main[1]" in records and 2 in steps_saved(where):
            os.kill(records["main[1]"], signal.SIGKILL)
            killed = True
        time.sleep(0.02)
    assert run.returncode == 0 and killed, log.read_text()
    assert "resuming from" in log.read_text()
    assert_close(where, local)


@pytest.mark.long("hone/cluster/torchrun", "hone/cluster/runtime.py")
def test_a_stopped_run_saves_and_fits_one_process(data: Path, local: list[dict], tmp_path: Path):
    where, log = tmp_path / "run", tmp_path / "log"
    run = launch(data, where, log, steps=2)
    assert run.wait(LONG) == 0, log.read_text()
    assert steps_saved(where) == [1, 2]
    assert log.read_text().count("plan: 8 preferences") == 1, "only the first rank reports"
    words = small_preference_settings(data, where, *OPTIONS, f"trainer.total_training_steps={STEPS}")
    assert preference.train(load_config(PreferenceConfig, words)) == 0
    assert_close(where, local)


@pytest.mark.long("hone/cluster/torchrun", "hone/cluster/runtime.py")
def test_a_mistake_is_one_message(data: Path, tmp_path: Path):
    """A launcher with another number of ranks than configured; no rank waits for the others."""
    log = tmp_path / "log"
    run = launch(data, tmp_path / "run", log, "--nproc-per-node=1")
    assert run.wait(LONG) != 0
    output = log.read_text()
    assert output.count("R02") == 1 and "trainer.nnodes=1 trainer.n_gpus_per_node=1" in output


def test_the_error_of_a_rank_is_its_cause():
    """A user's mistake comes before other errors, and those before collectives that broke for lack of a rank."""
    mistake, bug, echo = ConfigError("3 is wrong"), KeyError("a bug"), RuntimeError("gloo: connection closed by peer")
    for errors in ([echo, mistake, bug], [mistake, echo]):
        with pytest.raises(ConfigError):
            values_of(dict(enumerate(map(failed, errors))))
    with pytest.raises(KeyError):
        values_of(dict(enumerate(map(failed, [echo, bug]))))
    done: Future[int] = Future()
    done.set_result(7)
    assert values_of({0: done, 1: done}) == [7, 7]


def failed(error: BaseException) -> Future[int]:
    answer: Future[int] = Future()
    answer.set_exception(error)
    return answer


def test_the_variables_of_a_launcher():
    assert LaunchedRank.from_environment(VARIABLES) == LaunchedRank(3, 8, 1, 2, "node0")
    with pytest.raises(ConfigError) as caught:
        LaunchedRank.from_environment({name: value for name, value in VARIABLES.items() if name != "LOCAL_RANK"})
    assert (caught.value.code, caught.value.where) == ("R02", "trainer.runtime") and "LOCAL_RANK" in caught.value.what
    with pytest.raises(ConfigError):
        LaunchedRank.from_environment(VARIABLES | {"RANK": "first"})
