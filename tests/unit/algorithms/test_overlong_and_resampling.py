"""The overlong penalty and PF-PPO's resampling against the oracle."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import corrections as oracle
from support.examples import examples
from support.messages import raises

from hone.algorithms import REWEIGHT_METHODS, overlong_penalty, resample, resampling_weights
from hone.errors import ConfigError, RewardError

quick = examples(60)
SCORES = st.lists(
    st.one_of(st.sampled_from([0.0, 1.0, -1.0]), st.floats(-3, 3).map(lambda x: round(x, 3))), min_size=1, max_size=12
)


@quick
@given(
    lengths=st.lists(st.integers(0, 300), max_size=8),
    limit=st.integers(1, 200),
    share=st.floats(0, 1),
    factor=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
)
def test_overlong_penalty(lengths: list[int], limit: int, share: float, factor: float) -> None:
    buffer = max(1, round(limit * share))
    penalty = overlong_penalty(torch.tensor(lengths, dtype=torch.int64), limit, buffer, factor)
    expected = [oracle.overlong_penalty(n, limit, buffer, factor) for n in lengths]
    assert penalty.dtype == torch.float32 and penalty.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "mention"),
    [
        ((100, 0, 1.0), "buffer_len=0"),
        ((100, 101, 1.0), "max_resp_len=100"),
        ((100, 20, -1.0), "penalty_factor=1.0"),
    ],
)
def test_overlong_penalty_refuses_wrong_numbers(arguments: tuple, mention: str) -> None:
    with raises(ConfigError, mention):
        overlong_penalty(torch.tensor([1]), *arguments)


@pytest.mark.parametrize("method", REWEIGHT_METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@quick
@given(scores=SCORES, power=st.sampled_from([0.0, 1.0, 2.0, 3.5]))
def test_resampling_weights(method: str, dtype: torch.dtype, scores: list[float], power: float) -> None:
    rounded = torch.tensor(scores, dtype=dtype)
    weights = resampling_weights(rounded, method, weight_pow=power)
    assert float(weights.min()) >= 0 and float(weights.max()) <= 1
    expected = oracle.resampling_weights(rounded.tolist(), method, power)
    assert (weights / weights.sum()).tolist() == pytest.approx(expected, abs=1e-12)


def test_huge_scores_do_not_overflow() -> None:
    assert resampling_weights(torch.tensor([1e200, -1e200, 1e199], dtype=torch.float64)).tolist() == pytest.approx(
        [1.0, 1.0, 0.01]
    )


@pytest.mark.parametrize("method", REWEIGHT_METHODS)
def test_resample_draws_in_proportion_and_reproducibly(method: str) -> None:
    scores = torch.tensor([2.0, 1.0, 0.0, -1.0])
    draws = 20_000
    rows = resample(scores, method, generator=torch.Generator().manual_seed(0), num_samples=draws)
    again = resample(scores, method, generator=torch.Generator().manual_seed(0), num_samples=draws)
    assert torch.equal(rows, again)
    shares = torch.bincount(rows, minlength=4) / draws
    for share, p in zip(shares.tolist(), oracle.resampling_weights(scores.tolist(), method, 2.0), strict=True):
        assert abs(share - p) <= 4 * math.sqrt(p * (1 - p) / draws)  # exactly 0 where the weight is 0


def test_resample_keeps_the_size_and_takes_an_empty_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    assert resample(torch.zeros(5), generator=generator).shape == (5,)
    assert resample(torch.zeros(0), generator=generator).shape == (0,)


def test_resampling_refuses_what_it_cannot_weigh() -> None:
    generator = torch.Generator()
    with raises(RewardError, "sample 2", "nan"):
        resample(torch.tensor([1.0, 0.0, math.nan]), generator=generator)
    with raises(ConfigError, "max_min"):
        resample(torch.tensor([1.0]), "maxmin", generator=generator)
    with raises(ConfigError, "weight_pow=-1"):
        resample(torch.tensor([1.0]), generator=generator, weight_pow=-1)
