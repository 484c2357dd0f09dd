"""What each sandbox backend bounds, found by attacking it; the table in docs/rewards.md is made from the same attacks."""

from __future__ import annotations

import dataclasses
import os
import re
import resource
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.messages import raises
from support.sandboxes import EVERY, LIMITS, MISSING, WORKING

from hone.errors import ConfigError
from hone.rewards.sandbox import Ending
from hone.rewards.sandbox.backends import PROTECTIONS, Backend, execute
from hone.rewards.sandbox.runner import choose
from hone.rewards.sandbox.system_calls import SIGNALS, landlock_version, system_call_filter

pytestmark = pytest.mark.application("hone/rewards/sandbox")


IN_MEMORY = """
import os
held = []
try:
    for number in range(20):
        file = os.memfd_create('x'); held.append(file)
        for _ in range(16): os.write(file, b'x' * (1 << 20))
except (OSError, AttributeError): pass
print(sum(os.fstat(file).st_size for file in held))
"""
USER_NAMESPACE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.unshare(0x10000000 | 0x20000))
print(libc.mount(b'none', b'/tmp', b'tmpfs', 0, b'size=2g'))
print(libc.syscall(56 if os.uname().machine == 'x86_64' else 220, 0x10000000 | 17, 0, 0, 0, 0))
written = 0
try:
    for number in range(400):
        with open(f'/tmp/{number}', 'wb') as file: written += file.write(b'x' * (4 << 20))
except OSError: pass
print(written)
"""
QUEUES = """
import ctypes
libc = ctypes.CDLL(None)
print([libc.shmget(0, 300 << 20, 0o1600), libc.msgget(0, 0o1600), libc.semget(0, 10, 0o1600)])
"""


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("code", [IN_MEMORY, USER_NAMESPACE, QUEUES], ids=["memfd", "namespace", "queues"])  # fmt: skip
def test_memory_of_every_kind_is_bounded(name: str, code: str) -> None:
    assert "memory" not in WORKING[name].unprotected, "this kernel has neither seccomp nor Landlock"
    result = execute(WORKING[name], code, "", {}, LIMITS)
    if code is QUEUES:
        assert result.stdout.split() == ["[-1,", "-1,", "-1]"]
    elif code is IN_MEMORY:
        assert int(result.stdout) <= LIMITS.memory_mb << 20
    else:
        *refused, written = map(int, result.stdout.split())
        assert refused == [-1, -1, -1] and written <= LIMITS.disk_mb << 20


WHERE = "import os\nprint(os.getcwd(), flush=True)\n"
FOLDERS = "import os\nn = 0\nwhile True:\n  os.mkdir(f'd{n}'); n += 1"
DEEP = "import os\nwhile True:\n  os.mkdir('d'); os.chdir('d')"
FILES = "n = 0\nwhile True:\n  open(f'f{n}', 'w').close(); n += 1"
MANY = "n = 0\nwhile True:\n  open(f'f{n}', 'wb').write(b'x' * (4 << 20)); n += 1"
UNNAMED = "import os\nheld = []\nwhile True:\n  f = open('f', 'wb'); f.write(b'x' * (4 << 20)); f.flush(); os.unlink('f'); held.append(f)"
CLOSED = "import os\nos.mkdir('d')\nfor n in range(50): open(f'd/{n}', 'w').close()\nos.chmod('d', 0)"


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("code", [FOLDERS, DEEP, FILES, MANY, UNNAMED, CLOSED], ids=["folders", "deep", "files", "large", "unnamed", "closed"])  # fmt: skip
def test_what_is_written_is_bounded_and_removed(name: str, code: str) -> None:
    result = execute(WORKING[name], WHERE + code, "", {}, LIMITS)
    assert result.ending is Ending.DISK or result.exit_code is not None, result  # a limit, or the file system refused
    assert name == "bubblewrap" or not Path(result.stdout.strip()).exists()
    if code is not CLOSED:
        assert (result.ending, result.exit_code) != (Ending.FINISHED, 0)


@pytest.mark.parametrize("name", EVERY)
def test_nothing_is_written_elsewhere(name: str) -> None:
    files = [f"{place}/hone-attack-{secrets.token_hex(8)}" for place in ("/tmp", "/dev/shm", "/var/tmp")]
    code = f"for file in {files}:\n  try: open(file, 'w').write('x')\n  except OSError as error: pass"
    assert execute(WORKING[name], code, "", {}, LIMITS).succeeded
    assert not [file for file in files if Path(file).exists()]


@pytest.mark.parametrize("name", EVERY)
def test_no_server_of_the_machine_is_reached(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)"
        assert execute(WORKING[name], code, "", {}, LIMITS).exit_code == 1
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()
    pair = "import socket, asyncio\na, b = socket.socketpair(); a.send(b'x'); print(b.recv(1)); print(asyncio.run(asyncio.sleep(0, 3)))"
    assert execute(WORKING[name], pair, "", {}, LIMITS).stdout.split() == ["b'x'", "3"]


@pytest.mark.parametrize("name", EVERY)
def test_files_and_processes_of_the_trainer_are_out_of_reach(name: str, tmp_path: Path) -> None:
    private = tmp_path / "private.txt"
    private.write_text("secret of the trainer")
    private.chmod(0o644)
    tmp_path.chmod(0o755)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"S": "secret of a process"})
    try:
        code = f"""
