"""Shapes of conversations, and a check of their renderings that shares no code with Hone."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections import Counter
from typing import Any

Messages = list[dict[str, Any]]

PERU = "In Peru, on the coast."
ECUADOR = "In Ecuador, in the hills."


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(number: int, *, as_text: bool = False, **arguments: Any) -> dict[str, Any]:
    given = json.dumps(arguments) if as_text else arguments
    return {
        "id": f"functions.get_weather:{number}",
        "type": "function",
        "function": {"name": "get_weather", "arguments": given},
    }


def result(number: int, content: str) -> dict[str, Any]:
    return {
        "role": "tool",
        "tool_call_id": f"functions.get_weather:{number}",
        "name": "get_weather",
        "content": content,
    }


def part(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tell the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Its name."}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
LIMA, QUITO, ROME = user("Where is Lima?"), user("And where is Quito?"), user("How is the weather in Rome?")
BRIEF = {"role": "system", "content": "Be brief and kind."}
THOUGHT = "<think>\nA capital of the south.\n</think>\n\n"
SUNNY = said("It will be sunny there.")
NESTED = {"city": 'Rome "old" <b> é', "days": None, "area": {"r": [1, 2.5, True], "unit": "km"}}

SHAPES: dict[str, tuple[Messages, list[dict[str, Any]] | None]] = {
    "one": ([LIMA, said(PERU)], None),
    "two": ([LIMA, said(PERU), QUITO, said(ECUADOR)], None),
    "system": ([BRIEF, LIMA, said(PERU)], None),
    "system, two": ([BRIEF, LIMA, said(PERU), QUITO, said(ECUADOR)], None),
    "parts": ([user(part("Where is Lima?")), said(part(PERU)), user(part("And Quito?")), said(part(ECUADOR))], None),
    "white space": ([user("  Where is Lima?\n"), said("\n\nIn Peru.\n\n  Really.  ")], None),
    "thought": ([LIMA, said(THOUGHT + PERU)], None),
    "thoughts": ([LIMA, said(THOUGHT + PERU), QUITO, said("<think>\nHigh up.\n</think>\n\n" + ECUADOR)], None),
    "reasoning": ([LIMA, said(PERU, reasoning_content="A capital of the south.")], None),
    "reasoning, two": (
        [LIMA, said(PERU, reasoning_content="A capital."), QUITO, said(ECUADOR, reasoning_content="High up there.")],
        None,
    ),
    "call": ([ROME, said("", tool_calls=[call(0, city="Rome", days=3)]), result(0, "clear sky"), SUNNY], TOOLS),
    "call as text": (
        [ROME, said("", tool_calls=[call(0, as_text=True, city="Rome", days=3)]), result(0, "clear sky"), SUNNY],
        TOOLS,
    ),
    "call at the end": ([ROME, said("", tool_calls=[call(0, city="Rome", days=3)])], TOOLS),
    "call with words": (
        [ROME, said("I look it up.", tool_calls=[call(0, city="Rome")]), result(0, "clear sky"), SUNNY],
        TOOLS,
    ),
    "parallel calls": (
        [ROME, said("", tool_calls=[call(0, city="Rome"), call(1, city="Oslo")]), result(0, "clear"), result(1, "wet"), SUNNY],
        TOOLS,
    ),
    "nested arguments": (
        [ROME, said("", tool_calls=[call(0, **NESTED)]), result(0, json.dumps({"t": 21, "u": "C"})), SUNNY],
        TOOLS,
    ),
    "calls of two turns": (
        [ROME, said("", tool_calls=[call(0, city="Rome")]), result(0, "clear sky"), SUNNY,
         user("And Oslo?"), said("", tool_calls=[call(1, city="Oslo")]), result(1, "showers"), said("It rains.")],
        TOOLS,
    ),
    "call after reasoning": (
        [ROME, said("", reasoning_content="I need the tool.", tool_calls=[call(0, city="Rome")]), result(0, "clear sky"),
         said("It will be sunny there.", reasoning_content="Now I know.")],
        TOOLS,
    ),
    "unused tool": ([LIMA, said(PERU)], TOOLS),
    "weight": ([LIMA, said(PERU, weight=0), QUITO, said(ECUADOR, weight=1)], None),
    "an answer first": ([said("Hello, it is me."), LIMA, said(PERU)], None),
    "an answer of one letter": ([LIMA, said("a"), QUITO, said("is")], None),
    "no answer": ([LIMA, said(""), QUITO, said(ECUADOR)], None),
    "system after a turn": ([LIMA, said(PERU), BRIEF, QUITO, said(ECUADOR)], None),
    "the same system twice": ([BRIEF, LIMA, said(PERU), BRIEF, QUITO, said(ECUADOR)], None),
    "two answers in a row": ([LIMA, said("Let me see."), said(PERU)], None),
    "a result that the call has": (
        [user("2 + 0 = ?"), said("", tool_calls=[call(0, city="2", days=0)]), result(0, "2"), said("It makes 2.")],
        TOOLS,
    ),
    "reasoning that has the answer": (
        [user("What is the capital of Italy?"), said("Rome", reasoning_content="The capital is Rome, I am sure.")],
        None,
    ),
    "a thought that has the answer": ([user("The capital of Italy?"), said("<think>\nRome, I am sure.\n</think>\n\nRome")], None),
    "letters that tokens have": ([LIMA, said("e"), user("o"), said("a")], None),
    "a system that the question repeats": (
        [{"role": "system", "content": "Answer in French."}, user("Answer in French. Where is Lima?"), said(PERU)],
        None,
    ),
    "a quote in an argument": ([ROME, said("", tool_calls=[call(0, city="L'Aquila")]), result(0, "a"), SUNNY], TOOLS),
    "words that an argument has": (
        [ROME, said("Rome", tool_calls=[call(0, city="Rome, Italy")]), result(0, "clear sky"), SUNNY],
        TOOLS,
    ),
    "reasoning that has the call": (
        [ROME, said("", reasoning_content='I call get_weather with {"city": "Rome"}.', tool_calls=[call(0, city="Rome")])],
        TOOLS,
    ),
    "words that name the tool": (
        [ROME, said("I use get_weather for Rome.", tool_calls=[call(0, city="Rome")]), result(0, "clear sky"), SUNNY],
        TOOLS,
    ),
    "words before a thought": ([LIMA, said("Well. " + THOUGHT + PERU)], None),
    "a thought before a question": ([LIMA, said(THOUGHT + PERU), QUITO, said(ECUADOR)], None),
}  # fmt: skip


def forms(messages: Messages) -> list[Messages]:
    """Every form in which a template may take the messages."""
    made = []
    for parts, text in itertools.product((False, True), repeat=2):
        form = copy.deepcopy(messages)
        for message in form:
            content = message["content"]
            if parts and isinstance(content, str):
                message["content"] = part(content)
            elif not parts and isinstance(content, list):
                message["content"] = "".join(piece["text"] for piece in content)
            for each in message.get("tool_calls", ()):
                given = each["function"]["arguments"]
                each["function"]["arguments"] = (
                    json.dumps(given, ensure_ascii=False) if text and isinstance(given, dict)
                    else json.loads(given) if not text and isinstance(given, str) else given
                )  # fmt: skip
        made.append(form)
    return made


def texts(tokenizer: Any, messages: Messages, tools: Any) -> list[str]:
    """The renderings of all forms that the template takes."""
    rendered = []
    for form in forms(messages):
        try:
            rendered.append(tokenizer.apply_chat_template(form, tools=tools, tokenize=False))
        except Exception:  # noqa: BLE001  whatever a template raises is a refusal
            continue
    return [text for text in rendered if "{'type': 'text'" not in text]  # the parts in Python's notation are no text


def lacks(text: str, messages: Messages, tools: Any) -> list[str]:
    """Words of a conversation that a rendering does not have, by the words alone: an independent, coarser check."""
    words: list[str] = []
    last = max(n for n, m in enumerate(messages) if m["role"] == "assistant")
    for number, message in enumerate(messages):
        content = message["content"]
        content = content if isinstance(content, str) else "".join(piece["text"] for piece in content)
        if message["role"] == "assistant" and "</think>" in content and number < last:
            content = content.split("</think>")[-1]  # earlier thoughts may go
        words += re.findall(r"\w+", content.replace("think", ""))
        words += re.findall(r"\w+", message.get("reasoning_content", "")) if number == last else []
        for each in message.get("tool_calls", ()):
            given = each["function"]["arguments"]
            words += [
                each["function"]["name"],
                *re.findall(r"\w{3,}", given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)),
            ]
    for tool in tools or ():
        words += [tool["function"]["name"], *tool["function"]["parameters"]["properties"]]
        words += re.findall(r"\w+", tool["function"]["description"])
    needed = Counter(words)
    missing = [word for word, count in needed.items() if text.count(word) < count and word not in {"null", "true"}]
    spoken = [m["content"] for m in messages if m["role"] in ("user", "assistant") and isinstance(m["content"], str)]
    return missing + [content for content in spoken if "think" not in content and content.strip() not in text]


def learned(tokenizer: Any, ids: list[int], mask: list[int]) -> list[str]:
    """The text of each run of 1s in the mask."""
    runs: list[list[int]] = []
    last = 0
    for token, bit in zip(ids, mask, strict=True):
        if bit and not last:
            runs.append([])
        if bit:
            runs[-1].append(token)
        last = bit
    return [tokenizer.decode(run) for run in runs]
