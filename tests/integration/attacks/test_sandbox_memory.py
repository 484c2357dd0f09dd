"""Memory that is in no process's resident set, and files that no process lists: a program in the sandbox holds no more of it than its limit.

Each attack holds what it can, prints how many MiB that was, and waits. That is within the limit, or the supervisor ends it.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.patience import SOON
from support.sandboxes import EVERY, LIMITS, WORKING

from hone.rewards.sandbox import Ending
from hone.rewards.sandbox.backends import execute

pytestmark = pytest.mark.application("hone/rewards/sandbox")

TOOLS = """
import ctypes, fcntl, mmap, os, select, socket, sys, threading, time
libc, x86 = ctypes.CDLL(None, use_errno=True), os.uname().machine == 'x86_64'
def call(numbers, *arguments): return libc.syscall(numbers[not x86], *arguments)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
for name in ('munmap', 'madvise', 'mprotect'): getattr(libc, name).argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int][:3 - (name == 'munmap')]
PAGE, MB = 4096, 1 << 20
def area(size, flags, file=-1):
    at = libc.mmap(None, size, 3, flags, file, 0)
    if at == 2**64 - 1: raise OSError(ctypes.get_errno(), 'mmap')
    return at
def fill(*ends):
    held = 0
    for end in ends:
        end.setblocking(False)
        try:
            while True: held += end.send(bytes(200_000))
        except BlockingIOError: pass
    return held
def pairs(most, kind=socket.SOCK_STREAM, prepare=lambda end: None):
    held, ends = 0, []
    try:
        while len(ends) < most:
            pair = socket.socketpair(socket.AF_UNIX, kind)
            ends += pair
            for end in pair: prepare(end)
            held += fill(*pair)
    except OSError: pass
    return held, ends
def children(work, number=12):
    for _ in range(number):
        if os.fork() == 0:
            work()
            os._exit(0)
    for _ in range(number): os.wait()
def hold(held):
    print(held >> 20, flush=True)
    if held: time.sleep(5)
"""
UNMAPPED = """
def remains(flags, file=-1):
    held = 0
    try:
        for _ in range(40):
            at = area(16 * MB, flags, file)
            ctypes.memset(at, 1, 16 * MB); libc.munmap(at + PAGE, 16 * MB - PAGE)
            held += 16 * MB
    except OSError: pass
    hold(held)
"""
ATTACKS = {
    "a page remains of shared mappings": UNMAPPED + "remains(0x21)",
    "a page remains of mappings of zeros": UNMAPPED
    + "try: remains(1, os.open('/dev/zero', os.O_RDWR))\nexcept OSError: hold(0)",
    "pages of shared mappings are not needed": """
def work():
    try: at = area(150 * MB, 0x21)
    except OSError: return hold(0)
    for step in range(150): ctypes.memset(at + step * MB, 1, MB); libc.madvise(at + step * MB, MB, 4)
    hold(150 * MB)
children(work)""",
    "buffers of sockets": "children(lambda: hold(pairs(500)[0]))",
    "buffers of sockets with messages": "children(lambda: hold(pairs(500, socket.SOCK_SEQPACKET)[0]))",
    "large buffers of sockets": "held = pairs(50, prepare=lambda end: end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * MB))\nhold(held[0])",
    "sockets that waiting threads have": """
def work(ends):
    poll = select.poll()
    for end in ends: poll.register(end.fileno(), 0)
    poll.poll()
held = 0
threading.stack_size(1 << 18)
for _ in range(12):
    more, ends = pairs(200)
    threading.Thread(target=work, args=(ends,)).start(); time.sleep(0.1)
    for end in ends: end.close()
    held += more
hold(held)""",
    "sockets of threads with files of their own": """
def work():
    call((436, 436), ctypes.c_uint(1000), ctypes.c_uint(1000), ctypes.c_uint(2))
    hold(pairs(500)[0])
threading.stack_size(1 << 18)
for _ in range(12): threading.Thread(target=work).start()""",
    "sockets that nobody accepts": """
held = 0
for family, address in ((socket.AF_UNIX, chr(0) + 'x'), (socket.AF_INET, ('127.0.0.1', 7777))):
    try:
        server = socket.socket(family); server.bind(address); server.listen(4096)
        for _ in range(1500):
            with socket.socket(family) as client: client.connect(address); held += fill(client)
    except OSError: pass
hold(held)""",
    "datagrams of senders that are gone": """
held, kept = 0, []
try:
    for number in range(150):
        receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); receiver.bind(chr(0) + str(number)); kept.append(receiver)
        for _ in range(10):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender: held += sender.sendto(bytes(200_000), chr(0) + str(number))
except OSError: pass
hold(held)""",
    "sockets in messages": """
a, b = socket.socketpair()
held = 0
try:
    for _ in range(16):
        more, ends = pairs(100)
        socket.send_fds(a, [b'x'], [end.fileno() for end in ends])
        for end in ends: end.close()
        held += more
except OSError: pass
hold(held)""",
    "pages that pipes refer to": """
class Part(ctypes.Structure): _fields_ = [('at', ctypes.c_void_p), ('size', ctypes.c_size_t)]
held, kept = 0, []
try:
    while held < 600 * MB:
        kept.append(os.pipe())
        for _ in range(16):
            at = area(4 * MB, 0x22); huge = (at + 2 * MB - 1) // (2 * MB) * (2 * MB)
            libc.madvise(huge, 2 * MB, 14); ctypes.memset(huge, 1, 8)
            part = Part(huge, 1)
            if libc.vmsplice(kept[-1][1], ctypes.byref(part), ctypes.c_size_t(1), 0) < 0: raise OSError
            libc.munmap(at, 4 * MB); held += 2 * MB
except OSError: pass
hold(held)""",
    "pages of files that sockets and pipes refer to": """
