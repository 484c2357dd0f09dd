"""One thread computes with all cores; what other threads compute takes no further threads."""

import subprocess
import sys

PROGRAM = """
import os, threading, torch
from hone.threads import compute_here

def elsewhere(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

def running():
    return len(os.listdir("/proc/self/task"))

def copy():
    source.clone()
    counts.append((torch.get_num_threads(), running()))

source, counts = torch.randn(1000, 1000), []
if {limited}:
    compute_here(2)
else:
    torch.set_num_threads(2)
source.clone()
before = running()
elsewhere(copy)
elsewhere(copy)
print(torch.get_num_threads(), [(threads, more - before) for threads, more in counts])
compute_here(3)
elsewhere(copy)
print(torch.get_num_threads(), counts[-1][0])
"""


def copied_elsewhere(*, limited: bool) -> list[str]:
    command = [sys.executable, "-c", PROGRAM.replace("{limited}", str(limited))]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.splitlines()


def test_other_threads_compute_alone_and_the_number_can_be_changed() -> None:
    plain, limited = copied_elsewhere(limited=False), copied_elsewhere(limited=True)
    assert (
        plain[0] == "2 [(2, 2), (2, 2)]"
    )  # what torch does by itself: the thread that copies, and one of a team of its own
    assert limited[0] == "2 [(1, 1), (1, 1)]"
    assert limited[1] == plain[1] == "3 1"
