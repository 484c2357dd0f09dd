"""Importer of the rollout data that slime and miles save (``--save-debug-rollout-data``).

A file is ``torch.save`` of a dictionary with ``rollout_id`` and ``samples``. A sample has ``tokens`` (prompt and response),
``response_length``, ``loss_mask``, ``rollout_log_probs``, ``weight_versions``, ``reward``, ``label`` and ``status``.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.apps.lab.importers.base import (
    Importer,
    Row,
    conversation,
    matching_files,
    number,
    prompt_uid,
    split_values,
)
from hone.errors import DataError
from hone.text import valid_data

_STOPS = {"completed": "stop", "truncated": "length", "aborted": "aborted", "failed": "error"}


def _read(path: Path) -> Iterator[Row]:
    data = _loaded(path)
    fate = "validation" if "eval" in path.stem else "trained"
    for sample in data["samples"]:
        yield _row(valid_data(dict(sample)), int(data["rollout_id"]), fate)


def _loaded(path: Path) -> Mapping[str, Any]:
    import torch

    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"the file cannot be read: {_first_line(error)}", where=str(path), fix="copy it again, or remove it"
        ) from None
    except pickle.UnpicklingError as error:
        raise DataError(
            f"the file holds more than plain values and tensors: {_first_line(error)}",
            where=str(path),
            why="other Python objects would run code of the file while they are loaded",
            fix="save it again with plain samples: torch.save({'rollout_id': ..., 'samples': [sample.to_dict(), ...]}, FILE)",
        ) from None
    if not isinstance(data, Mapping) or "rollout_id" not in data or not isinstance(data.get("samples"), Sequence):
        raise DataError(
            "no dictionary with rollout_id and samples", where=str(path), fix="name files of --save-debug-rollout-data"
        )
    return data


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _row(sample: dict[str, Any], step: int, fate: str) -> Row:
    prompt, messages = conversation(sample.get("prompt"))
    status = str(sample.get("status") or "completed")
    if fate == "trained" and status in ("aborted", "failed", "pending"):
        fate = "failed"
    elif fate == "trained" and sample.get("remove_sample"):
        fate = "filtered"
    reward = sample.get("reward")
    terms, extra = split_values(reward) if isinstance(reward, Mapping) else ({}, {})
    score = number(reward)
    if score is None:
        score = terms.get("score", terms.get("reward"))
    group = sample.get("group_index")
    return {
        "step": step,
        "uid": prompt_uid(sample.get("prompt")) if group is None else f"group:{group}",
        "fate": fate,
        "prompt": prompt,
        "messages": messages,
        "text": sample.get("response") or "",
        "ground_truth": sample.get("label"),
        "stop_reason": _STOPS.get(status),
        "score": score,
        "terms": terms,
        "extra": {**extra, **({"metadata": sample["metadata"]} if sample.get("metadata") else {})},
        **_tokens(sample),
    }


def _tokens(sample: Mapping[str, Any]) -> dict[str, Any]:
    tokens, length = _list(sample.get("tokens")), int(sample.get("response_length") or 0)
    if not tokens or length > len(tokens):
        return {}
    mask = _list(sample.get("loss_mask")) or [1] * length
    versions = {str(version) for version in sample.get("weight_versions") or ()}
    one = versions.pop() if len(versions) == 1 else ""
    columns = {
        "prompt_ids": tokens[: len(tokens) - length],
        "response_ids": tokens[len(tokens) - length :],
        "response_mask": mask,
        "loss_mask": mask,
        "rollout_log_probs": _list(sample.get("rollout_log_probs")) or None,
        "token_versions": [int(one) if sampled else -1 for sampled in mask] if one.isdecimal() else None,
    }
    by_token = ("response_mask", "loss_mask", "rollout_log_probs", "token_versions")
    return {
        name: value for name, value in columns.items() if name not in by_token or value is None or len(value) == length
    }


def _list(values: Any) -> list[Any]:
    return [] if values is None else values.tolist() if hasattr(values, "tolist") else list(values)


SLIME = Importer(
    "slime",
    "slime and miles: `*.pt` of --save-debug-rollout-data",
    lambda source: matching_files(source, "*.pt"),
    _read,
)
