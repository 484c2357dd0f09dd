"""Install packages like `pip install` into the environment of the running Python: `python -P installer.py torch`

uv needs half a minute where pip needs three. uv does not read pip's settings, so those about package indexes are passed to it.
pip installs the packages when uv is not available for the machine or fails.

Scripts run this file before Hone is installed, and engines' environments do not contain Hone, so it only uses the standard
library.
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
"""Settings of pip, and the equivalent environment variables of uv."""
PIP_ALONE = ("no-index", "proxy", "trusted-host", "client-cert", "require-hashes")
"""Settings that require pip."""
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def uv_environment(listing: str, environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return the environment variables for uv, or None when pip must install.

    Args:
        listing: output of `pip config list`, such as `global.index-url='https://...'`, one setting per line.
        environment: variables that are already set; they take precedence over pip's settings.
    """
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # like pip: the newest version of all indexes
    for line in sorted(listing.splitlines(), key=lambda line: line.startswith(":env:")):  # environment before files
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if name in PIP_ALONE:
            return None
        if name in VARIABLES:
            separator = "," if name == "find-links" else " "
            variables[VARIABLES[name]] = separator.join(str(ast.literal_eval(value)).split())
    return {**variables, **environment}


def main(arguments: list[str]) -> int:
    """Install the packages and return the exit code."""
    listing = subprocess.run([*PIP, "config", "list"], check=True, capture_output=True, text=True).stdout
    environment = uv_environment(listing, os.environ)
    if environment is not None:
        if _pip(UV, capture_output=True) == 0:
            uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
            if subprocess.run([*uv, *arguments], env=environment).returncode == 0:
                return 0
        sys.stderr.write("uv failed or is not available; installing with pip, which takes longer ...\n")
    return _pip(*arguments)


def _pip(*arguments: str, capture_output: bool = False) -> int:
    return subprocess.run([*PIP, "install", "--quiet", *arguments], capture_output=capture_output).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
