"""The heap keeps what the next update needs, and gives holes back."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, resource, sys
import torch
from hone.models.kernels.cpu.memory import heap_watch, resident_memory, trim_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def work(count):
    return [torch.ones(25_000) for _ in range(count)]  # of 100 kB, too small to be mapped each on its own

if not trim_memory():
    sys.exit(3)
watch = heap_watch()
work(1000)
watch()                                  # an update needs 100 MB
before = faults()
work(1000)
again = faults() - before                # the second finds them where they were
watch()
steady = watch.trims
kept = work(6000)[::2]                   # one that leaves 300 MB of holes
grown = resident_memory()
watch()
print(json.dumps({"again": again, "steady": steady, "trims": watch.trims, "returned": grown - resident_memory()}))
"""


@pytest.fixture(scope="module")
def seen():
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    if ended.returncode == 3:
        pytest.skip("not glibc")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_the_second_update_finds_the_memory_of_the_first(seen):
    assert seen["again"] < 2_500  # pages; 100 MB have 25,000
    assert seen["steady"] == 0


def test_holes_go_back_once_the_process_has_grown(seen):
    assert seen["trims"] == 1
    assert seen["returned"] > 200_000_000  # of 300 MB of holes
