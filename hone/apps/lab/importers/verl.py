"""Importer of the dumps of verl (``trainer.rollout_data_dir`` and ``trainer.validation_data_dir``).

A file ``<step>.jsonl`` has a line per answer: ``input``, ``output``, ``gts``, ``score``, ``step``, and the other values of the reward
function. It has no tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hone.apps.lab.importers.base import (
    Importer,
    Row,
    first_row,
    matching_files,
    number,
    prompt_uid,
    read_json_lines,
    split_values,
)

_OWN = {"input", "output", "gts", "score", "step", "uid"}


def _files(source: Path) -> list[Path]:
    files = [file for file in matching_files(source, "*.jsonl") if file.stem.isdecimal()]
    return files if files and {"input", "output", "score"} <= first_row(files[0]).keys() else []


def _read(path: Path) -> Iterator[Row]:
    for line in read_json_lines(path):
        terms, extra = split_values({name: value for name, value in line.items() if name not in _OWN})
        yield {
            "step": int(line.get("step", path.stem)),
            "uid": str(line["uid"]) if line.get("uid") else prompt_uid(line["input"]),
            "fate": "trained",
            "prompt": line["input"],
            "text": line["output"],
            "ground_truth": line.get("gts"),
            "score": number(line["score"]),
            "terms": terms,
            "extra": extra,
        }


VERL = Importer("verl", "verl: `<step>.jsonl` of trainer.rollout_data_dir", _files, _read)
