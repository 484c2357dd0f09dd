"""Bad requests to the endpoint over real HTTP: each is refused by itself, at once, and on a connection that stays open."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from support.families import make_engine
from support.forked_python import Forks
from support.patience import SOON, STALL
from support.scripted import ScriptedEngine, served
from support.templates import tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from hone.agents.serving import server as connections
from hone.agents.serving import wire as intake
from hone.errors import GenerationError, ProcessError, RequestError
from hone.generation.protocol import GenerationRequest
from hone.generation.remote import messages

pytestmark = pytest.mark.application(
    "hone/agents/serving", "hone/generation/server", "hone/trainers/serving.py", "hone/cli/serve.py"
)

TOKENIZER = tokenizer("qwen2_5")
CONTEXT = 512


def load_benchmark() -> ModuleType:
    """Return the module of the benchmark, whose attacks and clients these tests share."""
    path = Path(__file__).parents[3] / "benchmarks" / "serve_under_attack.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


benchmark = load_benchmark()
TEXT, CHAT = benchmark.TEXT, benchmark.CHAT


def random_model() -> PreTrainedModel:
    config = Qwen3Config(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        eos_token_id=TOKENIZER.eos_token_id,
        pad_token_id=TOKENIZER.pad_token_id,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    engine = make_engine(random_model(), tokenizer=TOKENIZER, max_model_len=CONTEXT)
    with served(engine, TOKENIZER, max_model_len=CONTEXT, vocabulary=len(TOKENIZER)) as (url, _):
        yield url.removeprefix("http://")


JSON = {"Content-Type": "application/json"}


def line_to(host: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(host, timeout=SOON)


def good(number: int = 1) -> tuple[str, bytes]:
    return benchmark.good_request(number)


def assert_refused(host: str, path: str, body: bytes, status: int) -> dict[str, Any]:
    """Check that a request gets an error in OpenAI's form, and that its connection serves the next request."""
    line = line_to(host)
    line.connect()
    connection = line.sock
    given, answer = benchmark.post(line, path, body)
    error = answer["error"]
    assert given == status, error
    assert error["message"] and error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert benchmark.post(line, *good())[0] == 200 and line.sock is connection
    line.close()
    return error


@pytest.mark.parametrize("name", benchmark.SMALL)
def test_bad_input_is_answered_on_a_connection_that_stays(host: str, name: str) -> None:
    path, body, status = benchmark.SMALL[name]
    assert_refused(host, path, body(), status)


@pytest.mark.parametrize("name", benchmark.LARGE)
def test_large_input_is_answered_on_a_connection_that_stays(host: str, name: str) -> None:
    path, body, status = benchmark.LARGE[name]
    assert_refused(host, path, body(), status)


@pytest.mark.parametrize(
    ("name", "param"),
    [
        ("token beyond the vocabulary", "prompt"),
        ("top_k of 70 bits", "top_k"),
        ("infinite temperature", None),
        ("overflowing temperature", "temperature"),
        ("calls that are a number", "messages.1.tool_calls"),
        ("deep arguments", "messages.1.tool_calls"),
        ("function that is text", "tools.0.function"),
        ("long stop string", "stop"),
        ("the server's template argument", "chat_template_kwargs"),
    ],
)
def test_the_error_names_the_field(host: str, name: str, param: str | None) -> None:
    path, body, status = benchmark.SMALL[name]
    assert assert_refused(host, path, body(), status)["param"] == param


def test_neighbours_of_bad_requests_get_their_replies(host: str) -> None:
    alone = benchmark.send_good(host, 12, 4)
    stop = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        attackers = [pool.submit(benchmark.attack, host, benchmark.SMALL, stop) for _ in range(2)]
        attacked = benchmark.send_good(host, 12, 4)
        stop.set()
        counts = sum((attacker.result() for attacker in attackers), benchmark.Counter())
    assert attacked.texts == alone.texts and None not in alone.texts
    assert counts.keys() == {"refused"} and counts["refused"] > 12


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("CUDA error: device-side assert triggered"), 500),
        (GenerationError("the engine returned no completion"), 500),
        (RequestError("the request needs 600 tokens"), 400),
    ],
)
def test_an_error_of_a_replica_is_the_servers_and_a_refusal_the_callers(error: Exception, status: int) -> None:
    """A replica sends its errors as messages, and they keep their kind."""

    def answer(request: GenerationRequest) -> list[int]:
        raise messages.error_of(messages.error_as_message(error))

    with served(ScriptedEngine(answer), TOKENIZER) as (url, _):
        given, reply = benchmark.post(line_to(url.removeprefix("http://")), *good())
    assert (given, reply["error"]["type"] == "server_error") == (status, status >= 500)


def test_a_lost_engine_is_to_be_tried_again() -> None:
    def answer(request: GenerationRequest) -> list[int]:
        raise ProcessError("all replicas are lost")

    with served(ScriptedEngine(answer), TOKENIZER) as (url, _):
        assert benchmark.post(line_to(url.removeprefix("http://")), *good())[0] == 503


def test_a_stream_ends_with_the_error_of_its_engine() -> None:
    """It used to wait for ever, because only errors of the API reached the stream."""

    def answer(request: GenerationRequest) -> list[int]:
        raise IndexError("a bug")

    with served(ScriptedEngine(answer), TOKENIZER) as (url, _):
        line = line_to(url.removeprefix("http://"))
        path, body = good()
        line.request("POST", path, json.dumps({**json.loads(body), "stream": True}).encode(), JSON)
        events = line.getresponse().read().decode().split("\n\n")
    assert json.loads(events[0].removeprefix("data: "))["error"]["type"] == "server_error"
    assert events[1] == "data: [DONE]"


