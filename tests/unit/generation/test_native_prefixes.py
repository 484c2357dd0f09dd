"""Shared prefixes: attention over prefix and row equals attention over their concatenation, and slots are compacted."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support.examples import examples

from hone.generation.native.cache import KVCache
from hone.generation.native.contexts import DecodeContext, RowExtent
from hone.generation.native.prefixes import PrefixGroups, SharedPrefixes
from hone.generation.native.scheduler import Job
from hone.generation.protocol import Completion, GenerationRequest, SamplingParams
from hone.models.attention.context import Scoring
from hone.models.attention.softmax import attention_probabilities

DEVICE = torch.device("cpu")
HEADS, WIDTH = 4, 8
UNBALANCED = [0] * 40 + list(range(1, 20)) + [20] * 3  # one group would be mostly padding
IN_ORDER = [0, 0, 1, 1], [0, 0, 1]  # with one key head the rows need no reordering; then with one padding row


def filled(rows: int, capacity: int, dtype: torch.dtype, kv_heads: int) -> KVCache:
    cache = KVCache(DEVICE, dtype)
    cache.reserve(rows, capacity, used=0, generous=capacity, limit=1 << 20)
    layer = cache.kv_layer(0)
    layer.require(*[(1, kv_heads, 1, WIDTH)] * 2)
    layer.keys.normal_()
    layer.values.normal_()
    return cache


def oracle(query, keys, values, positions, here, scoring):
    """Attention of one row ``query [heads, d]`` over tokens one by one."""
    hidden = torch.tensor([scoring.window is not None and p <= here - scoring.window for p in positions])
    keys, values = (torch.stack(x, 1).float() for x in (keys, values))
    keys, values = (x.repeat_interleave(HEADS // len(x), 0) for x in (keys, values))
    scores = torch.einsum("hd,hkd->hk", query.float(), keys)[None, :, None]
    return (attention_probabilities(scores, hidden, scoring)[0, :, 0, :, None] * values).sum(1)


@examples(40)
@given(
    slots=st.one_of(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.sampled_from([UNBALANCED, *IN_ORDER])),
    seed=st.integers(0, 1000),
    in_step=st.booleans(),
    window=st.sampled_from([None, 3, 9]),
    softcap=st.sampled_from([None, 2.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kv_heads=st.sampled_from([1, 2, 4]),
    capacity=st.sampled_from([5, 8, 40]),
)
def test_attention_over_prefix_and_row_equals_attention_over_both(
    slots, seed, in_step, window, softcap, dtype, kv_heads, capacity
):
    names = {slot: number for number, slot in enumerate(dict.fromkeys(slots))}
    slots = [names[slot] for slot in slots]  # 0 .. count - 1
    torch.manual_seed(seed)
    prefixes = SharedPrefixes(KVCache(DEVICE, dtype))
    lengths = torch.randint(0, 7, (len(names),)).tolist()
    for slot in slots:
        prefixes.take(bytes([slot]), 0, lengths[slot])
    prefixes.cache = filled(len(names), max(lengths) + 2, dtype, kv_heads)
    in_row = torch.full((len(slots),), 4) if in_step else torch.randint(0, 5, (len(slots),))
    cache = filled(len(slots) + 1, capacity, dtype, kv_heads)  # full, taken whole, taken in part
    joint = torch.randn(len(slots), 1, HEADS + 2 * kv_heads, WIDTH).to(dtype)  # as one matmul returns them
    query, key, value = (states.transpose(1, 2) for states in joint.split([HEADS, kv_heads, kv_heads], 2))
    shared = torch.tensor([lengths[slot] for slot in slots])
    scoring = Scoring(0.3, window, softcap)
    extent = RowExtent(int(in_row.min()), int(in_row.max()), int(shared.min()))
    context = DecodeContext(cache, in_row, shared, extent, PrefixGroups(slots, prefixes))
    output = context.attend(0, query, key, value, scoring)
    assert context.position_ids.flatten().tolist() == (shared + in_row).tolist()
    in_prefixes, in_rows = ((kv.keys, kv.values) for kv in (prefixes.cache.kv_layer(0), cache.kv_layer(0)))
    for row, slot in enumerate(slots):
        assert torch.equal(in_rows[0][row, :, in_row[row]], key[row, :, 0])
        keys, values = (
            [kv[slot, :, j] for j in range(lengths[slot])] + [mine[row, :, j] for j in range(int(in_row[row]) + 1)]
            for kv, mine in zip(in_prefixes, in_rows, strict=True)
        )
        here = lengths[slot] + int(in_row[row])
        expected = oracle(query[row, :, 0], keys, values, range(here + 1), here, scoring)
        torch.testing.assert_close(
            output[row, 0].float(), expected, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=0
        )


def assert_sampled_as_alone(together: dict[str, Completion], requests: list[GenerationRequest], alone, serve) -> None:
    for one in requests:
        expected = serve(alone, [one])[one.request_id]
        assert together[one.request_id].token_ids == expected.token_ids
        assert together[one.request_id].log_probs == pytest.approx(expected.log_probs, abs=1e-5)


@examples(12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    groups=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=5),
    max_num_seqs=st.integers(1, 6),
    max_cache_tokens=st.sampled_from([24, 40, None]),
)
def test_samples_of_any_groups_equal_separate_ones(
    make_model, make_engine, serve, groups, max_num_seqs, max_cache_tokens
):
    model = make_model("qwen3")
    requests = [
        GenerationRequest(f"{g}.{i}", [3 + g, *range(5, 4 + length)], SamplingParams(max_tokens=1 + (3 * i + g) % 9), i)
        for g, (length, samples) in enumerate(groups)
        for i in range(samples)
    ]
    engine = make_engine(model, max_num_seqs=max_num_seqs, max_cache_tokens=max_cache_tokens)
    together, alone = serve(engine, requests), make_engine(model)
    stats = engine.describe().stats
    assert stats["peak_cache_tokens"] <= (max_cache_tokens or max_num_seqs * 128)
    assert_sampled_as_alone(together, requests, alone, serve)
    assert engine._runner.rows.prefixes.count == 0


def test_a_shared_prefix_is_stored_once(make_model, make_engine, serve):
    engine = make_engine(make_model("qwen3"), max_num_seqs=8)
    requests = [
        GenerationRequest(str(i), [7] * 65, SamplingParams(max_tokens=32, ignore_eos=True), i) for i in range(8)
    ]
    serve(engine, requests)
    assert engine.describe().stats["peak_cache_tokens"] == 8 * 32 + 64  # not 8 * 97


def test_row_capacity_is_close_to_the_used_length(make_model, make_engine):
    engine = make_engine(make_model("qwen3"))
    runner, unused = engine._runner, []
    for most in (90, 3):  # short sequences do not keep the capacity of long ones
        requests = [GenerationRequest(str(i), [7, 8], SamplingParams(max_tokens=most), i) for i in range(4)]
        engine._scheduler.waiting.extend(Job.from_request(one, asyncio.Queue()) for one in requests)
        with runner.computing():
            runner.enter(engine._scheduler.admit(len(runner.running), 0, runner.rows.admission))
            for drawn in range(1, most):
                runner.step()
                unused.append(runner.rows.cache.capacity - drawn)
            runner.step()
        assert not runner.running
    assert max(unused) <= 16


def arriving(engine, arrivals: list[tuple[int, GenerationRequest]]) -> dict[str, Completion]:
    """Serve requests, each of which arrives some decode steps after the previous one."""
    scheduler, runner, answers = engine._scheduler, engine._runner, {}
    left, pause = deque(arrivals), 0
    with runner.computing():
        while left or scheduler.waiting or runner.running:
            while left and left[0][0] <= pause:
                scheduler.waiting.append(Job.from_request(left.popleft()[1], asyncio.Queue()))
                pause = 0
            pause += 1
            if entering := scheduler.admit(len(runner.running), runner.version, runner.rows.admission):
                runner.enter(entering)
            assert len({job.in_row for job in runner.running}) <= 1
            answers |= {job.request.request_id: completion for job, completion in runner.step()}
    return answers


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 3), st.one_of(st.integers(1, 9), st.just(40))),
        min_size=1,
        max_size=9,
    ),
    max_num_seqs=st.integers(1, 6),
    max_cache_tokens=st.sampled_from([24, 40, 50, 96, None]),
)
def test_requests_are_sampled_as_alone_whenever_they_arrive(
    make_model, make_engine, serve, arrivals, max_num_seqs, max_cache_tokens
):
    model = make_model("qwen3")
    requests = []
    for i, (pause, prompt, most) in enumerate(arrivals):
        ids = [3 + prompt, *range(5, 6 + 2 * prompt)]
        sampling = SamplingParams(max_tokens=min(most, (max_cache_tokens or 128) - len(ids)))
        requests.append((pause, GenerationRequest(str(i), ids, sampling, i)))
    engine = make_engine(model, max_num_seqs=max_num_seqs, max_cache_tokens=max_cache_tokens)
    together, alone = arriving(engine, requests), make_engine(model)
    assert engine.describe().stats["peak_cache_tokens"] <= (max_cache_tokens or max_num_seqs * 128)
    assert_sampled_as_alone(together, [one for _, one in requests], alone, serve)


def test_prompts_are_stored_in_rows_until_one_is_requested_again(make_model, make_engine):
    def request(name: str, first: int) -> GenerationRequest:
        return GenerationRequest(name, [first, 5, 6, 7, 8], SamplingParams(max_tokens=8, ignore_eos=True), 0)

    engine = make_engine(make_model("qwen3"), max_num_seqs=8)
    arriving(engine, [(0, request("a", 3)), (0, request("b", 4))])
    assert engine._runner.rows.prefixes.cache.tokens == 0
    answers = arriving(engine, [(0, request("a", 3)), (0, request("b", 4)), (3, request("again", 3))])
    stats = engine.describe().stats
    assert stats["prefix_hits"] == 1 and stats["prefill_tokens"] == 4 * 4  # a, b; a, b: none for the last
    assert answers["again"].token_ids == answers["a"].token_ids
    assert engine._runner.rows.prefixes.count == 0


def test_unused_slots_are_compacted():
    prefixes = SharedPrefixes(KVCache(DEVICE, torch.float32))
    taken = [prefixes.take(name, 0, length) for name, length in ((b"a", 2), (b"b", 3), (b"a", 2), (b"c", 4), (b"d", 1))]
    assert taken == [(0, True), (1, True), (0, False), (2, True), (3, True)]
    assert prefixes.take(b"a", 1, 2) == (4, True)  # of other weights
    prefixes.cache = filled(5, 4, torch.float32, 2)
    keys = prefixes.cache.kv_layer(0).keys
    kept = {2: keys[2, :, :4].clone(), 4: keys[4, :, :2].clone()}
    moved = prefixes.release([0, 1, 0, 3])
    assert prefixes.count == 2 and set(moved) <= {2, 4} and prefixes.longest == 4
    for slot, expected in kept.items():
        assert torch.equal(keys[moved.get(slot, slot), :, : expected.shape[1]], expected)
    assert prefixes.take(b"c", 0, 4) == (moved[2], False)
