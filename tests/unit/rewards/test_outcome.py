"""What a scorer may return, and what is an error."""

import math

import numpy as np
import pytest
import torch

from hone.rewards.worker import to_score


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.bool_(True), np.array(1.0), torch.tensor(1.0)])
def test_numbers(value: object) -> None:
    score = to_score(value)
    assert (score.total, score.terms, score.error) == (1.0, {}, None)


def test_dict_gives_terms_and_extra() -> None:
    value = {
        "score": 0.5,
        "acc": True,
        "length": np.int64(3),
        "pred": "7",
        "steps": (1, {"a": {2}}),
        "none": None,
        5: object,
    }
    score = to_score(value)
    assert score.total == 0.5 and score.error is None
    assert score.terms == {"acc": 1.0, "length": 3.0}
    assert score.extra == {"pred": "7", "steps": [1, {"a": [2]}], "none": None, "5": repr(object)}


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (None, "None"),
        ("1.0", "a str"),
        ([1.0, 2.0], "a list of length 2"),
        (np.ones(2), "ndarray"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        ({"reward": 1.0}, "without 'score'; it has ['reward']"),
        ({"score": None}, "'score' is None"),
        ({"score": {"score": 1}}, "'score' is a dict"),
        ({"score": 1.0, "acc": math.nan}, "term 'acc' is nan"),
        (1j, "a complex"),
    ],
)
def test_errors(value: object, error: str) -> None:
    score = to_score(value)
    assert score.total == 0.0 and score.error is not None and error in score.error
