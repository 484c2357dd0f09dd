"""`hone serve` as a real process: the official client, two thousand connections, and what is refused."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from support.forked_python import Forks
from support.messages import raises
from support.patience import LONG, SOON
from support.serve import serving
from support.templates import tokenizer
from support.tool_model import ANSWER, CALL, NAME, QUESTION, RESULT, WEATHER, make_tool_model
from transformers import AutoModelForCausalLM

from hone.agents.rendering import renderer_for
from hone.agents.serving.server import allow_many_connections
from hone.insight.audit import read_audit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.application("hone/agents", "hone/generation/native", "hone/cli/serve.py", "hone/trainers/serving.py"),
]
TOKENIZER = tokenizer(NAME)
TOKEN = "a token"
CONNECTIONS = 2000


PLAYED: list[str] = []
"""Sessions in which a tool was called in this process."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_model(tmp_path_factory.mktemp("model") / "weather")


@pytest.fixture(scope="module")
def url(model: Path, forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("serve")
    with serving(forks, model, folder / "log", "--audit", str(folder / "audit"), token=TOKEN) as address:
        yield address
    calls = [line for line in read_audit(folder / "audit") if line.record["tool"] == "get_weather"]
    if PLAYED:  # tests of a module may run in several processes
        assert any(line.record["session"] == "one" and '"Rome"' in line.record["arguments"] for line in calls)
    assert not any(line.problem for line in read_audit(folder / "audit"))


def client(url: str, path: str = "") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}{path}/v1", api_key=TOKEN, max_retries=0, timeout=SOON)


def test_a_tool_conversation_is_recorded_with_the_log_probs_of_the_model(url: str, model: Path) -> None:
    PLAYED.append("one")
    asking, messages = client(url, "/sessions/one"), [QUESTION]
    arguments: Any = {"model": "weather", "tools": [WEATHER], "temperature": 0}
    first = asking.chat.completions.create(messages=messages, **arguments).choices[0]
    assert first.finish_reason == "tool_calls"
    (call,) = first.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Rome"})
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    stream = asking.chat.completions.create(messages=messages, stream=True, **arguments)
    said = [piece.choices[0].delta.content or "" for piece in stream]
    assert "".join(said) == "It is sunny in Rome."

    request = urllib.request.Request(f"{url}/sessions/one", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=SOON) as answer:
        (told,) = json.loads(answer.read())["conversations"]
    renderer = renderer_for(TOKENIZER)
    asked, answered = (TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in (CALL, ANSWER))
    bridge = renderer.bridge(asked, [{**RESULT, "tool_call_id": call.id}], [WEATHER])
    assert told["prompt_ids"] == renderer.prompt([QUESTION], [WEATHER])
    assert told["response_ids"] == asked + bridge + answered
    assert told["response_mask"] == [1] * len(asked) + [0] * len(bridge) + [1] * len(answered)
    with torch.no_grad():
        whole = torch.tensor([told["prompt_ids"] + told["response_ids"]])
        logits = AutoModelForCausalLM.from_pretrained(model)(whole).logits[0, len(told["prompt_ids"]) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(told["response_ids"])[:, None])[:, 0]
    mask = torch.tensor(told["response_mask"]).bool()
    assert (expected - torch.tensor(told["log_probs"]))[mask].abs().max() < 1e-4


