"""The ways to confine a program, from the strongest to the weakest, and which of them this machine has.

``bubblewrap``   Linux namespaces: no network, a read-only system of which nothing but the interpreter is visible, process
                 numbers of its own. Root's programs run as another user.
``user``         for root without namespaces, as in most containers: another user, who may neither read the trainer's files and
                 environment nor signal its processes.
``process``      limits only.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.errors import ConfigError
from hone.rewards.sandbox.limits import Limits

logger = logging.getLogger("hone.rewards")

FIRST_USER, USERS = 61184, 4096
"""User ids for programs of root; systemd reserves the same for users without a name."""
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/localtime",
)
_NETWORK, _USER_FILES = "the network", "files that this user may read or write"
_PROCESSES = "signals to this user's processes, and their environment"
_DISK = "how many files it writes"


@dataclass(frozen=True)
class Backend:
    """One way to confine a program.

    Attributes:
        name: ``bubblewrap``, ``user`` or ``process``.
        python: the interpreter for its programs.
        unprotected: what it does not keep from a program, in words.
        unshare: leave the network by a system call (root).
    """

    name: str
    python: str
    unprotected: tuple[str, ...] = field(default=())
    unshare: bool = False

    def request(self, limits: Limits, stdin: str, files: dict[str, str], main: str) -> dict[str, Any]:
        """What the supervisor is asked to do.

        Args:
            limits: of the program.
            stdin: its standard input.
            files: path in its folder to text.
            main: the file to run.
        """
        uid = FIRST_USER + secrets.randbelow(USERS) if os.geteuid() == 0 and self.name != "process" else None
        command = [self.python, "-I", "-B", main]
        seconds = limits.cpu_seconds or limits.seconds
        confined = self.name == "bubblewrap"
        return {
            "argv": _bubblewrap(limits, root=uid is not None) if confined else [],
            "tail": ["--remount-ro", "/", "--", *_inside(limits, uid), *command] if confined else command,
            "env": {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp", "OMP_NUM_THREADS": "1"}
            | {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            "stdin": stdin,
            "files": files,
            "directory": not confined,
            "uid": None if confined else uid,
            "unshare": self.unshare,
            "limits": vars(limits) | {"cpu_seconds": seconds},
        }


def choose(wanted: str) -> Backend:
    """The backend of a run: the one wanted, or with ``auto`` the strongest that works. Says once what a weak one leaves open.

    Raises:
        ConfigError: the one wanted does not work here.
    """
    working, missing = available()
    names = {"auto": ("bubblewrap", "user", "process"), "process": ("user", "process")}.get(wanted, (wanted,))
    backend = next((working[name] for name in names if name in working), None)
    if backend is None:
        raise ConfigError(
            f"programs cannot be confined by {wanted} here: {missing.get(wanted, 'there is no such backend')}",
            why="model-written code would not be kept from this machine",
            fix="apt-get install bubblewrap, or reward.sandbox.backend=auto",
            where="reward.sandbox.backend",
        )
    _say(backend, missing.get("bubblewrap", ""))
    return backend


@functools.cache
def _say(backend: Backend, reason: str) -> None:
    if backend.unprotected:
        logger.warning(
            "the sandbox for code is weak here (%s%s). Not kept from programs: %s",
            *(backend.name, reason and f"; bubblewrap: {reason}", "; ".join(backend.unprotected)),
        )


@functools.cache
def available() -> tuple[dict[str, Backend], dict[str, str]]:
    """The backends that work here, each tried with a program, and why the others do not."""
    working: dict[str, Backend] = {}
    missing: dict[str, str] = {}
    if not sys.platform.startswith("linux"):
        return working, dict.fromkeys(("bubblewrap", "user", "process"), "it needs Linux")
    candidates = [Backend("bubblewrap", sys.executable)]
    if os.geteuid() == 0:
        open_network = (_NETWORK, _DISK, "files that everybody may read, and /tmp")
        for python in dict.fromkeys((sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin") or "")):
            candidates += [
                Backend("user", python, open_network[1:], unshare=True),
                Backend("user", python, open_network),
            ]
    candidates.append(Backend("process", sys.executable, (_NETWORK, _USER_FILES, _PROCESSES, _DISK)))
    for backend in candidates:
        if backend.name not in working and backend.python:
            fault = _fault(backend)
            if fault:
                missing[backend.name] = fault
            else:
                working[backend.name] = backend
    return working, {name: fault for name, fault in missing.items() if name not in working}


def _fault(backend: Backend) -> str:
    """Why a backend does not work, or empty."""
    from hone.rewards.sandbox.runner import execute

    if backend.name == "bubblewrap":
        path = shutil.which("bwrap")
        if path is None:
            return "the program bwrap is not installed"
        usage = subprocess.run([path, "--help"], capture_output=True, text=True, check=False, timeout=10)
        if "--size" not in usage.stdout:
            return "bwrap is older than 0.7"
        if shutil.which("prlimit") is None or shutil.which("setpriv") is None:
            return "prlimit or setpriv (of util-linux) is not installed"
    program = "print(sum(1 for _ in open('/proc/self/net/dev')) - 2)"
    result = execute(backend, program, "", {}, Limits(seconds=20.0))
    if not result.succeeded:
        return (result.error or result.stderr or f"exit code {result.exit_code}").strip().splitlines()[-1]
    if backend.unshare and result.stdout.strip() != "1":
        return "the network cannot be left without the right to administer"
    return ""


def _bubblewrap(limits: Limits, *, root: bool) -> list[str]:
    """Arguments up to where files are added."""
    rights = ["--cap-drop", "ALL"]
    if root:  # mounts are made as root, and the program then becomes another user
        rights += [word for right in ("SETUID", "SETGID", "SETPCAP") for word in ("--cap-add", f"CAP_{right}")]
    else:
        rights += ["--unshare-user"]
    spaces = [f"--unshare-{space}" for space in ("pid", "net", "ipc", "uts")]
    size = str(limits.disk_mb * 2**20)
    words = ["bwrap", *spaces, *rights, "--die-with-parent", "--new-session", "--hostname", "sandbox"]
    for place in _SYSTEM:
        words += _shown(place)
    for place in dict.fromkeys((sys.base_prefix, sys.prefix)):
        if not place.startswith("/usr") and Path(place) not in (Path("/"), Path.home()):
            parents = [str(parent) for parent in reversed(Path(place).parents) if parent != Path("/")]
            words += [word for parent in parents for word in ("--perms", "0755", "--dir", parent)]
            words += ["--ro-bind", place, place]
    words += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", size, "--tmpfs", "/dev/shm"]
    words += ["--remount-ro", "/dev", "--perms", "1777", "--size", size, "--tmpfs", "/tmp", "--chdir", "/tmp"]
    return words


def _shown(place: str) -> list[str]:
    path = Path(place)
    if path.is_symlink():
        return ["--symlink", str(path.readlink()), place]
    return ["--ro-bind", place, place] if path.exists() else []


def _inside(limits: Limits, uid: int | None) -> list[str]:
    """What runs before the program, inside: a limit on its processes, and another user."""
    other = (
        [] if uid is None else ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--bounding-set=-all"]
    )
    return ["prlimit", f"--nproc={limits.processes}", *other]
