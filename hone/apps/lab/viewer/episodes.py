"""Episodes as a tree of turns: messages, tool calls, sub-agents, rewritten segments and time.

Images of archived samples: their names in token ids and messages, and their files.

Files are in the folder ``images`` of the archive, under the key that the token ids have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.apps.lab.viewer.run import Archived, plain
from hone.data.images import IMAGE_PARTS, content_text, key_of, place_of
from hone.errors import HoneError
from hone.insight.archive.read import find_image, keys_in, name_of

TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".webp": "image/webp", ".gif": "image/gif"}
"""Content type of the files that a browser shows, by ending."""
_NAME = re.compile(r"[0-9a-f]{11}")


@dataclass(frozen=True)
class Picture:
    """Content of an image, with its content type."""

    content: bytes
    media_type: str


def picture(archived: Archived, name: str) -> Picture:
    image = find_image(archived.index.archive.folder, int(name, 16)) if _NAME.fullmatch(name) else None
    if image is not None and image.suffix in TYPES:  # by its content: other files are never shown as images
        return Picture(image.content, TYPES[image.suffix])
    raise HoneError(f"the run has no image '{name}'", fix="open a sample of the list", code="E-view-address")


def names_in(ids: Sequence[int]) -> list[str]:
    """Return the names of the images in a row of token ids, in order."""
    return [name_of(key) for key in keys_in(ids)]


def pictures_by_place(ids: Sequence[int]) -> dict[int, str]:
    """Return the names of images by the place of their first token in a row of ids."""
    return {place: name_of(key_of(token)) for place, token in enumerate(ids) if token < 0 and place_of(token) == 0}


def shown_message(message: Mapping[str, Any], of_prompt: Iterator[str]) -> tuple[dict[str, Any], list[str]]:
    """Return a message with a text, in which an image is a mark, and the names of its images.

    Parts of later messages name their image; ``of_prompt`` are the names for parts without one, in order.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message), []
    parts = [part for part in content if isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS]
    names = [str(part.get("key") or next(of_prompt, "")) for part in parts]
    return {**message, "content": content_text(content)}, names


_COLUMNS = (
    "step", "uid", "index", "part", "prompt", "messages", "text", "ground_truth", "score", "terms", "stop_reason",
    "seconds", "episode", "turn_values", "response_mask", "prompt_ids", "response_ids",
)  # fmt: skip


def one_episode(archived: Archived, step: int, uid: str, index: int) -> dict[str, Any]:
    """Return an episode.

    ``lanes``: conversations, the episode's own first, then those of sub-agents, each with ``name``, ``first`` (number of its first
    turn), ``after`` (turn of the own lane that called it) and ``entries``; an entry is a message with its ``images`` (names),
    ``turn``, ``reward``, ``value`` (of a forked turn) and ``calls``. ``segments``: number of tokens by segment, with the tokens
    that it shares with the one before (``shared``). ``times``: seconds of the engine and of what is outside. ``siblings``:
    numbers of the group's answers.
    """
    records = archived.records(step, uid, _COLUMNS)
    parts = [record for record in records if record["index"] == index]
    record = (parts or [archived.record(step, uid, index, 0)])[0]
    episode: dict[str, Any] = (record["episode"] or {}) | {"turn_values": record["turn_values"] or {}}
    conversations = episode.get("conversations") or []
    of_others = {turn for part in conversations for turn in range(part["turn"], part["turn"] + part["turns"])}
    total = int(episode.get("assistant_turns") or 1)
    own_turns = [turn for turn in range(total) if turn not in of_others]
    messages = episode.get("messages") or [{"role": "assistant", "content": record["text"]}]
    prompt = record["messages"] or [{"role": "user", "content": record["prompt"]}]
    lanes = [
        {
            "name": "episode",
            "first": 0,
            "after": None,
            "entries": [*_given(prompt, record["prompt_ids"] or []), *_entries(episode, messages, own_turns)],
        }
    ]
    for number, part in enumerate(conversations):
        turns = list(range(part["turn"], part["turn"] + part["turns"]))
        after = max((turn for turn in own_turns if turn < part["turn"]), default=None)
        entries = list(_entries(episode, part["messages"], turns))
        lanes.append({"name": f"sub-agent {number + 1}", "first": part["turn"], "after": after, "entries": entries})
    facts = ("step", "uid", "index", "ground_truth", "score", "terms", "stop_reason", "seconds")
    return plain(
        {
            **{name: record[name] for name in facts},
            "end": episode.get("end"),
            "error": episode.get("error"),
            "facts": episode.get("facts") or {},
            "retries": episode.get("retries") or 0,
            "times": {"generate": episode.get("generate_seconds"), "outside": episode.get("tool_seconds")},
            "lanes": lanes,
            "segments": _segments(parts),
            "siblings": sorted({other["index"] for other in records}),
        }
    )


def _given(messages: Sequence[Mapping[str, Any]], prompt_ids: Sequence[int]) -> Iterator[dict[str, Any]]:
    names = iter(names_in(prompt_ids))
    for message in messages:
        yield _entry(message, names)


def _entry(message: Mapping[str, Any], names: Iterator[str], **facts: Any) -> dict[str, Any]:
    shown, images = shown_message(message, names)
    return {"message": shown, "images": images, "turn": None, "reward": None, "value": None, "calls": []} | facts


def _entries(
    episode: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], turns: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield the messages; those of the policy take the turns in order, each with its calls."""
    rewards, calls = episode.get("turn_rewards") or [], episode.get("tool_calls") or []
    left = iter(turns)
    for message in messages:
        if message.get("role") != "assistant":
            yield _entry(message, iter(()))
            continue
        turn = next(left, None)
        reward = rewards[turn] if turn is not None and turn < len(rewards) else None
        made = [call for call in calls if turn is not None and call.get("turn") == turn]
        value = episode["turn_values"].get(str(turn))
        yield _entry(message, iter(()), turn=turn, reward=reward, value=value, calls=made)


def _segments(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    segments, before = [], []
    for record in sorted(parts, key=lambda part: part["part"]):
        ids = [*(record["prompt_ids"] or []), *(record["response_ids"] or [])]
        shared = next(
            (place for place, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), min(len(before), len(ids))
        )
        segments.append(
            {
                "part": record["part"],
                "tokens": len(ids),
                "sampled": sum(record["response_mask"] or []),
                "shared": shared,
            }
        )
        before = ids
    return segments
