"""Constraints made to take all time or memory: each is answered, and neighbours of it get the tokens that they get without it."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.families import make_engine, model_of, tiny_config
from support.patience import SOON, STALL
from support.scripted import served
from support.templates import tokenizer

from hone.errors import RequestError
from hone.generation.grammars import check_compiles
from hone.generation.protocol import Constraint, ConstraintKind

TOKENIZER = tokenizer("qwen2_5")
CONTEXT = 512


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


MANY = {"type": "object", "properties": {f"k{number}": {} for number in range(9000)}}
HOSTILE: dict[str, dict[str, Any]] = {
    "states": {"guided_regex": "(a|b)*a(a|b){200}"},
    "repetition": {"guided_regex": "(([ab]{1,1000}){1,1000}){1,1000}"},
    "any then": {"guided_regex": "(.|\n)*a(.|\n){300}b"},
    "properties": {"guided_json": MANY},
    "pattern": {"guided_json": {"type": "string", "pattern": "^([a-z]*[aeiou]){50}(a|b)*a(a|b){300}$"}},
    "length": {"guided_json": {"type": "string", "minLength": 10**8, "maxLength": 10**9}},
    "items": {"guided_json": {"type": "array", "minItems": 10**8}},
    "nested": {"guided_json": nested(90)},
    "itself": {"guided_json": {"$ref": "#"}},
    "ambiguous": {"guided_grammar": 'start: a a a a a a\na: a a | "x" | "y" | b\nb: a | b a | "x"*\n'},
    "left": {"guided_grammar": 'start: start start | "a" | '},
    "large": {"guided_choice": [f"value {number}" for number in range(40000)]},
    "strings": {"guided_json": {"enum": [f"value {number}" for number in range(9000)]}},
}


def post(url: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 100, "seed": 3, **fields}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=SOON) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    config = tiny_config("qwen3")
    config.vocab_size, config.max_position_embeddings = len(TOKENIZER), CONTEXT
    engine = make_engine(model_of(config), tokenizer=TOKENIZER, max_model_len=CONTEXT)
    with served(engine, TOKENIZER, max_model_len=CONTEXT, vocabulary=len(TOKENIZER)) as (address, _):
        post(address, guided_regex="a")  # the library is imported
        yield address


@pytest.mark.application("hone/generation", "hone/trainers/serving.py")
def test_hostile_constraints_end_alone_and_do_not_stop_the_server(url: str) -> None:
    free = {"prompt": "Hello", "max_tokens": 200}
    _, expected = post(url, **free)
    waits: list[float] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            start = time.monotonic()
            with urllib.request.urlopen(f"{url}/health", timeout=SOON) as answer:
                assert answer.status == 200
            waits.append(time.monotonic() - start)
            time.sleep(0.02)

    with ThreadPoolExecutor(20) as pool:
        watching = pool.submit(watch)
        answers = {name: pool.submit(post, url, **fields) for name, fields in HOSTILE.items()}
        beside = [pool.submit(post, url, **free) for _ in range(4)]
        statuses = {name: answer.result()[0] for name, answer in answers.items()}
        texts = [answer.result()[1]["choices"][0]["text"] for answer in beside]
        over.set()
        watching.result()
    assert set(statuses.values()) <= {200, 400}
    assert {statuses[name] for name in ("properties", "itself", "large")} == {400}
    assert texts == [expected["choices"][0]["text"]] * 4
    assert max(waits) < STALL


def test_compilation_is_bounded() -> None:
    with pytest.raises(RequestError):
        check_compiles(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(MANY)))
