"""Sandbox backends, from the strongest to the weakest.

``bubblewrap``   Linux namespaces: no network, a read-only system with only the interpreter visible, and a separate process
                 number space. Programs of root run as another user.
``user``         for root without namespaces, as in most containers: another user, which can neither read the trainer's files
                 and environment nor signal its processes.
``process``      the trainer's user.

All filter system calls. ``user`` and ``process`` also confine a program to its own folder and the interpreter's files (Landlock).
What a kernel does not offer is left out, and :attr:`Backend.unprotected` says what a program can then reach.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import logging
import os
import secrets
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hone.rewards.sandbox.limits import Ending, Limits, Result
from hone.rewards.sandbox.system_calls import SIGNALS, rules, system_call_filter

MAIN = "main.py"  # name of the program's file in its folder
GRACE = 30.0  # seconds beyond the limit for the supervisor to start and end all processes
logger = logging.getLogger("hone.rewards")
_SUPERVISOR = Path(__file__).with_name("supervisor.py")

FIRST_USER, USERS = 61184, 4096  # user ids for programs of root; systemd reserves this range for users without a name
PROTECTIONS = {
    "network": "other machines, and servers on this one",
    "files": "files that the trainer's user or everyone may read or write",
    "processes": "signals to this user's processes, and their environment",
    "memory": "memory that belongs to no process: files in memory, shared mappings, buffers of sockets",
    "disk": "space on disks that everyone may write to",
}
"""What a sandbox protects, and what a program reaches without it."""
_SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime",
)  # fmt: skip
_users = itertools.count(secrets.randbelow(USERS))


@dataclass(frozen=True)
class Workspace:
    """Folders and a user for several commands of ``bubblewrap`` one after another, which see what those before them wrote."""

    folder: str  # of this machine; each folder in it is one of the same name below the root that a command sees
    uid: int | None  # user of its files and commands; None for the caller's
    workdir: str  # where a command begins


@dataclass(frozen=True)
class Backend:
    """Method of confining a program."""

    name: str  # ``bubblewrap``, ``user`` or ``process``
    python: str  # interpreter for programs
    filtered: bool = True  # True to filter system calls
    landlock: int = 0  # version of Landlock; 0 to use none
    cgroup: str = ""  # folder of a control group (version 2) in which each program gets its own; empty without one

    @property
    def memory_bound(self) -> str:
        """Text: what bounds the memory of a program, with the kernel's for it."""
        counted = "counting of its processes, mappings, pipes and sockets"
        group = f"memory.max and pids.max in {self.cgroup}" if self.cgroup else "no cgroup"
        return f"{counted}; {'the filter of system calls' if self.filtered else 'no filter'}; {group}"

    @property
    def unprotected(self) -> tuple[str, ...]:
        """Names of :data:`PROTECTIONS` that this backend does not give here; tests attack each of them."""
        given = {
            "network": self.name == "bubblewrap" or self.filtered,
            "files": self.name == "bubblewrap" or self.landlock > 0,
            "processes": self.name != "process" or self.landlock >= SIGNALS,
            "memory": (self.filtered or self.cgroup != "") and (self.name == "bubblewrap" or self.landlock > 0),
            "disk": self.name == "bubblewrap" or self.landlock > 0,
        }
        return tuple(name for name in PROTECTIONS if not given[name])

    def user(self) -> int | None:
        """Return the id of another user for a program of root; None if it runs as the caller."""
        return FIRST_USER + next(_users) % USERS if os.geteuid() == 0 and self.name != "process" else None

    def request(
        self, limits: Limits, command: list[str], stdin: str, files: dict[str, str], workspace: Workspace | None = None
    ) -> dict[str, Any]:
        """Return the request for the supervisor.

        Args:
            command: program to run, and its arguments.
            files: text by path in the program's folder.
            workspace: folders to show, with ``bubblewrap``; None gives the program a new one.
        """
        uid = workspace.uid if workspace else self.user()
        seconds = limits.cpu_seconds or limits.seconds
        confined = self.name == "bubblewrap"
        program = system_call_filter(sockets=confined) if self.filtered else None
        return {
            "argv": _bubblewrap(limits, workspace, root=uid is not None) if confined else [],
            "tail": ["--remount-ro", "/", "--", *_inside(limits, uid), *command] if confined else command,
            "env": {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp", "OMP_NUM_THREADS": "1"}
            | {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            "stdin": stdin,
            "files": files,
            "directory": not confined,
            "workspace": workspace.folder if workspace else "",
            "uid": None if confined else uid,
            "filter": program and base64.b64encode(program).decode(),
            "landlock": rules(self.landlock, _readable(self.python)) if self.landlock and not confined else None,
            "cgroup": self.cgroup,
            "limits": vars(limits) | {"cpu_seconds": seconds},
        }


def _prefixes() -> list[str]:
    """Return the folders of the interpreter that are not in the system's."""
    return [
        prefix
        for prefix in dict.fromkeys((sys.base_prefix, sys.prefix))
        if not prefix.startswith("/usr/") and prefix != "/usr" and Path(prefix) not in (Path("/"), Path.home())
    ]


def _readable(python: str) -> list[str]:
    return [*_SYSTEM, *(_prefixes() if python == sys.executable else ())]


def _bubblewrap(limits: Limits, workspace: Workspace | None, *, root: bool) -> list[str]:
    """Return the arguments of bubblewrap before those that add files."""
    rights = ["--cap-drop", "ALL"]
    if root:  # mounts are made as root, then the program runs as another user
        rights += [word for right in ("SETUID", "SETGID", "SETPCAP") for word in ("--cap-add", f"CAP_{right}")]
    else:
        rights += ["--unshare-user"]
    spaces = [f"--unshare-{space}" for space in ("pid", "net", "ipc", "uts")]
    # these file systems are memory; the files of a workspace are on disk
    size = str((min(64, limits.disk_mb) if workspace else limits.disk_mb) * 2**20)
    arguments = ["bwrap", *spaces, *rights, "--die-with-parent", "--new-session", "--hostname", "sandbox"]
    arguments += ["--perms", "0755", "--dir", "/etc"]  # links to programs lead through it
    for path_name in _SYSTEM:
        arguments += _bind_arguments(path_name)
    arguments += ["--perms", "1777", "--size", size, "--tmpfs", "/tmp"]  # the interpreter may be below it
    for prefix in () if workspace else _prefixes():
        parents = [str(parent) for parent in reversed(Path(prefix).parents) if parent not in (Path("/"), Path("/tmp"))]
        arguments += [word for parent in parents for word in ("--perms", "0755", "--dir", parent)]
        arguments += ["--ro-bind", prefix, prefix]
    # no terminals, and no /dev/zero, whose shared mappings belong to no process: /dev/full reads the same
    arguments += ["--proc", "/proc", "--tmpfs", "/dev", "--dev-bind", "/dev/full", "/dev/zero"]
    for name in ("null", "full", "random", "urandom"):
        arguments += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, target in {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}.items():
        arguments += ["--symlink", f"/proc/self/{target}", f"/dev/{name}"]
    arguments += ["--perms", "1777", "--size", size, "--tmpfs", "/dev/shm"]
    for folder in sorted(Path(workspace.folder).iterdir()) if workspace else ():
        arguments += ["--bind", str(folder), f"/{folder.name}"]
    arguments += ["--remount-ro", "/dev", "--chdir", workspace.workdir if workspace else "/tmp"]
    return arguments


def _bind_arguments(path_name: str) -> list[str]:
    path = Path(path_name)
    if path.is_symlink():
        return ["--symlink", str(path.readlink()), path_name]
    return ["--ro-bind", path_name, path_name] if path.exists() else []


def _inside(limits: Limits, uid: int | None) -> list[str]:
    """Return the command prefix inside the sandbox: a limit on processes, and another user."""
    other = (
        [] if uid is None else ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--bounding-set=-all"]
    )
    return ["prlimit", f"--nproc={limits.processes}", *other]


def execute(backend: Backend, code: str, stdin: str, files: dict[str, str], limits: Limits) -> Result:
    """Run one program under a new supervisor and wait for it."""
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or name == MAIN or "\x00" in name:
            raise ValueError(f"'{name}' must be a path inside the program's folder, other than {MAIN}")
    command = [backend.python, "-I", "-B", "-X", "int_max_str_digits=0", MAIN]
    return _supervised(backend.request(limits, command, stdin, {**files, MAIN: code}), limits)


def execute_in(backend: Backend, workspace: Workspace, command: list[str], limits: Limits) -> Result:
    """Run one command among the files of ``workspace`` under a new supervisor and wait for it and all that it started."""
    return _supervised(backend.request(limits, command, "", {}, workspace), limits)


def _supervised(request: dict[str, Any], limits: Limits) -> Result:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_SUPERVISOR)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin:/usr/local/bin", "LANG": "C.UTF-8"},
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    watchdog = threading.Timer(limits.seconds + GRACE, process.kill)
    watchdog.start()
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()  # left open: the supervisor ends when it closes
        answer, errors = process.stdout.read(), process.stderr.read()
    finally:
        watchdog.cancel()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        exit_code = process.wait()
        process.stdout.close()
        process.stderr.close()
    return _result(answer, errors, exit_code)


def _result(answer: bytes, errors: bytes, code: int) -> Result:
    try:
        fields: dict[str, Any] = json.loads(answer)
    except json.JSONDecodeError:
        last = (errors.decode(errors="replace").strip().splitlines() or ["nothing"])[-1]
        return Result(Ending.BROKEN, error=f"the supervisor ended with exit code {code} and the message: {last}")
    texts = {
        name: base64.b64decode(fields.pop(name, "")).decode("utf-8", errors="replace") for name in ("stdout", "stderr")
    }
    if left := fields.pop("left", ""):
        logger.warning("a program's folder could not be removed: %s", left)
    return Result(Ending(fields.pop("ending")), **texts, **fields)
