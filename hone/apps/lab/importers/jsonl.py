"""Importers of rows whose columns have the names of a table: plain JSON lines, and the files of verl and of TRL.

JSON lines: what `hone archive export` writes, or rows with a prompt, a completion and a reward by usual names.

verl (``trainer.rollout_data_dir`` and ``trainer.validation_data_dir``): a file ``<step>.jsonl`` has a line per answer: ``input``,
``output``, ``gts``, ``score``, ``step``, and the other values of the reward function. It has no tokens.

TRL (``log_completions=True``): a file ``completions_<step>.parquet`` has the columns ``step``, ``prompt``, ``completion``, one for
each reward function, and ``advantage``. It has no tokens. The score is column ``reward`` if there is one, else the sum of all numeric
columns, that is with reward weights of 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hone.apps.lab.importers.base import (
    Importer,
    Row,
    answer_text,
    conversation,
    episode,
    first_row,
    matching_files,
    number,
    prompt_uid,
    read_json_lines,
    split_values,
)
from hone.errors import DataError
from hone.insight.archive.read import require_archive
from hone.insight.archive.schema import BY_NAME, COLUMNS
from hone.insight.run_files import atomic_file, jsonable
from hone.text import valid_data


def export_records(folder: Path, out: Path, step: int | None = None) -> int:
    """Write the sequences of a step, or of all without one, as JSON lines; return their number."""
    archive, rows = require_archive(folder), 0
    with atomic_file(out) as file:
        for number in archive.steps() if step is None else [step]:
            for record in archive.records(number):
                line = json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False)
                file.write(f"{line}\n".encode())
                rows += 1
    return rows


Names = Mapping[str, tuple[str, ...]]
"""Names of each value, the first that a row has counts."""
_NAMES: Names = {
    "prompt": ("prompt", "messages", "input", "question", "query", "instruction"),
    "completion": ("completion", "response", "output", "generation", "text"),
    "score": ("reward", "score"),
    "step": ("step", "global_step", "iteration"),
    "uid": ("uid", "group_id", "prompt_id", "example_id"),
    "ground_truth": ("ground_truth", "answer", "label", "target", "gts"),
    "prompt_ids": ("prompt_ids", "prompt_token_ids", "prompt_tokens"),
    "response_ids": ("response_ids", "completion_ids", "response_token_ids", "completion_tokens"),
    "response_mask": ("response_mask", "completion_mask", "loss_mask"),
    "rollout_log_probs": ("rollout_log_probs", "logprobs", "log_probs", "completion_logprobs"),
    "advantages": ("advantages",),
}
_OF_VERL: Names = {
    "prompt": ("input",),
    "completion": ("output",),
    "score": ("score",),
    "step": ("step",),
    "uid": ("uid",),
    "ground_truth": ("gts",),
}
_OF_TRL: Names = {"prompt": ("prompt",), "completion": ("completion",), "score": ("reward",), "step": ("step",)}
_REQUIRED = {column.name for column in COLUMNS if column.required}


def _read_lines(path: Path) -> Iterator[Row]:
    for place, line in enumerate(read_json_lines(path), 1):
        if line.keys() >= _REQUIRED and line.keys() <= BY_NAME.keys():
            yield line
        else:
            yield _row_of(line, f"{path}, row {place}", _NAMES)


def _files_of_verl(source: Path) -> list[Path]:
    files = [file for file in matching_files(source, "*.jsonl") if file.stem.isdecimal()]
    return files if files and {"input", "output", "score"} <= first_row(files[0]).keys() else []


def _read_verl(path: Path) -> Iterator[Row]:
    for place, line in enumerate(read_json_lines(path), 1):
        yield _row_of({"step": path.stem, **line, "score": line["score"]}, f"{path}, row {place}", _OF_VERL)


def _read_trl(path: Path) -> Iterator[Row]:
    try:
        lines = pq.read_table(path).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"the file cannot be read: {error}", where=str(path), fix="remove the file") from None
    for line in map(valid_data, lines):
        advantage, mode = line.pop("advantage", None), line.pop("mode", None)
        row = _row_of(line, str(path), _OF_TRL)
        if advantage is not None:
            row["extra"]["advantage"] = advantage
        if row["score"] is None and row["terms"]:
            row["score"] = sum(row["terms"].values())
        yield row | {"fate": "validation" if mode == "eval" else "trained"}


def _row_of(line: Mapping[str, Any], where: str, usual: Names) -> Row:
    names = {value: next((name for name in known if name in line), None) for value, known in usual.items()}
    if names["prompt"] is None or names["completion"] is None:
        missing = "prompt" if names["prompt"] is None else "completion"
        raise DataError(
            f"no {missing} among the keys {', '.join(sorted(line))}",
            where=where,
            fix=f"name it by one of {', '.join(usual[missing])}",
        )
    known = {value: line[name] for value, name in names.items() if name is not None and line[name] is not None}
    prompt, messages = conversation(known.get("prompt"))
    _, turns = conversation(known.get("completion"))
    terms, extra = split_values({name: value for name, value in line.items() if name not in names.values()})
    return {
        "step": int(known.get("step", 0)),
        "uid": str(known["uid"]) if "uid" in known else prompt_uid(known.get("prompt")),
        "fate": "trained",
        "prompt": prompt,
        "messages": messages,
        "text": answer_text(known.get("completion")),
        "ground_truth": known.get("ground_truth"),
        "score": number(known.get("score")),
        "terms": terms,
        "extra": extra,
        "episode": None if turns is None else episode(turns),
        **_tokens(known),
    }


def _tokens(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns by token whose length is that of the response; an answer's tokens are sampled unless a mask says so."""
    ids = known.get("response_ids")
    if not isinstance(ids, list):
        return {}
    by_token = {name: known.get(name) for name in ("response_mask", "rollout_log_probs", "advantages")}
    columns = {
        name: column for name, column in by_token.items() if isinstance(column, list) and len(column) == len(ids)
    }
    columns.setdefault("response_mask", [1] * len(ids))
    prompt = known.get("prompt_ids")
    return {"prompt_ids": prompt if isinstance(prompt, list) else None, "response_ids": ids, **columns}


JSONL = Importer(
    "jsonl",
    "JSON lines: of `hone archive export`, or with prompt, completion and reward",
    lambda source: matching_files(source, "*.jsonl"),
    _read_lines,
)
VERL = Importer("verl", "verl: `<step>.jsonl` of trainer.rollout_data_dir", _files_of_verl, _read_verl)
TRL = Importer(
    "trl",
    "TRL: `completions/completions_<step>.parquet` of log_completions",
    lambda source: matching_files(source, "completions_*.parquet"),
    _read_trl,
)
