"""The proof that a rendering shows every part of a conversation: where a part may stand."""

from __future__ import annotations

from typing import Any

from hone.data.proof import Missing, Shown, missing_part

CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "door"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "is it 42"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "42"},
    {"role": "user", "content": "thanks"},
]


def rendered(result: str) -> tuple[str, list[int | None]]:
    turns = ["<user>is it 42", '<call>look {"at": "door"}', f"<result>{result}", "<user>thanks"]
    return "".join(turns), [sum(map(len, turns[:number])) for number in range(len(turns))]


def test_a_result_is_looked_for_after_the_turn_that_called() -> None:
    missing = missing_part(*rendered(""), MESSAGES)
    assert isinstance(missing, Missing) and (missing.message, missing.text) == (2, "42")
    text, starts = rendered("42")
    shown = missing_part(text, starts, MESSAGES)
    assert isinstance(shown, Shown) and [text[slice(*span)] for span in shown.spans][2] == "42"


def test_a_result_may_stand_within_the_turn_that_called() -> None:
    text = '<user>is it 42<call>look {"at": "door"} -> 42<user>thanks'
    shown = missing_part(text, [0, 14, None, text.index("<user>thanks")], MESSAGES)
    assert isinstance(shown, Shown) and shown.spans[2] == (text.index("> 42") + 2, text.index("> 42") + 4)
