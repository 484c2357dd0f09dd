"""`hone serve` as a process of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from support.forked_python import Forks
from support.patience import LONG, SOON


@contextlib.contextmanager
def serving(forks: Forks, model: Path, log: Path, *options: str, token: str | None = None) -> Iterator[str]:
    """Serve a model at a free port until the block ends; yields the address, like ``http://127.0.0.1:8017``.

    Args:
        log: file that gets the server's messages; a traceback in it fails the test.
        options: further options of `hone serve`.
        token: token that clients must send.
    """
    command = [str(forks.bin / "hone"), "serve", str(model), "--port", "0", *options]
    environment = {**os.environ, "HONE_SERVE_TOKEN": token} if token else None
    with log.open("w") as file:
        server = subprocess.Popen(command, stderr=file, env=environment)
    try:
        deadline = time.monotonic() + LONG
        while not (address := re.search(r"at (http://127\.0\.0\.1:\d+)/v1", log.read_text())):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        assert ("(token required)" in log.read_text()) == (token is not None)
        yield address[1]
    finally:
        server.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(SOON)
        server.kill()
    assert "Traceback" not in log.read_text(), log.read_text()
