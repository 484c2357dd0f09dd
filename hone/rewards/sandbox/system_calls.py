"""Rules by which a program confines itself: a filter of system calls (seccomp), and rules of Landlock (Linux 5.13 and newer).

The supervisor, which imports nothing of the package, gets both as bytes, numbers and paths. The filter is a program of the kernel's packet
filter. It closes what no other limit covers: memory that belongs to no process (files in memory, shared mappings without a file, queues, pages
that pipes refer to, objects of the kernel without a limit), other processes and their memory, changes of the machine, and kernel
interfaces that no program for a reward needs. Sockets are those within the program, of a kind whose buffers the supervisor can count:
where a program has no network namespace of its own, pairs only. Numbers are in
``system_calls.txt``.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import socket
import struct
from pathlib import Path
from typing import Any

_CREATE_RULESET, _VERSION = 444, 1  # number of the system call, and its flag to ask for the version
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER, _TRUNCATE, _DEVICE_CONTROL = (1 << bit for bit in (0, 1, 2, 3, 14, 15))
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All rights to files by the first version that knows them."""
_TCP, _SCOPES = 0b11, 0b11  # bind and connect (version 4); abstract sockets and signals of others (version 6)
SIGNALS = 6  # first version that keeps signals from other processes
_READABLE = ("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/sys", "/proc/filesystems")
_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")


def landlock_version() -> int:
    """Return the version of the kernel's interface; 0 if there is none."""
    return max(0, ctypes.CDLL(None).syscall(_CREATE_RULESET, None, 0, _VERSION))


def rules(version: int, readable: list[str]) -> dict[str, Any]:
    """Return the rules for a program that reads some folders and writes only to its own.

    ``readable``: paths of files and folders that the program reads and executes. Returns ``handled``: restricted rights
    to files, to the network, and scopes; ``paths``: allowed rights by path; ``folder``: rights in the program's folder;
    ``file``: those rights that a file can have.
    """
    everything = max(rights for first, rights in _RIGHTS.items() if first <= version)
    reading = _EXECUTE | _READ_FILE | _READ_FOLDER
    paths = dict.fromkeys([*readable, *_READABLE], reading) | dict.fromkeys(_DEVICES, _READ_FILE | _WRITE_FILE)
    return {
        "handled": [everything, _TCP if version >= 4 else 0, _SCOPES if version >= SIGNALS else 0],
        "paths": paths,
        "folder": everything,
        "file": (_EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _DEVICE_CONTROL) & everything,
    }


_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ, ...
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in seccomp_data; the argument's lower half (little endian)
_X32 = 0x40000000  # first number of x86-64's second table

_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Architecture as the kernel's audit constant, and its place in the numbers of a call."""
_LINES = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
_TABLE = [line.split() for line in _LINES if not line.startswith("#")]
_CALLS = {name: (int(x86), int(arm)) for name, x86, arm, _ in _TABLE}
_REFUSED = [name for name, _, _, use in _TABLE if use == "refused"]
_IS, _NOT = range(2)
_ALL = 0xFFFFFFFF
_OWN = ((_IS, 0, _ALL, 0),)  # a process: the caller itself
_STREAMS = (_IS, 1, 2, 0)  # a datagram's receiver holds what senders left that are gone
_ARGUMENTS = {
    "prlimit64": _OWN,
    "sched_setaffinity": _OWN,
    "sched_setparam": _OWN,
    "sched_setscheduler": _OWN,
    "sched_setattr": _OWN,
    "get_robust_list": _OWN,
    "setpriority": (*_OWN, (_IS, 1, _ALL, 0)),
    "ioprio_set": ((_IS, 0, _ALL, 1), (_IS, 1, _ALL, 0)),
    # no CLONE_NEW flag, and open files are shared by threads alone
    "clone": ((_IS, 0, 0x7E020000, 0), (_NOT, 0, 0x10400, 0x400)),
    "mmap": ((_NOT, 3, 0x21, 0x21), (_IS, 3, 0x40000, 0)),  # MAP_SHARED|MAP_ANONYMOUS, MAP_HUGETLB
    "fcntl": tuple((_NOT, 1, _ALL, command) for command in (1031, 37, 38)),  # F_SETPIPE_SZ, F_OFD_SETLK
    # PR_SET_DUMPABLE, which hides from the supervisor, PR_SET_SECCOMP, PR_SCHED_CORE of others
    "prctl": tuple((_NOT, 0, _ALL, option) for option in (4, 22, 62)),
    "socketpair": (_STREAMS,),
    # buffers, filters, pages of others
    "setsockopt": tuple((_NOT, 2, _ALL, option) for option in (7, 8, 26, 32, 33, 50, 51, 52, 60)),
}
"""Calls by the arguments with which they are allowed: of each, a test, the argument's place, a mask, and a value."""


def system_call_filter(*, sockets: bool, machine: str | None = None) -> bytes | None:
    """Return the filter as an array of ``struct sock_filter``; None for an architecture whose numbers are not known.
    ``sockets``: True to allow sockets of this machine (AF_UNIX), for a program with its own network namespace.
    """
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        return None
    architecture, column = _MACHINES[machine]
    refuse = (_RETURN, 0, 0, _REFUSE | errno.EPERM)
    steps = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), refuse, (_LOAD, 0, 0, _NUMBER)]
    if machine == "x86_64":
        steps += [(_AT_LEAST, 0, 1, _X32), refuse]
    # outside of a network namespace open files could hide in messages
    others = [] if sockets else ["socket", "sendmsg", "sendmmsg"]
    for name in (*_REFUSED, *others):
        steps += [(_EQUAL, 0, 1, _CALLS[name][column]), refuse]
    # the C library falls back to clone, whose flags the filter can read, and Python to reading and writing
    for name, error in (("clone3", errno.ENOSYS), ("sendfile", errno.ENOTSOCK)):
        steps += [(_EQUAL, 0, 1, _CALLS[name][column]), (_RETURN, 0, 0, _REFUSE | error)]
    local = {"socket": ((_IS, 0, _ALL, socket.AF_UNIX), _STREAMS)} if sockets else {}
    for name, tests in (_ARGUMENTS | local).items():
        checks = [step for test in tests for step in (*_check(*test), refuse)]
        steps += [(_EQUAL, 0, len(checks) + 1, _CALLS[name][column]), *checks, (_RETURN, 0, 0, _ALLOW)]
    steps += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _check(test: int, place: int, mask: int, value: int) -> list[tuple[int, int, int, int]]:
    """Return the steps that skip the next one if an argument passes a test."""
    right = int(test == _IS)
    return [(_LOAD, 0, 0, _FIRST_ARGUMENT + 8 * place), (_AND, 0, 0, mask), (_EQUAL, right, 1 - right, value)]
