"""Filter of system calls (seccomp) for sandboxed programs, as a program of the kernel's packet filter.

It closes what no other limit covers: memory that belongs to no process (files in memory, message queues, file systems in a user
namespace), other processes and their memory, changes of the machine, and kernel interfaces that no program for a reward needs. Where
a program has no network namespace of its own, the filter also refuses sockets, except pairs within the program. Numbers: the kernel's
tables of system calls.
"""

from __future__ import annotations

import errno
import platform
import struct

_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = (
    0x20,
    0x15,
    0x35,
    0x45,
    0x06,
)  # BPF_LD|W|ABS, BPF_JMP|JEQ, |JGE, |JSET, BPF_RET
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in seccomp_data; the argument's lower half (little endian)
_NAMESPACES = 0x7E020000  # every CLONE_NEW flag
_X32 = 0x40000000  # first number of x86-64's second table

_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Architecture as the kernel's audit constant, and its column below."""
_REFUSED = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_register": (427, 427),
    "open_by_handle_at": (304, 265),
}
_MACHINE = {
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "chroot": (161, 51),
    "fanotify_init": (300, 262),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
"""Calls that change the machine, or other processes by their descriptors."""
_OWN = {
    "prlimit64": ((302, 261), {0: 0}),
    "sched_setaffinity": ((203, 122), {0: 0}),
    "sched_setparam": ((142, 118), {0: 0}),
    "sched_setscheduler": ((144, 119), {0: 0}),
    "sched_setattr": ((314, 274), {0: 0}),
    "get_robust_list": ((274, 100), {0: 0}),
    "setpriority": ((141, 140), {0: 0, 1: 0}),
    "ioprio_set": ((251, 30), {0: 1, 1: 0}),
}
"""Calls that take a process, and the arguments with which they are allowed, by place: the caller itself, which is 0."""
_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)


def system_call_filter(*, sockets: bool, machine: str | None = None) -> bytes | None:
    """Return the filter as an array of ``struct sock_filter``; None for an architecture whose numbers are not known.

    Args:
        sockets: True to allow sockets.
        machine: name of the architecture; by default this machine's.
    """
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        return None
    architecture, column = _MACHINES[machine]
    refuse = (_RETURN, 0, 0, _REFUSE | errno.EPERM)
    steps = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), refuse, (_LOAD, 0, 0, _NUMBER)]
    if machine == "x86_64":
        steps += [(_AT_LEAST, 0, 1, _X32), refuse]
    refused = [*_REFUSED.values(), *_MACHINE.values(), *([] if sockets else [_SOCKET])]
    for numbers in refused:
        steps += [(_EQUAL, 0, 1, numbers[column]), refuse]
    for numbers, allowed in _OWN.values():
        checks = [
            step
            for place, value in allowed.items()
            for step in ((_LOAD, 0, 0, _FIRST_ARGUMENT + 8 * place), (_EQUAL, 1, 0, value), refuse)
        ]
        steps += [(_EQUAL, 0, len(checks) + 1, numbers[column]), *checks, (_RETURN, 0, 0, _ALLOW)]
    # the C library falls back to clone, whose flags the filter can read
    steps += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _REFUSE | errno.ENOSYS)]
    steps += [(_EQUAL, 0, 3, _CLONE[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_ANY_BIT, 0, 1, _NAMESPACES), refuse]
    steps += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
