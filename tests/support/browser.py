"""Chromium for tests and benchmarks of the viewer: Debian's, driven by playwright, which brings none of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.patience import SOON

ROOT = Path(__file__).parents[2]
TOKEN = "a-token"


def chromium() -> str | None:
    """Return the path of a Chromium; None without one."""
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


@contextlib.contextmanager
def browser(**options: Any) -> Iterator[Any]:
    """Open a browser and yield a context of it.

    Args:
        options: of the context, such as ``color_scheme``.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        try:
            yield started.new_context(viewport={"width": 1440, "height": 900}, **options)
        finally:
            started.close()


@contextlib.contextmanager
def viewing(*runs: Path, log: Path, seconds: float = 60.0) -> Iterator[str]:
    """Start ``hone view`` in a process of its own, and yield the address with the token."""
    command = [sys.executable, "-m", "hone.cli.main", "view", *map(str, runs), "--no-browser", "--port", "0"]
    environment = {**os.environ, "HONE_VIEW_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=ROOT)
        try:
            deadline = time.monotonic() + seconds
            while "http://" not in log.read_text():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"hone view did not start: {log.read_text()}")
                time.sleep(0.05)
            yield next(word for word in log.read_text().split() if word.startswith("http://"))
        finally:
            process.terminate()
            process.wait(SOON)
