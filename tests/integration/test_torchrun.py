"""Runs whose ranks a launcher starts: the numbers of one process, a killed rank, and mistakes that are one message."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from support.patience import LONG
from support.small_preferences import make_small_preferences, small_preference_settings
from support.world import metrics, steps_saved
from torch._C._distributed_c10d import TCPStore

from hone.cluster.torchrun.exchange import packed, unpacked
from hone.cluster.torchrun.ranks import LaunchedRank
from hone.config import PreferenceConfig, load_config
from hone.data.batch import Batch
from hone.data.ragged import Ragged
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


def launch(
    data: Path, where: Path, log: Path, *launcher: str, steps: int = STEPS, words: tuple[str, ...] = ()
) -> subprocess.Popen[bytes]:
    """Start `hone prefer` on two ranks."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *launcher),
            *("-m", "hone.cli.main", *words_of(data, where, steps), *words),
        ],
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def words_of(data: Path, where: Path, steps: int) -> list[str]:
    """Return the command's words."""
    settings = small_preference_settings(data, where, *OPTIONS, *RANKS, f"trainer.total_training_steps={steps}")
    return ["prefer", "preflight.allow=[R47]", *settings]


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


@pytest.mark.long("hone/cluster/torchrun", "hone/trainers/launched_session.py")
@pytest.mark.parametrize("words", [("data.train_files=nowhere.parquet",), ("data.max_lenght=3",)])
def test_a_mistake_of_all_ranks_is_said_once(data: Path, tmp_path: Path, words: tuple[str, ...]):
    log = tmp_path / "log"
    run = launch(data, tmp_path / "run", log, words=words)
    assert run.wait(LONG) != 0
    output = log.read_text()
    assert output.count("  Fix: ") == 1, output


@pytest.mark.long("hone/cluster/torchrun", "hone/trainers/launched_session.py")
def test_strangers_at_every_port_of_the_ranks(data: Path, local: list[dict], tmp_path: Path):
    """Lines, frames, pickles and silence at whatever the ranks listen on, before the second rank comes and later.

    What torch's own transport does with bytes that imitate one of its ranks is not tried.
    """
    where, log = tmp_path / "run", tmp_path / "log"
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the launcher's
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    command = [sys.executable, "-m", "hone.cli.main", *words_of(data, where, STEPS)]

    def start(rank: int) -> subprocess.Popen[bytes]:
        names = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command, stdout=log.open("ab"), stderr=subprocess.STDOUT, env={**os.environ, **variables, **names}
        )

    ranks, held, met = [start(0)], [], set[int]()
    deadline = time.monotonic() + LONG
    while any(rank.poll() is None for rank in ranks):
        assert time.monotonic() < deadline and not any(rank.poll() for rank in ranks), log.read_text()
        for port in ports_of(ranks) - met:
            met.add(port)
            for words in (
                b"",
                b"hello\n",
                struct.pack(">I", 5) + b"abcde",
                pickle.dumps({"a": 1}),
                b"GET / HTTP/1.1\r\n\r\n",
            ):
                with contextlib.suppress(OSError):
                    held.append(socket.create_connection(("127.0.0.1", port), timeout=5))
                    held[-1].sendall(words)
        if len(ranks) == 1 and met:
            ranks.append(start(1))
        time.sleep(0.02)
    assert [rank.returncode for rank in ranks] == [0, 0], log.read_text()
    assert_close(where, local)


def ports_of(processes: list[subprocess.Popen[bytes]]) -> set[int]:
    """Return the ports that processes listen on."""
    ports = set[int]()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            connections = psutil.Process(process.pid).net_connections("tcp")
            ports |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return ports


@pytest.mark.long("hone/cluster/torchrun", "hone/trainers/launched_session.py")
def test_what_ranks_tell_each_other():
    program = Path(__file__).parents[1] / "support" / "launched_program.py"
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = subprocess.run([*launcher, str(program)], capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all was heard") == 2


def test_bytes_of_a_stranger_are_no_objects():
    """What is received is JSON and safetensors; a pickle is an error."""
    batch = Batch(
        {
            "uid": ["a", "b"],
            "ids": Ragged.from_rows([[1, 2, 3], []], torch.int64),
            "half": torch.tensor([0.5, -1.0], dtype=torch.bfloat16),
        },
        kl=0.25,
    )
    received = unpacked(packed({"value": batch}))["value"]
    assert received.names() == batch.names() and received.meta == batch.meta and received.uids == ["a", "b"]
    assert received.ragged("ids").to_lists() == [[1, 2, 3], []]
    assert torch.equal(received.tensor("half"), batch.tensor("half"))
    with pytest.raises(ValueError):
        unpacked(struct.pack("<Q", 64) + pickle.dumps(Evil()).ljust(64))
    assert not Evil.ran
    with pytest.raises(TypeError):
        packed({"value": Evil()})


class Evil:
    """Run code when it is unpickled."""

    ran = False

    def __reduce__(self) -> tuple:
        return setattr, (Evil, "ran", True)


def test_the_variables_of_a_launcher():
    assert LaunchedRank.from_environment(VARIABLES) == LaunchedRank(3, 8, 1, 2, "node0")
    with pytest.raises(ConfigError) as caught:
        LaunchedRank.from_environment({name: value for name, value in VARIABLES.items() if name != "LOCAL_RANK"})
    assert (caught.value.code, caught.value.where) == ("R02", "trainer.runtime") and "LOCAL_RANK" in caught.value.what
    with pytest.raises(ConfigError):
        LaunchedRank.from_environment(VARIABLES | {"RANK": "first"})
