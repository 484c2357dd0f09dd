"""Freed memory stays with the process, so that a training step does not pay for fresh pages again and again."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHURN = """
import resource, sys
import torch
from hone.training.memory import keep_freed_memory

if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit(3)

def churn(times):
    for _ in range(times):
        tensors = [torch.ones(4_000_000) for _ in range(10)]
        del tensors

churn(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
churn(2)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    ended = subprocess.run([sys.executable, "-c", CHURN, how], capture_output=True, text=True, check=False)
    if ended.returncode == 3:
        pytest.skip("not glibc")
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout)


def test_the_same_tensors_again_need_no_fresh_pages():
    kept, left = page_faults("keep"), page_faults("leave")  # of twice 160 MB, 78,000 pages
    assert kept < left / 3
