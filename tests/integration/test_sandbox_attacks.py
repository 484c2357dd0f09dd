"""Programs that attack the machine they run on: none harms it, and each leaves no process behind."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.patience import SOON

from hone.rewards.sandbox import Ending, Limits, Result, Sandbox
from hone.rewards.sandbox.backends import execute
from hone.rewards.sandbox.runner import available

pytestmark = pytest.mark.application("hone/rewards/sandbox")

WORKING, MISSING = available()
LIMITS = Limits(seconds=SOON, memory_mb=256, processes=16, output_bytes=100_000, disk_mb=8)


def backend(name: str) -> object:
    skip = pytest.mark.skipif(name not in WORKING, reason=f"no {name} here: {MISSING.get(name, 'not for this user')}")
    return pytest.param(name, marks=skip, id=name)


EVERY = [backend("bubblewrap"), backend("user"), backend("process")]
OTHER_USER = [backend("bubblewrap"), backend("user")]


@pytest.fixture
def attack(request: pytest.FixtureRequest) -> Iterator[object]:
    """Runs a program; afterwards nothing that carries its mark is alive."""
    mark = f"mark{secrets.token_hex(8)}"

    def run(name: str, code: str, *, limits: Limits = LIMITS) -> Result:
        return execute(WORKING[name], code.replace("MARK", mark), "", {}, limits)

    def alive() -> list[int]:
        processes = psutil.process_iter(["cmdline"])
        return [process.pid for process in processes if mark in " ".join(process.info["cmdline"] or [])]

    yield run
    deadline = time.monotonic() + SOON
    while alive() and time.monotonic() < deadline:  # what is killed may take a moment
        time.sleep(0.05)
    assert not alive()


SLEEPER = "import subprocess, sys; START = lambda: subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600) # MARK'])\n"


@pytest.mark.parametrize("name", EVERY)
def test_processes_are_limited_in_number(name: str, attack) -> None:
    code = (
        SLEEPER
        + "made = 0\ntry:\n  while made < 200: START(); made += 1\nexcept OSError as error: print(made, error.errno)"
    )
    result = attack(name, code, limits=Limits(seconds=SOON, processes=16, memory_mb=1024))
    if name == "process" and os.geteuid() == 0:
        assert result.ending is Ending.PROCESSES  # the kernel sets root no such limit
    else:
        made, errno = map(int, result.stdout.split())
        assert made < 16 and errno == 11


@pytest.mark.parametrize("name", OTHER_USER)
def test_a_fork_bomb_fizzles(name: str, attack) -> None:
    named = "import os, sys\nif sys.argv[1:] == []: os.execv(sys.executable, [sys.executable, 'main.py', 'MARK'])\n"
    bomb = "while True:\n  try: os.fork()\n  except OSError: pass"
    result = attack(name, named + bomb, limits=Limits(2.0, processes=16))
    assert result.ending in (Ending.TIMEOUT, Ending.MEMORY)


@pytest.mark.parametrize("name", EVERY)
def test_memory_is_limited_alone_and_together(name: str, attack) -> None:
    result = attack(name, "x = bytearray(400 << 20)")
    assert result.exit_code == 1 and "MemoryError" in result.stderr
    children = "import os, time\nfor _ in range(4):\n  if os.fork() == 0: x = b'x' * (100 << 20); time.sleep(600)\ntime.sleep(600)"
    assert attack(name, children, limits=Limits(seconds=SOON, memory_mb=256)).ending is Ending.MEMORY


@pytest.mark.parametrize("name", EVERY)
def test_endless_output_is_cut(name: str, attack) -> None:
    for stream in (1, 2):
        result = attack(name, f"import os\nwhile True: os.write({stream}, b'x' * 65536)")
        assert result.ending is Ending.OUTPUT and len(result.stdout) + len(result.stderr) <= 2 * LIMITS.output_bytes


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    "code", ["while True: pass", "import time; time.sleep(600)", "import signal, time\nfor s in (15, 2, 24): signal.signal(s, lambda *a: None)\nwhile True: pass"]
)  # fmt: skip
def test_time_is_limited(name: str, code: str, attack) -> None:
    result = attack(name, code, limits=Limits(seconds=0.7))
    assert result.ending is Ending.TIMEOUT and result.seconds > 0.6


@pytest.mark.parametrize("name", EVERY)
def test_background_processes_end_with_the_program(name: str, attack) -> None:
    double_fork = (
        "import os, subprocess, sys, time\n"
        "if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n"
        "    os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600) # MARK'])\n  os._exit(0)\n"
        "time.sleep(0.3); print('done')"
    )
    result = attack(name, double_fork)
    assert result.ending is Ending.FINISHED and result.stdout == "done\n"


@pytest.mark.parametrize("name", OTHER_USER)
def test_environment_and_files_of_the_trainer_cannot_be_read(name: str, attack, tmp_path: Path, monkeypatch) -> None:
    secret = secrets.token_hex(8)
    monkeypatch.setenv("HONE_TEST_SECRET", secret)
    private = tmp_path / "private.txt"
    private.write_text(secret)
    private.chmod(0o600)
    pids = [os.getpid(), os.getppid(), 1]
    code = f"""
import os
print(dict(os.environ))
for path in ({str(private)!r}, '/etc/shadow', *(f'/proc/{{p}}/{{f}}' for p in ({pids}) for f in ('environ', 'mem', 'fd/0'))):
    try: print(path, open(path, 'rb').read(100000))
    except OSError as error: print(type(error).__name__)
