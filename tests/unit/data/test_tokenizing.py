"""Tokenizing of many chats: in processes and from the cache, always the same."""

import numpy as np
import pytest
from support.chat_templates import assistant, user
from support.messages import raises

from hone.data import tokenizing
from hone.data.files import cache_directory
from hone.data.tokenizing import Chats, TokenCache, tokenize, tokenize_here
from hone.errors import DataError

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def many(count, kind="conversation", **more):
    messages = [[user(f"q {n} {'x' * (n % 7)}"), assistant(f"a {n}")] for n in range(count)]
    tools = [TOOLS if n % 3 == 0 else None for n in range(count)]
    chats = Chats(kind, messages, tools, [f"row {n}" for n in range(count)], more)
    return chats if kind == "conversation" else Chats(kind, [m[:1] for m in messages], tools, chats.names, more)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch, tmp_path, tokenizer):
    tokenizer.chat_template = "{{ tools | tojson if tools else '' }}" + tokenizer.chat_template
    monkeypatch.setattr(tokenizing, "CHUNK", 20)
    monkeypatch.setenv("HONE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", ["conversation", "prompt"])
def test_processes_and_the_cache_give_what_one_call_gives(tokenizer, kind, monkeypatch):
    chats = many(130, kind)
    expected = tokenize_here(tokenizer, chats)
    assert tokenize(tokenizer, chats, processes=2) == expected
    (entry,) = (cache_directory() / "tokens").glob("*")
    assert entry.suffix == ".npz"
    monkeypatch.setattr(tokenizing, "tokenize_here", lambda *_: pytest.fail("the cache was not read"))
    assert tokenize(tokenizer, chats) == expected


def test_an_entry_is_for_its_content_alone(tokenizer):
    def path(chats):
        return TokenCache.entry(tokenizer, chats.kind, chats.kwargs, zip(chats.messages, chats.tools, strict=True)).path

    base = many(30)
    others = [
        many(29),
        many(30, kind="prompt"),
        many(30, tone="x"),
        Chats(base.kind, base.messages, [None] * 30, base.names, {}),
    ]
    paths = {path(chats) for chats in (base, *others)}
    template = tokenizer.chat_template
    tokenizer.chat_template = template + " "
    paths.add(path(base))
    tokenizer.chat_template = template
    tokenizer.add_tokens(["q 1"])
    paths.add(path(base))
    assert len(paths) == 7
    tokenizer.chat_template = "{{ strftime_now('%d') }}"  # other tokens tomorrow
    assert TokenCache.entry(tokenizer, "prompt", {}, []) is None


@pytest.mark.parametrize("damage", ["cut", "object", "short"])
def test_a_damaged_entry_is_made_again(tokenizer, damage):
    chats = many(50)
    expected = tokenize(tokenizer, chats, processes=1)
    (entry,) = (cache_directory() / "tokens").glob("*.npz")
    if damage == "cut":
        entry.write_bytes(entry.read_bytes()[:200])
    elif damage == "object":  # a pickle is never loaded
        np.savez(entry, ids=np.array([{}], dtype=object), mask=np.array([]), ends=np.array([1]))
    else:
        np.savez(entry, ids=np.array([1]), mask=np.array([1]), ends=np.array([1]))
    assert tokenize(tokenizer, chats, processes=1) == expected
    assert TokenCache(entry).read(50) == expected


def test_an_error_in_a_process_names_its_row(tokenizer):
    chats = many(70)
    chats.messages[55] = [user("no answer")]
    with raises(DataError, "row 55"):
        tokenize(tokenizer, chats, processes=2)
    assert not list((cache_directory() / "tokens").glob("*"))


def test_what_a_killed_process_did_not_read_is_dropped(tokenizer):
    worker = tokenizing._Worker(tokenizer)
    worker.kill()
    with pytest.raises(BrokenPipeError):
        worker._send(many(1))  # small enough to stay in the buffer
    worker.close()
    assert worker._input.closed and worker._output.closed


def test_a_process_that_dies_costs_no_rows(tokenizer, monkeypatch, caplog):
    chats = many(90)
    expected = tokenize_here(tokenizer, chats)
    send = tokenizing._Worker._send

    def killed(self, value):
        if isinstance(value, Chats) and len(value) == 20:
            self._process.kill()
        send(self, value)

    monkeypatch.setattr(tokenizing._Worker, "_send", killed)
    assert tokenize(tokenizer, chats, processes=2) == expected
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 2


def test_a_cache_that_cannot_be_written_costs_nothing(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HONE_CACHE", str(tmp_path / "file"))
    chats = many(50)
    assert tokenize(tokenizer, chats, processes=1) == tokenize_here(tokenizer, chats)


def test_tokens_are_below_the_cache_that_the_user_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HONE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert str(cache_directory()) == "/caches/hone"
    monkeypatch.setenv("HONE_CACHE", "/own")
    assert str(cache_directory()) == "/own"