import os, signal
for path in ({str(private)!r}, '/proc/{child.pid}/environ', '/proc/{child.pid}/fd/0', '/etc/passwd'):
    try: print(open(path).read())
    except OSError: pass
try: os.kill({child.pid}, signal.SIGKILL); print('killed')
except OSError: pass
"""
        result = execute(WORKING[name], code, "", {}, LIMITS)
        assert result.succeeded, result
        assert "processes" in WORKING[name].unprotected or (result.stdout == "" and child.poll() is None)
        assert "secret of the trainer" not in result.stdout and "root:" not in result.stdout
    finally:
        child.kill()
        child.communicate()


OTHERS = """
import ctypes, os, struct
libc, x86 = ctypes.CDLL(None), os.uname().machine == 'x86_64'
def call(numbers, *arguments): return libc.syscall(numbers[not x86], *arguments)
limits, mask, lowest = (ctypes.c_uint64 * 2)(2**20, 2**20), ctypes.c_uint64(1), ctypes.c_int(0)
print(call((302, 261), PID, 7, limits, None), call((203, 122), PID, 8, ctypes.byref(mask)), libc.setpriority(0, PID, 19),
      call((144, 119), PID, 3, ctypes.byref(lowest)), call((251, 30), 1, PID, 3 << 13), libc.setpriority(2, os.getuid(), 0))
