"""The text in dataset files, for training a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hone.data.files import read_rows

COLUMNS = ("messages", "prompt", "text")


def texts_of(files: Sequence[Path], max_samples: int) -> Iterator[str]:
    """Every text in the message, prompt or text columns of dataset files; the lines of other files.

    Raises:
        DataError: a file is missing or cannot be read.
    """
    for path in files:
        if path.suffix in (".txt", ".md"):
            yield from path.read_text(encoding="utf-8").splitlines(keepends=True)
            continue
        for _, row in read_rows([str(path)], needs=[], max_samples=max_samples):
            column = next((row[name] for name in COLUMNS if row.get(name)), "")
            yield from _texts(column)


def _texts(column: Any) -> Iterator[str]:
    if isinstance(column, str):
        yield column
    else:
        yield from (str(message["content"]) for message in column if isinstance(message, dict))
