"""Sampling against transformers' logits processors, and the random streams."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hone.generation.native.sampler import RowSampling, sample, streams_of, uniforms
from hone.generation.protocol import SamplingParams

VOCABULARY = 40
CPU = torch.device("cpu")


def oracle(logits: Tensor, params: SamplingParams, ids: Tensor) -> Tensor:
    """Log-probs of the distribution that transformers would sample one row from."""
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors(ids[None], logits[None].clone())[0].log_softmax(-1)  # type: ignore[arg-type]


def seen_of(ids: list[Tensor]) -> Tensor:
    seen = torch.zeros(len(ids), VOCABULARY, dtype=torch.bool)
    for row, tokens in enumerate(ids):
        seen[row, tokens] = True
    return seen


parameters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 1, 5, 40, 99]),
    top_p=st.sampled_from([1.0, 0.9, 0.4, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.6]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    report_support=st.booleans(),
)


@examples(150)
@given(params=st.lists(parameters, min_size=1, max_size=5), seed=st.integers(0, 2**63 - 1))
def test_every_row_has_the_distribution_of_transformers(params, seed):
    generator = torch.Generator().manual_seed(seed % 2**31)
    logits = torch.randn(len(params), VOCABULARY, generator=generator) * 3
    ids = [torch.randint(0, VOCABULARY, (6,), generator=generator) for _ in params]
    rows = RowSampling.from_params(params, [seed + i for i in range(len(params))], CPU)
    counters = torch.arange(len(params))
    tokens, log_probs, drawn, support = sample(logits, rows, counters, seen_of(ids) if rows.penalises else None)
    assert (support is not None) == any(p.wants_support for p in params)
    for row, p in enumerate(params):
        expected = oracle(logits[row], p, ids[row])
        if support is not None:
            assert support[row].tolist() == expected.isfinite().tolist()
        token = tokens[row]
        assert expected[token] > float("-inf")
        torch.testing.assert_close(drawn[row], expected[token], atol=1e-5, rtol=1e-5)
        raw = (logits[row] / p.temperature).log_softmax(-1)[token]
        torch.testing.assert_close(log_probs[row], raw, atol=1e-5, rtol=1e-5)
        # the inverse of the cumulative distribution at the row's own number
        u = uniforms(rows.streams[row : row + 1], counters[row : row + 1])[0]
        cumulative = expected.double().exp().cumsum(0)
        before = cumulative[token] - expected[token].double().exp()
        assert before - 1e-5 <= u * cumulative[-1] <= cumulative[token] + 1e-5


def test_frequencies_follow_the_truncated_distribution():
    params = SamplingParams(temperature=0.8, top_k=12, top_p=0.9, min_p=0.02)
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(4)) * 2
    count = 40_000
    rows = RowSampling.from_params([params] * count, list(range(count)), CPU)
    tokens, *_ = sample(logits.expand(count, -1), rows, torch.zeros(count, dtype=torch.int64), None)
    expected = oracle(logits, params, torch.zeros(1, dtype=torch.int64)).exp() * count
    observed = torch.bincount(tokens, minlength=VOCABULARY)
    assert bool((observed[expected == 0] == 0).all())
    kept = expected > 0
    chi_squared = float(((observed - expected)[kept] ** 2 / expected[kept]).sum())
    degrees = int(kept.sum()) - 1
    assert chi_squared < degrees + 5 * (2 * degrees) ** 0.5


@given(st.lists(parameters, min_size=2, max_size=5))
def test_a_row_does_not_feel_its_neighbours(params):
    logits = torch.randn(len(params), VOCABULARY, generator=torch.Generator().manual_seed(len(params)))
    ids = [torch.tensor([row, row + 3]) for row in range(len(params))]
    together = RowSampling.from_params(params, list(range(len(params))), CPU)
    counters = torch.arange(len(params))
    crowd = sample(logits, together, counters, seen_of(ids) if together.penalises else None)
    for row, p in enumerate(params):
        own = RowSampling.from_params([p], [row], CPU)
        seen = seen_of(ids[row : row + 1]) if own.penalises else None
        alone = sample(logits[row : row + 1], own, counters[row : row + 1], seen)
        for a, b in zip(alone[:3], crowd[:3], strict=True):
            assert torch.equal(a[0], b[row])


def test_nothing_truncated_means_one_log_prob():
    rows = RowSampling.from_params([SamplingParams()] * 3, [1, 2, 3], CPU)
    _, raw, drawn, _ = sample(torch.randn(3, VOCABULARY), rows, torch.zeros(3, dtype=torch.int64), None)
    assert raw is drawn


def test_greedy_takes_the_likeliest_at_temperature_one():
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(0))
    rows = RowSampling.from_params(
        [SamplingParams(temperature=0.0, top_k=3), SamplingParams(temperature=2.0)], [0, 0], CPU
    )
    tokens, raw, drawn, _ = sample(logits, rows, torch.zeros(2, dtype=torch.int64), None)
    assert int(tokens[0]) == int(logits[0].argmax())
    torch.testing.assert_close(raw[0], logits[0].log_softmax(-1).max())
    assert raw[0] == drawn[0]


def test_uniforms_are_splitmix64_uniform_and_independent_of_shape():
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    seeds, counters = torch.tensor([0, 1, 2**63 - 1, -5]), torch.tensor([0, 7, 2**40, 3])
    expected = [
        (mix((mix(s & mask) + (c + 1) * 0x9E3779B97F4A7C15) & mask) >> 12) * 2.0**-52
        for s, c in zip(seeds.tolist(), counters.tolist(), strict=True)
    ]
    assert uniforms(streams_of(seeds), counters).tolist() == expected

    streams = streams_of(torch.arange(200))
    grid = uniforms(streams[:, None].expand(200, 200), torch.arange(200).expand(200, 200))
    assert float(grid.min()) >= 0 and float(grid.max()) < 1
    counts = torch.histc(grid.float(), 50, 0, 1)
    assert float(((counts - 800) ** 2 / 800).sum()) < 49 + 5 * 98**0.5
    neighbours = torch.stack([grid[:, :-1].flatten(), grid[:, 1:].flatten(), grid.t()[:, 1:].flatten()])
    assert float((torch.corrcoef(neighbours) - torch.eye(3)).abs().max()) < 0.03


@pytest.mark.parametrize("logits", [[0.0, -200.0, -300.0], [-300.0, -200.0, 0.0]])
def test_a_token_of_probability_zero_is_never_drawn(logits):
    count = 2000
    rows = RowSampling.from_params([SamplingParams()] * count, list(range(count)), CPU)
    tokens, *_ = sample(torch.tensor(logits).expand(count, 3), rows, torch.zeros(count, dtype=torch.int64), None)
    assert set(tokens.tolist()) == {logits.index(0.0)}