name = os.uname().nodename.encode()
print(libc.sethostname(name, len(name)), libc.acct(None), libc.chroot(b'/'), call((227, 112), 0, ctypes.byref((ctypes.c_long * 2)(-1, -1))))
print(*{line.split()[1].strip('0') or '0' for line in open('/proc/self/status') if line.startswith(('CapE', 'CapP', 'CapA'))})
"""
OWN = """
import os, resource, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32)); os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); os.nice(1); os.mkfifo('f')
thread = threading.Thread(target=print, args=(1,)); thread.start(); thread.join()
if (child := os.fork()) == 0: os._exit(0)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("name", EVERY)
def test_other_processes_and_the_machine_are_not_changed(name: str) -> None:
    """Limits, processors and priorities of a process of the trainer; name and accounting of the machine, set to what they are."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        before = [resource.prlimit(child.pid, resource.RLIMIT_NOFILE), os.sched_getaffinity(child.pid)]
        result = execute(WORKING[name], OTHERS.replace("PID", str(child.pid)), "", {}, LIMITS)
        assert before == [resource.prlimit(child.pid, resource.RLIMIT_NOFILE), os.sched_getaffinity(child.pid)]
        assert (os.sched_getscheduler(child.pid), os.getpriority(os.PRIO_PROCESS, child.pid)) == (
            0,
            os.getpriority(0, 0),
        )
    calls, capabilities = result.stdout.split()[:10], result.stdout.split()[10:]
    assert calls == ["-1"] * 10, result
    assert capabilities == ["0"], result
    assert execute(WORKING[name], OWN, "", {}, LIMITS).stdout.split() == ["1", "0"]


def test_without_filter_or_landlock_a_backend_says_what_it_lacks() -> None:
    full = Backend("process", "python", True, SIGNALS)
    assert full.unprotected == ()
    assert dataclasses.replace(full, landlock=SIGNALS - 1).unprotected == ("processes",)
    assert dataclasses.replace(full, landlock=0).unprotected == ("files", "processes", "memory", "disk")
    assert dataclasses.replace(full, filtered=False).unprotected == ("network", "memory")
    assert dataclasses.replace(full, filtered=False, landlock=0).unprotected == tuple(PROTECTIONS)
    assert Backend("bubblewrap", "python").unprotected == ()
    assert Backend("bubblewrap", "python", False).unprotected == ("memory",)
    assert Backend("user", "python", False, 0).unprotected == ("network", "files", "memory", "disk")


@pytest.mark.parametrize("weak", [{"filtered": False}, {"landlock": 0}], ids=["no filter", "no Landlock"])
def test_what_is_required_and_lacking_is_refused(weak: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    backend = dataclasses.replace(WORKING["process"], **weak)  # type: ignore[arg-type]
    assert execute(backend, "print(1)", "", {}, LIMITS).stdout == "1\n"
    monkeypatch.setattr("hone.rewards.sandbox.runner.available", lambda: ({"process": backend}, {}))
    assert choose("process", [name for name in PROTECTIONS if name not in backend.unprotected]) is backend
    with raises(ConfigError, "process", "memory", where="reward.sandbox.require"):
        choose("process", ["memory"])


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_fits_the_kernel(machine: str) -> None:
    program = system_call_filter(sockets=False, machine=machine)
    assert program is not None and len(program) % 8 == 0 and len(program) // 8 < 4096
    assert system_call_filter(sockets=False, machine="sparc") is None


@pytest.mark.slow
@pytest.mark.skipif("bubblewrap" not in WORKING, reason=f"no bubblewrap: {MISSING.get('bubblewrap')}")
def test_an_environment_below_tmp_works_with_bubblewrap(tmp_path: Path) -> None:
    environment = Path("/tmp") / f"hone-environment-{os.getpid()}"
    try:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
        program = (
            "import sys; sys.path[:0] = " + repr([str(Path(__file__).parents[3]), *sys.path]) + "\n"
            "from hone.rewards.sandbox import Sandbox\n"
            "print(sys.prefix, Sandbox(backend='bubblewrap').run_sync('import sys; print(sys.prefix)').stdout)"
        )
        python = environment / "bin" / "python"
        run = subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True)
        assert run.stdout.split() == [str(environment)] * 2
    finally:
        shutil.rmtree(environment, ignore_errors=True)


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, list[str]]]:
    page = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()
    rows = re.findall(r"^\| `(bubblewrap|user|process)` \| (.*) \|$", page, re.MULTILINE)
    yield {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}


@pytest.mark.parametrize("name", EVERY)
def test_the_table_of_the_docs_is_what_runs(name: str, table: dict[str, list[str]]) -> None:
    yes = [cell.startswith("yes") for cell in table[name][: len(PROTECTIONS)]]
    if WORKING[name].filtered and (name == "bubblewrap" or landlock_version() >= SIGNALS):
        assert yes == [protection not in WORKING[name].unprotected for protection in PROTECTIONS]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a program another user")
@pytest.mark.parametrize("name", EVERY)
def test_a_program_of_root_has_neither_its_user_nor_its_groups(name: str) -> None:
    result = execute(
        WORKING[name], "import os; print(*os.getresuid(), *os.getresgid(), *os.getgroups())", "", {}, LIMITS
    )
    user, *others = map(int, result.stdout.split())
    assert (user > 0) == (name != "process") and others == ([user] * 5 if user else [0] * 5 + os.getgroups())
