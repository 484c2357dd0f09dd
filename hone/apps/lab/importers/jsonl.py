"""Importer of plain JSON lines: what `hone archive export` writes, or rows with a prompt, a completion and a reward by usual names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hone.apps.lab.importers.base import (
    Importer,
    Row,
    answer_text,
    conversation,
    episode,
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


_NAMES: dict[str, tuple[str, ...]] = {
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
"""Usual names of each value, the first that a row has counts."""
_REQUIRED = {column.name for column in COLUMNS if column.required}


def _read(path: Path) -> Iterator[Row]:
    for place, line in enumerate(read_json_lines(path), 1):
        if line.keys() >= _REQUIRED and line.keys() <= BY_NAME.keys():
            yield line
        else:
            yield _guessed(line, f"{path}, row {place}")


def _guessed(line: Mapping[str, Any], where: str) -> Row:
    names = {value: next((name for name in usual if name in line), None) for value, usual in _NAMES.items()}
    if names["prompt"] is None or names["completion"] is None:
        missing = "prompt" if names["prompt"] is None else "completion"
        raise DataError(
            f"no {missing} among the keys {', '.join(sorted(line))}",
            where=where,
            fix=f"name it by one of {', '.join(_NAMES[missing])}",
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
    _read,
)
