"""What each sandbox bounds, tried and measured; run as a program, this file prints the table of docs/rewards.md.

Each program prints how much it got, more and more; what it printed last is the figure.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[2])]
from support.patience import SOON
from support.sandboxes import EVERY, WORKING

from hone.rewards.sandbox import Ending, Limits
from hone.rewards.sandbox.backends import execute

pytestmark = pytest.mark.application("hone/rewards/sandbox")

NAMES = ("bubblewrap", "user", "process")
PAGE = Path(__file__).parents[3] / "docs" / "rewards.md"


@dataclass(frozen=True)
class Bound:
    """A resource, a program that takes all it can of it, and what it may get.

    Attributes:
        code: the program; it prints figures.
        limit: of the figure, if the program is not ended with ``ending``.
        unit: of the figure.
        ending: that of a program that wants more.
        limits: of the program.
    """

    code: str
    limit: float
    unit: str
    ending: Ending
    limits: Limits = Limits(seconds=SOON, memory_mb=256, processes=16, disk_mb=16, files=2000)


CALLS = """
import ctypes, os, signal, socket
libc, x86, done = ctypes.CDLL(None), os.uname().machine == 'x86_64', 0
def call(numbers, *arguments): return libc.syscall(numbers[not x86], *arguments)
def attempt(action):
    global done
    try: done += action() != -1
    except OSError: pass
def send(kind, family, address, text=b'x'):
    with socket.socket(family, kind) as client: client.settimeout(5); client.connect(address); client.send(text)
