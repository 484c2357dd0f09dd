"""Servers as processes of their own: `hone serve`, and every other command that writes its address to its log."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from support.forked_python import Forks
from support.patience import LONG, SOON


@contextlib.contextmanager
def listening(command: Sequence[object], log: Path, token: str | None = None) -> Iterator[str]:
    """Run a server until the block ends; yields its address, like ``http://127.0.0.1:8017``.

    Args:
        log: file that gets its messages.
        token: token that clients must send.
    """
    environment = {**os.environ, "HONE_SERVE_TOKEN": token} if token else None
    with log.open("w") as file:
        server = subprocess.Popen([str(word) for word in command], stdout=file, stderr=file, env=environment)
    try:
        deadline = time.monotonic() + LONG
        while not (address := re.search(r"(http://127\.0\.0\.1:\d+)\b", log.read_text())):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield address[1]
    finally:
        server.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(SOON)
        server.kill()


@contextlib.contextmanager
def serving(forks: Forks, model: Path, log: Path, *options: str, token: str | None = None) -> Iterator[str]:
    """Serve a model at a free port until the block ends; yields the address.

    Args:
        log: file that gets the server's messages; a traceback in it fails the test.
        options: further options of `hone serve`.
        token: token that clients must send.
    """
    with listening([forks.bin / "hone", "serve", model, "--port", "0", *options], log, token) as address:
        assert ("(token required)" in log.read_text()) == (token is not None)
        yield address
    assert "Traceback" not in log.read_text(), log.read_text()
