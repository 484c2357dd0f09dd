"""Rules by which a program confines itself: a filter of system calls (seccomp), and rules of Landlock (Linux 5.13 and newer).

The supervisor, which imports nothing of the package, gets both as bytes, numbers and paths. The filter is a program of the kernel's packet
filter. It closes what no other limit covers: memory that belongs to no process (files in memory, shared mappings without a file, queues, pages
that pipes refer to, objects of the kernel without a limit), other processes and their memory, changes of the machine, and kernel
interfaces that no program for a reward needs. Sockets are those within the program, of a kind whose buffers the supervisor can count:
where a program has no network namespace of its own, pairs only. Numbers: the kernel's tables of system calls.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import socket
import struct
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
"""Architecture as the kernel's audit constant, and its column below."""
_REFUSED = {
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "unshare": (272, 97), "setns": (308, 268),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438), "kcmp": (312, 272), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_register": (427, 427),
    "open_by_handle_at": (304, 265), "vmsplice": (278, 75), "splice": (275, 76), "tee": (276, 77),
    "inotify_init": (253, 26), "inotify_init1": (294, 26), "io_setup": (206, 0),
    "landlock_create_ruleset": (444, 444), "seccomp": (317, 277),
    # what changes the machine, or other processes by their descriptors
    "sethostname": (170, 161), "setdomainname": (171, 162), "acct": (163, 89), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "syslog": (103, 116), "vhangup": (153, 58), "chroot": (161, 51),
    "fanotify_init": (300, 262), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
}  # fmt: skip
_IS, _NOT = range(2)
_ALL = 0xFFFFFFFF
_OWN = ((_IS, 0, _ALL, 0),)  # a process: the caller itself
_STREAMS = (_IS, 1, 2, 0)  # a datagram's receiver holds what senders left that are gone
_ARGUMENTS = {
    "prlimit64": ((302, 261), _OWN),
    "sched_setaffinity": ((203, 122), _OWN),
    "sched_setparam": ((142, 118), _OWN),
    "sched_setscheduler": ((144, 119), _OWN),
    "sched_setattr": ((314, 274), _OWN),
    "get_robust_list": ((274, 100), _OWN),
    "setpriority": ((141, 140), (*_OWN, (_IS, 1, _ALL, 0))),
    "ioprio_set": ((251, 30), ((_IS, 0, _ALL, 1), (_IS, 1, _ALL, 0))),
    # no CLONE_NEW flag, and open files are shared by threads alone
    "clone": ((56, 220), ((_IS, 0, 0x7E020000, 0), (_NOT, 0, 0x10400, 0x400))),
    "mmap": ((9, 222), ((_NOT, 3, 0x21, 0x21), (_IS, 3, 0x40000, 0))),  # MAP_SHARED|MAP_ANONYMOUS, MAP_HUGETLB
    "fcntl": ((72, 25), tuple((_NOT, 1, _ALL, command) for command in (1031, 37, 38))),  # F_SETPIPE_SZ, F_OFD_SETLK
    # PR_SET_DUMPABLE, which hides from the supervisor, PR_SET_SECCOMP, PR_SCHED_CORE of others
    "prctl": ((157, 167), tuple((_NOT, 0, _ALL, option) for option in (4, 22, 62))),
    "socketpair": ((53, 199), (_STREAMS,)),
    # buffers, filters, pages of others
    "setsockopt": ((54, 208), tuple((_NOT, 2, _ALL, option) for option in (7, 8, 26, 32, 33, 50, 51, 52, 60))),
}
"""Calls by the arguments with which they are allowed: of each, a test, the argument's place, a mask, and a value."""
_SOCKET, _SENDFILE, _CLONE3 = (41, 198), (40, 71), (435, 435)
_SENDMSG, _SENDMMSG = (46, 211), (307, 269)


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
    others = [] if sockets else [_SOCKET, _SENDMSG, _SENDMMSG]
    for numbers in (*_REFUSED.values(), *others):
        steps += [(_EQUAL, 0, 1, numbers[column]), refuse]
    # the C library falls back to clone, whose flags the filter can read, and Python to reading and writing
    for numbers, error in ((_CLONE3, errno.ENOSYS), (_SENDFILE, errno.ENOTSOCK)):
        steps += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _REFUSE | error)]
    local = {"socket": (_SOCKET, ((_IS, 0, _ALL, socket.AF_UNIX), _STREAMS))} if sockets else {}
    for numbers, tests in (_ARGUMENTS | local).values():
        checks = [step for test in tests for step in (*_check(*test), refuse)]
        steps += [(_EQUAL, 0, len(checks) + 1, numbers[column]), *checks, (_RETURN, 0, 0, _ALLOW)]
    steps += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _check(test: int, place: int, mask: int, value: int) -> list[tuple[int, int, int, int]]:
    """Return the steps that skip the next one if an argument passes a test."""
    right = int(test == _IS)
    return [(_LOAD, 0, 0, _FIRST_ARGUMENT + 8 * place), (_AND, 0, 0, mask), (_EQUAL, right, 1 - right, value)]
