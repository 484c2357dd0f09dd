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
        tensors = [torch.ones(size) for size in (4_000_000, 500_000, 3_000_000)]
        del tensors

churn(3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
churn(20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    ended = subprocess.run([sys.executable, "-c", CHURN, how], capture_output=True, text=True, check=False)
    if ended.returncode == 3:
        pytest.skip("not glibc")
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout)


def test_the_same_tensors_again_need_no_fresh_pages():
    assert page_faults("keep") < 500 < page_faults("leave")