held, kept = 0, []
try:
    while held < 600 * MB:
        kept.append(socket.socketpair()); kept[-1][0].setblocking(False)
        file = os.open('big', os.O_RDWR | os.O_CREAT); os.write(file, bytes(8 * MB))
        try:
            for step in range(128): os.sendfile(kept[-1][0].fileno(), file, step * 65536, 1)
        except BlockingIOError: pass
        os.ftruncate(file, 0); os.close(file); held += 8 * MB
except OSError: pass
hold(held)""",
    "large pipes": """
held, kept = 0, []
try:
    while held < 600 * MB:
        kept.append(os.pipe()); os.set_blocking(kept[-1][1], False)
        fcntl.fcntl(kept[-1][1], 1031, MB); held += os.write(kept[-1][1], bytes(MB))
except OSError: pass
hold(held * 16)  # the kernel's own bound is 64 MiB for a user""",
    "a process whose first thread has ended": """
def work():
    def late():
        time.sleep(0.3); kept = [bytearray(b'x' * MB) for _ in range(150)]; hold(150 * MB)
    threading.Thread(target=late).start(); call((60, 93), 0)
children(work, 6)""",
    "many mappings": """
def work():
    at, size = area(28_000 * 2 * PAGE, 0x4022), 0
    for number in range(28_000): libc.mprotect(at + number * 2 * PAGE, PAGE, 1)
    hold(28_000 * 2 * 400)
children(work, 14)""",
    "rules, watches and filters": """
held = 0
for numbers, arguments in (((444, 444), ((ctypes.c_uint64 * 3)(0, 3, 0), ctypes.c_size_t(16), 0)), ((294, 26), (0,)), ((206, 0), (65536, (ctypes.c_long * 1)()))):
    held += 300 * MB * (call(numbers, *arguments) >= 0)
libc.prctl(38, 1, 0, 0, 0)
steps = (ctypes.c_uint64 * 1)(0x7FFF000000000006)
program = (ctypes.c_uint64 * 2)(1, ctypes.addressof(steps))
held += 300 * MB * (call((317, 277), 1, 8, program) >= 0)
hold(held)""",
}  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("attack", ATTACKS)
def test_memory_outside_of_processes_is_bounded(name: str, attack: str) -> None:
    result = execute(WORKING[name], TOOLS + ATTACKS[attack], "", {}, LIMITS)
    assert result.ending is Ending.MEMORY or sum(map(int, result.stdout.split())) <= LIMITS.memory_mb, result


MAPPED = """
for number in range(40):
    file = os.open('big', os.O_RDWR | os.O_CREAT); os.write(file, bytes(8 * MB)); os.unlink('big')
    area(PAGE, 1, file); os.close(file)
hold(320 * MB)"""


@pytest.mark.parametrize("name", EVERY)
def test_mapped_files_without_a_name_are_written_files(name: str) -> None:
    result = execute(WORKING[name], TOOLS + MAPPED, "", {}, LIMITS)
    assert result.ending is Ending.DISK or result.exit_code == 1, result  # bubblewrap's file system is full


HIDING = """
import shutil
print(libc.prctl(4, 0, 0, 0, 0), flush=True)
shutil.copy('/bin/sleep', 'mine'); os.chmod('mine', 0o111)
os.execv('./mine', ['mine', '600'])"""
UNREAPED = """
if os.fork() == 0: os._exit(0)
time.sleep(2); print('fine')"""
UNTRACED = """
import sys
sys.path[:0] = {path}
from hone.rewards.sandbox.runner import available
from hone.rewards.sandbox.backends import execute
from hone.rewards.sandbox.limits import Limits
for name, backend in available()[0].items():
    if name != "bubblewrap":
        for code in {codes}:
            result = execute(backend, code, "", {{}}, Limits(seconds={seconds}))
            print(name, result.ending.value, result.stdout.strip())
"""


def test_a_program_that_hides_its_files_is_ended_and_an_ended_process_hides_nothing() -> None:
    """As in a container, where root may not look at the processes of every other user."""
    path = [str(Path(__file__).parents[3]), *sys.path]
    code = UNTRACED.format(path=path, codes=[TOOLS + HIDING, TOOLS + UNREAPED], seconds=SOON)
    weaker = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"] if os.geteuid() == 0 else []
    run = subprocess.run([*weaker, sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = [name for name in WORKING if name != "bubblewrap"]
    assert run.stdout.split("\n")[:-1] == [f"{name} {end}" for name in names for end in ("memory -1", "finished fine")]


@pytest.mark.parametrize("name", EVERY)
def test_threads_are_limited_in_number(name: str) -> None:
    code = """
import _thread
threading.stack_size(65536)
made = 0
try:
    while made < 600: _thread.start_new_thread(time.sleep, (600,)); made += 1
    time.sleep(600)
except RuntimeError: pass
print(made)"""
    result = execute(WORKING[name], TOOLS + code, "", {}, LIMITS)
    assert result.ending is Ending.PROCESSES or int(result.stdout) < LIMITS.processes, result


@pytest.mark.parametrize("name", [name for name in WORKING if WORKING[name].cgroup] or [pytest.param("", marks=pytest.mark.skip(reason="no cgroup (version 2) that this user may divide"))])  # fmt: skip
def test_a_cgroup_bounds_what_nothing_else_does(name: str) -> None:
    """With the filter and Landlock off, shared mappings and forks are bounded by the kernel."""
    backend = dataclasses.replace(WORKING[name], filtered=False, landlock=0)
    result = execute(backend, TOOLS + ATTACKS["a page remains of shared mappings"], "", {}, LIMITS)
    assert result.ending is Ending.MEMORY, result
    assert not list(Path(backend.cgroup).glob("hone-sandbox-*"))
