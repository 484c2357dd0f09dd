"""Labels and comments that a person gives to answers: `<run>/labels.jsonl`, one object per line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hone.apps.lab.viewer.index import Rows
from hone.apps.lab.viewer.queries import MASKS
from hone.apps.lab.viewer.run import Archived, ViewedRun
from hone.errors import HoneError
from hone.insight.run_files import disk_errors, now
from hone.text import json_lines, valid_text

FILE = "labels.jsonl"
USUAL = ("good", "bad", "reward wrong", "look again")
"""Labels that are offered before any is given."""
_LONGEST = 4000


def read_labels(path: Path) -> list[dict[str, Any]]:
    """Return the labels of a run directory, the newest last; lines that are damaged are left out."""
    file = _labels_file(path)
    entries = []
    for line in json_lines(file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict) and {"step", "uid", "index", "part", "label", "comment", "at"} <= set(entry):
            entries.append(entry)
    return entries


def _labels_file(path: Path) -> Path:
    """Return the file of labels of a run directory."""
    file = path / FILE
    if file.is_symlink() or (file.exists() and not file.is_file()):
        raise HoneError(
            "labels are kept in a file of the run, and this is none",
            why="a link would be followed, and another file read and changed",
            where=str(file),
            fix=f"remove {file}",
            code="E-view-label",
        )
    return file


def label_list(run: ViewedRun, kind: str) -> dict[str, Any]:
    """Return the labels of a kind of samples, and the ``names`` to offer, the most used first."""
    labels = [entry for entry in read_labels(run.path) if entry.get("kind", "rollouts") == kind]
    used = Counter(entry["label"] for entry in labels if entry["label"])
    names = [name for name, _ in used.most_common()]
    return {"labels": labels, "names": [*names, *(name for name in USUAL if name not in used)]}


def add_label(run: ViewedRun, kind: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    label, comment = (str(entry.get(name) or "").strip()[:_LONGEST] for name in ("label", "comment"))
    if not label and not comment:
        raise HoneError("a label needs a name or a comment", code="E-view-label")
    address = {
        "step": int(entry["step"]),
        "uid": str(entry["uid"]),
        "index": int(entry["index"]),
        "part": int(entry["part"]),
    }
    run.archived(kind).record(address["step"], address["uid"], address["index"], address["part"])
    line = {"at": now(), "kind": kind, **address, "label": label, "comment": comment}
    file = _labels_file(run.path)
    with disk_errors(file), file.open("a", encoding="utf-8", newline="\n") as out:
        out.write(valid_text(json.dumps(line, ensure_ascii=False)) + "\n")
    return line


def _labelled(archived: Archived, rows: Rows, value: str) -> np.ndarray:
    """Return the rows whose label or comment contains the value; ``any`` means all labelled rows."""
    wanted = value.casefold()
    labelled = {
        (entry["step"], entry["uid"], entry["index"], entry["part"])
        for entry in read_labels(archived.run_path)
        if entry.get("kind", "rollouts") == archived.kind
        and (wanted == "any" or wanted in f"{entry['label']} {entry['comment']}".casefold())
    }
    result = np.zeros(len(rows), bool)
    for step, uid, index, part in labelled:
        code = archived.index.code("uid", uid)
        if code is not None:
            result |= (rows["step"] == step) & (rows["uid"] == code) & (rows["index"] == index) & (rows["part"] == part)
    return result


MASKS["label"] = _labelled
