"""How scripts and engines install: by uv from the places that pip's settings name, or by pip."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "hone" / "installer.py"


@pytest.fixture(scope="module")
def program() -> Any:
    spec = importlib.util.spec_from_file_location("install", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_uv_is_told_what_pip_was_told(program: Any) -> None:
    listing = (
        ":env:.find-links='/env/a /env/b'\nglobal.cert='/ca.pem'\nglobal.extra-index-url='\\nhttps://one\\nhttps://two'\n"
        "global.find-links='/file'\nglobal.index-url='https://main'\nglobal.timeout='60'\n"
    )
    assert program.uv_environment(listing, {"HOME": "/home", "UV_DEFAULT_INDEX": "https://mine"}) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_DEFAULT_INDEX": "https://mine",
        "UV_INDEX": "https://one https://two",
        "UV_FIND_LINKS": "/env/a,/env/b",
        "SSL_CERT_FILE": "/ca.pem",
        "HOME": "/home",
    }


@pytest.mark.parametrize("setting", ["no-index='1'", "proxy='http://p:1'", "trusted-host='h'"])
def test_what_only_pip_follows_leaves_it_to_pip(program: Any, setting: str) -> None:
    assert program.uv_environment(f"global.timeout='60'\n:env:.{setting}\n", {}) is None


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one package, which no index has."""
    folder = tmp_path_factory.mktemp("wheels")
    files = {
        "hone_probe.py": "",
        "hone_probe-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: hone-probe\nVersion: 1.0\n",
        "hone_probe-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, "hone_probe-1.0.dist-info/RECORD"))
    with zipfile.ZipFile(folder / "hone_probe-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in {**files, "hone_probe-1.0.dist-info/RECORD": record}.items():
            wheel.writestr(name, text)
    (folder / "simple").mkdir()
    return folder


@pytest.mark.long("hone/installer.py", "hone/generation/environments.py")
@pytest.mark.parametrize(
    ("settings", "wanted", "installer"),
    [
        ({}, "hone-probe", "uv"),
        ({"PIP_NO_INDEX": "1"}, "hone-probe", "pip"),
        ({"UV_FIND_LINKS": "/nowhere"}, "hone-probe", "pip"),
        ({}, "hone-unknown", None),
    ],
    ids=["uv", "only-pip-follows", "uv-cannot", "neither-can"],
)
def test_packages_are_installed(
    settings: dict[str, str], wanted: str, installer: str | None, wheels: Path, tmp_path: Path
) -> None:
    """Into a bare environment that sees this one's pip and uv; the only index is an empty one."""
    if installer == "uv" and importlib.util.find_spec("uv") is None:
        pytest.skip("there is no uv for this machine")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "tools.pth").write_text(sysconfig.get_path("purelib") + "\n")
    told = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"file://{wheels}/simple", "PIP_FIND_LINKS": str(wheels)}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    command = [str(tmp_path / "env" / "bin" / "python"), "-P", str(PROGRAM), wanted]
    done = subprocess.run(command, cwd=tmp_path, env={**kept, **told, **settings}, capture_output=True, text=True)
    found = site / "hone_probe-1.0.dist-info" / "INSTALLER"
    assert (done.returncode == 0) == (installer is not None), done.stderr
    assert installer == (found.read_text().strip() if found.exists() else None), done.stderr
    assert ("installing with pip" in done.stderr) == ("UV_FIND_LINKS" in settings or installer is None)
