"""Metrics by the age of tokens, against a loop over tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.trainers.reporting import age_metrics

TOKENS = st.lists(
    st.tuples(st.integers(0, 3), st.floats(-3, 0), st.floats(-3, 0), st.booleans()), min_size=1, max_size=12
)


@given(rows=st.lists(TOKENS, min_size=1, max_size=4))
@examples(60)
def test_every_age_by_a_loop(rows: list[list[tuple[int, float, float, bool]]]) -> None:
    rows[0].append((0, -1.0, -1.0, True))
    version = 3
    batch = Batch(
        {
            "token_versions": Ragged.from_rows([[v if on else -1 for v, _, _, on in row] for row in rows], torch.int64),
            "old_log_probs": Ragged.from_rows([[a for _, a, _, _ in row] for row in rows], torch.float32),
            "rollout_log_probs": Ragged.from_rows([[b for _, _, b, _ in row] for row in rows], torch.float32),
            "response_mask": Ragged.from_rows([[int(on) for *_, on in row] for row in rows], torch.int64),
        }
    )
    sampled = [(version - v, a - b) for row in rows for v, a, b, on in row if on]
    metrics = age_metrics(batch, version)
    assert metrics["async/age/mean"] == pytest.approx(sum(age for age, _ in sampled) / len(sampled))
    assert math.isclose(sum(value for name, value in metrics.items() if name.endswith("token_share")), 1.0)
    for age in {age for age, _ in sampled}:
        ratios = [ratio for other, ratio in sampled if other == age]
        weights = [math.exp(ratio) for ratio in ratios]
        expected = {
            "token_share": len(ratios) / len(sampled),
            "log_ratio_abs_mean": sum(map(abs, ratios)) / len(ratios),
            "effective_sample_share": sum(weights) ** 2 / (len(ratios) * sum(weight**2 for weight in weights)),
        }
        for name, value in expected.items():
            assert metrics[f"async/age_{age}/{name}"] == pytest.approx(value, abs=1e-5)
