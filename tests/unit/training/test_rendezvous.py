"""Ranks of one model meet, and have a GPU each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from hone.errors import ConfigError
from hone.training.layout import require_separate_gpus


def outcomes(gpus: list[str]) -> list[ConfigError | None]:
    """The error of each rank, or None, with these GPUs."""
    store = HashStore()

    def check(rank: int) -> ConfigError | None:
        try:
            require_separate_gpus(store, rank, len(gpus), gpus[rank])
        except ConfigError as error:
            return error
        return None

    with ThreadPoolExecutor(len(gpus)) as threads:
        return list(threads.map(check, range(len(gpus))))


def test_ranks_with_a_gpu_each_pass() -> None:
    assert outcomes(["GPU 0 of a", "GPU 1 of a", "GPU 0 of b"]) == [None] * 3


@pytest.mark.parametrize(("gpus", "named"), [(["x", "y", "x"], "0 and 2"), (["y", "x", "x", "x"], "1 and 2 and 3")])
def test_every_rank_learns_which_ones_share_a_gpu(gpus: list[str], named: str) -> None:
    errors = outcomes(gpus)
    assert all(error is not None and error.code == "R02" for error in errors)
    assert {error.what for error in errors if error is not None} == {f"ranks {named} have the same device, x"}
