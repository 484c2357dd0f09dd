"""`/v1/responses` as the official client sees it: items, tools, events, stored responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.patience import SOON
from support.scripted import ScriptedEngine, served
from support.templates import tokenizer

from hone.agents.rendering import renderer_for
from hone.agents.serving import responses as storage
from hone.agents.serving.responses import messages_from

TOKENIZER = tokenizer("qwen2_5")
RENDERER = renderer_for(TOKENIZER)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "name": "get_weather", "description": "weather of a city", "parameters": PARAMETERS}
CHAT_WEATHER = {"type": "function", "function": {name: WEATHER[name] for name in ("name", "description", "parameters")}}
QUESTION = "How is the weather in Rome?"
CALL = 'I look.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def ids(text: str) -> list[int]:
    return TOKENIZER(f"{text}<|im_end|>", add_special_tokens=False)["input_ids"]


def weather(request: Any) -> list[int]:
    shown = TOKENIZER.decode(request.prompt_ids).rpartition("user")[2]
    return (
        ids("It is sunny.")
        if "<tool_response>" in shown or "<tools>" not in TOKENIZER.decode(request.prompt_ids)
        else ids(CALL)
    )


def client(url: str, path: str = "") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}{path}/v1", api_key="none", max_retries=0, timeout=SOON)


@pytest.fixture(scope="module", name="url")
def _url() -> Iterator[str]:
    with served(ScriptedEngine(weather), TOKENIZER) as (url, _):
        yield url


def test_a_text_gets_a_text(url: str) -> None:
    response = client(url).responses.create(model="tiny", input=QUESTION, instructions="Be brief.", metadata={"a": "b"})
    prompt = RENDERER.prompt([{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}])
    assert (response.output_text, response.status, response.object) == ("It is sunny.", "completed", "response")
    assert response.usage.input_tokens == len(prompt) and response.usage.output_tokens == len(ids("It is sunny."))
    assert response.metadata == {"a": "b"} and response.instructions == "Be brief."


def test_a_tool_conversation_of_items_is_one_recorded_conversation() -> None:
    engine = ScriptedEngine(weather)
    with served(engine, TOKENIZER) as (url, endpoint):
        asking = client(url, "/sessions/a")
        items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
        first = asking.responses.create(model="tiny", input=items, tools=[WEATHER])
        text, call = first.output
        assert (text.content[0].text, call.name, json.loads(call.arguments)) == (
            "I look.",
            "get_weather",
            {"city": "Rome"},
        )
        items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
        second = asking.responses.create(model="tiny", input=items, tools=[WEATHER])
        assert second.output_text == "It is sunny."
        (ledger,) = endpoint.sessions.find("a").ledgers()
    assert engine.asked[0].prompt_ids == RENDERER.prompt([{"role": "user", "content": QUESTION}], [CHAT_WEATHER])
    assert sum(ledger.mask) == len(ids(CALL)) + len(ids("It is sunny."))


def test_a_response_continues_an_earlier_one_by_its_id() -> None:
    engine = ScriptedEngine(weather)
    with served(engine, TOKENIZER) as (url, endpoint):
        asking = client(url, "/sessions/a")
        first = asking.responses.create(model="tiny", input=QUESTION, instructions="One.", tools=[WEATHER])
        output = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "sunny"}
        second = asking.responses.create(
            model="tiny", input=[output], instructions="One.", tools=[WEATHER], previous_response_id=first.id
        )
        assert second.output_text == "It is sunny." and second.previous_response_id == first.id
        assert len(endpoint.sessions.find("a").ledgers()) == 1
        assert asking.responses.retrieve(first.id).output[1].call_id == first.output[1].call_id
        with pytest.raises(openai.NotFoundError):
            client(url).responses.retrieve(first.id)  # of another session
        asking.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            asking.responses.retrieve(first.id)
        unstored = asking.responses.create(model="tiny", input=QUESTION, store=False)
        with pytest.raises(openai.NotFoundError) as caught:
            asking.responses.create(model="tiny", input=QUESTION, previous_response_id=unstored.id)
    assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize("tools", [[], [WEATHER]])
def test_the_events_are_those_of_openai_and_end_with_the_whole_response(url: str, tools: list[Any]) -> None:
    events = list(client(url).responses.create(model="tiny", input=QUESTION, tools=tools, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 1
    text = ["output_item.added", "content_part.added", *["output_text.delta"] * deltas, "output_text.done",
            "content_part.done", "output_item.done"]  # fmt: skip
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds == ["created", "in_progress", *text, *(call if tools else []), "completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    response = events[-1].response
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert response.output_text == said == ("I look." if tools else "It is sunny.")
    whole = client(url).responses.create(model="tiny", input=QUESTION, tools=tools)
    assert [item.type for item in response.output] == [item.type for item in whole.output]
    assert response.usage == whole.usage
    with client(url).responses.stream(model="tiny", input=QUESTION, tools=tools) as stream:
        assert stream.get_final_response().output_text == said


def test_a_reply_at_its_limit_is_incomplete(url: str) -> None:
    asking: Any = {"model": "tiny", "input": QUESTION, "max_output_tokens": 2}
    whole = client(url).responses.create(**asking)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == 2
    assert [event.type for event in client(url).responses.create(stream=True, **asking)][-1] == "response.incomplete"


def test_log_probs_and_sampling_fields_reach_the_reply() -> None:
    engine = ScriptedEngine(weather)
    with served(engine, TOKENIZER) as (url, _):
        asking: Any = {"model": "tiny", "input": QUESTION, "include": ["message.output_text.logprobs"]}
        asking |= {"temperature": 0.5, "extra_body": {"seed": 7, "top_k": 5, "return_token_ids": True}}
        whole = client(url).responses.create(**asking)
        events = list(client(url).responses.create(stream=True, **asking))
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    (part,) = whole.output[0].content
    assert [entry.logprob for entry in part.logprobs] == [
        -(8 + place) / 100 for place in range(len(ids("It is sunny.")))
    ]
    assert [entry.logprob for entry in done.logprobs] == [entry.logprob for entry in part.logprobs]
    assert whole.model_extra["token_ids"] == ids("It is sunny.")
    assert (engine.asked[0].sampling.temperature, engine.asked[0].sampling.top_k, engine.asked[0].seed) == (0.5, 5, 7)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"background": True}, "background"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.json_schema"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"type": "reasoning", "id": "x", "summary": [], "encrypted_content": "y"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"n": 2}, "n"),
        ({"temprature": 1}, "temprature"),
        ({"temperature": -1}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"model": "other"}, "model"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_its_field(url: str, change: dict[str, Any], param: str) -> None:
    body = {"model": "tiny", "input": QUESTION, **change}
    with pytest.raises(openai.APIStatusError) as caught:
        client(url).post("/responses", body=body, cast_to=object)
    assert caught.value.status_code in (400, 404) and (caught.value.param or "").startswith(param)


def test_fields_without_a_value_are_not_refused(url: str) -> None:
    body = {"model": "tiny", "input": QUESTION, "background": False, "reasoning": {"effort": None}, "truncation": "disabled",
            "service_tier": "auto", "prompt": None, "max_tool_calls": 3, "user": "me"}  # fmt: skip
    assert client(url).post("/responses", body=body, cast_to=object)


def test_items_of_one_turn_are_one_message() -> None:
    call = {"type": "function_call", "call_id": "c0", "name": "f", "arguments": "{}"}
    items = [
        {"role": "user", "content": "Go."},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I go."}]},
        call,
        {**call, "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c0", "output": "gone"},
        {**call, "call_id": "c2"},
    ]
    messages = messages_from(items)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["c0", "c1"] and messages[1][
        "reasoning_content"
    ] == "Hm."


def test_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "MAX_RESPONSES", 3)
    kept = storage.ResponseStore()
    for number in range(5):
        kept.put({"id": str(number)}, [{"role": "user", "content": "x" * 100}], None)
    for number in range(5):
        if number < 2:
            with pytest.raises(storage.ApiError):
                kept.get(str(number), None)
        else:
            assert kept.get(str(number), None).messages[0]["content"] == "x" * 100
    monkeypatch.setattr(storage, "MAX_BYTES", 250)
    kept.put({"id": "last"}, [{"role": "user", "content": "x" * 100}], None)
    assert kept.get("last", None)
    with pytest.raises(storage.ApiError):
        kept.get("3", None)
