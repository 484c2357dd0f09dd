"""Sweeps in Hydra's multirun grammar."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.messages import raises

from hone.cli.trials import draw_trials, grid, parse_sweep
from hone.errors import ConfigError


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("a=1,2,3", ("1", "2", "3")),
        ("a=range(1,10,3)", ("1", "4", "7")),
        ("a=choice(x,y)", ("x", "y")),
        ("a=[1,2],[3]", ("[1,2]", "[3]")),
        ("a='x y',z", ("'x y'", "z")),
        ("+a=1e-5,1e-4", ("1e-05", "0.0001")),
    ],
)
def test_values_are_listed_as_overrides(word, values):
    fixed, (axis,) = parse_sweep(["b=2", word, "c=[1,2]", "~d"])
    assert fixed == ["b=2", "c=[1,2]", "~d"] and axis.values == values
    assert axis.key == word.partition("=")[0]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_the_grid_is_the_product_of_the_axes(sizes):
    words = [f"k{n}={','.join(map(str, range(size)))}" for n, size in enumerate(sizes) if size > 1]
    _, axes = parse_sweep(words)
    trials = grid(axes)
    kept = [size for size in sizes if size > 1]
    expected = [tuple(map(str, values)) for values in itertools.product(*(range(size) for size in kept))]
    assert [tuple(trial.values()) for trial in trials] == expected
    assert sorted(map(str, draw_trials(axes, 10_000, 0))) == sorted(map(str, trials))


@given(st.integers(1, 20), st.integers(0, 5))
def test_random_draws_are_within_their_intervals_and_extend(count, seed):
    words = ["a=interval(0.5,2)", "b=tag(log,interval(1e-6,1e-2))", "c=int(interval(1,3))", "d=x,y"]
    _, axes = parse_sweep(words)
    trials = draw_trials(axes, count, seed)
    assert len(trials) == count and trials == draw_trials(axes, count + 3, seed)[:count]
    for trial in trials:
        assert 0.5 <= float(trial["a"]) <= 2 and 1e-6 <= float(trial["b"]) <= 1e-2
        assert trial["c"] in ("1", "2", "3") and trial["d"] in ("x", "y")


def test_logarithmic_draws_are_as_often_below_the_geometric_mean_as_above():
    _, axes = parse_sweep(["b=tag(log,interval(1e-6,1e-2))"])
    values = [float(trial["b"]) for trial in draw_trials(axes, 400, 0)]
    assert 160 < sum(value < 1e-4 for value in values) < 240
    assert math.isclose(sum(map(math.log10, values)) / 400, -4, abs_tol=0.2)


def test_fewer_values_than_draws():
    _, axes = parse_sweep(["c=int(interval(1,3))"])
    assert sorted(trial["c"] for trial in draw_trials(axes, 10, 0)) == ["1", "2", "3"]


def test_a_value_that_is_written_twice_is_one_trial():
    _, axes = parse_sweep(["a=1,1,2"])
    assert grid(axes) == [{"a": "1"}, {"a": "2"}]
    assert sorted(trial["a"] for trial in draw_trials(axes, 3, 0)) == ["1", "2"]


def test_draws_of_an_interval_narrower_than_its_digits_end():
    _, axes = parse_sweep(["a=interval(1.0,1.0000001)"])
    assert draw_trials(axes, 2, 0) == [{"a": "1"}]


def test_bad_sweeps():
    with raises(ConfigError, "range(1,10,3)"):
        parse_sweep(["a=1,,2"])
    with raises(ConfigError, "choice(a,b)"):
        parse_sweep(["a=glob(*)"])
    with raises(ConfigError, "empty"):
        parse_sweep(["a=interval(2,1)"])
    with raises(ConfigError, "above 0"):
        parse_sweep(["a=tag(log,interval(0,1))"])
    with raises(ConfigError, "twice"):
        parse_sweep(["a=1,2", "a=3,4"])
    with raises(ConfigError, "--random"):
        grid(parse_sweep(["a=interval(0.1,1)"])[1])
    with raises(ConfigError, "1,000,000"):
        grid(parse_sweep(["a=range(0,1000)", "b=range(0,1000)"])[1])
