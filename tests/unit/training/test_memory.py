"""Freed memory stays with the process, so that a training step does not pay for fresh pages again and again."""

from __future__ import annotations

import subprocess
import sys

import pytest

FREED = """
import sys
from pathlib import Path
import torch
from hone.training.memory import keep_freed_memory

if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit(3)

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

torch.ones(1000)
before = resident()
tensor = torch.ones(5_000_000)
del tensor
print(resident() - before)
"""


def held_after_freeing(how: str) -> int:
    """Bytes that a process still holds of a tensor of 20 MB that it has freed."""
    ended = subprocess.run([sys.executable, "-c", FREED, how], capture_output=True, text=True, check=False)
    if ended.returncode == 3:
        pytest.skip("not glibc")
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout)


def test_a_freed_tensor_stays_with_the_process():
    assert held_after_freeing("leave") < 5_000_000 < 15_000_000 < held_after_freeing("keep")
