"""Machines for commands of one episode whose files stay: a container of docker or podman, or the sandbox."""

from __future__ import annotations

import functools
import hashlib
import os
import posixpath
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.errors import ConfigError, NoVerdict
from hone.rewards.sandbox.backends import Workspace, execute_in
from hone.rewards.sandbox.limits import Ending, Limits, Result
from hone.rewards.sandbox.processes import remove
from hone.rewards.sandbox.runner import available

LEAST_MB = 2048
"""Memory and space on disk (MiB) of a task that names none."""
OUTPUT = 1_000_000  # bytes of a command's output
_BASES = re.compile(r"(docker\.io/)?(library/)?(ubuntu|debian)(:[\w.-]+)?")  # what they have, the sandbox has
_IMAGE = re.compile(r"\w[\w./:@-]*")
_SYSTEM = {"usr", "bin", "sbin", "lib", "lib32", "lib64", "etc", "proc", "dev", "sys", "tests", "solution", "logs"}
_WITHOUT_EFFECT = ("LABEL", "MAINTAINER", "EXPOSE", "CMD")  # commands run in a shell of their own
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_building = threading.Lock()


@dataclass(frozen=True)
class HarborTask:
    """Contents of one task directory, without its files."""

    folder: Path
    instruction: str
    agent_seconds: float  # for all commands of the policy together; infinite without a limit
    verifier_seconds: float
    build_seconds: float
    image: str | None  # built image, used instead of environment/Dockerfile
    network: bool
    workdir: str | None  # None: that of the image
    cpus: float
    memory_mb: int
    storage_mb: int
    env: dict[str, str]
    verifier_env: dict[str, str]


def machine_for(task: HarborTask, container: str, *, ignore_build: bool) -> Callable[[], Sandboxed | Container]:
    """Return what starts a machine for a task: docker, podman or the sandbox (``none``), or with ``auto`` the first that works.

    Raises:
        ConfigError: none works here, or the sandbox cannot be what the task's Dockerfile describes.
    """
    if container not in ("auto", "docker", "podman", "none"):
        raise ConfigError(f"container={container} is unknown", fix="container=auto, docker, podman or none")
    names = ("docker", "podman") if container == "auto" else (container,)
    program = next((name for name in names if name != "none" and works(name)), None)
    if program is not None:
        return functools.partial(Container, program, task, _tag(task))
    if container in ("docker", "podman"):
        raise ConfigError(f"container={container}, but `{container} version` fails here", fix=f"start {container}")
    if "bubblewrap" not in available()[0]:
        raise ConfigError(
            f"tasks of Harbor need docker, podman or bubblewrap, and none works here ({available()[1]['bubblewrap']})",
            why="commands of a model run in a container or the sandbox alone",
            fix="apt-get install bubblewrap",
        )
    return functools.partial(Sandboxed, task, read_dockerfile(task, ignore_build=ignore_build))


