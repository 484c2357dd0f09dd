"""Tokenize the chats of a dataset: in processes when they are many, and only once; and what becomes of rows with too many tokens.

few chats      in this process
many           chunks of them in processes (hone/data/tokenizing_worker.py); the result is the same
any number     read from the cache if the same chats, tokenizer, template and settings were tokenized before
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hone import __version__
from hone.data.assistant_mask import render_conversations
from hone.data.chat import render_prompts
from hone.data.files import cache_directory
from hone.errors import ConfigError, DataError, HoneError, did_you_mean
from hone.progress import Bar, progress

_FORM = 5
_PACKAGES = ("transformers", "tokenizers", "jinja2")


class TokenCache:
    """One entry of the cache."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def entry(
        cls, tokenizer: PreTrainedTokenizerBase, kind: str, kwargs: dict[str, Any], chats: Iterable[tuple[Any, Any]]
    ) -> TokenCache | None:
        """Return the entry of chats with their tools; None where tokens may differ between two calls."""
        template = tokenizer.chat_template
        if not isinstance(tokenizer, PreTrainedTokenizerFast) or "strftime_now" in json.dumps(template):
            return None
        digest = hashlib.sha256()
        settings = [_FORM, kind, kwargs, template, tokenizer.special_tokens_map]
        settings += [__version__, *map(version, _PACKAGES)]
        try:
            digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
            digest.update(tokenizer.backend_tokenizer.to_str().encode())
            for chat in chats:
                digest.update(json.dumps(chat, sort_keys=False).encode() + b"\n")
        except TypeError:  # content that is not JSON, such as images
            return None
        return cls(cache_directory() / "tokens" / f"{digest.hexdigest()}.npz")

    def read(self, count: int) -> list[tuple[list[int], list[int]]] | None:
        """Return the tokens and masks of ``count`` chats; None if they are not in the cache, or the entry is damaged."""
        if not self.path.is_file():
            return None
        try:
            with np.load(self.path, allow_pickle=False) as file:
                ids, mask, ends = file["ids"], file["mask"], file["ends"].tolist()
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            log.warning("%s cannot be read (%s); the dataset is tokenized again", self.path, error)
            return None
        if len(ends) != count or len(ids) != (ends[-1] if ends else 0) or len(mask) not in (0, len(ids)):
            log.warning("%s has other rows than its name says; the dataset is tokenized again", self.path)
            return None
        starts = [0, *ends[:-1]]
        places = zip(starts, ends, strict=True)
        return [(ids[start:end].tolist(), mask[start:end].tolist()) for start, end in places]

    def write(self, tokens: list[tuple[list[int], list[int]]]) -> None:
        """Write the tokens at once, and log the size; a full disk is only logged."""
        ids = np.fromiter((token for row, _ in tokens for token in row), np.int32)
        mask = np.fromiter((bit for _, row in tokens for bit in row), np.uint8)
        ends = np.cumsum([len(row) for row, _ in tokens], dtype=np.int64)
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as file:
                np.savez(file, ids=ids, mask=mask, ends=ends)
            Path(file.name).replace(self.path)
            whole = sum(entry.stat().st_size for entry in folder.glob("*.npz"))
        except OSError as error:
            log.warning("the tokens of the dataset could not be kept in %s: %s", folder, error.strerror or error)
            return
        log.info(
            "tokens of %d rows are kept in %s: %.1f MB, %.1f MB with those of other datasets; delete it at any time",
            len(tokens),
            folder,
            self.path.stat().st_size / 1e6,
            whole / 1e6,
        )


log = logging.getLogger(__name__)

Tokens = tuple[list[int], list[int]]
"""Token ids of a chat, and 1 for each token of an assistant turn; the mask of a prompt is empty."""

CHUNK = 256  # chats per call of the template and the tokenizer
MOST_PROCESSES = 16
_SECONDS_PER_PROCESS = 15.0