os.symlink({str(private)!r}, 'link')
try: print(open('link').read())
except OSError as error: print(type(error).__name__)
"""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"S": secret})
    try:
        result = attack(name, code.replace(f"{pids}", f"{[*pids, child.pid]}"))
    finally:
        child.communicate(b"\n")
    assert result.exit_code == 0, result.stderr
    assert secret not in result.stdout and "root:" not in result.stdout
    assert result.stdout.count("Error") >= 3


@pytest.mark.parametrize("name", EVERY)
def test_the_environment_is_clean(name: str, attack, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    result = attack(name, "import os; print(sorted(os.environ)); print(open('/proc/self/environ').read())")
    assert "OPENAI_API_KEY" not in result.stdout and "sk-secret" not in result.stdout
    if name == "bubblewrap":  # whatever process it can see has nothing to tell either
        found = attack(
            name,
            "import glob\nfor f in glob.glob('/proc/[0-9]*/environ'):\n  try: print(open(f).read())\n  except OSError: pass",
        )
        assert "sk-secret" not in found.stdout


@pytest.mark.parametrize("name", OTHER_USER)
def test_the_trainer_cannot_be_signalled(name: str, attack) -> None:
    received = threading.Event()

    before = signal.signal(signal.SIGUSR1, lambda *_: received.set())
    try:
        code = f"""
import os, signal
for pid in ({os.getpid()}, os.getppid(), -1, 1):
    try: os.kill(pid, signal.SIGUSR1); print(pid, 'sent')
    except OSError as error: print(pid, error)
"""
        result = attack(name, f"import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n{code}")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not received.is_set() and result.ending is Ending.FINISHED and f"{os.getpid()} sent" not in result.stdout


@pytest.mark.parametrize("name", [backend("bubblewrap")])
def test_the_system_is_read_only_and_what_is_written_is_limited(name: str, attack, tmp_path: Path) -> None:
    code = f"""
import os, sys

for path in ('/x', '/usr/x', '/etc/x', '/dev/x', '/root/x', '/home/x', {str(tmp_path / "x")!r}, sys.prefix + '/x', '/proc/sys/kernel/core_pattern'):
    try: open(path, 'w').write('x'); print('wrote', path)
    except OSError: pass
for folder in ('/tmp', '/dev/shm'):
    size = 0
    try:
        for n in range(40):
            with open(f'{{folder}}/f{{n}}', 'wb') as file: size += file.write(b'x' * (1 << 20))
    except OSError: print(size >> 20)
"""
    result = attack(name, code)
    assert result.exit_code == 0 and "wrote" not in result.stdout, result
    assert all(int(size) <= 8 for size in result.stdout.split()) and len(result.stdout.split()) == 2


@pytest.mark.parametrize("name", EVERY)
def test_one_file_is_limited(name: str, attack) -> None:
    where = "import os\nprint(os.getcwd(), flush=True)\n"
    result = attack(name, where + "with open('big', 'wb') as f:\n  for _ in range(64): f.write(b'x' * (1 << 20))")
    assert not result.succeeded and (name == "bubblewrap" or not Path(result.stdout.strip()).exists())


@pytest.mark.parametrize("name", OTHER_USER)
def test_a_program_that_attacks_its_supervisor_is_an_error_of_its_own(name: str, attack) -> None:
    result = attack(
        name,
        "import os, signal\nfor pid in (os.getppid(), 1):\n  try: os.kill(pid, signal.SIGKILL)\n  except OSError: pass\nprint('alive')",
    )
    assert result.ending is Ending.FINISHED and result.stdout == "alive\n"


def test_the_program_ends_with_the_trainer(tmp_path: Path) -> None:
    program = (
        "import sys; from hone.rewards.sandbox import Sandbox, Limits; box = Sandbox(backend='process'); print('ready', flush=True)\n"
        "box.run_sync('import time; time.sleep(600)', limits=Limits(seconds=600))"
    )
    trainer = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None and trainer.stdout.readline() == "ready\n"
    me, found = psutil.Process(trainer.pid), []
    while not found and trainer.poll() is None:
        time.sleep(0.05)
        found = [p for p in me.children(recursive=True) if p.cmdline()[-1:] == ["main.py"]]
    trainer.kill()
    trainer.communicate()
    found[0].wait(timeout=SOON)


@pytest.mark.slow
def test_dozens_of_programs_run_with_bounded_concurrency(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, running, most = threading.Lock(), 0, 0

    def counted(*program):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        try:
            return execute(*program)
        finally:
            with lock:
                running -= 1

    async def all_of_them():
        return await asyncio.gather(*(sandbox.run("print(int(input()) ** 2)", stdin=str(n)) for n in range(40)))

    monkeypatch.setattr("hone.rewards.sandbox.runner.execute", counted)
    sandbox = Sandbox(max_concurrent=4, limits=Limits(seconds=SOON))
    results = asyncio.run(all_of_them())
    sandbox.close()
    assert [int(result.stdout) for result in results] == [n * n for n in range(40)]
    assert most == 4


def test_a_broken_supervisor_is_a_broken_result_and_paths_stay_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = next(iter(WORKING.values()))
    for path in ("/etc/x", "../x", "a/../../x", "main.py", ""):
        with pytest.raises(ValueError, match="path"):
            execute(chosen, "", "", {path: "x"}, LIMITS)
    monkeypatch.setattr("hone.rewards.sandbox.backends._SUPERVISOR", Path("/nowhere.py"))
    result = execute(chosen, "print(1)", "", {}, LIMITS)
    assert result.ending is Ending.BROKEN and "nowhere.py" in result.error and not result.succeeded
