"""Memory that a process may use: the machine's, or less if its container says so, in either version of control groups."""

from pathlib import Path

import psutil

from hone.insight.environment import usable_memory


def test_memory_is_that_of_the_container_if_it_has_less(tmp_path: Path) -> None:
    total = psutil.virtual_memory().total
    assert usable_memory(tmp_path) == total
    old = tmp_path / "memory/memory.limit_in_bytes"
    old.parent.mkdir()
    old.write_text("2000\n")
    assert usable_memory(tmp_path) == 2000
    for text, expected in (("1000\n", 1000), (f"{2 * total}\n", total), ("max\n", 2000)):
        (tmp_path / "memory.max").write_text(text)
        assert usable_memory(tmp_path) == expected
