"""Buckets of weights that the actor sends: no larger than asked, none lost, in order."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hone.cluster.roles import PolicyWorker


@given(sizes=st.lists(st.integers(1, 9), max_size=12), most=st.integers(1, 12))
def test_buckets_hold_what_they_may_and_nothing_is_lost(sizes: list[int], most: int):
    worker = PolicyWorker.__new__(PolicyWorker)
    weights = [(f"w{n}", torch.zeros(size, dtype=torch.uint8)) for n, size in enumerate(sizes)]
    worker.engine_weights = lambda: iter(weights)  # type: ignore[method-assign]
    for _ in range(2):  # a second sync begins anew
        worker.export_weights()
        buckets = []
        while (bucket := worker.next_weights(most)) is not None:
            buckets.append(bucket)
        assert [name for bucket in buckets for name, _ in bucket] == [name for name, _ in weights]
        for bucket in buckets:
            assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= most
        for before, after in zip(buckets, buckets[1:], strict=False):
            assert sum(t.nbytes for _, t in before) + after[0][1].nbytes > most
    worker.export_weights()
    assert worker.next_weights(10**6) == (weights or None) and worker.next_weights(1) is None
