"""`/v1/messages` as Anthropic's official client sees it: blocks, tools, thinking, events, errors."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from support.patience import SOON
from support.scripted import ScriptedEngine, served
from support.templates import tokenizer

from hone.agents.rendering import renderer_for
from hone.agents.serving.messages import CALLER_DATA
from hone.errors import GenerationError

TOKENIZER = tokenizer("qwen2_5")
RENDERER = renderer_for(TOKENIZER)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"name": "get_weather", "description": "weather of a city", "input_schema": SCHEMA}
CHAT_WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": SCHEMA, "description": "weather of a city"},
}
QUESTION: Any = {"role": "user", "content": "How is the weather in Rome and Oslo?"}
THOUGHT = "I should look at both."
CALLS = "".join(
    f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
    for city in ("Rome", "Oslo")
)
FIRST, LAST = f"<think>\n{THOUGHT}\n</think>\n\nI look.{CALLS}", "It is sunny in both."
TOKEN = "a token"


def ids(text: str, ended: bool = True) -> list[int]:
    return TOKENIZER(text + ("<|im_end|>" if ended else ""), add_special_tokens=False)["input_ids"]


def weather(request: Any) -> list[int]:
    shown = TOKENIZER.decode(request.prompt_ids)
    return ids(LAST) if "<tool_response>" in shown or "<tools>" not in shown else ids(FIRST)


def client(url: str, path: str = "", **options: Any) -> anthropic.Anthropic:
    settings: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 20, **options}
    return anthropic.Anthropic(base_url=f"{url}{path}", **settings)


def ask(asking: anthropic.Anthropic, *messages: Any, **fields: Any) -> Any:
    return asking.messages.create(
        **{"model": "tiny", "max_tokens": 500, "messages": list(messages) or [QUESTION]} | fields
    )


def results(reply: Any, **more: Any) -> dict[str, Any]:
    blocks = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "sunny"}], **more}
        for block in reply.content
        if block.type == "tool_use"
    ]
    return {"role": "user", "content": blocks}


@pytest.fixture(scope="module", name="url")
def _url() -> Iterator[str]:
    with served(ScriptedEngine(weather), TOKENIZER) as (url, _):
        yield url


def test_a_text_gets_a_text(url: str) -> None:
    system = [
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be kind."},
    ]
    reply = ask(client(url), system=system, metadata={"user_id": "me"})
    prompt = RENDERER.prompt([{"role": "system", "content": "Be brief.\nBe kind."}, QUESTION])
    assert [(block.type, block.text) for block in reply.content] == [("text", LAST)]
    assert (reply.stop_reason, reply.stop_sequence, reply.role, reply.type) == (
        "end_turn",
        None,
        "assistant",
        "message",
    )
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(prompt), len(ids(LAST)))


def test_tools_and_thinking_are_one_recorded_conversation_of_exact_tokens() -> None:
    engine = ScriptedEngine(weather)
    with served(engine, TOKENIZER) as (url, endpoint):
        asking = client(url, "/sessions/a")
        first = ask(asking, tools=[WEATHER])
        thinking, text, rome, oslo = first.content
        assert (thinking.thinking, text.text, first.stop_reason) == (THOUGHT, "I look.", "tool_use")
        assert [(rome.name, rome.input), (oslo.name, oslo.input)] == [
            ("get_weather", {"city": "Rome"}),
            ("get_weather", {"city": "Oslo"}),
        ]
        assert rome.id != oslo.id
        session = endpoint.sessions.find("a")
        assert session.named(thinking.signature).completion.token_ids == ids(FIRST)
        after = results(first)
        second = ask(asking, QUESTION, {"role": "assistant", "content": first.content}, after, tools=[WEATHER])
        assert second.content[0].text == LAST
        (ledger,) = session.ledgers()
    tool_messages = [
        {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "sunny"} for call in (rome, oslo)
    ]
    prompt = RENDERER.prompt([QUESTION], [CHAT_WEATHER])
    bridge = RENDERER.bridge(ids(FIRST), tool_messages, [CHAT_WEATHER])
    assert engine.asked[1].prompt_ids == prompt + ids(FIRST) + bridge, "the second prompt is the recorded tokens"
    assert ledger.prompt_ids == prompt and ledger.response_ids == ids(FIRST) + bridge + ids(LAST)
    assert ledger.mask == [1] * len(ids(FIRST)) + [0] * len(bridge) + [1] * len(ids(LAST))
    assert session.counts == {"calls": 2, "opened": 1}


@pytest.mark.parametrize("kept", ["all", "signature", "none"])
def test_of_replies_that_read_alike_the_signature_names_one(kept: str) -> None:
    thoughts = iter([f"<think>\n{thought}\n</think>\n\nYes." for thought in ("One.", "Two.", "Three.")])
    engine = ScriptedEngine(lambda request: ids(next(thoughts, "Sure.")))
    with served(engine, TOKENIZER) as (url, _):
        asking = client(url, "/sessions/a")
        seen = [ask(asking) for _ in range(3)]
        thinking, text = (block.model_dump(exclude_none=True) for block in seen[1].content)
        blocks = {"all": [thinking, text], "signature": [{**thinking, "thinking": ""}, text], "none": [text]}[kept]
        again = [QUESTION, {"role": "assistant", "content": blocks}, {"role": "user", "content": "Sure?"}]
        ask(asking, *again)
    start = len(engine.asked[0].prompt_ids)
    thought = "Three." if kept == "none" else "Two."  # without a signature it is the latest
    reply = ids(f"<think>\n{thought}\n</think>\n\nYes.")
    assert engine.asked[3].prompt_ids[start : start + len(reply)] == reply


def test_changed_thinking_is_refused_and_that_of_another_server_is_text(url: str) -> None:
    asking = client(url, "/sessions/changed")
    first = ask(asking, tools=[WEATHER])
    thinking, *rest = (block.model_dump(exclude_none=True) for block in first.content)
    changed = {"role": "assistant", "content": [{**thinking, "thinking": "Something else."}, *rest]}
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(asking, QUESTION, changed, results(first), tools=[WEATHER])
    assert caught.value.body["error"]["message"].startswith("messages.1.content.0.thinking")
    changed["content"][0]["signature"] = "of-another-server"
    assert ask(asking, QUESTION, changed, results(first), tools=[WEATHER]).content[0].text == LAST


@pytest.mark.parametrize("tools", [[], [WEATHER]])
@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_the_events_are_those_of_anthropic_and_give_the_whole_message(url: str, tools: list[Any], display: str) -> None:
    asking = {"tools": tools, "thinking": {"type": "adaptive", "display": display}}
    events = list(ask(client(url), stream=True, **asking))
    kinds = [(event.type, getattr(event, "index", None)) for event in events]
    assert kinds[0] == ("message_start", None) and kinds[-2:] == [("message_delta", None), ("message_stop", None)]
    blocks = 4 if tools else 1
    for index in range(blocks):
        (start,) = [place for place, kind in enumerate(kinds) if kind == ("content_block_start", index)]
        (stop,) = [place for place, kind in enumerate(kinds) if kind == ("content_block_stop", index)]
        assert set(kinds[start + 1 : stop]) == {("content_block_delta", index)}
        assert stop + 1 == len(kinds) - 2 or kinds[stop + 1] == ("content_block_start", index + 1)
    whole = ask(client(url), **asking)
    with client(url).messages.stream(model="tiny", max_tokens=500, messages=[QUESTION], **asking) as stream:
        final = stream.get_final_message()

    def blocks_of(message: Any) -> list[dict[str, Any]]:
        found = [
            block.model_dump(exclude={"signature", "parsed_output"}, exclude_none=True) for block in message.content
        ]
        assert all(block.signature for block in message.content if block.type == "thinking")
        return found

    assert blocks_of(final) == blocks_of(whole) and len(final.content) == blocks
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    if tools:
        assert final.content[0].thinking == ("" if display == "omitted" else THOUGHT)


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_says_why_it_ended(stream: bool) -> None:
    with served(ScriptedEngine(weather), TOKENIZER, max_model_len=110) as (url, _):

        def end(**fields: Any) -> tuple[str | None, str | None]:
            if not stream:
                reply = ask(client(url), **fields)
                return reply.stop_reason, reply.stop_sequence
            delta = list(ask(client(url), stream=True, **fields))[-2].delta
            return delta.stop_reason, delta.stop_sequence

        assert end() == ("end_turn", None)
        assert end(max_tokens=3) == ("max_tokens", None)
        prompt = len(RENDERER.prompt([QUESTION]))
        long = {"role": "user", "content": "a" * (110 - prompt - 2) + QUESTION["content"]}
        left = 110 - client(url).messages.count_tokens(model="tiny", messages=[long]).input_tokens
        assert 0 < left < len(ids(LAST))
        assert end(messages=[long]) == ("model_context_window_exceeded", None)


def test_a_stop_sequence_ends_the_text_and_is_named() -> None:
    engine = ScriptedEngine(lambda request: ids("One. STOP", ended=False))  # an engine ends a reply at a stop string
    with served(engine, TOKENIZER) as (url, _):
        reply = ask(client(url), stop_sequences=["END", "STOP"])
    assert (reply.content[0].text, reply.stop_reason, reply.stop_sequence) == ("One. ", "stop_sequence", "STOP")
    assert engine.asked[0].sampling.stop == ("END", "STOP")


@pytest.mark.parametrize(
    ("choice", "begins", "most"),
    [({"type": "any"}, "<tool_call>\n", 2), ({"type": "tool", "name": "get_weather"}, '"arguments":', 2),
     ({"type": "auto", "disable_parallel_tool_use": True}, "assistant\n", 1), ({"type": "none"}, "assistant\n", 0)],
)  # fmt: skip
def test_tool_choice_reaches_the_model(choice: dict[str, Any], begins: str, most: int) -> None:
    rest = CALLS.partition(begins)[2] or CALLS
    engine = ScriptedEngine(lambda request: ids(rest))
    with served(engine, TOKENIZER) as (url, _):
        reply = ask(client(url), tools=[WEATHER], tool_choice=choice)
    assert TOKENIZER.decode(engine.asked[0].prompt_ids).endswith(begins)
    assert (engine.asked[0].sampling.constraint is None) == (choice["type"] in ("auto", "none"))
    assert len([block for block in reply.content if block.type == "tool_use"]) == most


def test_sampling_fields_and_a_format_reach_the_engine() -> None:
    engine = ScriptedEngine(weather)
    form = {"type": "json_schema", "schema": SCHEMA}
    with served(engine, TOKENIZER) as (url, _):
        extra = {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "seed": 7, "return_token_ids": True}
        reply = ask(client(url), extra_body=extra, output_config={"format": form, "effort": "max"})
    sampling_of = engine.asked[0].sampling
    assert (sampling_of.temperature, sampling_of.top_k, sampling_of.top_p, engine.asked[0].seed) == (0.5, 5, 0.9, 7)
    assert sampling_of.constraint is not None and reply.model_extra["token_ids"] == ids(LAST)


def test_a_last_message_of_the_assistant_is_continued() -> None:
    engine = ScriptedEngine(lambda request: ids(" sunny."))
    with served(engine, TOKENIZER) as (url, _):
        reply = ask(client(url), QUESTION, {"role": "assistant", "content": "It is"})
    assert (
        TOKENIZER.decode(engine.asked[0].prompt_ids).endswith("assistant\nIt is") and reply.content[0].text == " sunny."
    )


def test_results_become_messages_in_their_order() -> None:
    engine = ScriptedEngine(weather)
    with served(engine, TOKENIZER) as (url, _):
        call = {"type": "tool_use", "id": "c0", "name": "get_weather", "input": {"city": "Rome"}}
        failed = {"type": "tool_result", "tool_use_id": "c0", "content": "no network", "is_error": True}
        user = {
            "role": "user",
            "content": [failed, {"type": "text", "text": "Go on."}, {"type": "text", "text": "Please."}],
        }
        ask(client(url), QUESTION, {"role": "assistant", "content": [call]}, user, tools=[WEATHER])
    shown = TOKENIZER.decode(engine.asked[0].prompt_ids)
    assert shown.endswith(
        "<tool_response>\nerror: no network\n</tool_response><|im_end|>\n<|im_start|>user\nGo on.\nPlease.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_data_of_the_caller_in_the_system_prompt_does_not_split_a_conversation() -> None:
    engine = ScriptedEngine(weather)
    with served(engine, TOKENIZER) as (url, endpoint):
        asking = client(url, "/sessions/a")
        systems = [
            [{"type": "text", "text": f"{CALLER_DATA}: {number}"}, {"type": "text", "text": "Be brief."}]
            for number in range(2)
        ]
        first = ask(asking, system=systems[0], tools=[WEATHER])
        reply = {"role": "assistant", "content": first.content}
        ask(asking, QUESTION, reply, results(first), system=systems[1], tools=[WEATHER])
        assert endpoint.sessions.find("a").counts == {"calls": 2, "opened": 1}
    assert CALLER_DATA not in TOKENIZER.decode(engine.asked[0].prompt_ids)


def test_tokens_are_counted_as_they_are_rendered(url: str) -> None:
    counted = client(url).messages.count_tokens(model="tiny", system="Be brief.", messages=[QUESTION], tools=[WEATHER])
    prompt = RENDERER.prompt([{"role": "system", "content": "Be brief."}, QUESTION], [CHAT_WEATHER])
    assert counted.input_tokens == len(prompt)


@pytest.mark.parametrize(
    ("change", "kind", "where"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "model"),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"temperature": -1}, anthropic.BadRequestError, "temperature"),
        ({"n": 2}, anthropic.BadRequestError, "n"),
        ({"container": "c"}, anthropic.BadRequestError, "container"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, anthropic.BadRequestError, "tools.0.type"),
        ({"tools": [{"name": "f"}]}, anthropic.BadRequestError, "tools.0.input_schema"),
        ({"tool_choice": {"type": "tool", "name": "f"}, "tools": [WEATHER]}, anthropic.BadRequestError, "tool_choice"),
        ({"tool_choice": {"type": "all"}}, anthropic.BadRequestError, "tool_choice"),
        ({"thinking": {"type": "much"}}, anthropic.BadRequestError, "thinking"),
        ({"context_management": {"edits": [{"type": "clear"}]}}, anthropic.BadRequestError, "context_management.edits"),
        ({"output_config": {"format": {"type": "xml"}}}, anthropic.BadRequestError, "output_config.format"),
        ({"system": [{"type": "image"}]}, anthropic.BadRequestError, "system.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         anthropic.BadRequestError, "messages.0.content.0"),
        ({"messages": [QUESTION, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
         anthropic.BadRequestError, "messages.1.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
         anthropic.BadRequestError, "messages.0.content.0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, anthropic.BadRequestError, "messages.0.role"),
        ({"messages": [QUESTION, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]},
         anthropic.BadRequestError, "messages.1.content.0"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_in_the_form_of_anthropic(
    url: str, change: dict[str, Any], kind: type[anthropic.APIStatusError], where: str
) -> None:
    body = {"model": "tiny", "max_tokens": 5, "messages": [QUESTION], **change}
    with pytest.raises(kind) as caught:
        client(url).post("/v1/messages", body=body, cast_to=object)
    error = caught.value.body
    assert error["type"] == "error" and error["error"]["message"].startswith(f"{where}")
    assert error["error"]["type"] == ("not_found_error" if kind is anthropic.NotFoundError else "invalid_request_error")


def test_fields_about_the_caller_are_not_refused(url: str) -> None:
    body = {"model": "tiny", "max_tokens": 5, "messages": [QUESTION], "metadata": {"user_id": "me"}, "service_tier": "auto",
            "cache_control": {"type": "ephemeral"}, "speed": "standard", "container": None, "mcp_servers": [],
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}  # fmt: skip
    assert client(url).post("/v1/messages", body=body, cast_to=object)


def test_a_prompt_that_is_too_long_says_so_in_words_that_harnesses_know(url: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client(url), {"role": "user", "content": "word " * 5000})
    assert caught.value.body["error"]["message"].startswith("prompt is too long")


def test_a_key_is_that_of_either_api_and_its_lack_an_authentication_error() -> None:
    with served(ScriptedEngine(weather), TOKENIZER, token=TOKEN) as (url, _):
        assert ask(client(url, api_key=TOKEN)).content
        for name in ("x-api-key", "X-Api-Key"):  # as older clients send it
            body = json.dumps({"model": "tiny", "max_tokens": 5, "messages": [QUESTION]}).encode()
            headers = {"Content-Type": "application/json", name: TOKEN}
            with urllib.request.urlopen(
                urllib.request.Request(f"{url}/v1/messages", body, headers), timeout=SOON
            ) as reply:
                assert json.load(reply)["usage"]["output_tokens"] == 5
        with pytest.raises(anthropic.AuthenticationError) as caught:
            ask(client(url, api_key="wrong"))
    assert caught.value.body["error"]["type"] == "authentication_error"


def test_a_failure_of_the_engine_is_an_error_before_and_within_a_stream() -> None:
    def fails(request: Any) -> list[int]:
        raise GenerationError("out of order", fix="repair it")

    with served(ScriptedEngine(fails), TOKENIZER) as (url, _):
        with pytest.raises(anthropic.InternalServerError) as caught:
            ask(client(url))
        assert caught.value.body["error"]["type"] == "api_error"
        with pytest.raises(anthropic.APIStatusError) as late:
            list(ask(client(url), stream=True))
        assert late.value.body["error"]["type"] == "api_error"


def test_a_busy_server_is_overloaded() -> None:
    with (
        served(ScriptedEngine(weather), TOKENIZER, most_waiting=0) as (url, _),
        pytest.raises(anthropic.APIStatusError) as caught,
    ):
        ask(client(url))
    assert (caught.value.status_code, caught.value.body["error"]["type"]) == (529, "overloaded_error")
