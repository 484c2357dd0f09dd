"""Python programs as forks of a process that has imported the heavy libraries once.

A new Python program imports torch and transformers before it does anything: four seconds of a core. Under :func:`forked_python` it
is this file that others start in place of Python: Ray for its workers (`py_executable` of the runtime environment), a shell for the
`python` and `hone` of :attr:`Forks.bin`. It asks the server to fork, and lives as long as the fork, which is the program: a process
of its own, that can be killed like any other.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

LARGEST = 2**18
"""Bytes of a request: words, environment and directory of a program."""
KILLED = 137
"""What a shell says of a program that ended without a word."""


@dataclass(frozen=True)
class Forks:
    """How to have a program forked.

    Attributes:
        bin: directory with a `python` and a `hone`; as programs of a PATH they are forks.
        ray_workers: environment variables under which `ray.init` makes its workers in this way.
    """

    bin: Path
    ray_workers: dict[str, str]


@contextmanager
def forked_python(folder: Path) -> Iterator[Forks]:
    """Serve forks, from an empty folder."""
    from support.launch import context

    address = folder / "forks"
    server = context().Process(target=serve, args=(str(address),), daemon=True)
    server.start()
    executable = f"{sys.executable} -I -S {__file__} {address}"
    (folder / "bin").mkdir()
    for name, words in (("python", ""), ("hone", "-m hone.cli.main ")):
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {executable} {words}"$@"\n')
        (folder / "bin" / name).chmod(0o755)
    job = {"runtime_env": {"py_executable": executable}}
    yield Forks(folder / "bin", {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)})
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
                program = os.fork()
                if program == 0:
                    listener.close()
                    _become(connection, descriptors, **json.loads(data))
                for descriptor in descriptors:
                    os.close(descriptor)
                connection.send(str(program).encode())


def _reap(*_: Any) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _become(
    connection: socket.socket, descriptors: list[int], words: list[str], environment: dict[str, str], directory: str
) -> NoReturn:
    """Go on as the program that was asked for, and tell how it ended."""
    import io

    os.setpgid(0, 0)  # Ray ends the group of a worker with the worker, and this one was that of the tests
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))  # the server's has seen the end of its own
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    code = 1
    try:
        code = _run(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001  as Python itself ends with it
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        with suppress(OSError):  # nobody is there any more
            connection.send(bytes([code & 255]))
        os._exit(code)


def _run(words: list[str]) -> int:
    """`python WORDS`, where the words are a file, or `-m` and a module, and what the program is told."""
    import importlib.util
    import runpy

    if words[0] == "-m":
        found = importlib.util.find_spec(words[1])
        assert found is not None and found.origin is not None, f"no module named {words[1]}"
        words = [found.origin, *words[2:]]
        sys.path.insert(0, str(Path.cwd()))
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    return 0


def _ask(address: str, words: list[str]) -> int:
    """What is started in place of Python: ask for the fork, and end when it ends, with its exit code."""
    if not words or words[0] in ("-", "-c"):
        os.execv(sys.executable, [sys.executable, *words])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(address)
        request = {"words": words, "environment": dict(os.environ), "directory": str(Path.cwd())}
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        program = int(connection.recv(64))
        signal.signal(signal.SIGTERM, lambda *_: os.kill(program, signal.SIGTERM))
        code = connection.recv(1)
        return code[0] if code else KILLED


if __name__ == "__main__":
    sys.exit(_ask(sys.argv[1], sys.argv[2:]))
