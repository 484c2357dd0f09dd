"""Records of samples, as in the rollout archive, and episodes as text: messages, tool calls and rewards in order."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Required, TypedDict, Unpack

import pyarrow as pa

from hone.data.types import Trajectory, row_of
from hone.insight.archive.read import table_records


class ScoreValues(TypedDict, total=False):
    """Values of a record that come from the score; absent ones are null, or empty."""

    score: Required[float | None]  # reward, None without a verdict
    unshaped: float | None  # reward before the length penalty, None without one
    terms: Mapping[str, float] | None  # named parts of the reward
    extra: Mapping[str, Any] | None  # other values that the scorer returned
    error: str | None  # why there is no verdict, or None
    cause: str | None  # kind of the error


def trajectory_record(
    trajectory: Trajectory, *, prompt_text: str | None = None, **values: Unpack[ScoreValues]
) -> dict[str, Any]:
    """Return one sample as in the rollout archive: tokens, text, mask and scores."""
    whole = trajectory.rollout_log_probs == trajectory.sampling_log_probs
    return episode_record(trajectory, prompt_text=prompt_text, **values) | {
        "prompt_ids": list(trajectory.prompt_ids),
        "response_ids": list(trajectory.response_ids),
        "response_mask": list(trajectory.response_mask),
        "token_versions": list(trajectory.token_versions) or None,
        "rollout_log_probs": list(trajectory.rollout_log_probs),
        "sampling_log_probs": None if whole else list(trajectory.sampling_log_probs),
    }


def episode_record(
    trajectory: Trajectory, *, prompt_text: str | None = None, **values: Unpack[ScoreValues]
) -> dict[str, Any]:
    """Return the part of :func:`trajectory_record` without a value per token."""
    place = row_of(trajectory.uid).rpartition(":")[2]
    return {
        "uid": trajectory.uid,
        "index": trajectory.index,
        "part": trajectory.part,
        "data_source": trajectory.sample.data_source,
        "row": int(place) if place.isdecimal() else None,
        "seed": trajectory.seed,
        "prompt": prompt_text,
        "messages": trajectory.sample.messages,
        "text": trajectory.text,
        "ground_truth": trajectory.sample.ground_truth,
        "stop_reason": trajectory.stop_reason.value,
        "seconds": trajectory.seconds,
        "score": values["score"],
        "unshaped": values.get("unshaped"),
        "terms": dict(values.get("terms") or {}),
        "extra": dict(values.get("extra") or {}),
        "error": values.get("error"),
        "cause": values.get("cause"),
        "episode": None if trajectory.episode is None else trajectory.episode.record(),
    }


def weight_versions(record: Mapping[str, Any]) -> tuple[int, int]:
    """Return the lowest and the highest weight version that sampled a token; (0, 0) if unknown."""
    sampled = [version for version in record["token_versions"] or () if version >= 0]
    return (min(sampled), max(sampled)) if sampled else (0, 0)


def shown_score(record: Mapping[str, Any]) -> str:
    return "no verdict" if record["score"] is None else f"score {record['score']:g}"


SHOWN = 8  # number of episodes of a step that are written as text
_LINE = "-" * 100


def sampled_traces(table: pa.Table, count: int = SHOWN) -> str | None:
    """Return some episodes of several turns, spread evenly over a step's sequences; None if there are none."""
    parts = zip(table["episode"].is_valid().to_pylist(), table["part"].to_pylist(), strict=True)
    multi_turn = [row for row, (several, part) in enumerate(parts) if several and part == 0]
    if not multi_turn:
        return None
    every = max(1, len(multi_turn) // count)
    shown = table.take(multi_turn[::every][:count])
    return f"\n{_LINE}\n\n".join(trace(record) for record in table_records(shown))


def trace(record: Mapping[str, Any]) -> str:
    """Render one episode: its prompt, its turns with their calls and rewards, and its end."""
    episode = record["episode"]
    lines = [_head(record), ""]
    lines += [_message_text(message["role"], message) for message in record["messages"] or []]
    if episode is None:
        lines.append(f"assistant: {record['text']}")
    else:
        delegated = episode.get("conversations") or []
        of_others = {turn for part in delegated for turn in _turns_of(part)}
        lines += _conversation(episode, episode["messages"], (n for n in itertools.count() if n not in of_others))
        for part in delegated:
            lines += ["", "sub-agent:", *_conversation(episode, part["messages"], iter(_turns_of(part)))]
        lines.append(f"\nended: {episode['end']}" + (f"\nerror: {episode['error']}" if episode["error"] else ""))
    return "\n".join(lines) + "\n"


def turn_messages(episode: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the message of each assistant turn of an episode, those of its sub-agents included, by the number of the turn."""
    said: dict[int, Mapping[str, Any]] = {}
    delegated = episode.get("conversations") or []
    for part in delegated:
        said |= zip(_turns_of(part), _said(part["messages"]), strict=False)
    others = (turn for turn in itertools.count() if not any(turn in _turns_of(part) for part in delegated))
    said |= zip(others, _said(episode["messages"]), strict=False)
    return [said[turn] for turn in sorted(said)]


def _said(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [message for message in messages if message["role"] == "assistant"]


def _turns_of(part: Mapping[str, Any]) -> range:
    return range(part["turn"], part["turn"] + part["turns"])


def _conversation(
    episode: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], turns: Iterator[int]
) -> Iterator[str]:
    """Yield the lines of a conversation, given the numbers of its turns in the episode."""
    for message in messages:
        if message["role"] != "assistant":
            yield _message_text(message["role"], message)
            continue
        turn = next(turns)
        earned = episode["turn_rewards"][turn] if turn < len(episode["turn_rewards"]) else 0.0
        yield _message_text(f"assistant, turn {turn + 1}" + (f", reward {earned:g}" if earned else ""), message)
        yield from (_call_text(call) for call in episode["tool_calls"] if call["turn"] == turn)


def _head(record: Mapping[str, Any]) -> str:
    terms = ", ".join(f"{name} {value:g}" for name, value in (record["terms"] or {}).items())
    failure = f": {record['error']}" if record["error"] else ""
    return (
        f"row {record['uid']}, episode {record['index']}: {shown_score(record)}"
        + (f" ({terms})" if terms else "")
        + failure
    )


def _message_text(who: str, message: Mapping[str, Any]) -> str:
    name = f" {message['name']}" if message.get("name") else ""
    thoughts = message.get("reasoning_content")
    parts = [f"{who}{name}:", *([f"(thinks) {thoughts}"] if thoughts else []), _text(message.get("content"))]
    parts += [
        f"(calls) {call['function']['name']}({call['function']['arguments']})"
        for call in message.get("tool_calls") or []
    ]
    return " ".join(part for part in parts if part)


def _call_text(call: Mapping[str, Any]) -> str:
    notes = [call["status"], *([f"{call['attempts']} tries"] if call["attempts"] > 1 else [])]
    notes += (["cut"] if call["truncated"] else []) + ([f"reward {call['reward']:g}"] if call["reward"] else [])
    return f"    {call['name'] or '?'}: {', '.join(notes)}"


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
