"""Progress of commands: a bar on a terminal, and nothing on stdout."""

import os
import pty
import re
import subprocess
import sys

import pytest
from support.patience import LONG
from support.world import World

pytestmark = [pytest.mark.slow, pytest.mark.application("hone/progress.py", "hone/cli")]


def on_a_terminal(*words: object) -> tuple[str, str]:
    """Return what a command writes to its terminal (as stderr) and to its piped stdout."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "hone.cli.main", *map(str, words)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=slave, env={**os.environ, "TERM": "xterm"}
    ) as process:
        os.close(slave)
        shown = b""
        while True:
            try:
                part = os.read(master, 1 << 16)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            shown += part
        out = process.stdout.read().decode() if process.stdout else ""
        assert process.wait(LONG) == 0, shown.decode() + out
    os.close(master)
    return shown.decode(), out


@pytest.mark.parametrize("command", ["eval", "make"])
def test_a_terminal_shows_a_bar_and_stdout_is_the_same(world: World, tmp_path, command: str) -> None:
    def words(folder) -> list[object]:
        return {
            "eval": [
                "eval",
                world.model,
                "--data",
                world.val,
                "--max-samples",
                4,
                "--max-response-length",
                4,
                "--json",
            ],
            "make": ["data", "make", "arithmetic", "--out", folder, "--size", 50, "--val-size", 5],
        }[command]

    shown, out = on_a_terminal(*words(tmp_path / "a"))
    what = {"eval": "answers", "make": "problems"}[command]
    assert what in shown and "left" in shown and re.search(r"[\d.]+/(s|min)", shown)
    piped = subprocess.run(
        [sys.executable, "-m", "hone.cli.main", *map(str, words(tmp_path / "b"))],
        capture_output=True, text=True, timeout=LONG, check=True,
    )  # fmt: skip
    assert piped.stdout == out.replace(str(tmp_path / "a"), str(tmp_path / "b")) and "left" not in out
