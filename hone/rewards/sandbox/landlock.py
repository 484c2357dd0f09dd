"""Rules of Landlock (Linux 5.13 and newer), with which a program confines itself to some files, without rights of root.

The supervisor, which imports nothing of the package, gets the rules as numbers and paths.
"""

from __future__ import annotations

import ctypes
from typing import Any

_CREATE_RULESET, _VERSION = 444, 1  # number of the system call, and its flag to ask for the version
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER, _TRUNCATE, _DEVICE_CONTROL = (1 << bit for bit in (0, 1, 2, 3, 14, 15))
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All rights to files by the first version that knows them."""
_TCP, _SCOPES = 0b11, 0b11  # bind and connect (version 4); abstract sockets and signals of others (version 6)
SIGNALS = 6
"""First version that keeps signals from other processes."""
_READABLE = ("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/sys", "/proc/filesystems")
_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")


def landlock_version() -> int:
    """Return the version of the kernel's interface; 0 if there is none."""
    return max(0, ctypes.CDLL(None).syscall(_CREATE_RULESET, None, 0, _VERSION))


def rules(version: int, readable: list[str]) -> dict[str, Any]:
    """Return the rules for a program that reads some folders and writes only to its own.

    Args:
        version: of the kernel's interface.
        readable: paths of files and folders that the program reads and executes.

    Returns:
        ``handled``: restricted rights to files, to the network, and scopes; ``paths``: allowed rights by path; ``folder``: rights
        in the program's folder; ``file``: those rights that a file can have.
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
