"""One thread computes with all cores; what other threads compute takes no further threads."""

import os
import re
import subprocess
import sys

import pytest
from support.patience import LONG

from hone.threads import SPIN, omp_threads

ABOUT = pytest.mark.application("hone/threads.py", "hone/__init__.py", "constraints.txt")

PROGRAM = """
import os, threading, time, torch
from hone.threads import compute_here

def elsewhere(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    gone = time.monotonic() + 60
    while str(thread.native_id) in running():  # a thread joined may not have left the kernel yet
        assert time.monotonic() < gone, "a thread that ended is still there"
        time.sleep(0.001)

def running():
    return set(os.listdir("/proc/self/task"))

def copy():
    source.clone()
    counts.append((torch.get_num_threads(), running()))

source, counts = torch.randn(1000, 1000), []
for value in ("3", ""):
    os.environ["OMP_NUM_THREADS"] = value
    compute_here()
    print(torch.get_num_threads())
compute_here(2)
source.clone()
before = running()
elsewhere(copy)
elsewhere(copy)
print(torch.get_num_threads(), [(threads, len(tasks - before)) for threads, tasks in counts])
compute_here(3)
elsewhere(copy)
print(torch.get_num_threads(), counts[-1][0])
"""


@ABOUT
def test_other_threads_compute_alone_and_the_number_can_be_changed() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=LONG)
    given, default, first, second = ended.stdout.splitlines()
    assert (given, default) == ("3", str(len(os.sched_getaffinity(0))))
    assert first == "2 [(1, 1), (1, 1)]"  # by itself torch has 2 threads there, and makes one more: [(2, 2), (2, 2)]
    assert second == "3 1"


@pytest.mark.parametrize(("value", "threads"), [("3", 3), ("0", None), ("many", None), ("", None)])
def test_the_environment_sets_the_default(value: str, threads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert omp_threads() == threads


@ABOUT
@pytest.mark.parametrize(
    ("given", "spins"), [({}, SPIN), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_teams_of_torch_spin_briefly_unless_the_user_says_how_they_wait(
    given: dict[str, str], spins: str | None
) -> None:
    unset = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    shown = {**unset, **given, "OMP_DISPLAY_ENV": "verbose"}
    command = [sys.executable, "-c", "import hone, torch"]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LONG, env=shown)
    found = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", ended.stderr)
    if not found:
        pytest.skip("torch has another OpenMP than GNU's")
    assert spins in (None, *found) and (spins is not None or found != [SPIN])
