"""Python environments beside the one under test, for packages whose dependencies do not go together with Hone's."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from support.patience import LONG

INSTALL = Path(__file__).parents[2] / "hone" / "installer.py"
FOLDER = Path(os.environ.get("HONE_TEST_ENVIRONMENTS", str(Path.home() / ".cache" / "hone" / "environments")))


def foreign_python(name: str, *requirements: str, beside: bool = False, version: str = "") -> str:
    """The Python of the environment ``name``, made when it is first asked for and kept; see :func:`missing` where it cannot be.

    Args:
        name: of the environment, a folder below :data:`FOLDER`.
        requirements: what is installed in it; options of pip may come first.
        beside: whether it also has the packages of the Python that runs the tests, such as torch. Its own come first.
        version: of another Python than the one that runs the tests, such as 3.12.
    """

    def make(folder: Path) -> None:
        _run([_interpreter(version), "-m", "venv", str(folder)], name)
        _run([str(folder / "bin" / "python"), "-P", str(INSTALL), *requirements], name)

    folder = _made(name, "\n".join(requirements), make)
    if beside:
        own = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
        (own / "beside.pth").write_text(sysconfig.get_path("purelib"))
    return str(folder / "bin" / "python")


def npm_folder(name: str, *packages: str) -> Path:
    """The folder below :data:`FOLDER` with packages of npm, installed when it is first asked for; see :func:`missing`.

    Args:
        name: of the folder.
        packages: with their versions, like ``left-pad@1.3.0``.
    """
    npm = shutil.which("npm")
    if npm is None:
        missing("npm is missing")
    install = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", *packages, "--prefix"]
    return _made(name, "\n".join(packages), lambda folder: _run([*install, str(folder)], ", ".join(packages)))


def source_folder(requirement: str) -> Path:
    """The unpacked source distribution of a package like ``left-pad==1.3.0``, which may have what no wheel has; see :func:`missing`."""
    package = requirement.partition("==")[0]
    fetch = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary",
        package,
        requirement,
        "--dest",
    ]

    def make(folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        _run([*fetch, str(folder)], requirement)
        (archive,) = folder.glob("*.tar.gz")
        shutil.unpack_archive(archive, folder, filter="data")

    (unpacked,) = (path for path in _made(f"{package}-source", requirement, make).iterdir() if path.is_dir())
    return unpacked


def wheel_folder(requirement: str) -> Path:
    """The unpacked wheel of a package like ``left-pad==1.3.0``, without what it depends on; see :func:`missing`."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    name = f"{requirement.partition('==')[0]}-wheel"
    return _made(name, requirement, lambda folder: _run([*install, str(folder), requirement], requirement))


def missing(why: str) -> NoReturn:
    """Skip the test that needs something of the network, or fail it where HONE_TEST_FOREIGN is 1."""
    (pytest.fail if os.environ.get("HONE_TEST_FOREIGN") == "1" else pytest.skip)(why)


def _interpreter(version: str) -> str:
    if not version:
        return sys.executable
    on_path = shutil.which(f"python{version}")
    for path in (*([on_path] if on_path else []), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")):
        if subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return str(path)
    missing(f"there is no Python {version}")


def _made(name: str, wanted: str, make: Callable[[Path], None]) -> Path:
    """Return the folder ``name``, made by one process if what it holds is not what is wanted."""
    folder = FOLDER / name
    made = folder / "installed.txt"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.is_file() or made.read_text() != wanted:
            make(folder)
            made.write_text(wanted)
    return folder


def _run(command: list[str], what: str) -> None:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LONG)
    except subprocess.TimeoutExpired:
        missing(f"{what} cannot be installed within {LONG:.0f} s")
    if ended.returncode:
        missing(f"{what} cannot be installed: {ended.stderr.strip()[-300:]}")