@functools.cache
def works(program: str) -> bool:
    """Return whether a container program is there with its service."""
    try:
        return subprocess.run([program, "version"], capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def files_below(folder: Path) -> list[Path]:
    """Return all files and folders in ``folder``, sorted.

    Raises:
        ValueError: one of them, or the folder, is a link or something else that could lead out of it.
    """
    paths = sorted(folder.rglob("*")) if folder.is_dir() and not folder.is_symlink() else []
    for path in (folder, *paths) if folder.is_symlink() or folder.exists() else ():
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise ValueError(f"{path} is a link, or neither a file nor a folder, which is refused")
    return paths


# the sandbox ---------------------------------------------------------------------------------------------------------


@dataclass
class Contents:
    """Files and variables that a Dockerfile puts into the sandbox."""

    workdir: str = ""
    env: dict[str, str] = field(default_factory=dict)
    copies: list[tuple[Path, str]] = field(default_factory=list)  # files or folders, and the path of each


class _Unsupported(Exception):
    """An instruction that the sandbox cannot follow; ``ignore_build`` leaves it out."""


def read_dockerfile(task: HarborTask, *, ignore_build: bool) -> Contents:
    """Read what the sandbox can follow of environment/Dockerfile: WORKDIR, ENV, and COPY of files of its folder.

    Raises:
        ConfigError: a line is another instruction (unless ``ignore_build``), or leads out of the folder.
    """
    contents, folder = Contents(), task.folder / "environment"
    file = folder / "Dockerfile"
    line, where = "the folder", str(folder)
    try:
        files_below(folder)
        if any(folder.glob("*compose*.y*ml")):
            raise ValueError("it describes several containers")
        if not file.is_file() and not ignore_build:
            raise _Unsupported(f"there is only the image {task.image}")
        for number, line in _lines(file.read_text(encoding="utf-8") if file.is_file() else ""):
            where = f"{file}:{number}"
            try:
                _follow(line, contents, folder)
            except _Unsupported:
                if not ignore_build:
                    raise
        if task.workdir:
            contents.workdir = _inside(task.workdir, contents.workdir)
    except _Unsupported as unsupported:
        raise ConfigError(
            f"the sandbox cannot build this task: {line!r:.200}: {unsupported}",
            why="neither docker nor podman works here, and the sandbox has this machine's programs alone",
            fix="start docker or podman, or leave such lines out with ignore_build=true where this machine has what they bring",
            where=where,
        ) from None
    except ValueError as error:
        raise ConfigError(f"{line!r:.200}: {error}", fix="correct the task", where=where) from error
    contents.workdir = contents.workdir or "/app"
    return contents


def _lines(text: str) -> list[tuple[int, str]]:
    """Return the instructions of a Dockerfile with the numbers of their first lines."""
    lines, first, parts = [], 0, []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            first = first if parts else number
            parts.append(line.strip().removesuffix("\\").strip())
            if not line.rstrip().endswith("\\"):
                lines.append((first, " ".join(parts)))
                parts = []
    return [*lines, (first, " ".join(parts))] if parts else lines


def _follow(line: str, contents: Contents, folder: Path) -> None:
    word, _, rest = line.partition(" ")
    word, rest = word.upper(), rest.strip()
    if "<<" in rest:
        raise ValueError("text between lines of a Dockerfile is not supported in the sandbox")
    if word in _WITHOUT_EFFECT or (word == "FROM" and _BASES.fullmatch(rest)):
        return
    if word not in ("WORKDIR", "ENV", "COPY"):
        raise _Unsupported(f"it only follows FROM ubuntu or debian, WORKDIR, ENV and COPY, not {word} {rest:.40}")
    if "$" in rest or rest.startswith(("--", "[")):
        raise _Unsupported("it knows no variables, options or lists")
    words = shlex.split(rest)
    if not words:
        raise ValueError("it has no arguments")
    if word == "WORKDIR":
        contents.workdir = _inside(rest if len(words) != 1 else words[0], contents.workdir)
    elif word == "ENV":
        split = [entry.partition("=") for entry in words] if "=" in words[0] else [rest.partition(" ")]
        for name, _, value in split:
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ValueError("a variable has no name")
            contents.env[name] = value
    else:
        _copy(words, contents, folder)


def _copy(words: list[str], contents: Contents, folder: Path) -> None:
    if len(words) < 2 or (folder / ".dockerignore").exists() or any(c in word for word in words for c in "*?["):
        raise _Unsupported("it copies files and folders by name, without .dockerignore")
    *names, given = words
    target = _inside(given, contents.workdir or "/")
    for name in names:
        source = folder / posixpath.normpath(name.lstrip("/") or ".")
        if ".." in Path(name).parts or not source.exists():
            raise ValueError(f"{name} is not in {folder}")
        into = source.is_file() and (given.rpartition("/")[2] in ("", ".") or len(names) > 1)
        contents.copies.append((source, f"{target}/{source.name}" if into else target))


def _inside(path: str, workdir: str) -> str:
    """Return a path below a folder that the sandbox can keep."""
    whole = posixpath.normpath(posixpath.join(workdir or "/", path))
    first = whole.lstrip("/").partition("/")[0]
    if ".." in Path(path).parts or "\x00" in path:
        raise ValueError(f"{path} has '..'")
    if not first or first in _SYSTEM:
        raise _Unsupported(f"{whole} is a folder of the system or of Harbor")
    return f"/{whole.lstrip('/')}"


class Sandboxed:
    """The sandbox, with folders that stay for the episode. What a command starts ends with it.

    A command runs in a new shell, and its errors are in its output.
    """

    def __init__(self, task: HarborTask, contents: Contents) -> None:
        self.task, self.contents = task, contents
        self.backend = available()[0]["bubblewrap"]
        self.workspace = Workspace(tempfile.mkdtemp(prefix="hone-harbor-"), self.backend.user(), contents.workdir)
        try:
            for name in ("tmp", "root", "logs", contents.workdir.lstrip("/")):
                Path(self.workspace.folder, name).mkdir(parents=True, exist_ok=True)
            for source, target in contents.copies:
                self._copy(source, target)
            self._give("")
        except OSError as error:
            self.close()
            raise NoVerdict(f"the folder of {task.folder.name} cannot be made: {error}") from error

    def _copy(self, source: Path, target: str) -> None:
        place = Path(self.workspace.folder, target.lstrip("/"))
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, place, dirs_exist_ok=True)
        else:
            shutil.copy2(source, place / source.name if place.is_dir() else place)

    def _give(self, name: str) -> None:
        """Give the files in a folder that no command has seen yet to the user of the commands."""
        if self.workspace.uid is not None:
            top = Path(self.workspace.folder, name)
            for path in [*([top] if name else []), *top.rglob("*")]:
                os.chown(path, self.workspace.uid, self.workspace.uid, follow_symlinks=False)

    def run(self, command: str, seconds: float, env: dict[str, str]) -> Result:
        task = self.task
        variables = {"PATH": _PATH, "HOME": "/root"} | self.contents.env | task.env | env
        words = ["/usr/bin/env", *(f"{name}={value}" for name, value in variables.items()), "/bin/bash", "-c", command]
        limits = Limits(
            seconds, seconds * max(1.0, task.cpus), task.memory_mb, 256, OUTPUT, task.storage_mb, 100_000, 1024
        )
        return execute_in(self.backend, self.workspace, ["/bin/bash", "-c", 'exec "$@" 2>&1', "bash", *words], limits)

    def put_tests(self) -> None:
        """Put the task's tests at /tests, and an empty folder at /logs/verifier."""
        for name in ("logs", "tests"):
            remove(f"{self.workspace.folder}/{name}")
        Path(self.workspace.folder, "logs", "verifier").mkdir(parents=True)
        self._copy(self.task.folder / "tests", "/tests")
        Path(self.workspace.folder, "tests", "test.sh").chmod(0o755)
        for name in ("logs", "tests"):
            self._give(name)

    def close(self) -> None:
        remove(self.workspace.folder)


