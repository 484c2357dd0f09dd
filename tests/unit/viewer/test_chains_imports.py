"""The import in the background ends before the factors import the same packages."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.application("hone/apps/lab/viewer", "hone/insight", "hone/apps/lab", "hone/rewards")

PROGRAM = """
import sys, threading
from pathlib import Path
from hone.apps.lab.viewer import tokens

begun = threading.Event()
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers":
            begun.set()
sys.meta_path.insert(0, Finder())
tokens.prepare()
assert begun.wait(120), "the thread imports transformers"
try:
    tokens._step_factors(Path("no run"), 1, 0)
except ImportError:
    raise
except Exception as error:
    print(type(error).__name__)
"""


def test_factors_wait_for_the_import_in_the_background() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0 and "HoneError" in ended.stdout, ended.stderr[-2000:]
