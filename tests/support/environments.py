"""Python environments beside the one under test, for packages whose dependencies do not go together with Hone's."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.patience import LONG

INSTALL = Path(__file__).parents[2] / "hone" / "installer.py"
FOLDER = Path(os.environ.get("HONE_TEST_ENVIRONMENTS", str(Path.home() / ".cache" / "hone" / "environments")))


def foreign_python(name: str, *requirements: str) -> str:
    """The Python of the environment ``name``, made when it is first asked for and kept; skips the test where it cannot be.

    Args:
        name: of the environment, a folder below :data:`FOLDER`.
        requirements: what is installed in it.
    """
    folder = FOLDER / name
    python, made = folder / "bin" / "python", folder / "installed.txt"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.is_file() or made.read_text() != "\n".join(requirements):
            install = [str(python), "-P", str(INSTALL), *requirements]
            for command in ([sys.executable, "-m", "venv", str(folder)], install):
                try:
                    ended = subprocess.run(command, capture_output=True, text=True, timeout=LONG)
                except subprocess.TimeoutExpired:
                    pytest.skip(f"no environment for {', '.join(requirements)} within {LONG:.0f} s")
                if ended.returncode:
                    pytest.skip(f"no environment for {', '.join(requirements)}: {ended.stderr.strip()[-300:]}")
            made.write_text("\n".join(requirements))
    return str(python)


def npm_folder(name: str, package: str) -> Path:
    """The folder below :data:`FOLDER` with a package of npm, installed when it is first asked for; skips the test where it cannot be.

    Args:
        name: of the folder.
        package: the package with its version, like ``left-pad@1.3.0``.
    """
    npm, folder = shutil.which("npm"), FOLDER / name
    if npm is None:
        pytest.skip("npm is missing")
    made = folder / "installed.txt"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.is_file() or made.read_text() != package:
            install = [npm, "install", "--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund", package]
            ended = subprocess.run(install, capture_output=True, text=True, timeout=LONG)
            if ended.returncode:
                pytest.skip(f"npm cannot install {package}: {ended.stderr.strip()[-300:]}")
            made.write_text(package)
    return folder
