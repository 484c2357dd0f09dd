"""Installs packages into the environment of the Python that runs this file, as `pip install` would: `python -P installer.py torch`

uv does in half a minute what pip takes three for. It does not read pip's settings, so it is told those that say where
packages are to be had. Where there is no uv for the machine, or it cannot install, pip does it.

Scripts run this before Hone is installed, and engines' environments have no Hone at all: it is a file to be run, of the
standard library alone.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping

UV = "uv==0.13.9"
VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}
"""Settings of pip, and the environment variables that tell uv the same."""
PIP_ALONE = ("no-index", "proxy", "trusted-host", "client-cert", "require-hashes")
"""Settings that only pip is trusted to follow."""
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def told_to_uv(listing: str, environment: Mapping[str, str]) -> dict[str, str] | None:
    """Environment variables for uv, or None where pip is to do it.

    Args:
        listing: what `pip config list` prints, such as `global.index-url='https://...'`, a setting a line.
        environment: what is set already goes before pip's settings.
    """
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # as pip does: the newest version of all places
    for line in sorted(listing.splitlines(), key=lambda line: line.startswith(":env:")):  # it goes before files
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if name in PIP_ALONE:
            return None
        if name in VARIABLES:
            separator = "," if name == "find-links" else " "
            found[VARIABLES[name]] = separator.join(str(ast.literal_eval(value)).split())
    return {**found, **environment}


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    listing = subprocess.run([*PIP, "config", "list"], check=True, capture_output=True, text=True).stdout
    told = told_to_uv(listing, os.environ)
    if told is not None:
        if _pip(UV, capture_output=True) == 0:
            uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
            if subprocess.run([*uv, *arguments], env=told).returncode == 0:
                return 0
        sys.stderr.write("uv could not, or cannot be had; now with pip, which takes longer ...\n")
    return _pip(*arguments)


def _pip(*arguments: str, capture_output: bool = False) -> int:
    return subprocess.run([*PIP, "install", "--quiet", *arguments], capture_output=capture_output).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
