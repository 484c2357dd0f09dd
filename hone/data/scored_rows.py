"""Read a few rows of a dataset as a reward receives them, without a tokenizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.data.files import EVERY_COLUMN, Row, read_rows
from hone.data.messages import plain
from hone.data.prompts import NO_SOURCE, other_columns
from hone.data.types import Sample

REFERENCES = ("solution", "answer", "response", "completion", "output")
"""Columns, or entries of extra_info, that may contain a worked answer."""
_LOOKED_AT = 2000


@dataclass(frozen=True)
class ScoredRow:
    """One row of a dataset."""

    sample: Sample  # input of the reward, without prompt tokens
    worked: tuple[str, ...] = ()  # worked answers in the file
    # messages after the prompt of a worked episode with tool calls; empty without one
    demonstration: tuple[dict[str, Any], ...] = ()


def scored_rows(
    files: Sequence[str | Path] | str | Path,
    *,
    reward_fn_key: str,
    limit: int,
    messages_key: str = "messages",
    prompt_key: str = "prompt",
) -> list[ScoredRow]:
    """Read up to ``limit`` rows among the first 2000, taking the data sources in turn.

    Raises DataError: a file cannot be read.
    """
    rows = read_rows(
        files, required=(), optional=EVERY_COLUMN, defaults={reward_fn_key: NO_SOURCE}, max_rows=_LOOKED_AT
    )
    by_source: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_source[str(row.values[reward_fn_key])].append(row)
    turns = max(map(len, by_source.values()), default=0)
    chosen = [group[turn] for turn in range(turns) for group in by_source.values() if turn < len(group)][:limit]
    return [_scored(row, reward_fn_key, messages_key, prompt_key) for row in chosen]


def samples_by_uid(files: Sequence[str | Path], *, reward_fn_key: str) -> dict[str, Sample]:
    """Return every row of the files as a reward receives it, by its uid, without prompt tokens."""
    rows = read_rows(files, required=(), optional=EVERY_COLUMN, defaults={reward_fn_key: NO_SOURCE})
    return {row.uid: _scored(row, reward_fn_key, "messages", "prompt").sample for row in rows}


def _scored(row: Row, reward_fn_key: str, messages_key: str, prompt_key: str) -> ScoredRow:
    reward, extra = plain(row.values.get("reward_model")), plain(row.values.get("extra_info"))
    extra = extra if isinstance(extra, dict) else {}
    prompt = plain(row.values.get(prompt_key))
    sample = Sample(
        uid=row.uid,
        prompt_ids=[],
        messages=prompt if isinstance(prompt, list) and all(isinstance(part, dict) for part in prompt) else None,
        data_source=str(row.values[reward_fn_key]),
        ground_truth=reward.get("ground_truth") if isinstance(reward, dict) else None,
        extra_info={**other_columns(row, prompt_key, reward_fn_key), **extra},
        agent_name=row.values.get("agent_name"),
    )
    messages = plain(row.values.get(messages_key))
    answers = [_last_answer(messages)]
    answers += [place.get(name) for place in (row.values, extra) for name in REFERENCES]
    worked = tuple(dict.fromkeys(text for text in answers if isinstance(text, str) and text.strip()))
    return ScoredRow(sample, worked, _demonstration(messages, sample.messages or []))


def _demonstration(messages: Any, prompt: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    """Return the turns after the prompt if some of them call tools, and the last one answers."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return ()
    turns = messages[len(prompt) :]
    answered = isinstance(_last_answer(turns), str)
    return tuple(turns) if answered and any(turn.get("tool_calls") for turn in turns) else ()


def _last_answer(messages: Any) -> Any:
    last = messages[-1] if isinstance(messages, list) and messages else None
    return last.get("content") if isinstance(last, dict) and last.get("role") == "assistant" else None
