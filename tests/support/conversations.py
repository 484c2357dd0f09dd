"""Random conversations with tools, and how a template's model would have written their turns."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from hone.agents.rendering import Renderer

LOOKALIKES = (
    "<|im_end|>", "<|im_start|>assistant\n", "<|eot_id|>", "<|call|>", "<|end|>", "<turn|>", '<|"|>', "<end_of_turn>",
    "<｜User｜>", "<|tool_call_end|>", "<tool_call>", '{"name": "add", "arguments": {}}', "[add(a=1)]", "</s>", "\n\n", "```",
    "functions.add:0", "## Return of", "<function=add>", " to=functions.add", "\\n", '"', "'", "{{ x }}", "{% if %}", "é", "日本", "🙂",
)  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "integer"}, "exact": {"type": "boolean"}},
                "required": ["a", "b"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the web.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "filters": {"type": "object", "properties": {}},
                    "sites": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["query"],
            },
        },
    },
]
MARKUP = ("tool_call", "tool▁", "think", "function=", "parameter", "tool_response")
"""What an assistant's own words are kept free of: there it would be markup."""


def texts(*, largest: int = 5) -> st.SearchStrategy[str]:
    """Text that begins and ends with something visible; some of it looks like special tokens or calls."""
    plain = st.text(st.characters(exclude_categories=["Cs", "Cc", "Co", "Cn"], exclude_characters="▁"), max_size=8)
    pieces = st.lists(st.one_of(plain, st.sampled_from(LOOKALIKES)), min_size=1, max_size=largest)
    return pieces.map("".join).map(str.strip).filter(bool)


def words() -> st.SearchStrategy[str]:
    """What an assistant says: text without the markup of calls and thoughts, that begins like a sentence."""
    clean = texts().filter(lambda text: not any(mark in text for mark in MARKUP) and "</s>" not in text)
    return clean.map(lambda text: f"Well: {text}")


def calls() -> st.SearchStrategy[dict[str, Any]]:
    """Arguments of either tool."""
    number = st.one_of(
        st.integers(-(10**6), 10**6),
        st.floats(-1e6, 1e6, allow_nan=False, allow_subnormal=False).map(lambda x: round(x, 3)),
    )
    add = st.fixed_dictionaries({"a": number, "b": st.integers(-99, 99)}, optional={"exact": st.booleans()})
    safe = texts().filter(lambda text: "parameter" not in text and "function=" not in text)
    search = st.fixed_dictionaries(
        {"query": safe},
        optional={
            "sites": st.lists(safe, max_size=2),
            "filters": st.dictionaries(st.sampled_from(["lang", "year"]), safe, max_size=2),
        },
    )
    return st.one_of(
        add.map(lambda arguments: {"name": "add", "arguments": arguments}),
        search.map(lambda arguments: {"name": "search", "arguments": arguments}),
    )


def turns(most_calls: int) -> st.SearchStrategy[tuple[str, Any]]:
    """What happens next: a user says something, or tools are called and answer."""
    called = st.lists(st.tuples(calls(), texts()), min_size=1, max_size=most_calls)
    return st.one_of(st.tuples(st.just("user"), st.tuples(words(), texts())), st.tuples(st.just("tools"), called))


def calling(made: list[dict[str, Any]], before: int) -> dict[str, Any]:
    """The assistant's message that makes these calls."""
    tool_calls = [
        {
            "id": f"functions.{call['name']}:{before + number}",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)},
        }
        for number, call in enumerate(made)
    ]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def written(renderer: Renderer, messages: list[dict[str, Any]], message: dict[str, Any]) -> list[int]:
    """Tokens of an assistant turn as the template writes it, up to the token that ends it."""
    asked = renderer.rendered(messages, TOOLS)
    shown = renderer.rendered([*messages, message], TOOLS, ask=False)
    # the same text may be hidden behind another character once more messages are there, so tokens are compared
    before, after = renderer.template.encode(asked), renderer.template.encode(shown)
    assert after[: len(before)] == before
    turn = after[len(before) :]
    empty = list(renderer.tokenizer("<think>\n\n</think>\n\n", add_special_tokens=False)["input_ids"])
    if turn[: len(empty)] == empty:  # which Qwen 3 has in a conversation's last turn only
        turn = turn[len(empty) :]
    ends = [position for position, token in enumerate(turn) if renderer.turn_ended([token])]
    return turn[: ends[-1] + 1] if ends else turn
