"""Program of two launched ranks, which tell each other values, batches and errors, and check what they hear."""

from __future__ import annotations

import contextlib

import pytest
import torch

from hone.cluster.torchrun.exchange import FailedElsewhere, OtherRankFailed, joined_ranks
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.errors import ConfigError, HoneError

ranks = joined_ranks()
rank = ranks.launched.rank


def fail(error: Exception) -> None:
    raise error


def raised(errors: list[Exception | None]) -> Exception:
    """Return what this rank raises if each rank fails with its error, or succeeds."""
    error = errors[rank]
    with pytest.raises(Exception) as caught:
        ranks.together(lambda: None if error is None else fail(error))
    return caught.value


assert ranks.decided(lambda: {"step": rank, "where": None}) == {"step": 0, "where": None}
batch = ranks.decided(lambda: Batch({"uid": ["x"], "ids": Ragged.from_rows([[rank, 7]], torch.int64)}))
assert batch.ragged("ids").to_lists() == [[0, 7]]
assert ranks.together(lambda: 10 + rank) == [10, 11]
assert ranks.together(lambda: 10 + rank, gather=False) == [10 + rank] * 2
assert ranks.together(lambda: "b" * (1 + 5000 * rank), aside=True)[1] == "b" * 5001

mistake = ConfigError("3 is wrong", why="it must be 4", fix="set it", where="a.key", code="R02")
mine, echo = KeyError("a bug"), RuntimeError("gloo: connection closed by peer")
for errors in ([mine, mistake], [None, mistake], [echo, mistake], [mistake, echo]):
    error = raised(errors)
    if rank:
        assert isinstance(error, FailedElsewhere)
    else:
        assert isinstance(error, HoneError) and error.render() == mistake.render()
error = raised([None, mine])
assert isinstance(error, FailedElsewhere if rank else OtherRankFailed)
assert rank or "a bug" in str(error)
error = raised([mine, echo])
assert isinstance(error, FailedElsewhere) if rank else error is mine

with contextlib.suppress(FailedElsewhere if rank else ZeroDivisionError):
    ranks.decided(lambda: 1 // 0)
    raise AssertionError("an error was not heard")
ranks.close()
print("all was heard", flush=True)  # noqa: T201 - the test reads it