def test_echo_gives_the_log_probs_of_transformers(url: str, model: Path) -> None:
    prompts = [TOKENIZER(text)["input_ids"] for text in ("It is sunny in Rome, and the sky is clear.", "Is it?")]
    arguments: Any = {"model": "weather", "prompt": prompts, "echo": True, "logprobs": 2, "temperature": 0}
    one, none = (client(url).completions.create(max_tokens=most, **arguments).choices for most in (1, 0))
    network = AutoModelForCausalLM.from_pretrained(model)
    for ids, more, told in zip(prompts, one, none, strict=True):
        with torch.no_grad():
            every = network(torch.tensor([ids])).logits[0].log_softmax(-1)
        own = every[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
        for entry in (more.logprobs, told.logprobs):
            assert entry.token_logprobs[1 : len(ids)] == pytest.approx(own.tolist(), abs=1e-4)
            best = [max(top.values()) for top in entry.top_logprobs[1 : len(ids)]]
            assert best == pytest.approx(every[:-1].amax(-1).tolist(), abs=1e-4)
        assert (len(told.logprobs.tokens), len(more.logprobs.tokens)) == (len(ids), len(ids) + 1)
        assert more.logprobs.token_logprobs[-1] == pytest.approx(every[-1].max().item(), abs=1e-4)


def test_streams_come_in_pieces_and_seeds_repeat(url: str) -> None:
    arguments: Any = {
        "model": "weather",
        "prompt": "It is",
        "max_tokens": 40,
        "seed": 5,
        "extra_body": {"ignore_eos": True},
    }
    pieces = list(client(url).completions.create(stream=True, **arguments))
    whole = client(url).completions.create(**arguments).choices[0]
    assert "".join(piece.choices[0].text for piece in pieces) == whole.text and len(pieces) > 3
    assert whole.finish_reason == "length"


def test_metrics_have_the_load_of_the_engine(url: str) -> None:
    client(url).completions.create(model="weather", prompt=[5, 6, 7], max_tokens=3)
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=SOON) as answer:
        lines = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
    assert 0 < float(lines["hone_kv_cache_usage_perc"]) <= 1
    assert float(lines["hone_prefix_cache_queries_total"]) > 0
    assert float(lines["hone_time_to_first_token_seconds_count"]) > 0


def test_what_cannot_be_served_is_refused(url: str) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
    with raises(openai.NotFoundError, "'gpt'", "'weather'"):
        client(url).chat.completions.create(model="gpt", messages=[QUESTION])
    with raises(openai.BadRequestError, 1024) as caught:
        client(url).completions.create(model="weather", prompt=[5] * 1024)
    assert caught.value.code == "context_length_exceeded"


def test_two_thousand_connections_at_once_lose_no_reply(url: str) -> None:
    assert allow_many_connections() > CONNECTIONS + 100
    host, port = url.removeprefix("http://").split(":")

    async def one(number: int, connected: asyncio.Semaphore, everybody: asyncio.Event) -> dict[str, Any]:
        reader, writer = await asyncio.open_connection(host, int(port))
        connected.release()
        await everybody.wait()
        body = json.dumps(
            {
                "model": "weather",
                "prompt": [5, 6, 7],
                "max_tokens": 3,
                "seed": number,
                "ignore_eos": True,
                "return_token_ids": True,
            }
        )
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body.encode())
        status = await reader.readline()
        length = 0
        while line := (await reader.readline()).strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        answer = json.loads(await reader.readexactly(length))
        writer.close()
        assert b" 200 " in status, answer
        return answer

    async def all_of_them() -> list[dict[str, Any]]:
        connected, everybody = asyncio.Semaphore(0), asyncio.Event()
        asking = [asyncio.ensure_future(one(number, connected, everybody)) for number in range(CONNECTIONS)]
        for _ in range(CONNECTIONS):  # all connections stand before the first request is sent
            await connected.acquire()
        everybody.set()
        return await asyncio.gather(*asking)

    answers = asyncio.run(asyncio.wait_for(all_of_them(), LONG))
    assert len({answer["id"] for answer in answers}) == CONNECTIONS
    assert all(len(answer["choices"][0]["token_ids"]) == 3 for answer in answers)
    again = client(url).completions.create(
        model="weather",
        prompt=[5, 6, 7],
        max_tokens=3,
        seed=77,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    assert again.choices[0].model_extra["token_ids"] == answers[77]["choices"][0]["token_ids"], "a seed is a draw"
