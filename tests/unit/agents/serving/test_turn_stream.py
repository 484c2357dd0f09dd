"""Deltas of a reply: what was sent is never taken back, calls arrive one by one, and all together they are the whole reply."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st
from support.conversations import TOOLS, calling, calls, words, written
from support.examples import examples
from support.patience import SOON
from support.scripted import ScriptedEngine, served
from support.templates import SHAPES, tokenizer

from hone.agents.messages import AssistantTurn, Message
from hone.agents.rendering import Renderer, renderer_for
from hone.agents.rendering.template import ASKED
from hone.agents.serving.chat import TurnStream

FEW = examples(6, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.explicit, Phase.generate])
WITH_TOOLS = [name for name in sorted(SHAPES) if name != "gemma3"]
"""Templates that show tools and calls."""
WHOLE_AT_THE_END = ("llama3_1", "llama3_2_pythonic")
"""Templates whose calls have no end of their own: more text may make them invalid."""
SINGLE = ("llama3_1", "harmony")
"""Templates that refuse several calls in a turn."""


def message_of(turn: AssistantTurn) -> Message:
    """The message of a complete turn, with malformed calls as text."""
    unreadable = "".join(call.raw for call in turn.calls if call.error is not None)
    sound = tuple(call for call in turn.calls if call.error is None)
    return AssistantTurn(turn.content + unreadable, turn.reasoning, sound).message()


def streamed(renderer: Renderer, ids: list[int], steps: list[int]) -> tuple[Message, Message, list[int]]:
    """What a client of a stream has at the end, the whole message, and after how many tokens each call came."""
    stream = TurnStream(renderer.parser, (), has_tools=True)
    received: Message = {"role": "assistant", "content": ""}
    arrived: list[int] = []

    def take(deltas: Any, place: int) -> None:
        for delta in deltas:
            for key in ("content", "reasoning_content"):
                if key in delta:
                    received[key] = received.get(key, "") + delta[key]
            for call in delta.get("tool_calls", ()):
                made = received.setdefault("tool_calls", [])
                if "id" in call:
                    assert call["index"] == len(made) and call["function"]["name"] and not call["function"]["arguments"]
                    made.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
                    arrived.append(place)
                else:
                    made[call["index"]]["function"]["arguments"] += call["function"]["arguments"]

    prompt = renderer.prompt([ASKED], TOOLS)
    for place in steps:
        take(stream.grow(renderer.parse(renderer.parser.settled(ids[:place]), TOOLS, prompt_ids=prompt)), place)
    whole = message_of(renderer.parse(ids, TOOLS, prompt_ids=prompt))
    take(stream.end(whole), len(ids))
    assert stream.content == received["content"]
    return received, whole, arrived


@pytest.mark.parametrize("name", WITH_TOOLS)
@FEW
@given(data=st.data())
def test_the_deltas_of_a_reply_are_the_reply(name: str, data: st.DataObject) -> None:
    renderer = renderer_for(tokenizer(name))
    most = 1 if name in SINGLE else 3
    made = data.draw(st.lists(calls(), max_size=most))
    message = calling(made, 0) if made else {"role": "assistant", "content": data.draw(words())}
    ids = written(renderer, [ASKED], message)
    steps = sorted(data.draw(st.sets(st.integers(0, len(ids) - 1))))
    received, whole, arrived = streamed(renderer, ids, steps)
    assert received == whole
    parsed = [json.loads(call["function"]["arguments"]) for call in received.get("tool_calls", ())]
    assert parsed == [call["arguments"] for call in made]
    if len(made) > 1 and steps == list(range(len(ids))) and name not in WHOLE_AT_THE_END:
        assert arrived[0] < arrived[-1] < len(ids) + 1


@pytest.mark.parametrize("name", sorted(SHAPES))
@FEW
@given(data=st.data())
def test_any_tokens_can_be_streamed(name: str, data: st.DataObject) -> None:
    """Whatever is sampled: the calls are those of the whole reply, and no text is taken back."""
    made = tokenizer(name)
    token = st.one_of(st.integers(0, len(made) - 1), st.sampled_from(sorted(made.added_tokens_decoder)))
    ids = data.draw(st.lists(token, max_size=30))
    received, whole, _ = streamed(renderer_for(made), ids, list(range(len(ids))))
    assert received.get("tool_calls") == whole.get("tool_calls")
    assert whole["content"].startswith(received["content"]) or received["content"]


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_calls_arrive_one_by_one_at_a_client(name: str) -> None:
    made = [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "search", "arguments": {"query": "Rome"}}]
    if name in SINGLE:
        made = made[:1]
    renderer = renderer_for(tokenizer(name))
    ids = written(renderer, [ASKED], calling(made, 0))
    engine = ScriptedEngine(lambda request: ids, step=1)
    with served(engine, renderer.tokenizer) as (url, endpoint):
        client = openai.OpenAI(base_url=f"{url}/sessions/a/v1", api_key="none", max_retries=0, timeout=SOON)
        arguments: Any = {"model": "tiny", "messages": [ASKED], "tools": TOOLS}
        chunks = list(client.chat.completions.create(stream=True, **arguments))
        with client.chat.completions.stream(**arguments) as stream:
            final = stream.get_final_completion().choices[0]
        whole = client.chat.completions.create(**arguments).choices[0]
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [(call.index, bool(call.id), call.function.name) for call in deltas] == [
        part for index, call in enumerate(made) for part in ((index, True, call["name"]), (index, False, None))
    ]
    for index, call in enumerate(made):
        text = "".join(delta.function.arguments for delta in deltas if delta.index == index)
        assert json.loads(text) == call["arguments"]
    places = [
        place for place, chunk in enumerate(chunks) for call in chunk.choices[0].delta.tool_calls or () if call.id
    ]
    if len(made) > 1 and name not in WHOLE_AT_THE_END:
        assert places[0] + 5 < places[1], "the first call does not wait for the second"
    assert chunks[-1].choices[0].finish_reason == final.finish_reason == whole.finish_reason == "tool_calls"
    assert [call.function.arguments for call in final.message.tool_calls] == [
        call.function.arguments for call in whole.message.tool_calls
    ]


def test_text_and_reasoning_grow_with_tools() -> None:
    made = tokenizer("qwen2_5")
    text = "<think>\nLet me think of it.\n</think>\n\nIt is sunny in Rome and it will rain.<|im_end|>"
    ids = made(text, add_special_tokens=False)["input_ids"]
    with served(ScriptedEngine(lambda request: ids, step=1), made) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=SOON)
        chunks = client.chat.completions.create(model="tiny", messages=[ASKED], tools=TOOLS, stream=True)
        deltas = [chunk.choices[0].delta for chunk in chunks]
    contents = [delta.content for delta in deltas if delta.content]
    thoughts = [text for delta in deltas if (text := (delta.model_extra or {}).get("reasoning_content"))]
    assert "".join(contents) == "It is sunny in Rome and it will rain." and len(contents) > 5
    assert "".join(thoughts) == "Let me think of it." and len(thoughts) > 3


def test_of_calls_that_may_not_be_parallel_the_first_is_streamed() -> None:
    renderer = renderer_for(tokenizer("qwen2_5"))
    both = [{"name": "add", "arguments": {"a": 1, "b": number}} for number in range(2)]
    ids = written(renderer, [ASKED], calling(both, 0))
    with served(ScriptedEngine(lambda request: ids, step=1), renderer.tokenizer) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=SOON)
        chunks = client.chat.completions.create(
            model="tiny", messages=[ASKED], tools=TOOLS, stream=True, parallel_tool_calls=False
        )
        calls_seen = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert {call.index for call in calls_seen} == {0}
    assert json.loads("".join(call.function.arguments for call in calls_seen)) == both[0]["arguments"]
