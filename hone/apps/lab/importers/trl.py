"""Importer of the completions that trainers of TRL log (``log_completions=True``).

A file ``completions_<step>.parquet`` has the columns ``step``, ``prompt``, ``completion``, one for each reward function, and
``advantage``. It has no tokens. The score is column ``reward`` if there is one, else the sum of all numeric columns, that is with
reward weights of 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from hone.apps.lab.importers.base import (
    Importer,
    Row,
    answer_text,
    conversation,
    episode,
    matching_files,
    number,
    prompt_uid,
    split_values,
)
from hone.errors import DataError
from hone.text import valid_data

_OWN = {"step", "prompt", "completion", "advantage", "reward", "mode"}


def _read(path: Path) -> Iterator[Row]:
    try:
        lines = pq.read_table(path).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"the file cannot be read: {error}", where=str(path), fix="remove the file") from None
    for line in map(valid_data, lines):
        prompt, messages = conversation(line["prompt"])
        terms, extra = split_values({name: value for name, value in line.items() if name not in _OWN})
        if line.get("advantage") is not None:
            extra["advantage"] = line["advantage"]
        score = number(line.get("reward"))
        if score is None and terms:
            score = sum(terms.values())
        _, turns = conversation(line["completion"])
        yield {
            "step": int(line["step"]),
            "uid": prompt_uid(line["prompt"]),
            "fate": "validation" if line.get("mode") == "eval" else "trained",
            "prompt": prompt,
            "messages": messages,
            "text": answer_text(line["completion"]),
            "score": score,
            "terms": terms,
            "extra": extra,
            "episode": None if turns is None else episode(turns),
        }


TRL = Importer(
    "trl",
    "TRL: `completions/completions_<step>.parquet` of log_completions",
    lambda source: matching_files(source, "completions_*.parquet"),
    _read,
)