"""
BOUNDS = {
    "memory of one process": Bound(
        "held = []\nwhile True: held.append(bytearray(b'x' * (8 << 20))); print(8 * len(held), flush=True)",
        *(256, "MiB", Ending.MEMORY),
    ),
    "memory of its processes": Bound(
        "import os, time\n"
        "for number in range(1, 11):\n"
        "    if os.fork() == 0: held = b'x' * (64 << 20); time.sleep(600)\n"
        "    time.sleep(0.2); print(64 * number, flush=True)\ntime.sleep(600)",
        *(256, "MiB", Ending.MEMORY),
    ),
    "memory of no process: shared mappings": Bound(
        "import mmap\nheld = []\n"
        "while len(held) < 40:\n"
        "    try: held.append(mmap.mmap(-1, 16 << 20))\n    except OSError: break\n"
        "    held[-1].write(b'x' * (16 << 20)); held[-1].madvise(mmap.MADV_DONTNEED); print(16 * len(held), flush=True)\n"
        "print(16 * len(held))",
        *(256, "MiB", Ending.MEMORY),
    ),
    "memory of the kernel: buffers of sockets": Bound(
        "import os, socket, time\nread, write = os.pipe()\ntotal = 0\n"
        "def fill():\n"
        "    held, ends = 0, []\n"
        "    try:\n"
        "        while True:\n"
        "            ends += socket.socketpair()\n"
        "            for end in ends[-2:]:\n"
        "                end.setblocking(False)\n"
        "                try:\n                    while True: held += end.send(bytes(200_000))\n"
        "                except BlockingIOError: pass\n"
        "    except OSError: os.write(write, held.to_bytes(8, 'little')); time.sleep(600)\n"
        "for _ in range(12):\n"
        "    if os.fork() == 0: fill()\n"
        "    total += int.from_bytes(os.read(read, 8), 'little'); print(total >> 20, flush=True)\n"
        "time.sleep(600)",
        *(256, "MiB", Ending.MEMORY),
    ),
    "processes and threads": Bound(
        "import os, time\nmade = 0\n"
        "try:\n    while made < 200:\n        if os.fork() == 0: time.sleep(600)\n        made += 1; print(made, flush=True)\n"
        "    time.sleep(600)\nexcept OSError: pass",
        *(16, "", Ending.PROCESSES),
    ),
    "files": Bound(
        "made = 0\nwhile True:\n    open(f'f{made}', 'w').close(); made += 1\n    if made % 100 == 0: print(made, flush=True)",
        *(2000, "", Ending.DISK),
    ),
    "disk": Bound(
        "made = 0\n"
        "try:\n    while made < 400: open(f'f{made}', 'wb').write(b'x' * (1 << 20)); made += 1; print(made, flush=True)\n"
        "except OSError: pass",
        *(16, "MiB", Ending.DISK),
    ),
    "time": Bound(
        "import time\nbegun = time.monotonic()\nwhile True: print(round(time.monotonic() - begun, 1), flush=True); time.sleep(0.1)",
        *(1, "s", Ending.TIMEOUT),
        Limits(seconds=1),
    ),
    "processor time of two processes": Bound(
        "import os, time\nos.fork()\nwhile True:\n    for _ in range(10**6): pass\n    print(round(time.process_time(), 1), flush=True)",
        *(1, "s", Ending.TIMEOUT),
        Limits(seconds=SOON, cpu_seconds=1),
    ),
    "network: servers reached of 4": Bound(
        CALLS + "attempt(lambda: send(socket.SOCK_STREAM, socket.AF_INET, ('127.0.0.1', PORT)))\n"
        "attempt(lambda: send(socket.SOCK_DGRAM, socket.AF_INET, ('127.0.0.1', PORT)))\n"
        "attempt(lambda: send(socket.SOCK_STREAM, socket.AF_UNIX, chr(0) + 'hone-PORT'))\n"
        "attempt(lambda: send(socket.SOCK_DGRAM, socket.AF_INET, ('192.0.2.1', 53)))\nprint(done)",
        *(0, "", Ending.FINISHED),
    ),
    "signals sent to the trainer of 5": Bound(
        CALLS + "attempt(lambda: os.kill(PID, signal.SIGURG))\n"
        "attempt(lambda: call((234, 131), PID, PID, signal.SIGURG))\n"
        "attempt(lambda: call((129, 138), PID, signal.SIGURG, bytes([23] + [0] * 7 + [255] * 4 + [0] * 116)))\n"
        "attempt(lambda: signal.pidfd_send_signal(os.pidfd_open(PID), signal.SIGURG))\n"
        "attempt(lambda: os.killpg(os.getpgid(PID), signal.SIGURG))\nprint(done)",
        *(0, "", Ending.FINISHED),
    ),
    "changes of other processes of 6": Bound(
        CALLS + "limits, mask, data = (ctypes.c_uint64 * 2)(2**20, 2**20), ctypes.c_uint64(1), (ctypes.c_uint64 * 2)()\n"
        "attempt(lambda: call((302, 261), PID, 7, limits, None))\n"
        "attempt(lambda: call((203, 122), PID, 8, ctypes.byref(mask)))\n"
        "attempt(lambda: libc.setpriority(0, PID, 19))\n"
        "attempt(lambda: call((101, 117), 16, PID, 0, 0))\n"
        "attempt(lambda: call((310, 270), PID, data, 1, data, 1, 0))\n"
        "attempt(lambda: len(open('/proc/PID/environ', 'rb').read() + open('/proc/PID/maps', 'rb').read()))\nprint(done)",
        *(0, "", Ending.FINISHED),
    ),
}  # fmt: skip


@contextmanager
def trainer():
    """A process of this user, with a server of this machine beside it; gives its id and the server's port."""
    with (
        subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX) as local,
    ):
        port = server.getsockname()[1]
        datagrams.bind(("127.0.0.1", port))
        local.bind(f"\0hone-{port}")
        local.listen()
        yield process.pid, port


def measured(name: str, bound: Bound) -> tuple[float | None, Ending]:
    """Return the last figure that a program printed, if any, and its ending."""
    with trainer() as (pid, port):
        code = bound.code.replace("PID", str(pid)).replace("PORT", str(port))
        result = execute(WORKING[name], code, "", {}, bound.limits)
    figures = result.stdout.split()
    return (float(figures[-1]) if figures else None), result.ending


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("resource", BOUNDS)
def test_each_sandbox_keeps_each_bound(name: str, resource: str) -> None:
    if resource.startswith("signals") and "processes" in WORKING[name].unprotected:
        pytest.skip("this kernel's Landlock leaves signals alone")
    bound = BOUNDS[resource]
    figure, ending = measured(name, bound)
    assert ending in (Ending.FINISHED, bound.ending)
    if ending is Ending.FINISHED:
        assert figure is not None and figure <= bound.limit


