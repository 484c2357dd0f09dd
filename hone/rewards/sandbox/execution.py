"""Execution of one program under a supervisor process."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import subprocess
import sys
import threading
from pathlib import Path, PurePosixPath
from typing import Any

from hone.rewards.sandbox.backends import Backend
from hone.rewards.sandbox.limits import Ending, Limits, Result

MAIN = "main.py"  # name of the program's file in its folder
GRACE = 30.0  # seconds beyond the limit for the supervisor to start and end all processes
logger = logging.getLogger("hone.rewards")
_SUPERVISOR = Path(__file__).with_name("supervisor.py")


def execute(backend: Backend, code: str, stdin: str, files: dict[str, str], limits: Limits) -> Result:
    """Run one program under a new supervisor and wait for it."""
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or name == MAIN or "\x00" in name:
            raise ValueError(f"'{name}' must be a path inside the program's folder, other than {MAIN}")
    request = json.dumps(backend.request(limits, stdin, {**files, MAIN: code}, MAIN))
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_SUPERVISOR)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin:/usr/local/bin", "LANG": "C.UTF-8"},
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    watchdog = threading.Timer(limits.seconds + GRACE, process.kill)
    watchdog.start()
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(request.encode() + b"\n")
            process.stdin.flush()  # left open: the supervisor ends when it closes
        answer, errors = process.stdout.read(), process.stderr.read()
    finally:
        watchdog.cancel()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        exit_code = process.wait()
        process.stdout.close()
        process.stderr.close()
    return _result(answer, errors, exit_code)


def _result(answer: bytes, errors: bytes, code: int) -> Result:
    try:
        fields: dict[str, Any] = json.loads(answer)
    except json.JSONDecodeError:
        last = (errors.decode(errors="replace").strip().splitlines() or ["nothing"])[-1]
        return Result(Ending.BROKEN, error=f"the supervisor ended with exit code {code} and the message: {last}")
    texts = {
        name: base64.b64decode(fields.pop(name, "")).decode("utf-8", errors="replace") for name in ("stdout", "stderr")
    }
    if left := fields.pop("left", ""):
        logger.warning("a program's folder could not be removed: %s", left)
    return Result(Ending(fields.pop("ending")), **texts, **fields)
