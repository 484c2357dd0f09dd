"""The endpoint over a real HTTP server, as the official client and others see it."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.messages import mentioned, raises
from support.patience import SOON
from support.scripted import ScriptedEngine, served
from support.templates import tokenizer

from hone.agents.rendering import renderer_for
from hone.agents.serving.replies import TextStream, cut
from hone.agents.serving.server import check_access, is_loopback
from hone.errors import ConfigError

TOKENIZER = tokenizer("qwen2_5")
RENDERER = renderer_for(TOKENIZER)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
QUESTION = {"role": "user", "content": "How is the weather in Rome?"}


def ids(text: str, ended: bool = True) -> list[int]:
    return TOKENIZER(text + ("<|im_end|>" if ended else ""), add_special_tokens=False)["input_ids"]


def client(url: str, key: str = "none", path: str = "") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}{path}/v1", api_key=key, max_retries=0, timeout=SOON)


def weather(request: Any) -> list[int]:
    """Calls the tool, then reports; ends like a model of the Qwen family."""
    shown = TOKENIZER.decode(request.prompt_ids)
    return ids("It is sunny in Rome.") if "<tool_response>" in shown.rpartition("user")[2] else ids(CALL)


def post(url: str, path: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url + path, body, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=SOON) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_a_tool_conversation_is_recorded_as_the_tokens_that_were_sampled() -> None:
    engine = ScriptedEngine(weather)
    with served(engine, TOKENIZER) as (url, endpoint):
        asking = client(url, path="/sessions/episode-1")
        messages: list[Any] = [QUESTION]
        first = asking.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER])
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
        call = choice.message.tool_calls[0]
        assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Rome"}
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        second = asking.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER], max_tokens=50)
        assert second.choices[0].message.content == "It is sunny in Rome." and second.choices[0].finish_reason == "stop"
        assert second.usage and second.usage.prompt_tokens == len(engine.asked[1].prompt_ids)

        (ledger,) = endpoint.sessions.find("episode-1").ledgers()
    prompt = RENDERER.prompt([QUESTION], [WEATHER])
    result = {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "sunny"}
    bridge = RENDERER.bridge(ids(CALL), [result], [WEATHER])
    answer = ids("It is sunny in Rome.")
    assert ledger.prompt_ids == prompt and ledger.response_ids == ids(CALL) + bridge + answer
    assert ledger.mask == [1] * len(ids(CALL)) + [0] * len(bridge) + [1] * len(answer)
    assert engine.asked[1].prompt_ids == prompt + ids(CALL) + bridge, "the second prompt is the recorded tokens"
    assert [request.session for request in engine.asked] == ["episode-1"] * 2
    expected = [-(engine.asked[1].seed % 97 + place + 1) / 100 for place in range(len(answer))]
    assert ledger.log_probs[-len(answer) :] == expected and ledger.versions == (3, 3)


def test_a_reply_that_reads_otherwise_when_tokenized_again_keeps_its_tokens() -> None:
    odd = [token for letter in "sunny" for token in TOKENIZER(letter, add_special_tokens=False)["input_ids"]]
    assert odd != TOKENIZER("sunny", add_special_tokens=False)["input_ids"]
    engine = ScriptedEngine(lambda request: [*odd, *ids("")])
    with served(engine, TOKENIZER) as (url, endpoint):
        asking = client(url, path="/sessions/a")
        reply = asking.chat.completions.create(model="tiny", messages=[QUESTION]).choices[0].message
        assert reply.content == "sunny"
        again: list[Any] = [QUESTION, {"role": "assistant", "content": "sunny"}, {"role": "user", "content": "Sure?"}]
        asking.chat.completions.create(model="tiny", messages=again)
        session = endpoint.sessions.find("a")
    start = len(engine.asked[0].prompt_ids)
    assert engine.asked[1].prompt_ids[start : start + len(odd)] == odd
    assert session.counts == {"calls": 2, "opened": 1} and len(session.ledgers()) == 1


def test_a_rewritten_history_begins_another_conversation() -> None:
    engine = ScriptedEngine(lambda request: ids("Yes."))
    with served(engine, TOKENIZER) as (url, endpoint):
        asking = client(url, path="/sessions/a")
        for said in ("Yes.", "No, never."):
            history: list[Any] = [
                QUESTION,
                {"role": "assistant", "content": said},
                {"role": "user", "content": "Sure?"},
            ]
            if said == "Yes.":
                asking.chat.completions.create(model="tiny", messages=[QUESTION])
            asking.chat.completions.create(model="tiny", messages=history)
        session = endpoint.sessions.find("a")
    first, second = session.ledgers()
    assert session.counts == {"calls": 3, "opened": 1, "rewritten": 1}
    assert sum(first.mask) == 2 * len(ids("Yes.")) and sum(second.mask) == len(ids("Yes."))
    assert second.prompt_ids == RENDERER.prompt(history)


def test_a_turn_that_two_conversations_share_is_sampled_in_one_of_them() -> None:
    replies = iter([ids("Yes."), ids("A."), ids("B.")])
    engine = ScriptedEngine(lambda request: next(replies))
    with served(engine, TOKENIZER) as (url, endpoint):
        asking = client(url, path="/sessions/a")
        asking.chat.completions.create(model="tiny", messages=[QUESTION])
        for question in ("One?", "Two?"):
            history: list[Any] = [
                QUESTION,
                {"role": "assistant", "content": "Yes."},
                {"role": "user", "content": question},
            ]
            asking.chat.completions.create(model="tiny", messages=history)
        first, second = endpoint.sessions.find("a").ledgers()
    yes = len(ids("Yes."))
    assert first.mask[:yes] == [1] * yes and second.mask[:yes] == [0] * yes
    assert first.response_ids[:yes] == second.response_ids[:yes] == ids("Yes.")
    assert sum(first.mask) + sum(second.mask) == yes + len(ids("A.")) + len(ids("B."))


def test_streaming_gives_the_text_of_the_whole_answer() -> None:
    text = "It is sunny in Rome, and it will rain tomorrow. ☂️ 多雨"
    engine = ScriptedEngine(lambda request: ids(text), step=1)
    with served(engine, TOKENIZER) as (url, endpoint):
        stream = client(url, path="/sessions/a").chat.completions.create(
            model="tiny", messages=[QUESTION], stream=True, logprobs=True, stream_options={"include_usage": True}
        )
        pieces = list(stream)
        deltas = [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]
        logged = [
            entry for p in pieces if p.choices and p.choices[0].logprobs for entry in p.choices[0].logprobs.content
        ]
        (ledger,) = endpoint.sessions.find("a").ledgers()
    assert "".join(deltas) == text and sum(map(bool, deltas)) > 5, "in pieces, none of them half a character"
    assert [entry.logprob for entry in logged] == ledger.log_probs
    assert pieces[-1].usage.completion_tokens == len(ids(text)) and pieces[-2].choices[0].finish_reason == "stop"


def test_a_streamed_completion_counts_the_tokens_of_the_whole() -> None:
    engine = ScriptedEngine(lambda request: ids("It is sunny in Rome."), step=1)
    with served(engine, TOKENIZER) as (url, _):
        asked = {"model": "tiny", "prompt": "How is the weather?", "n": 2}
        whole = client(url).completions.create(**asked)
        pieces = list(client(url).completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert pieces[-1].usage == whole.usage and whole.usage.completion_tokens == 2 * len(ids("It is sunny in Rome."))


def test_streamed_tool_calls_arrive_whole() -> None:
    with served(ScriptedEngine(weather), TOKENIZER) as (url, _):
        stream = client(url).chat.completions.create(model="tiny", messages=[QUESTION], tools=[WEATHER], stream=True)
        pieces = [piece.choices[0] for piece in stream]
    calls = [call for piece in pieces for call in piece.delta.tool_calls or ()]
    assert [(call.id, call.function.name) for call in calls] == [("call_0", "get_weather"), (None, None)]
    assert json.loads(calls[1].function.arguments) == {"city": "Rome"}
    assert not any(piece.delta.content for piece in pieces) and pieces[-1].finish_reason == "tool_calls"


def test_choices_seeds_limits_and_stops() -> None:
    engine = ScriptedEngine(lambda request: ids(f"one two {request.seed} three"))
    with served(engine, TOKENIZER) as (url, _):
        asking = client(url)
        found = asking.chat.completions.create(model="tiny", messages=[QUESTION], n=3, seed=7)
        assert [choice.message.content for choice in found.choices] == [f"one two {seed} three" for seed in (7, 8, 9)]
        stopped = asking.chat.completions.create(model="tiny", messages=[QUESTION], stop=["two", "three"])
        assert stopped.choices[0].message.content == "one "
        assert engine.asked[-1].sampling.stop == ("two", "three")
        short = asking.chat.completions.create(model="tiny", messages=[QUESTION], max_completion_tokens=2)
        assert short.choices[0].finish_reason == "length" and short.usage.completion_tokens == 2
        asking.chat.completions.create(model="tiny", messages=[QUESTION], temperature=0.5, top_p=0.9)
        assert (engine.asked[-1].sampling.temperature, engine.asked[-1].sampling.top_p) == (0.5, 0.9)
        assert set(RENDERER.stop_token_ids) <= set(engine.asked[-1].sampling.stop_token_ids)
        none = asking.chat.completions.create(model="tiny", messages=[QUESTION], tools=[WEATHER], tool_choice="none")
        assert not none.choices[0].message.tool_calls


def test_a_call_that_is_asked_for_is_begun_for_the_model_and_not_counted_as_its_own() -> None:
    rest = ids(' {"city": "Rome"}}\n</tool_call>')
    engine = ScriptedEngine(lambda request: rest)
    with served(engine, TOKENIZER) as (url, endpoint):
        named: Any = {"type": "function", "function": {"name": "get_weather"}}
        arguments: Any = {"model": "tiny", "messages": [QUESTION], "tools": [WEATHER]}
        found = client(url, path="/sessions/a").chat.completions.create(tool_choice=named, **arguments)
        call = found.choices[0].message.tool_calls[0].function
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Rome"})
        (ledger,) = endpoint.sessions.find("a").ledgers()
        assert ledger.response_ids == rest and len(ledger.prompt_ids) > len(RENDERER.prompt([QUESTION], [WEATHER]))
        named["function"]["name"] = "get_time"
        with raises(openai.BadRequestError, "get_time", "get_weather"):
            client(url).chat.completions.create(tool_choice=named, **arguments)


def test_text_completions_of_text_and_of_tokens() -> None:
    engine = ScriptedEngine(lambda request: ids(" and so on", ended=False))
    with served(engine, TOKENIZER) as (url, endpoint):
        asking = client(url, path="/sessions/a")
        found = asking.completions.create(model="tiny", prompt=["It is", "Rome"], n=2, logprobs=1)
        assert [choice.text for choice in found.choices] == [" and so on"] * 4
        assert [request.prompt_ids for request in engine.asked] == [ids("It is", False)] * 2 + [ids("Rome", False)] * 2
        assert found.choices[3].logprobs.token_logprobs == [
            -(engine.asked[3].seed % 97 + place + 1) / 100 for place in range(len(ids(" and so on", False)))
        ]
        asking.completions.create(model="tiny", prompt=[5, 6, 7])
        asking.completions.create(model="tiny", prompt=[5, 6, 7, *ids(" and so on", False), 9])
        pieces = asking.completions.create(model="tiny", prompt="x", stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == " and so on"
        ledgers = endpoint.sessions.find("a").ledgers()
    assert len({request.seed for request in engine.asked}) == len(engine.asked), "every draw is its own"
    continued = next(ledger for ledger in ledgers if ledger.prompt_ids == [5, 6, 7])
    on = len(ids(" and so on", False))
    assert continued.mask == [1] * on + [0] + [1] * on


@pytest.mark.parametrize(
    ("change", "status", "param", "mention"),
    [
        ({"model": "other"}, 404, "model", "tiny"),
        ({"messages": []}, 400, "messages", "at least 1 item"),
        ({"messages": [{"role": "judge", "content": "x"}]}, 400, "messages.0.role", "judge"),
        ({"messages": [{"role": "user"}]}, 400, "messages.0.content", "user"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content", "text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.tool_call_id", "tool_call_id"),
        ({"temperature": -1}, 400, "temperature", "temperature=-1"),
        ({"n": 1000}, 400, "n", "128"),
        ({"max_tokens": 5000}, 400, "messages", "max_tokens <= 4053"),
        ({"temprature": 1}, 400, "temprature", "temperature"),
        ({"top_logprobs": 3}, 400, "top_logprobs", "top_logprobs=3"),
        ({"response_format": {"type": "xml"}}, 400, "response_format.type", "xml"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema", "json_schema"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, 400, "guided_choice", "guided_regex"),
        ({"presence_penalty": 3}, 400, "presence_penalty", "2"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias.x.[key]", "logit_bias"),
        ({"logit_bias": {"3": 101}}, 400, "logit_bias.3", "100"),
        ({"stop_token_ids": [-1]}, 400, "stop_token_ids.0", "0"),
        ({"reasoning_effort": "low"}, 400, "reasoning_effort", "reasoning_effort"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, 400, "messages", "4096"),
    ],
)  # fmt: skip
def test_the_error_of_an_invalid_request_names_the_field(
    change: dict[str, Any], status: int, param: str, mention: str, plain: str
) -> None:
    body = {"model": "tiny", "messages": [QUESTION], **change}
    found, answer = post(plain, "/v1/chat/completions", json.dumps(body).encode())
    error = answer["error"]
    assert (found, error["param"]) == (status, param) and mentioned(mention, error["message"])
    assert error["type"] == "invalid_request_error"


@pytest.fixture(scope="module", name="plain")
def _plain() -> Any:
    with served(ScriptedEngine(lambda request: ids("Yes.")), TOKENIZER) as (url, _):
        yield url


def test_invalid_json_and_unknown_routes_give_errors_of_the_same_form(plain: str) -> None:
    assert post(plain, "/v1/chat/completions", b"{")[1]["error"]["code"] == "invalid_json"
    assert post(plain, "/v1/chat/completions", b"[1]")[0] == 400
    assert post(plain, "/v1/embeddings", b"{}")[0] == 404
    with urllib.request.urlopen(plain + "/health", timeout=SOON) as answer:
        assert json.loads(answer.read())["status"] == "ok"
    assert [model.id for model in client(plain).models.list()] == ["tiny"]


def test_a_token_is_required_and_each_session_has_a_key() -> None:
    engine = ScriptedEngine(lambda request: ids("Yes."))
    with served(engine, TOKENIZER, token="secret") as (url, endpoint):
        for key in ("none", "", "secre", "secret2"):
            assert post(url, "/v1/chat/completions", b"{}", Authorization=f"Bearer {key}")[0] == 401
        assert client(url, "secret").models.list().data[0].id == "tiny"
        with raises(openai.NotFoundError, "gpt", "tiny"):
            client(url, "secret").chat.completions.create(model="gpt", messages=[QUESTION])
        one, other = endpoint.sessions.open("one"), endpoint.sessions.open("other")
        client(url, one.key).chat.completions.create(model="tiny", messages=[QUESTION])
        assert len(one.turns) == 1 and engine.asked[-1].session == "one"
        with pytest.raises(openai.AuthenticationError):
            client(url, one.key, "/sessions/other").chat.completions.create(model="tiny", messages=[QUESTION])
        own = urllib.request.Request(f"{url}/sessions/one", headers={"Authorization": f"Bearer {one.key}"})
        with raises(urllib.error.HTTPError, 401):
            urllib.request.urlopen(own, timeout=SOON)
        assert not other.turns
        endpoint.sessions.close(one)
        with pytest.raises(openai.AuthenticationError):
            client(url, one.key).models.list()


def test_sessions_can_be_read_and_ended(plain: str) -> None:
    client(plain, path="/sessions/s").chat.completions.create(model="tiny", messages=[QUESTION])
    with urllib.request.urlopen(f"{plain}/sessions/s", timeout=SOON) as answer:
        (conversation,) = json.loads(answer.read())["conversations"]
    assert conversation["prompt_ids"] == RENDERER.prompt([QUESTION]) and conversation["response_ids"] == ids("Yes.")
    request = urllib.request.Request(f"{plain}/sessions/s", method="DELETE")
    with urllib.request.urlopen(request, timeout=SOON) as answer:
        assert json.loads(answer.read())["deleted"]
    with raises(urllib.error.HTTPError, 404):
        urllib.request.urlopen(request, timeout=SOON)


def test_requests_above_the_limit_are_refused_until_a_client_that_goes_away_ends_its_own() -> None:
    engine = ScriptedEngine(lambda request: ids("Yes."), seconds=10 * SOON)
    with served(engine, TOKENIZER, most_waiting=1) as (url, endpoint):
        body = json.dumps({"model": "tiny", "messages": [QUESTION]}).encode()
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as line:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            line.sendall(head.encode() + body)
            while not engine.asked:
                time.sleep(0.01)
            with raises(openai.InternalServerError, 503, "1 requests"):
                client(url).chat.completions.create(model="tiny", messages=[QUESTION])
        deadline = time.monotonic() + SOON
        while (not engine.aborted or endpoint.services.current.gateway.under_way) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert engine.aborted and endpoint.services.current.gateway.under_way == 0


def test_only_this_machine_is_served_without_a_token() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    check_access("127.0.0.1", None)
    check_access("0.0.0.0", "secret")
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with raises(ConfigError, host, "HONE_SERVE_TOKEN"):
            check_access(host, None)


@given(
    pieces=st.lists(st.text("abE ND☂多", max_size=4), max_size=12),
    stops=st.lists(st.text("abEND", min_size=1, max_size=3), max_size=2),
)
@examples(200)
def test_a_stream_says_what_the_whole_says_and_never_takes_back(pieces: list[str], stops: list[str]) -> None:
    stream, text, said = TextStream(stops), "", ""
    for piece in pieces:
        text += piece
        said += stream.grow(text)
        assert cut(text, stops).startswith(said)
    assert said + stream.end(text) == cut(text, stops)
