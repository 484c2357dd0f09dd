"""The transcripts of docs/troubleshooting.md are what Hone really says."""

import re
import shlex
from pathlib import Path

import pytest
from support.launch import hone

from hone.preflight.rules import index, index_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
TRANSCRIPT = re.compile(r"^```text\n\$ (?P<command>hone .+?[^\\])\n(?P<output>.*?)^```$", re.M | re.S)


def transcripts() -> list[tuple[str, str]]:
    """``(command, what is shown)`` of every transcript of the page."""
    found = TRANSCRIPT.finditer(PAGE.read_text(encoding="utf-8"))
    return [(match["command"].replace("\\\n", " "), match["output"]) for match in found]


def said(command: str, folder: Path, number: int) -> tuple[int, str]:
    """Exit code and output of a command, the folder shown as a dot."""
    ended = hone(*shlex.split(command)[1:], log=folder / f".log{number}", cwd=folder)
    return ended.code, ended.output.replace(str(folder), ".")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the page's commands have made their files."""
    folder = tmp_path_factory.mktemp("troubleshooting")
    text = PAGE.read_text(encoding="utf-8")
    for name, body in re.findall(r"^```python (\S+)\n(.*?)^```$", text, re.M | re.S):
        (folder / name).write_text(body)
    (block,) = re.findall(r"^```bash\n(.*?)^```$", text, re.M | re.S)
    for number, line in enumerate(block.replace("\\\n", " ").splitlines()):
        ended = hone(*shlex.split(line)[1:], log=folder / f".make{number}", cwd=folder)
        assert ended.code == 0, ended.output
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(transcripts())))
def test_the_transcripts_are_true(number, folder):
    command, shown = transcripts()[number]
    code, output = said(command, folder, number)
    assert output == shown, f"{command}\n{output}"
    assert code == 2 and "Traceback" not in output


def test_the_index_is_complete_and_fresh():
    assert len(transcripts()) >= 10
    text = PAGE.read_text(encoding="utf-8")
    assert text == index_page(text), "run scripts/make_docs"
    assert all(f"| {entry.code} |" in text for entry in index())