@dataclass(frozen=True)
class Chats:
    """Chats to tokenize."""

    # "prompt" (rendered with the generation prompt) or "conversation" (with the mask of the assistant's tokens)
    kind: str
    messages: list[list[dict[str, Any]]]
    tools: list[list[dict[str, Any]] | None]  # function schemas that the template shows in each chat, or None
    names: list[str]  # source of each chat, for error messages
    kwargs: dict[str, Any]  # additional arguments of the template

    def __len__(self) -> int:
        return len(self.messages)

    def part(self, start: int, end: int) -> Chats:
        parts = {name: getattr(self, name)[start:end] for name in ("messages", "tools", "names")}
        return replace(self, **parts)


def tokenize(tokenizer: PreTrainedTokenizerBase, chats: Chats, *, processes: int | None = None) -> list[Tokens]:
    """Return the tokens of chats, in order.

    ``processes``: number of processes; None starts as many as the first chunk's time calls for.

    Raises DataError: the template refuses a chat, or rewrites earlier turns.
    """
    if len(chats) <= CHUNK and processes is None:
        return tokenize_here(tokenizer, chats)
    cache = TokenCache.entry(tokenizer, chats.kind, chats.kwargs, zip(chats.messages, chats.tools, strict=True))
    if cache is not None and (tokens := cache.read(len(chats))) is not None:
        return tokens
    parts = [chats.part(start, start + CHUNK) for start in range(0, len(chats), CHUNK)]
    with progress(f"tokenizing {chats.kind}s", len(chats)) as bar:
        started = time.monotonic()
        first = tokenize_here(tokenizer, parts[0])
        seconds = time.monotonic() - started
        bar.advance(len(parts[0]))
        count = processes if processes is not None else _processes(seconds * (len(parts) - 1))
        results = [first]
        if count > 1 and len(parts) > 1:
            results += _in_processes(tokenizer, parts[1:], (parts[0], first), min(count, len(parts) - 1), bar)
        for part in parts[len(results) :]:
            results.append(tokenize_here(tokenizer, part))
            bar.advance(len(part))
    tokens = list(itertools.chain.from_iterable(results))
    if cache is not None:
        cache.write(tokens)
    return tokens


def tokenize_here(tokenizer: PreTrainedTokenizerBase, chats: Chats) -> list[Tokens]:
    """Tokenize in this process; one call renders the chats with the same tools."""
    by_tools: dict[str, list[int]] = {}
    for number, schemas in enumerate(chats.tools):
        by_tools.setdefault(json.dumps(schemas, sort_keys=True), []).append(number)
    tokens: dict[int, Tokens] = {}
    for numbers in by_tools.values():
        shown = chats.tools[numbers[0]]
        settings = {**chats.kwargs, "tools": shown} if shown else chats.kwargs
        messages = [chats.messages[number] for number in numbers]
        if chats.kind == "prompt":
            rendered = [(ids, []) for ids in render_prompts(tokenizer, messages, settings)]
        else:
            rendered = render_conversations(tokenizer, messages, settings, [chats.names[number] for number in numbers])
        tokens.update(zip(numbers, rendered, strict=True))
    return [tokens[number] for number in range(len(chats))]


def _processes(seconds: float) -> int:
    """Return the number of processes for N seconds of work; a process takes some seconds to start."""
    return max(1, min(len(os.sched_getaffinity(0)), MOST_PROCESSES, int(seconds / _SECONDS_PER_PROCESS)))


