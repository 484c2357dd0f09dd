"""The commands that add an optional part of Hone, or a package, to the running environment, as the fix of an error shows them.

Hone comes from a package index, a checkout or a wheel, and an environment that uv made has no pip: a command for another origin
fails, or brings another version of Hone.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit


def install_command(extra: str = "", *options: str) -> str:
    """Return the command that installs Hone from where it came, with an extra."""
    return install_packages(*options, *_origin(f"[{extra}]" if extra else ""))


def install_packages(*words: str) -> str:
    """Return the command that installs packages; ``words``: options and requirements."""
    installer = "pip install" if importlib.util.find_spec("pip") else "uv pip install"
    return f"{installer} {shlex.join(words)}"


def _origin(extra: str) -> tuple[str, ...]:
    try:
        text = metadata.distribution("hone-rl").read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # a source tree that was never installed
        return "-e", _folder(Path(__file__).parents[1]) + extra
    origin = json.loads(text) if text else {}
    if "dir_info" in origin:
        folder = _folder(Path(unquote(urlsplit(origin["url"]).path))) + extra
        return ("-e", folder) if origin["dir_info"].get("editable") else (folder,)
    return (f"hone-rl{extra} @ {origin['url']}" if "archive_info" in origin else f"hone-rl{extra}",)


def _folder(path: Path) -> str:
    return "." if path == Path.cwd() else str(path)
