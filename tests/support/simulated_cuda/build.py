"""Compiles the driver of the simulated GPU with the system's C++ compiler; imports no torch, because the driver is loaded before it."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from filelock import FileLock

SOURCE = Path(__file__).with_name("driver.cpp")


def compiler() -> str | None:
    """Return the path of the system's C++ compiler: that of ``CXX``, else c++, g++ or clang++. None if there is none."""
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


@functools.cache
def driver() -> Path:
    """Return the shared library, compiled once for each source, torch and compiler.

    Raises:
        subprocess.CalledProcessError: the compiler refuses the source; its output is in the error.
    """
    torch = Path(str(importlib.util.find_spec("torch").submodule_search_locations[0]))  # type: ignore[union-attr,index]
    cxx = compiler()
    assert cxx is not None, "callers skip without a compiler"
    parts = (SOURCE.read_text(), importlib.metadata.version("torch"), str(torch), cxx)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"hone-simulated-cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"driver-{key}.so"
    with FileLock(folder / "lock"):
        if not library.exists():
            unfinished = library.with_suffix(".part")
            subprocess.run(_command(cxx, torch, unfinished), check=True, capture_output=True, text=True)
            unfinished.rename(library)
    return library


def _command(cxx: str, torch: Path, output: Path) -> list[str]:
    headers = [torch / "include", torch / "include/torch/csrc/api/include"]
    return [
        *(cxx, "-std=c++20", "-O0", "-fPIC", "-shared", str(SOURCE), "-o", str(output)),
        *(f"-isystem{path}" for path in headers),
        *(f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"),
    ]