def _in_processes(
    tokenizer: PreTrainedTokenizerBase, parts: Sequence[Chats], probe: tuple[Chats, list[Tokens]], count: int, bar: Bar
) -> list[list[Tokens]]:
    """Return the tokens of the parts; fewer if a process fails, and the caller tokenizes the others itself.

    Each process first tokenizes a probe, whose tokens must equal those of this process.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(parts)):
        waiting.put(number)
    answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    workers = [_Worker(tokenizer) for _ in range(count)]
    threads = [threading.Thread(target=_feed, args=(w, parts, probe, waiting, answers), daemon=True) for w in workers]
    results: dict[int, list[Tokens]] = {}
    try:
        for thread in threads:
            thread.start()
        running = count
        while running:
            number, answer = answers.get()
            if isinstance(answer, HoneError):
                raise answer
            if number < 0:
                running -= 1
                if answer is not None:
                    log.warning("a tokenizing process ended (%s); its chats are tokenized by the others", answer)
                continue
            results[number] = answer
            bar.advance(len(parts[number]))
    finally:
        for worker in workers:
            worker.kill()
        for thread in threads:  # they use the pipes
            thread.join()
        for worker in workers:
            worker.close()
    return list(_leading(results))


def _leading(results: dict[int, list[Tokens]]) -> Iterator[list[Tokens]]:
    for number in range(len(results)):
        if number not in results:
            return
        yield results[number]


def _feed(
    worker: _Worker,
    parts: Sequence[Chats],
    probe: tuple[Chats, list[Tokens]],
    waiting: queue.SimpleQueue[int],
    answers: queue.SimpleQueue[tuple[int, Any]],
) -> None:
    """Send parts to one process until none is left; end with the number -1 and the reason for an early end."""
    try:
        if worker.tokenize(probe[0].part(0, 16)) != probe[1][:16]:
            answers.put((-1, "its tokenizer gives other tokens"))
            return
        while True:
            number = waiting.get_nowait()
            try:
                answers.put((number, worker.tokenize(parts[number])))
            except (OSError, EOFError):
                waiting.put(number)
                raise
    except queue.Empty:
        answers.put((-1, None))
    except Exception as error:  # noqa: BLE001 - reported by the main thread, which tokenizes the rest
        answers.put((-1, f"{type(error).__name__}: {error}"))


class _Worker:
    """Process that tokenizes chunks."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        package = str(Path(__file__).resolve().parents[2])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hone.data.tokenizing_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "TOKENIZERS_PARALLELISM": "false",
                "OMP_NUM_THREADS": "1",
            },
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output, self._tokenizer = self._process.stdin, self._process.stdout, tokenizer
        self._started = False

    def tokenize(self, chats: Chats) -> Any:
        """Return the tokens of chats, or the HoneError of one."""
        if not self._started:
            self._send(self._tokenizer)
            self._started = True
        self._send(chats)
        return pickle.load(self._output)

    def kill(self) -> None:
        """End the process; a call of :meth:`tokenize` in another thread then fails."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # what it did not read is flushed
            self._input.close()
        self._output.close()

    def _send(self, value: Any) -> None:
        pickle.dump(value, self._input)
        self._input.flush()


T = TypeVar("T")

SIDES = ("left", "right", "middle")  # parts of a row that are removed when it is too long
POLICIES = ("error", "drop", "truncate", *SIDES)


def check_policy(policy: str) -> None:
    if policy not in POLICIES:
        raise ConfigError(f"unknown policy '{policy}'", where="data.truncation", fix=did_you_mean(policy, POLICIES))


def shortened(values: list[T], limit: int, side: str) -> list[T]:
    """Return at most ``limit`` values, without those on the left or right, or in the middle.

    >>> [shortened([1, 2, 3, 4, 5], 3, side) for side in ("left", "right", "middle")]
    [[3, 4, 5], [1, 2, 3], [1, 4, 5]]
    """
    if len(values) <= limit:
        return values
    first = {"left": 0, "right": limit, "middle": limit // 2}[side]
    return values[:first] + values[len(values) - (limit - first) :]


def overlong_rows(lengths: Sequence[int], limit: int, policy: str, *, what: str, key: str) -> set[int]:
    """Return the indices of rows longer than ``limit`` tokens.

    Args:
        policy: ``error`` raises if there is one; the others leave the rows to the caller.
        what: name of the rows in the message ("prompts").

    Raises:
        DataError: a row is too long and the policy is ``error``, or it is ``drop`` and no row would be left.
    """
    check_policy(policy)
    long = {row for row, length in enumerate(lengths) if length > limit}
    if not long or policy in ("truncate", *SIDES) or (policy == "drop" and len(long) < len(lengths)):
        return long
    ordered = sorted(lengths)
    p99 = ordered[int(0.99 * len(ordered))]
    fix = f"{key}={ordered[-1]}"
    raise DataError(
        f"{len(long)} of {len(lengths)} {what} are longer than {key}={limit} tokens "
        f"(longest {ordered[-1]}, 99th percentile {p99})",
        why="no row would be left" if policy == "drop" else "they exceed the context length that the run plans for",
        fix=fix if policy == "drop" else f"{fix}, or data.truncation=drop, or data.truncation=truncate",
    )
