"""Progress of a loop: a bar on a terminal, lines elsewhere, and silence for a short one."""

import contextlib
import io
import os
import pty
import re

from huggingface_hub.utils import enable_progress_bars

from hone.progress import progress, tracked


def test_lines_without_a_terminal():
    stream = io.StringIO()
    with progress("answers", 4, every=0, stream=stream) as bar:
        for _ in range(4):
            bar.advance()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4 and all(
        re.fullmatch(r"answers: \d of 4, [\d.]+/(s|min), \d+:\d\d left", line) for line in lines
    )
    assert "4 of 4" in lines[-1] and lines[-1].endswith("0:00 left")


def test_a_short_loop_is_silent_and_stdout_always(capfd):
    assert list(tracked(range(3), "rows", 3)) == [0, 1, 2]
    assert capfd.readouterr() == ("", "")


def read_terminal(master: int) -> str:
    """All that was written to a pseudo-terminal whose other end is closed; one read may return a part of it."""
    parts = []
    with os.fdopen(master, "rb", buffering=0) as reader, contextlib.suppress(OSError):  # EIO: the end
        while part := reader.read(1 << 16):
            parts.append(part)
    return b"".join(parts).decode()


def test_a_bar_on_a_terminal():
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal, progress("answers", 2, stream=terminal) as bar:
        bar.advance()
        bar.advance()
    shown = read_terminal(master)
    assert "answers" in shown and "2/2" in shown and re.search(r"[\d.]+/(s|min)", shown) and "0:00:00" in shown


def test_a_download_without_a_terminal_writes_lines(monkeypatch):
    from hone.hub import download

    enable_progress_bars()  # a model that was loaded in this process before has disabled them
    monkeypatch.setattr(download, "LINE_SECONDS", 0)
    stream = io.StringIO()
    with download.plain_bar()(total=4e6, unit="B", unit_scale=True, desc="files", file=stream) as bar:
        for _ in range(4):
            bar.update(1e6)
    lines = stream.getvalue().splitlines()
    assert lines and all(re.fullmatch(r"files: [\d.]+M of 4.00M, \S+, \S+ left", line) for line in lines)
    assert "\r" not in stream.getvalue()
