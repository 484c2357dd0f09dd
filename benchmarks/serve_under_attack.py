"""Measure what bad requests do to good ones: `python benchmarks/serve_under_attack.py`.

A `hone serve` process answers 500 good requests, eight at a time: first alone, then beside a continuous stream of bad ones (tokens
outside the vocabulary, numbers that no tensor holds, text that is not text, prompts of 4 and 30 MB, JSON of ten million lists, nested
arguments, unfinished headers). Good requests have seeds, so every reply must be the one that the server gave alone; any other is
lost. The script prints the lost requests, the ratios of latency, the slowest answer of /health and the memory of the process.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
CONTEXT = 8192
QUESTION = {"role": "user", "content": "17 + 25 ="}
Attack = tuple[str, Callable[[], bytes], int]
"""Path, body and the status of the answer."""


def _text(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 4, **fields}).encode()


def _chat(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"model": "tiny", "messages": [QUESTION], "max_tokens": 4, **fields}).encode()


def _called(arguments: Any) -> Callable[[], bytes]:
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return _chat(messages=[QUESTION, {"role": "assistant", "tool_calls": calls}])


def _raw(body: bytes, times: int = 1, tail: bytes = b"") -> Callable[[], bytes]:
    return lambda: body * times + tail


SMALL: dict[str, Attack] = {
    "token beyond the vocabulary": (TEXT, _text(prompt=[1_000_000]), 400),
    "negative token": (TEXT, _text(prompt=[5, -1]), 400),
    "token of 70 bits": (TEXT, _text(prompt=[2**70]), 400),
    "mixed prompt": (TEXT, _text(prompt=[5, "x"]), 400),
    "empty prompts": (TEXT, _text(prompt=[[], []]), 400),
    "top_k of 70 bits": (TEXT, _text(top_k=2**70), 400),
    "seed of 90 bits": (TEXT, _text(seed=2**90), 400),
    "number of 400 digits": (TEXT, _text(temperature=10**400), 400),
    "number of 5000 digits": (TEXT, _raw(b'{"model": "tiny", "prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}"), 400),
    "surrogate in stop": (TEXT, _text(stop="\ud800"), 400),
    "surrogate in a prompt": (TEXT, _text(prompt="a\ud800"), 400),
    "surrogate in a message": (CHAT, _chat(messages=[{"role": "user", "content": "\udfff"}]), 400),
    "surrogate in arguments": (CHAT, _called('{"a": "\\ud800"}'), 400),
    "thousand stop strings": (TEXT, _text(stop=[str(number) for number in range(1000)]), 400),
    "long stop string": (TEXT, _text(stop="x" * 30_000), 400),
    "infinite temperature": (CHAT, _chat(temperature=float("inf")), 400),
    "overflowing temperature": (CHAT, _raw(_chat(temperature=0.5)().replace(b"0.5", b"1e999")), 400),
    "tiny temperature": (CHAT, _chat(temperature=1e-300), 400),
    "tiny penalty": (CHAT, _chat(repetition_penalty=1e-200), 400),
    "many replies": (TEXT, _text(prompt=["x"] * 1000, n=128), 400),
    "calls that are a number": (CHAT, _chat(messages=[QUESTION, {"role": "assistant", "tool_calls": 5}]), 400),
    "call without a function": (CHAT, _chat(messages=[QUESTION, {"role": "assistant", "tool_calls": ["f"]}]), 400),
    "deep arguments": (CHAT, _called("[" * 20_000 + "]" * 20_000), 400),
    "deep body": (CHAT, _raw(b'{"model": "tiny", "messages": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"), 400),
    "tools that are text": (CHAT, _chat(tools=["f"]), 400),
    "function that is text": (CHAT, _chat(tools=[{"type": "function", "function": "f"}]), 400),
    "function without a name": (CHAT, _chat(tools=[{"type": "function", "function": {"name": 5}}]), 400),
    "the server's template argument": (CHAT, _chat(chat_template_kwargs={"tokenize": True}), 400),
    "template of the caller": (CHAT, _chat(chat_template_kwargs={"chat_template": "x"}), 400),
    "role that is a list": (CHAT, _chat(messages=[{"role": ["user"], "content": "x"}]), 400),
    "invalid UTF-8": (CHAT, _raw(b'{"model": "\xff"}'), 400),
    "no JSON": (CHAT, _raw(b"{"), 400),
    "unknown fields": (CHAT, _chat(**{f"field{number}": number for number in range(5000)}), 400),
}  # fmt: skip
LARGE: dict[str, Attack] = {
    "text of 4 MB": (TEXT, _raw(b'{"model": "tiny", "prompt": "', 1, b"hello world " * 350_000 + b'"}'), 413),
    "text of 30 MB": (TEXT, _raw(b'{"model": "tiny", "prompt": "', 1, b"hello world " * 2_600_000 + b'"}'), 413),
    "message of 30 MB": (
        CHAT,
        _raw(b'{"model": "tiny", "messages": [{"role": "user", "content": "', 1, b"x" * 30 * 2**20 + b'"}]}'),
        413,
    ),
    "text below the bound": (TEXT, _raw(b'{"model": "tiny", "prompt": "', 1, b"a b " * 25_000 + b'"}'), 400),
    "sixteen million tokens": (TEXT, _raw(b'{"model": "tiny", "prompt": [1', 1, b",1" * 16_000_000 + b"]}"), 413),
    "ten million lists": (CHAT, _raw(b'{"model": "tiny", "messages": [[]', 1, b",[]" * 10_000_000 + b"]}"), 413),
    "five million escapes": (TEXT, _raw(b'{"model": "tiny", "prompt": "', 1, b"\\u00e9" * 5_000_000 + b'"}'), 413),
    "half a million tokens": (TEXT, _raw(b'{"model": "tiny", "prompt": [1', 1, b",1" * 500_000 + b"]}"), 400),
    "300,000 lists": (CHAT, _raw(b'{"model": "tiny", "messages": [[]', 1, b",[]" * 300_000 + b"]}"), 400),
    "150,000 escapes": (TEXT, _raw(b'{"model": "tiny", "prompt": "', 1, b"\\u00e9" * 150_000 + b'"}'), 400),
    "text of 1 MB": (TEXT, _raw(b'{"model": "tiny", "prompt": "', 1, b"hello world " * 85_000 + b'"}'), 400),
    "more than the limit": (TEXT, _raw(b" " * (33 * 2**20)), 413),
}

# the server -----------------------------------------------------------------------------------------------------------


def make_model(folder: Path) -> Path:
    """Write a random Qwen3 of one million parameters with a small tokenizer."""
    hone = [sys.executable, "-m", "hone.cli.main"]
    for words in (
        ("data", "make", "arithmetic", "--out", "sums", "--size", "200", "--val-size", "20"),
        ("data", "tokenizer", "--files", "sums/train.parquet", "--template", "chatml_tools", "--out", "tokenizer"),
        ("init", "--arch", "qwen3", "--size", "1m", "--tokenizer", "tokenizer", "--out", "model"),
    ):
        subprocess.run([*hone, *words], cwd=folder, check=True, capture_output=True)
    return folder / "model"


@contextlib.contextmanager
def serving(
    model: Path, command: tuple[str, ...] = (sys.executable, "-m", "hone.cli.main"), context: int = CONTEXT
) -> Iterator[tuple[str, int]]:
    """Start `hone serve`; yield host and port, and the process id."""
    words = ["serve", str(model), "--name", "tiny", "--port", "0", "--max-model-len", str(context)]
    with tempfile.NamedTemporaryFile("w+") as log:
        server = subprocess.Popen([*command, *words], stderr=log, env={**os.environ, "HONE_SERVE_TOKEN": ""})
        try:
            while (address := re.search(r"at http://(127\.0\.0\.1:\d+)/v1", Path(log.name).read_text())) is None:
                if server.poll() is not None:
                    raise RuntimeError(Path(log.name).read_text())
                time.sleep(0.05)
            yield address[1], server.pid
        finally:
            server.terminate()
            server.wait(30)


# clients --------------------------------------------------------------------------------------------------------------


def post(line: http.client.HTTPConnection, path: str, body: bytes) -> tuple[int, Any]:
    """Send one request on a connection; return status and JSON of the answer."""
    line.request("POST", path, body, {"Content-Type": "application/json"})
    answer = line.getresponse()
    return answer.status, json.loads(answer.read())


def good_request(number: int) -> tuple[str, bytes]:
    """Return path and body of a good request."""
    if number % 2:
        return TEXT, _text(prompt=f"{number} + 4 =", max_tokens=24, seed=number, ignore_eos=True)()
    return CHAT, _chat(max_tokens=24, seed=number, ignore_eos=True)()


@dataclass
class Replies:
    """Replies to good requests: the text of each, None for a lost one, and the seconds that it took."""

    texts: list[str | None]
    seconds: list[float]

    def latency(self, share: float) -> float:
        """Return a percentile of the seconds."""
        return statistics.quantiles(self.seconds, n=100)[round(100 * share) - 1]


def send_good(host: str, count: int, concurrency: int) -> Replies:
    """Send good requests, ``concurrency`` at a time."""
    lines = threading.local()

    def one(number: int) -> tuple[str | None, float]:
        if not hasattr(lines, "line"):
            lines.line = http.client.HTTPConnection(host, timeout=120)
        started = time.perf_counter()
        try:
            status, answer = post(lines.line, *good_request(number))
        except (OSError, http.client.HTTPException):
            lines.line.close()
            return None, time.perf_counter() - started
        seconds = time.perf_counter() - started
        if status != 200:
            return None, seconds
        choice = answer["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"], seconds

    with ThreadPoolExecutor(concurrency) as pool:
        texts, seconds = zip(*pool.map(one, range(count)), strict=True)
    return Replies(list(texts), list(seconds))


def attack(host: str, attacks: dict[str, Attack], stop: threading.Event) -> Counter[str]:
    """Send attacks one after another until ``stop``; return the counts of answers."""
    counts: Counter[str] = Counter()
    line = http.client.HTTPConnection(host, timeout=120)
    while not stop.is_set():
        for name, (path, body, expected) in attacks.items():
            if stop.is_set():
                break
            try:
                status, _ = post(line, path, body())
                counts["refused" if status == expected else f"{name}: {status}"] += 1
            except (OSError, http.client.HTTPException) as error:
                counts[f"{name}: {type(error).__name__}"] += 1
                line.close()
    return counts


def hold_open(host: str, stop: threading.Event, lines: int = 50) -> Counter[str]:
    """Keep connections whose headers never end, a byte at a time, until ``stop``; return how many the server closed."""
    address, port = host.split(":")
    open_lines: list[socket.socket] = []
    closed = 0
    while not stop.wait(0.5):
        for line in list(open_lines):
            try:
                line.sendall(b"x")
            except OSError:
                open_lines.remove(line)
                closed += 1
        while len(open_lines) < lines:
            open_lines.append(socket.create_connection((address, int(port))))
            open_lines[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
    return Counter({"unfinished headers closed": closed})


ATTACKERS: dict[str, Callable[[str, threading.Event], Counter[str]]] = {
    "small": lambda host, stop: attack(host, SMALL, stop),
    "large": lambda host, stop: attack(host, LARGE, stop),
    "headers": hold_open,
}


@contextlib.contextmanager
def attacking(host: str) -> Iterator[Counter[str]]:
    """Attack from a process for each of ATTACKERS; yield the counts of answers, filled at the end."""
    counts: Counter[str] = Counter()
    words = [sys.executable, __file__, "--host", host, "--attacker"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    attackers = [subprocess.Popen([*words, name], text=True, **pipes) for name in ATTACKERS]  # type: ignore[call-overload]
    try:
        yield counts
    finally:
        for attacker in attackers:
            counts.update(json.loads(attacker.communicate("stop\n")[0]))


def run_attacker(name: str, host: str) -> None:
    """Attack until a line arrives; print the counts."""
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
    print(json.dumps(ATTACKERS[name](host, stop)))


@dataclass
class Watch:
    """Slowest answer of /health, and memory of the server in bytes, until the end of the block."""

    host: str
    process: psutil.Process
    slowest: float = 0.0
    peak: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watch:
        self._threads = [threading.Thread(target=self._health), threading.Thread(target=self._memory)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _health(self) -> None:
        line = http.client.HTTPConnection(self.host, timeout=120)
        while not self._stop.wait(0.02):
            started = time.perf_counter()
            line.request("GET", "/health")
            line.getresponse().read()
            self.slowest = max(self.slowest, time.perf_counter() - started)

    def _memory(self) -> None:
        while not self._stop.wait(0.01):
            self.peak = max(self.peak, self.process.memory_info().rss)


@dataclass
class Report:
    """Result of :func:`measure`; memory in bytes, times in seconds."""

    alone: Replies
    attacked: Replies
    answers: Counter[str]
    slowest_health: float
    rss_before: int
    rss_peak: int
    rss_after: int

    @property
    def lost(self) -> int:
        """Good requests without the reply that the server gave alone."""
        return sum(
            text is None or text != alone for text, alone in zip(self.attacked.texts, self.alone.texts, strict=True)
        )

    def ratio(self, share: float) -> float:
        """Return a percentile of the latency beside the attack, relative to the one alone."""
        return self.attacked.latency(share) / self.alone.latency(share)


def measure(host: str, pid: int, *, count: int, concurrency: int) -> Report:
    """Send good requests alone, then beside attackers."""
    process = psutil.Process(pid)
    send_good(host, 4 * concurrency, concurrency)
    alone = send_good(host, count, concurrency)
    before = process.memory_info().rss
    with Watch(host, process) as watch, attacking(host) as answers:
        time.sleep(1.0)
        attacked = send_good(host, count, concurrency)
    time.sleep(2.0)
    return Report(alone, attacked, answers, watch.slowest, before, watch.peak, process.memory_info().rss)


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--attacker", choices=ATTACKERS, help=argparse.SUPPRESS)
    parser.add_argument("--host", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attacker:
        run_attacker(options.attacker, options.host)
        return
    with tempfile.TemporaryDirectory() as folder, serving(make_model(Path(folder))) as (host, pid):
        report = measure(host, pid, count=options.requests, concurrency=options.concurrency)
    print(f"{psutil.cpu_count()} cores, {options.requests} good requests, {options.concurrency} at a time")
    print(f"bad requests: {dict(report.answers)}")
    print(f"good requests lost: {report.lost}")
    for name, share in (("median", 0.5), ("95 %", 0.95)):
        alone, attacked = 1000 * report.alone.latency(share), 1000 * report.attacked.latency(share)
        print(f"latency, {name}: {alone:.0f} ms alone, {attacked:.0f} ms attacked, {report.ratio(share):.2f}x")
    print(f"slowest /health: {1000 * report.slowest_health:.0f} ms")
    megabytes = [round(size / 2**20) for size in (report.rss_before, report.rss_peak, report.rss_after)]
    print("memory: {} MB before, {} MB at most, {} MB after".format(*megabytes))


if __name__ == "__main__":
    main()