# connections ----------------------------------------------------------------------------------------------------------


def raw(host: str, head: str) -> bytes:
    """Send bytes; return what arrives until the server closes the connection or an answer is there."""
    address, port = host.split(":")
    with socket.create_connection((address, int(port)), timeout=SOON) as line:
        line.sendall(head.encode())
        return line.recv(65536)


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("evil.example", 403), ("127.0.0.1.evil.example:80", 403), ("[::2]", 403), ("localhost.", 403), ("", 403),
        ("localhost", 200), ("LOCALHOST:1", 200), ("127.0.0.1", 200), ("[::1]:9", 200),
    ],
)  # fmt: skip
def test_the_host_header_names_this_host(host: str, name: str, status: int) -> None:
    answer = raw(host, f"GET /health HTTP/1.1\r\nHost: {name}\r\n\r\n")
    assert int(answer.split()[1]) == status


BODY = b'{"prompt": "a"}'
SENT = {
    "by a program": ("Content-Type: application/json", 200),
    "by a page of this host": ("Content-Type: application/json; charset=utf-8\r\nOrigin: http://127.0.0.1", 200),
    "as a form": ("Content-Type: application/x-www-form-urlencoded", 415),
    "as text": ("Content-Type: text/plain", 415),
    "without a type": ("X-Nothing: 1", 415),
    "by another site": ("Content-Type: application/json\r\nOrigin: http://evil.example", 403),
    "by a file": ("Content-Type: application/json\r\nOrigin: null", 403),
    "by a page of another port": ("Content-Type: application/json\r\nOrigin: http://127.0.0.1:1", 403),
    "as text by another site": ("Content-Type: text/plain\r\nOrigin: http://evil.example", 403),
}


@pytest.mark.parametrize("how", SENT)
@pytest.mark.parametrize("method", ["POST /tokenize", "POST /v1/completions", "POST /release"])
def test_a_web_page_cannot_change_anything(host: str, method: str, how: str) -> None:
    lines, status = SENT[how]
    head = (
        f"{method} HTTP/1.1\r\nHost: 127.0.0.1\r\n{lines}\r\nContent-Length: {len(BODY)}\r\nConnection: close\r\n\r\n"
    )
    code = int(raw(host, head + BODY.decode()).split()[1])
    assert code == status if status != 200 else code not in (403, 415)


def test_unfinished_headers_end_a_connection(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    assert raw(host, "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: ") == b""
    assert raw(host, "") == b""
    line = line_to(host)
    assert benchmark.post(line, *good())[0] == 200
    connection = line.sock
    time.sleep(1.0)  # an idle connection has no headers to complete
    assert benchmark.post(line, *good())[0] == 200 and line.sock is connection
    connection.sendall(b"GET /hea")
    assert connection.recv(10) == b""


def test_a_body_that_never_ends_is_refused(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "BODY_SECONDS", 0.3)
    answer = raw(
        host,
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
    )
    assert int(answer.split()[1]) == 408


def test_small_answers_are_sent_at_once(host: str) -> None:
    """Headers and body are two packets; unless asked, the system keeps the second until the client confirms the first (40 ms)."""
    line = line_to(host)
    benchmark.post(line, *good())
    sockets = psutil.Process().net_connections("tcp")
    (number,) = [each.fd for each in sockets if tuple(each.raddr or ()) == line.sock.getsockname()]
    with socket.socket(fileno=os.dup(number)) as connection:
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# a process ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def process(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, psutil.Process]]:
    """`hone serve` as a process: its host, and the process."""
    folder = tmp_path_factory.mktemp("model")
    random_model().save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    with benchmark.serving(folder, command=(str(forks.bin / "hone"),), context=CONTEXT) as (address, _):
        port = int(address.rpartition(":")[2])
        (pid,) = {
            each.pid
            for each in psutil.net_connections("tcp")
            if each.laddr and each.laddr.port == port and each.status == "LISTEN"
        }
        yield address, psutil.Process(pid)


@pytest.mark.slow
def test_large_prompts_leave_the_server_responsive_and_small(process: tuple[str, psutil.Process]) -> None:
    host, server = process
    line = line_to(host)
    for number in range(4):
        assert benchmark.post(line, *good(number))[0] == 200
    before = server.memory_info().rss
    with benchmark.Watch(host, server) as watch:
        for path, body, status in benchmark.LARGE.values():
            assert benchmark.post(line, path, body())[0] == status
    deadline = time.monotonic() + SOON
    while server.memory_info().rss > 1.1 * before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.memory_info().rss <= 1.1 * before
    assert watch.peak < before + 200 * 2**20  # one request of 30 MB took 6.5 GB
    assert watch.slowest < STALL  # 17 s for a prompt of 4 MB; 0.1 s on a quiet machine


@pytest.mark.slow
def test_good_requests_beside_an_attack_are_not_lost(process: tuple[str, psutil.Process]) -> None:
    host, server = process
    report = benchmark.measure(host, server.pid, count=16, concurrency=4)
    assert report.lost == 0 and report.answers["refused"] > 0  # how many depends on the machine
    assert report.answers.keys() <= {"refused", "unfinished headers closed"}
