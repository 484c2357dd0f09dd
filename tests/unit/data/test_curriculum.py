"""Mixtures and curricula: their proportions, their order, and exact resumption."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.messages import raises

from hone.data.curriculum import DifficultySampler, MixtureSampler, PassRateSampler, difficulties
from hone.errors import CheckpointError, DataError

SOURCES = ["a"] * 7 + ["b"] * 2 + ["c"] * 5


def mixture(weights=None, seed=0, batch=4):
    return MixtureSampler(SOURCES, weights or {"a": 1.0, "b": 3.0}, batch, seed=seed)


@given(
    weights=st.dictionaries(st.sampled_from("abc"), st.floats(0.1, 10), min_size=1),
    batches=st.integers(1, 40),
    seed=st.integers(0, 3),
)
def test_a_mixture_keeps_its_proportions(weights, batches, seed):
    sampler = mixture(weights, seed)
    drawn = [row for _ in range(batches) for row in sampler.next_batch()]
    counts = Counter(SOURCES[row] for row in drawn)
    total = sum(weights.values())
    for name, weight in weights.items():
        assert abs(counts[name] - len(drawn) * weight / total) <= len(weights)
        drawn_of_source = [row for row in drawn if SOURCES[row] == name]
        size = SOURCES.count(name)
        assert len(set(drawn_of_source[:size])) == min(size, len(drawn_of_source)), "each once before one comes again"
    assert set(counts) <= set(weights)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(0, 3))
def test_easy_rows_come_first_in_every_epoch(levels, seed):
    sampler = DifficultySampler(levels, 1, seed=seed)
    for _ in range(2):
        rows = [sampler.next_batch()[0] for _ in levels]
        assert sorted(rows) == list(range(len(levels)))
        assert [levels[row] for row in rows] == sorted(levels)


def test_rows_of_one_difficulty_come_in_another_order_each_epoch():
    sampler = DifficultySampler([0] * 20 + [1] * 20, 40, seed=1)
    first, second = sampler.next_batch(), sampler.next_batch()
    assert first != second and set(first[:20]) == set(second[:20]) == set(range(20))


def test_rows_of_medium_pass_rate_are_preferred():
    sampler = PassRateSampler(100, 10, seed=0)
    sampler.observe({row: 0.5 if row < 20 else float(row % 2) for row in range(100)})
    counts = Counter(row for _ in range(400) for row in sampler.next_batch())
    medium, decided = (sum(counts[row] for row in rows) / len(rows) for rows in (range(20), range(20, 100)))
    assert 6 < medium / decided < 13.5, "0.27 against 0.02, less because a batch takes a row once"
    assert min(counts[row] for row in range(100)) > 0, "every row comes again"


@given(
    kinds=st.lists(st.sampled_from(["easy", "fit", "hard"]), min_size=1, max_size=40),
    seen=st.lists(st.dictionaries(st.integers(0, 39), st.floats(0, 1), min_size=1), max_size=4),
)
def test_rows_of_one_kind_share_a_pass_rate(kinds, seen):
    sampler = PassRateSampler(len(kinds), 1, seed=1, kinds=kinds)
    expected: dict[str, float] = {}
    for batch in seen:
        rates = {row: rate for row, rate in batch.items() if row < len(kinds)}
        sampler.observe(rates)
        for kind in {kinds[row] for row in rates}:
            new = [rate for row, rate in rates.items() if kinds[row] == kind]
            mean = sum(new) / len(new)
            expected[kind] = 0.5 * expected[kind] + 0.5 * mean if kind in expected else mean
    for row, kind in enumerate(kinds):
        rate = expected.get(kind, 0.5)
        assert sampler.weight(row) == pytest.approx(rate * (1 - rate) + 0.02)


def test_levels_are_chosen_by_success_where_every_row_is_seen_once():
    levels = [level for level in (2, 8, 64) for _ in range(200)]
    sampler = PassRateSampler(600, 12, seed=0, kinds=levels)
    for _ in range(20):
        sampler.observe({row: {2: 1.0, 8: 0.5, 64: 0.0}[levels[row]] for row in sampler.next_batch()})
    counts = Counter(levels[row] for _ in range(40) for row in sampler.next_batch())
    assert counts[8] > 3 * (counts[2] + counts[64]) and min(counts.values()) > 0
    with raises(CheckpointError, 3, 600, "data.sampler", "trainer.resume_mode=disable"):
        PassRateSampler(600, 12, seed=0).load_state_dict(sampler.state_dict())


def test_a_difficulty_may_be_nested_in_an_entry():
    rows = [
        ("a", {"environment": {"options": {"max_number": 8}}}),
        ("b", {"environment": {"options": {"max_number": 4}}}),
    ]
    assert difficulties(rows, "environment.options.max_number") == [8.0, 4.0]
    with raises(DataError, "extra_info.environment.max_number", None, "data.sampler.difficulty_key=NAME"):
        difficulties(rows, "environment.max_number")


@given(size=st.integers(1, 30), seed=st.integers(0, 3), rates=st.dictionaries(st.integers(0, 29), st.floats(-1, 2)))
def test_a_batch_has_no_row_twice(size, seed, rates):
    sampler = PassRateSampler(size, (size + 1) // 2, seed=seed)
    sampler.observe({row: rate for row, rate in rates.items() if row < size})
    for _ in range(4):
        rows = sampler.next_batch()
        assert len(set(rows)) == len(rows) == (size + 1) // 2 and set(rows) <= set(range(size))
    assert all(0 <= rate <= 1 for rate in sampler.rates.values())


def test_estimates_are_running_means():
    sampler = PassRateSampler(3, 1, seed=0)
    sampler.observe({1: 1.0})
    sampler.observe({1: 0.0})
    assert sampler.rates == {1: 0.5} and sampler.weight(1) == sampler.weight(0) == 0.27


@pytest.mark.parametrize(
    "make",
    [mixture, lambda: DifficultySampler([3, 1, 2, 1, 3, 2], 2, seed=2), lambda: PassRateSampler(9, 2, seed=2)],
    ids=["mixture", "difficulty", "pass_rate"],
)
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_resuming_goes_on_exactly(make, steps):
    sampler, resumed = make(), make()

    def step(one):
        rows = one.next_batch()
        one.observe({row: (row % 3) / 2 for row in rows})
        return rows

    for _ in range(steps):
        step(sampler)
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert [step(resumed) for _ in range(12)] == [step(sampler) for _ in range(12)] and resumed.epoch == sampler.epoch


def test_another_mixture_does_not_resume():
    with raises(CheckpointError, "{'a': 1.0}", "data.sampler", "trainer.resume_mode=disable"):
        mixture({"a": 1.0}).load_state_dict(mixture().state_dict())


@pytest.mark.parametrize(
    ("weights", "mentions"),
    [
        ({}, (0, "data.sampler.weights={a:1,b:1,c:1}")),
        ({"a": 0.0}, ("weight 0.0", "'a'")),
        ({"d": 1.0}, ("'d'",)),
    ],
)
def test_weights_that_cannot_be(weights, mentions):
    with raises(DataError, *mentions, where="data.sampler.weights"):
        MixtureSampler(SOURCES, weights, 2, seed=0)


def test_difficulties_are_numbers():
    assert difficulties([("r1", {"difficulty": 2}), ("r2", {"difficulty": 0.5})], "difficulty") == [2.0, 0.5]
    for extra in ({}, {"difficulty": "hard"}, {"difficulty": True}, {"difficulty": float("nan")}):
        with raises(DataError, "r3", "extra_info.difficulty", where="data.sampler.difficulty_key"):
            difficulties([("r3", extra)], "difficulty")
