"""Rows with pages: the same tokens and log-probs as contiguous rows, no page lost or shared by accident, preemption instead of errors."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support.examples import examples
from support.paged import PAGE, paged_engine

from hone.data.types import StopReason
from hone.errors import GenerationError
from hone.generation.native.paged.pool import OutOfPages, Pages, PageShape
from hone.generation.native.paged.rows import PagedRows
from hone.generation.native.paged.support import number_of_pages
from hone.generation.native.rows import CacheLimits
from hone.generation.protocol import Completion, GenerationRequest, SamplingParams


def request(name: str, prompt: list[int], seed: int = 0, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(name, prompt, SamplingParams(**{"max_tokens": 12, **sampling}), seed)


def groups(**sampling: Any) -> list[GenerationRequest]:
    """Prompts of 1, 4, 5, 9 and 14 tokens with 1 to 4 samples each, of different lengths."""
    lengths = {1: 2, 4: 3, 5: 1, 9: 4, 14: 2}
    return [
        request(f"{n}.{i}", [3 + n, *range(5, 4 + n)], 10 * n + i, **{"max_tokens": 2 + (5 * i + n) % 11, **sampling})
        for n, copies in lengths.items()
        for i in range(copies)
    ]


def rows_of(engine: Any) -> PagedRows:
    return engine._runner.rows


def assert_pages_are_kept_apart(rows: PagedRows) -> None:
    """Every user of a page is a row or a kept turn; rows share only pages that none of them writes any more."""
    assert rows._memory is not None
    pages = rows._memory.pages
    users = Counter(page for job in rows.running for page in job.pages)
    users += Counter(page for turn in rows.sessions for page in turn.entries)
    assert {page: pages.users(page) for page in range(1, pages.count) if pages.users(page)} == dict(users)
    assert pages.free + len(users) == pages.count - 1
    for job in rows.running:
        written = (len(job.request.prompt_ids) - 1 + rows.num_sampled(job)) // PAGE
        assert all(users[page] == 1 for page in job.pages[written:])


def assert_same(first: dict[str, Completion], second: dict[str, Completion]) -> None:
    assert first.keys() == second.keys()
    for name, one in first.items():
        other = second[name]
        assert (one.token_ids, one.stop_reason) == (other.token_ids, other.stop_reason), name
        for values, others in ((one.log_probs, other.log_probs), (one.sampling_log_probs, other.sampling_log_probs)):
            torch.testing.assert_close(values, others, atol=1e-5, rtol=0)


CASES: dict[str, dict[str, Any]] = {
    "sampled": {},
    "greedy": {"temperature": 0.0},
    "truncated": {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "temperature": 0.8},
    "stop tokens": {"stop_token_ids": tuple(range(8, 24)), "max_tokens": 25},
    "stop strings": {"stop": ("=", ">", "?", "@", "A"), "max_tokens": 25},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "bias": {"logit_bias": ((7, 3.0), (9, -5.0))},
    "likeliest": {"top_log_probs": 3},
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_contiguous_rows(make_model, make_engine, serve, monkeypatch, case):
    model, requests = make_model("qwen3"), groups(**CASES[case])
    engine, contiguous = paged_engine(monkeypatch, model, max_num_seqs=5), make_engine(model, max_num_seqs=5)
    answers, expected = serve(engine, requests), serve(contiguous, requests)
    assert_same(answers, expected)
    reasons = {answer.stop_reason for answer in answers.values()}
    assert (StopReason.STOP in reasons) == case.startswith("stop")
    assert [[token for token, _ in place] for a in answers.values() for place in a.alternatives] == [
        [token for token, _ in place] for a in expected.values() for place in a.alternatives
    ]
    stats, others = engine.describe().stats, contiguous.describe().stats
    for name in ("prefill_tokens", "prefix_hits", "cached_tokens", "decode_tokens"):
        assert stats[name] <= others[name], name
    assert stats["preemptions"] == 0
    assert_pages_are_kept_apart(rows_of(engine))
    assert engine.describe().stats["cache_tokens"] == 0


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_other_models_and_windows(make_model, make_engine, serve, monkeypatch, name):
    model, requests = make_model(name), groups(max_tokens=20)
    assert_same(serve(paged_engine(monkeypatch, model), requests), serve(make_engine(model), requests))


@examples(12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 24)), min_size=1, max_size=9),
    max_num_seqs=st.integers(1, 6),
    pages=st.integers(9, 16),
    every=st.integers(1, 5),
)
def test_any_requests_in_few_pages(make_model, serve, make_engine, sizes, max_num_seqs, pages, every):
    """Whatever arrives, and however few pages there are: the tokens are those of a request alone, and pages are kept apart."""
    model = make_model("qwen3")
    requests = [
        request(str(i), [3 + prompt, *range(5, 4 + length)], i, max_tokens=most, stop_token_ids=(11, 12))
        for i, (prompt, length, most) in enumerate(sizes)
    ]
    with pytest.MonkeyPatch.context() as patch:
        engine = paged_engine(patch, model, max_num_seqs=max_num_seqs, max_cache_tokens=PAGE * pages, max_model_len=36)
    rows, step = rows_of(engine), rows_of(engine).step
    launched = 0

    def checked(work: Any) -> Any:
        nonlocal launched
        launched += 1
        ends = step(work)
        if launched % every == 0:
            assert_pages_are_kept_apart(rows)
        return ends

    rows.step = checked
    together = serve(engine, requests)
    assert_same(together, serve(make_engine(model), requests))
    assert rows._memory is not None and rows._memory.pages.in_use == 0
    assert engine.describe().stats["decode_tokens"] == sum(len(a.token_ids) for a in together.values())


def test_a_row_that_finds_no_page_waits_and_continues(make_model, make_engine, serve, monkeypatch):
    model = make_model("qwen3")
    requests = [request(str(i), [5, 6 + i, 7], i, max_tokens=30, ignore_eos=True) for i in range(4)]
    engine = paged_engine(
        monkeypatch, model, max_cache_tokens=16 * PAGE
    )  # one of them may need 8 pages, all of them 32
    answers, alone = serve(engine, requests), serve(make_engine(model), requests)
    assert_same(answers, alone)
    stats = engine.describe().stats
    assert stats["preemptions"] >= 2 and stats["decode_tokens"] == 120
    assert stats["peak_cache_tokens"] <= 16 * PAGE


def test_a_group_shares_full_pages(make_model, serve, monkeypatch):
    engine = paged_engine(monkeypatch, make_model("qwen3"), max_num_seqs=8)
    prompt = list(range(3, 3 + 4 * PAGE + 2))  # 17 tokens are cached: four full pages, and one of a fifth page
    serve(engine, [request(str(i), prompt, i, max_tokens=2, ignore_eos=True) for i in range(8)])
    stats = engine.describe().stats
    assert stats["prefill_tokens"] == 4 * PAGE + 1 and stats["prefix_hits"] == 7
    assert stats["peak_cache_tokens"] == PAGE * (4 + 8)


@pytest.mark.parametrize("shared", [2 * PAGE, 2 * PAGE + 1])
def test_turns_of_a_session_share_pages(make_model, make_engine, serve, monkeypatch, shared):
    model = make_model("qwen3")
    engine, fresh = paged_engine(monkeypatch, model), make_engine(model)
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    opening = list(range(3, 3 + shared))
    first = serve(engine, [GenerationRequest("a", opening, sampling, 1, "session")])["a"]
    cached = len(opening) + 6 - 1
    assert engine.describe().stats["cache_tokens"] == -(-cached // PAGE) * PAGE
    continued = [*opening, *first.token_ids, 9, 8, 7]
    branches = [continued, [*opening, 40, 41, 42, 43]]
    for ids in branches:
        request_ = GenerationRequest("b", ids, sampling, 2, "session")
        assert_same(serve(engine, [request_]), serve(fresh, [request_]))
        assert_pages_are_kept_apart(rows_of(engine))
    stats = engine.describe().stats
    assert stats["session_hits"] == 2 and stats["session_tokens"] == cached + shared
    asyncio.run(engine.end_sessions(["session"]))
    assert engine.describe().stats["cache_tokens"] == 0


def test_kept_turns_give_their_pages_to_rows(make_model, serve, monkeypatch):
    engine = paged_engine(monkeypatch, make_model("qwen3"), max_cache_tokens=10 * PAGE, max_model_len=10 * PAGE)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    for number in range(3):
        serve(engine, [GenerationRequest("a", [4 + number, 5, 6], sampling, 1, f"session {number}")])
    assert len(rows_of(engine).sessions) == 3
    serve(engine, [request("long", [7] * 20, max_tokens=20, ignore_eos=True)])
    assert len(rows_of(engine).sessions) == 0 and engine.describe().stats["preemptions"] == 0


def test_sleep_gives_the_pages_back(make_model, serve, monkeypatch):
    engine = paged_engine(monkeypatch, make_model("qwen3"))
    one = [GenerationRequest("a", [5, 6], SamplingParams(max_tokens=3), 1, "session")]
    first = serve(engine, one)
    asyncio.run(engine.sleep())
    assert rows_of(engine)._memory is None and engine.describe().stats["cache_tokens"] == 0
    asyncio.run(engine.wake())
    assert_same(serve(engine, one), first)


@pytest.mark.parametrize(
    ("share", "free", "expected"),
    [
        (1.0, 80, 1 + 64 * 32),  # all sequences of full length
        (0.5, 80, (40 - 16) * 1024),  # half of 80 GiB, less 16 GiB of weights, in pages of 1 MiB
        (0.9, 20, 18 * 1024),  # no more than 90 % of what is free
        (0.2, 80, None),  # the weights take the share
    ],
)
def test_pages_are_as_many_as_the_memory_has(monkeypatch, share, free, expected):
    gib, tokens = 2**30, 256
    shape = PageShape(layers=4, kv_heads=2, head_dim=128, dtype=torch.bfloat16, tokens=tokens)
    assert shape.bytes == 2**20
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * gib - gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * gib)
    sequences = 64 if expected == 1 + 64 * 32 else 4096
    limits = CacheLimits(sequences, 32 * tokens, None, share)
    weights, device = (0 if share == 0.9 else 16 * gib), torch.device("cuda", 0)
    if expected is None:
        with pytest.raises(GenerationError) as raised:
            number_of_pages(shape, limits, weights, device)
        assert "gpu_memory_utilization" in str(raised.value.fix)
    else:
        assert number_of_pages(shape, limits, weights, device) == expected


@examples(60)
@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(1, 4)), max_size=40))
def test_pages_are_counted(steps):
    pages, users = Pages(7), []  # users: lists of pages
    for name, number in steps:
        if name == "take":
            if number > pages.free:
                with pytest.raises(OutOfPages):
                    pages.take(number)
            else:
                taken = pages.take(number)
                assert not set(taken) & {page for user in users for page in user} and 0 not in taken
                users.append(taken)
        elif users:
            user = users[number % len(users)]
            if name == "share":
                pages.share(user)
                users.append(list(user))
            else:
                users.remove(user)
                pages.release(user)
        counts = Counter(page for user in users for page in user)
        assert [pages.users(page) for page in range(1, 7)] == [counts[page] for page in range(1, 7)]
        assert pages.free == 6 - len(counts) and pages.in_use == len(counts)


def test_a_step_that_cannot_be_captured_runs_without_a_graph(make_model, make_engine, serve, monkeypatch):
    model, requests, tried = make_model("qwen3"), groups(), []

    class Refused:
        def __init__(self, *_: Any, **settings: Any) -> None:
            tried.append(settings)

        def __enter__(self) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

        def __exit__(self, *_: object) -> None: ...

    for name in ("Stream", "CUDAGraph", "current_stream", "current_device", "stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "graph", Refused)
    engine = paged_engine(monkeypatch, model)
    rows_of(engine)._no_graphs = None
    assert_same(serve(engine, requests), serve(make_engine(model), requests))
    assert len(tried) == 1 and "not permitted" in str(rows_of(engine)._no_graphs)
