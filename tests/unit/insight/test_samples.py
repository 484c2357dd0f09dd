"""Samples of a run, chosen for a person to look at."""

from pathlib import Path

import pytest
from support.archives import archive

from hone.apps.lab.samples import SampleQuery, read_samples, spread
from hone.errors import HoneError


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    for step in (1, 5):
        records = [
            {
                "uid": f"train:{number // 2}",
                "prompt": f"Ask {number}",
                "text": f"Say {number}",
                "score": float((number * 7) % 10),
            }
            for number in range(10)
        ]
        archive(tmp_path, step, records)
    (tmp_path / "rollouts/step_5.txt").write_text("text")
    return tmp_path / "rollouts"


def test_the_newest_step_is_read_and_spread(rollouts: Path) -> None:
    result = read_samples(rollouts, SampleQuery(limit=5))
    assert (result.step, result.matching, result.total) == (5, 10, 10)
    assert [record["text"] for record in result.shown] == [f"Say {number}" for number in (0, 2, 4, 6, 8)]


def test_worst_and_best_by_score(rollouts: Path) -> None:
    result = read_samples(rollouts, SampleQuery(step=1, worst=2, best=1))
    assert [record["score"] for record in result.shown] == [0.0, 1.0, 9.0]
    assert {record["step"] for record in result.shown} == {1}


def test_text_and_row_narrow_the_choice(rollouts: Path) -> None:
    assert read_samples(rollouts, SampleQuery(contains="sAY 3")).matching == 1
    assert read_samples(rollouts, SampleQuery(contains="ask")).matching == 10
    assert read_samples(rollouts, SampleQuery(uid="train:3")).matching == 2


def test_a_step_without_samples_is_refused_with_the_nearest(
    rollouts: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(HoneError) as caught:
        read_samples(rollouts, SampleQuery(step=4))
    assert caught.value.code == "E-runs" and caught.value.fix == "--step 5"
    with pytest.raises(HoneError):
        read_samples(tmp_path_factory.mktemp("empty"), SampleQuery())


@pytest.mark.parametrize(("count", "length"), [(3, 10), (10, 10), (20, 10), (1, 1)])
def test_spread_keeps_order_and_bound(count: int, length: int) -> None:
    records = [{"n": number} for number in range(length)]
    chosen = [record["n"] for record in spread(records, count)]
    assert len(chosen) == min(count, length) and chosen == sorted(set(chosen)) and chosen[0] == 0
