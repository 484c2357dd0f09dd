"""Requests for a server's routes, changed at random, and a good client beside them whose answers have to stay the same.

A route is given by good requests. A change puts a hostile value, or one from elsewhere in the request, in any place of its JSON, its
query or its path; drops or repeats a part; or damages the bytes and the headers.
"""

from __future__ import annotations

import copy
import http.client
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import psutil
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from starlette.routing import Mount, Route
from support.examples import SEED_VARIABLE
from support.patience import SOON

EXAMPLES_VARIABLE = "HONE_FUZZ_EXAMPLES"
"""Environment variable with the number of requests to each server."""
USUAL = 400
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 7, 2**31, -(2**31) - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400),
    *(0.5, -0.0, 1e-300, 1e308, float("nan"), float("inf"), float("-inf")),
    *("", " ", "a", "0", "-1", "1e9", "nan", "٣", "1_0", "\x00", "\ud800", "é" * 300, "x" * 5000, "..", "../../x", "/etc/passwd"),
    *("<|im_start|>", "<|im_end|>\n", "{{ 7 * 7 }}", "%s%n", "[" * 2000, '{"a": 1}', "a(b|c)*" * 50, "score<", '"', "step:", "\n"),
    *([], {}, [[]], [None], {"": None}, {"type": "x"}, [0] * 3000, ["x"] * 300, {"$ref": "#"}, {"type": "object"}),
]  # fmt: skip
DEEP = json.loads("[" * 100 + "]" * 100)
Json = Any


@dataclass(frozen=True)
class Request:
    """A request as it is sent."""

    method: str
    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def fuzzing() -> settings:
    """Settings of a fuzzing test: the same requests in every run, except with `scripts/test --random`."""
    random = os.environ.get(SEED_VARIABLE) is not None
    storage = {} if random else {"database": None}
    count = int(os.environ.get(EXAMPLES_VARIABLE, USUAL))
    return settings(
        max_examples=count, deadline=None, derandomize=not random, suppress_health_check=list(HealthCheck), **storage
    )


def routes_of(routes: Iterable[Any], prefix: str = "") -> set[str]:
    """Return the routes of an application, like ``POST /v1/completions``."""
    found: set[str] = set()
    for route in routes:
        if isinstance(route, Mount):
            found |= routes_of(route.routes, prefix + route.path)
        elif isinstance(route, Route):
            found |= {f"{method} {prefix}{route.path}" for method in (route.methods or ()) - {"HEAD"}}
    return found


def requests(routes: Mapping[str, Sequence[Json]], headers: Mapping[str, str]) -> st.SearchStrategy[Request]:
    """Return changed requests.

    Args:
        routes: good requests by route, like ``POST /a/{name}``: the body, or the query of a GET; names in braces are its first values.
        headers: of good requests.
    """
    return _requests(sorted((route, good) for route, all_good in routes.items() for good in [all_good]), dict(headers))


@st.composite
def _requests(draw: st.DrawFn, routes: list[tuple[str, Sequence[Json]]], headers: dict[str, str]) -> Request:
    route, good = draw(st.sampled_from(routes))
    method, _, pattern = route.partition(" ")
    root = {"fields": copy.deepcopy(draw(st.sampled_from(list(good)))), "path": {}}
    for part in pattern.split("{")[1:]:
        name = part.partition("}")[0].partition(":")[0]
        root["path"][name] = root["fields"].pop(f"{{{name}}}", "x")
    for _ in range(draw(st.integers(0, 3))):
        _change(draw, root)
    for name, value in root["path"].items():
        kinds = ("", ":path", ":int")
        for kind in kinds:
            pattern = pattern.replace(f"{{{name}{kind}}}", quote(_text(value)[:2000], safe="", errors="replace"))
    headers = {**headers, **draw(st.just({}) | _HEADERS)}
    if method == "POST":
        body = json.dumps(root["fields"]).encode()
        return Request(method, pattern, _damaged(draw, body), headers)
    fields = root["fields"] if isinstance(root["fields"], dict) else {}
    query = urlencode({name: _text(value)[:3000] for name, value in fields.items()}, errors="replace")
    return Request(method, f"{pattern}?{query}" if query else pattern, None, headers)


_HEADERS = st.dictionaries(
    st.sampled_from(["Content-Type", "Authorization", "X-API-Key", "Cookie", "Accept", "Origin", "X-Hone-View", "Host"]),
    st.sampled_from(["", "a", "\xff\xfe", "text/plain", "application/json; charset=utf-16", "Bearer", "Bearer \xe9", "a=b; =; ;", "null", "*/*", "x" * 4000]),
    max_size=2,
)  # fmt: skip