# containers ----------------------------------------------------------------------------------------------------------


def _tag(task: HarborTask) -> str:
    """Return the name of a task's image: the one it names, else one of the content of its folder."""
    if task.image is not None:
        if not _IMAGE.fullmatch(task.image):
            raise ConfigError(
                f"'{task.image}' is not the name of an image", where=f"{task.folder}/task.toml", fix="correct it"
            )
        return task.image
    folder = task.folder / "environment"
    if any(folder.glob("*compose*.y*ml")) or not (folder / "Dockerfile").is_file():
        raise ConfigError(
            f"the task {task.folder.name} has no environment/Dockerfile, or has several containers",
            fix="use tasks of one container",
            where=str(folder),
        )
    content = hashlib.sha256()
    for path in files_below(folder):
        data = path.read_bytes() if path.is_file() else b""
        content.update(f"{path.relative_to(folder)}\0{path.stat().st_mode:o}\0{len(data)}\0".encode() + data)
    return f"hone-harbor:{content.hexdigest()[:32]}"


class Container:
    """A container of docker or podman. What a command starts stays until the episode ends."""

    def __init__(self, program: str, task: HarborTask, image: str) -> None:
        self.program, self.task, self.name = program, task, f"hone-{uuid.uuid4().hex}"
        with _building:  # once for all episodes
            if task.image is None and self._call("image", "inspect", image, check=False):
                self._call("build", "--tag", image, str(task.folder / "environment"), seconds=task.build_seconds)
        limits = [f"--memory={task.memory_mb}m", f"--cpus={task.cpus:g}", "--pids-limit=1024"]
        network = [] if task.network else ["--network=none"]
        options = [
            "--detach",
            "--name",
            self.name,
            "--label=hone",
            "--security-opt=no-new-privileges",
            *limits,
            *network,
        ]
        self._call("run", *options, image, "sh", "-c", "sleep infinity", seconds=task.build_seconds)

    def _call(self, *words: str, seconds: float = 120.0, check: bool = True) -> int:
        try:
            done = subprocess.run([self.program, *words], capture_output=True, timeout=seconds, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoVerdict(f"`{self.program} {words[0]}` of {self.task.folder.name} failed: {error!r:.300}") from error
        if check and done.returncode:
            end = done.stderr.decode(errors="replace").strip()[-300:]
            raise NoVerdict(f"`{self.program} {words[0]}` of {self.task.folder.name} failed: {end}")
        return done.returncode

    def run(self, command: str, seconds: float, env: dict[str, str]) -> Result:
        options = [f"--env={name}={value}" for name, value in (self.task.env | env).items()]
        options += [f"--workdir={self.task.workdir}"] if self.task.workdir else []
        words: Any = [self.program, "exec", *options, self.name, "bash", "-c", command]
        begun, ending = time.monotonic(), Ending.FINISHED
        with subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            timer = threading.Timer(seconds, process.kill)
            timer.start()
            assert process.stdout is not None
            output = process.stdout.read(OUTPUT + 1)
            if len(output) > OUTPUT:
                ending = Ending.OUTPUT
                process.kill()
            process.wait()
            timer.cancel()
        passed = time.monotonic() - begun
        if ending is Ending.FINISHED and process.returncode < 0:
            ending = Ending.TIMEOUT
        if ending is not Ending.FINISHED:
            self._call("restart", "--time=0", self.name)  # ends what the command left, and keeps the files
        text = output[:OUTPUT].decode(errors="replace")
        return Result(ending, process.returncode if ending is Ending.FINISHED else None, text, seconds=passed)

    def put_tests(self) -> None:
        self._call(
            "exec", "--user=0", self.name, "sh", "-c", "rm -rf /tests /logs/verifier && mkdir -p /tests /logs/verifier"
        )
        self._call("cp", f"{self.task.folder}/tests/.", f"{self.name}:/tests")
        self._call("exec", "--user=0", self.name, "chmod", "-R", "a+rwX", "/logs/verifier", "/tests")
        self._call("exec", "--user=0", self.name, "chmod", "755", "/tests/test.sh")

    def close(self) -> None:
        self._call("rm", "--force", "--volumes", self.name)
