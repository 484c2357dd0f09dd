"""Ray's workers as forks of a process that has imported the heavy libraries once.

Ray starts every worker as a new Python program, which imports torch and transformers before it does anything: four seconds of a core
a worker. Under :func:`forked_workers` it starts this file in place of Python (`py_executable` of its runtime environment); that asks
the server to fork, and lives as long as the fork, which is the worker: a process of its own, that can be killed like any other.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LARGEST = 2**18
"""Bytes of a request: words, environment and directory of a worker."""


@contextmanager
def forked_workers(folder: Path) -> Iterator[dict[str, str]]:
    """Serve forks; yields the environment variables under which `ray.init` makes its workers in this way."""
    from support.launch import context

    address = folder / "forks"
    server = context().Process(target=serve, args=(str(address),), daemon=True)
    server.start()
    executable = f"{sys.executable} -I -S {__file__} {address}"
    yield {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"py_executable": executable}})}
    server.kill()
    server.join()


def serve(address: str) -> None:
    """Fork once for each connection; the fork holds the connection as long as it lives."""
    import multiprocessing
    from multiprocessing.connection import wait

    assert "ray" not in sys.modules, (
        "it reads the environment when it is imported, so each worker has to do that itself"
    )
    signal.signal(signal.SIGCHLD, _reap)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        parent = multiprocessing.parent_process()
        assert parent is not None
        while listener in wait([listener, parent.sentinel]):  # until the tests are gone, however they ended
            connection, _ = listener.accept()
            with connection:
                data, descriptors, _, _ = socket.recv_fds(connection, LARGEST, 3)
                worker = os.fork()
                if worker == 0:
                    listener.close()
                    _become(descriptors, **json.loads(data))
                for descriptor in descriptors:
                    os.close(descriptor)
                connection.send(str(worker).encode())


def _reap(*_: Any) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _become(descriptors: list[int], words: list[str], environment: dict[str, str], directory: str) -> None:
    """Go on as the program that Ray asked for."""
    import runpy

    os.setpgid(0, 0)  # Ray ends the group of a worker with the worker, and this one was that of the tests
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = words
    code = 1
    try:
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ask(address: str, words: list[str]) -> None:
    """What Ray starts: ask for the fork, and end when it ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(address)
        request = {"words": words, "environment": dict(os.environ), "directory": str(Path.cwd())}
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        worker = int(connection.recv(64))
        signal.signal(signal.SIGTERM, lambda *_: os.kill(worker, signal.SIGTERM))
        connection.recv(1)


if __name__ == "__main__":
    _ask(sys.argv[1], sys.argv[2:])
