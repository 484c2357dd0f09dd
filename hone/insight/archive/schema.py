"""Columns of the rollout archive.

    <run>/rollouts/step_<N>.parquet      sequences of a training step
    <run>/validation/step_<N>.parquet    sequences of a validation
    <run>/rollouts/vocabulary.parquet    text of every token id: columns `id` (int32) and `text`

A row is one sequence: an episode, or a segment of an episode whose history was rewritten (`part`). Its identity is
(`step`, `uid`, `index`, `part`). Columns by token have one value per response token. What a run did not compute is null; so are the
token ids of an import whose source has text alone.

The metadata of a file has `hone.archive`, the version of the format, and `hone.rows`, the number of sequences of the step. A file with
fewer rows has only the prompts that are stored at every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hone.text import read_yaml

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 1  # version of the format
VERSION_KEY, ROWS_KEY = b"hone.archive", b"hone.rows"  # keys of the metadata of a file
INT, NUMBER, TEXT, JSON = "int32", "float64", "string", "json"
IDS, INTS, FLOATS = "list<int64>", "list<int32>", "list<float32>"


@dataclass(frozen=True)
class Column:
    """One column of the archive."""

    name: str
    kind: str  # arrow type; ``json`` is a string with JSON
    about: str  # meaning, with its unit
    required: bool = False  # True if no row may lack a value

    @property
    def by_token(self) -> bool:
        """True if the column has one value per response token."""
        return self.kind in (IDS, INTS, FLOATS) and self.name != "prompt_ids"


COLUMNS = tuple(
    Column(name, kind, about, bool(required))
    for name, (kind, about, *required) in read_yaml(
        Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    ).items()
)
BY_NAME = {column.name: column for column in COLUMNS}


def arrow_schema() -> pa.Schema:
    """Return the schema of an archive file, without metadata."""
    import pyarrow as pa

    types = {INT: pa.int32(), NUMBER: pa.float64(), TEXT: pa.string(), JSON: pa.string()}
    types |= {IDS: pa.list_(pa.int64()), INTS: pa.list_(pa.int32()), FLOATS: pa.list_(pa.float32())}
    return pa.schema([pa.field(column.name, types[column.kind], nullable=not column.required) for column in COLUMNS])
