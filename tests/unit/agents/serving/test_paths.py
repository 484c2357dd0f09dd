"""Paths apart from answers: tokens of prompts, metrics, version, and those that are not served."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.patience import SOON
from support.scripted import ScriptedEngine, served
from support.templates import tokenizer

from hone import __version__
from hone.agents.rendering import Ending, renderer_for

TOKENIZER = tokenizer("qwen2_5")
RENDERER = renderer_for(TOKENIZER)
QUESTION = {"role": "user", "content": "How is the weather in Rome?"}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
ANSWER = TOKENIZER("It is sunny.<|im_end|>", add_special_tokens=False)["input_ids"]
TOKEN = "a token"


@pytest.fixture(scope="module", name="url")
def _url() -> Iterator[str]:
    with served(ScriptedEngine(lambda request: ANSWER), TOKENIZER, token=TOKEN) as (url, _):
        yield url


def ask(url: str, path: str, body: Any = None, key: str = TOKEN) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url + path, None if body is None else json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=SOON) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if answer.headers["Content-Type"].endswith("json") else text.decode()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]


def test_a_prompt_is_tokenized_and_its_tokens_are_text_again(url: str) -> None:
    status, answer = ask(url, "/tokenize", {"model": "tiny", "prompt": "It is <|im_start|>", "return_token_strs": True})
    expected = TOKENIZER("It is <|im_start|>")["input_ids"]
    assert (status, answer["tokens"], answer["count"], answer["max_model_len"]) == (200, expected, len(expected), 4096)
    assert answer["token_strs"][-1] == "<|im_start|>"
    assert ask(url, "/detokenize", {"tokens": expected}) == (200, {"prompt": "It is <|im_start|>"})


def test_messages_are_tokenized_as_a_chat_is(url: str) -> None:
    messages = [QUESTION, {"role": "assistant", "content": "It is"}]
    assert ask(url, "/tokenize", {"messages": [QUESTION], "tools": [TOOL]})[1]["tokens"] == RENDERER.prompt(
        [QUESTION], [TOOL]
    )
    opened = ask(url, "/tokenize", {"messages": messages, "continue_final_message": True})[1]
    assert opened["tokens"] == RENDERER.prompt(messages, ending=Ending.OPEN)
    closed = ask(url, "/tokenize", {"messages": messages, "add_generation_prompt": False})[1]
    assert closed["tokens"] == RENDERER.prompt(messages, ending=Ending.CLOSED)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [QUESTION]}, "prompt"),
        ("/tokenize", {"messages": [QUESTION], "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "modle": "tiny"}, "modle"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/tokenize", {"prompt": "x" * 10**6}, "prompt"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_what_has_no_tokens_is_refused(url: str, path: str, body: Any, param: str) -> None:
    status, error = ask(url, path, body)
    assert status == (404 if param == "model" else 400) and error["param"] == param


def test_a_client_can_write_a_chat_as_the_server_does(url: str) -> None:
    status, answer = ask(url, "/tokenizer_info")
    assert status == 200 and (answer["eos_token"], answer["bos_token"]) == (TOKENIZER.eos_token, TOKENIZER.bos_token)
    text = TOKENIZER.apply_chat_template(
        [QUESTION], chat_template=answer["chat_template"], tokenize=False, add_generation_prompt=True
    )
    assert ask(url, "/tokenize", {"prompt": text, "add_special_tokens": False})[1]["tokens"] == RENDERER.prompt(
        [QUESTION]
    )


def test_the_version_is_hones(url: str) -> None:
    assert ask(url, "/version") == (200, {"version": __version__})


def test_all_but_health_needs_the_token(url: str) -> None:
    for path, body in (
        ("/version", None),
        ("/metrics", None),
        ("/tokenizer_info", None),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": []}),
    ):
        assert ask(url, path, body, key="wrong")[0] == 401
    assert ask(url, "/health", key="wrong")[0] == 200


def samples(url: str) -> dict[tuple[str, tuple[str, ...]], float]:
    text = ask(url, "/metrics")[1]
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_show_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(lambda request: ANSWER)
    stats = {"waiting": 3, "max_cache_tokens": 8, "cache_tokens": 2, "cached_tokens": 5, "prefill_tokens": 7}
    monkeypatch.setattr(engine, "describe", lambda: replace(ScriptedEngine.describe(engine), stats=stats))
    with served(engine, TOKENIZER) as (url, _):
        seen = samples(url)
    assert (seen["hone_num_requests_waiting", ()], seen["hone_num_requests_running", ()]) == (3, 0)
    assert seen["hone_kv_cache_usage_perc", ()] == 0.25
    assert (seen["hone_prefix_cache_queries_total", ()], seen["hone_prefix_cache_hits_total", ()]) == (12, 5)


def test_metrics_count_requests_tokens_and_seconds() -> None:
    with served(ScriptedEngine(lambda request: ANSWER, seconds=0.02), TOKENIZER) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        usage = client.chat.completions.create(model="tiny", messages=[QUESTION], n=2).usage
        list(client.chat.completions.create(model="tiny", messages=[QUESTION], stream=True))
        openai.OpenAI(base_url=f"{url}/sessions/a/v1", api_key="none").completions.create(model="tiny", prompt="x")
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="tiny", messages=[])
        for name in range(20):
            ask(url, f"/unknown/{name}")
        seen = samples(url)
    assert usage is not None
    assert seen["hone_http_requests_total", ("/v1/chat/completions", "200")] == 2
    assert seen["hone_http_requests_total", ("/v1/chat/completions", "400")] == 1
    assert seen["hone_http_requests_total", ("/sessions/<id>/v1/completions", "200")] == 1
    assert seen["hone_http_requests_total", ("other", "404")] == 20, "paths of callers add no labels"
    assert seen["hone_generation_tokens_total", ()] == 4 * len(ANSWER)
    assert seen["hone_prompt_tokens_total", ()] == 3 * usage.prompt_tokens + len(TOKENIZER("x")["input_ids"])
    assert seen["hone_e2e_request_latency_seconds_count", ()] == 4
    assert seen["hone_e2e_request_latency_seconds_sum", ()] > 4 * 0.02
    assert seen["hone_request_success_total", ("stop",)] == 4
    assert seen["hone_num_requests_running", ()] == seen["hone_num_requests_waiting", ()] == 0


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/audio/speech", "/v1/images/generations", "/v1/files", "/v2/chat"]
)
def test_other_paths_are_refused_in_openais_form(url: str, path: str) -> None:
    status, error = ask(url, path, {})
    assert (status, error["code"], error["type"]) == (404, "not_found", "invalid_request_error")
    assert path in error["message"] and "/v1/chat/completions" in error["message"]


def test_a_part_that_is_no_text_is_named(url: str) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    status, error = ask(
        url, "/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": parts}]}
    )
    assert status == 400 and "image_url" in error["message"] and error["param"] == "messages.0.content"