def _text(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _places(node: Json, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return each place of a tree as its container and its key; long lists by their ends."""
    keys: list[Any] = (
        list(node) if isinstance(node, dict) else [*range(len(node))][:8] if isinstance(node, list) else []
    )
    for key in keys:
        found.append((node, key))
        if len(found) < 400:
            _places(node[key], found)
    return found


def _change(draw: st.DrawFn, root: dict[str, Any]) -> None:
    places = _places(root["fields"], [(root, "fields")]) + _places(root["path"], [])
    node, key = draw(st.sampled_from(range(len(places))).map(places[::-1].__getitem__))
    match draw(st.sampled_from(["value", "value", "number", "text", "other", "drop", "repeat", "wrap", "add", "deep"])):
        case "value":
            node[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))
        case "number":
            node[key] = draw(st.integers(-(2**40), 2**70) | st.floats())
        case "text":
            node[key] = draw(st.text(max_size=40))
        case "other":
            other, name = draw(st.sampled_from(places))
            node[key] = copy.deepcopy(other[name])
        case "drop" if node is not root:
            node.pop(key)
        case "repeat" if isinstance(node[key], list):
            node[key] = node[key] * draw(st.sampled_from([2, 200]))
        case "wrap":
            node[key] = draw(st.sampled_from([[node[key]], {"a": node[key]}]))
        case "add" if isinstance(node[key], dict):
            node[key][draw(st.sampled_from(["", "a", "type", "n", "seed", "role", "content"]))] = copy.deepcopy(
                draw(st.sampled_from(VALUES))
            )
        case "deep":
            node[key] = copy.deepcopy(DEEP)


def _damaged(draw: st.DrawFn, body: bytes) -> bytes:
    at = draw(st.integers(0, len(body)))
    match draw(st.sampled_from(["", "", "", "", "", "", "cut", "bytes", "nothing", "encoding"])):
        case "cut":
            return body[:at]
        case "bytes":
            return body[:at] + draw(st.binary(max_size=8)) + body[at:]
        case "nothing":
            return b""
        case "encoding":
            return body.decode().encode("utf-16")
    return body


class Client:
    """A connection that is opened again after the server closed it; ``count`` has the statuses of the answers."""

    def __init__(self, address: str) -> None:
        self._host = address.removeprefix("http://")
        self.count: Counter[int] = Counter()
        self._line = http.client.HTTPConnection(self._host, timeout=SOON)

    def send(self, request: Request) -> tuple[int, bytes]:
        """Return status and body of the answer; an answer that does not come within a minute is an error."""
        for again in (True, False):
            try:
                self._line.request(request.method, request.path, request.body, dict(request.headers))
                answer = self._line.getresponse()
                content = answer.read()
                break
            except BaseException as error:
                self._line.close()  # the server may close a connection between two requests
                if not again or not isinstance(error, ConnectionError | http.client.BadStatusLine):
                    raise
        self.count[answer.status] += 1
        return answer.status, content


class Watched:
    """A server that is fuzzed: what it must never answer or log, a neighbour who asks it all the time, and its memory.

    Args:
        address: of the server.
        log: its messages.
        ask: asks it something; every answer has to equal the first.
    """

    def __init__(self, address: str, log: Path, ask: Callable[[], object]) -> None:
        self.client, self._log, self._read, self._ask = Client(address), log, 0, ask
        port = int(address.rpartition(":")[2])
        (pid,) = {
            each.pid
            for each in psutil.net_connections("tcp")
            if each.laddr and each.laddr.port == port and each.status == "LISTEN"
        }
        self._process, self.memory, self.asked, self.slowest, self.problem = psutil.Process(pid), [], 0, 0.0, ""
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._neighbour, daemon=True)

    def __enter__(self) -> Watched:
        self._right = self._ask()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _neighbour(self) -> None:
        while not self._stop.wait(0.05) and not self.problem:
            began = time.monotonic()
            try:
                found = self._ask()
            except Exception as error:  # noqa: BLE001 - shown where the requests are sent
                self.problem = f"the neighbour got no answer: {error!r}"
                return
            self.slowest, self.asked = max(self.slowest, time.monotonic() - began), self.asked + 1
            if found != self._right:
                got, right = repr(found), repr(self._right)
                place = len(os.path.commonprefix([got, right]))
                shown = slice(max(0, place - 200), place + 200)
                self.problem = f"the neighbour got ...{got[shown]}... instead of ...{right[shown]}..."

    def send(self, request: Request) -> tuple[int, bytes]:
        """Send a request, and check that the server answered as one that works."""
        status, content = self.client.send(request)
        with self._log.open(errors="replace") as log:
            log.seek(self._read)
            logged = log.read()
            self._read = log.tell()
        assert status < 500 and b'"server_error"' not in content, (status, content[:2000], logged[-4000:])
        assert "Traceback" not in logged, logged[-4000:]
        assert not self.problem, self.problem
        if sum(self.client.count.values()) % 100 == 1:
            self.memory.append(self._process.memory_info().rss // 2**20)
        return status, content

    def report(self) -> str:
        """Return the figures in a line."""
        memory = [*self.memory, self._process.memory_info().rss // 2**20]
        return (
            f"{sum(self.client.count.values())} requests {dict(sorted(self.client.count.items()))}, 0 with 5xx; neighbour: {self.asked} "
            f"right answers, slowest {self.slowest:.2f} s; memory {memory[0]} MB before, {max(memory)} at most, {memory[-1]} after"
        )