def test_the_docs_have_a_row_for_each_bound() -> None:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \| [^|]+ \| [^|]+ \|$", PAGE.read_text(), re.MULTILINE)
    assert [row for row in rows if row in BOUNDS] == list(BOUNDS)


HONEST = {
    "numpy": "import numpy as np\na = np.arange(250_000.0).reshape(500, 500) / 250_000\nprint((a @ np.eye(500) == a).all())",
    "threads": "import threading\ndone = []\n"
    "threads = [threading.Thread(target=lambda: done.append(sum(range(10**5)))) for _ in range(4)]\n"
    "for thread in threads: thread.start()\nfor thread in threads: thread.join()\nprint(len(done) == 4)",
    "asyncio and processes": "import asyncio, sys\nasync def main():\n"
    "    process = await asyncio.create_subprocess_exec(sys.executable, '-c', 'print(True)', stdout=-1)\n"
    "    print((await process.communicate())[0].decode().strip())\nasyncio.run(main())",
    "subprocess": "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'print(True)'], capture_output=True, text=True).stdout)",
    "pipes between processes": "import multiprocessing\ndef work(end): end.send(True)\nif __name__ == '__main__':\n"
    "    a, b = multiprocessing.Pipe(); process = multiprocessing.Process(target=work, args=(b,)); process.start(); print(a.recv()); process.join()",
    "files": "import shutil, sqlite3, tempfile, mmap\nopen('a', 'wb').write(b'x' * 10_000); shutil.copy('a', 'b')\n"
    "table = sqlite3.connect('t'); table.execute('create table t(x)'); table.execute('insert into t values(1)'); table.commit()\n"
    "file = tempfile.TemporaryFile(); file.truncate(10_000); area = mmap.mmap(file.fileno(), 10_000); area[0] = 1\n"
    "print(open('b', 'rb').read() == b'x' * 10_000)",
}
SEMAPHORES = {
    "pool": "import multiprocessing\ndef work(x): return x * x\nif __name__ == '__main__':\n"
    "    with multiprocessing.Pool(2) as pool: print(pool.map(work, range(5)) == [0, 1, 4, 9, 16])",
    "queue": "import multiprocessing\ndef work(queue): queue.put(bytes(100_000))\nif __name__ == '__main__':\n    queue = multiprocessing.Queue()\n"
    "    process = multiprocessing.Process(target=work, args=(queue,)); process.start(); print(len(queue.get()) == 100_000); process.join()",
    "shared memory": "from multiprocessing import shared_memory\nmine = shared_memory.SharedMemory(create=True, size=1 << 20); mine.buf[0] = 7\n"
    "same = shared_memory.SharedMemory(name=mine.name); print(same.buf[0] == 7); same.close(); mine.close(); mine.unlink()",
    "manager": "import multiprocessing\nif __name__ == '__main__':\n"
    "    with multiprocessing.Manager() as manager: shared = manager.dict(); shared[1] = True; print(shared[1])",
}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("program", [*HONEST, *SEMAPHORES])
def test_honest_programs_work(name: str, program: str) -> None:
    if program in SEMAPHORES and name != "bubblewrap":
        pytest.skip("semaphores need /dev/shm, which this sandbox shares with the machine")
    result = execute(WORKING[name], {**HONEST, **SEMAPHORES}[program], "", {}, Limits(seconds=SOON))
    if "No module named 'numpy'" in result.stderr:
        pytest.skip("the interpreter that other users may read has no numpy")
    assert result.stdout.split() == ["True"], result


def main() -> None:
    """Print the table."""
    print("| Resource | Limit | " + " | ".join(f"`{name}`" for name in NAMES) + " |\n|---|---|---|---|---|")  # noqa: T201
    for resource, bound in BOUNDS.items():
        cells = []
        for name in NAMES:
            figure, ending = measured(name, bound) if name in WORKING else (None, Ending.BROKEN)
            got = "" if figure is None else f"{figure:g} {bound.unit}".strip()
            cells.append(", ".join(filter(None, (got, "" if ending is Ending.FINISHED else f"ended: {ending.value}"))))
        print(f"| {resource} | {f'{bound.limit:g} {bound.unit}'.strip()} | {' | '.join(cells)} |")  # noqa: T201


if __name__ == "__main__":
    main()
