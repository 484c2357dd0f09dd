"""Buckets in flat buffers, and a group of members in threads over gloo."""

from __future__ import annotations

import os
import pickle
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.patience import LONG
from torch import Tensor

from hone.cluster import weight_broadcast
from hone.cluster.failures import BroadcastError
from hone.cluster.weight_broadcast import (
    BroadcastGroup,
    Bucket,
    BucketBuffers,
    Meeting,
    open_store,
    time_limit,
)
from hone.errors import ConfigError

CPU = torch.device("cpu")
VARIABLE = "TORCH_NCCL_BLOCKING_WAIT"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int64, torch.bool)


@st.composite
def weights(draw: st.DrawFn) -> list[tuple[str, Tensor]]:
    """Tensors of mixed dtypes, scalars, empty ones and transposed ones among them."""
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=6))
    named = []
    for number, shape in enumerate(shapes):
        tensor = (torch.arange(torch.Size(shape).numel()) * 7 % 120 - 60).view(shape).to(draw(st.sampled_from(DTYPES)))
        named.append((f"w{number}", tensor.transpose(0, -1) if draw(st.booleans()) and shape else tensor))
    return named


def assert_equal(got: list[tuple[str, Tensor]], expected: list[tuple[str, Tensor]]) -> None:
    assert [name for name, _ in got] == [name for name, _ in expected]
    for (_, tensor), (_, other) in zip(got, expected, strict=True):
        assert tensor.dtype == other.dtype and tensor.shape == other.shape and torch.equal(tensor, other)


@given(weights())
def test_packed_weights_are_read_bit_for_bit_from_a_copy_of_the_buffer(named: list[tuple[str, Tensor]]) -> None:
    source, target = BucketBuffers(CPU), BucketBuffers(CPU)
    bucket = source.pack(4, named)
    received: Bucket = pickle.loads(pickle.dumps(bucket))  # noqa: S301 - as Ray sends it
    target.memory(received).copy_(source.memory(bucket))
    assert_equal(target.tensors(received), named)
    starts = [place["offset"] for place in bucket.places]
    ends = [offset + tensor.nbytes for offset, (_, tensor) in zip(starts, named, strict=True)]
    assert all(end <= start for end, start in zip(ends, [*starts, bucket.size][1:], strict=True)), (
        "places do not overlap"
    )
    assert all(start % 64 == 0 for start in starts)


def test_two_buckets_are_kept_and_the_third_overwrites_the_first() -> None:
    buffers = BucketBuffers(CPU)
    named = [[("w", torch.full((size,), float(size)))] for size in (300, 200, 100)]
    packed = [buffers.pack(number, tensors) for number, tensors in enumerate(named[:2])]
    for bucket, tensors in zip(packed, named, strict=False):
        assert_equal(buffers.tensors(bucket), tensors)
    address = buffers.memory(packed[0]).data_ptr()
    third = buffers.pack(2, named[2])
    assert buffers.memory(third).data_ptr() == address and buffers.memory(third).numel() < 300 * 4
    assert_equal(buffers.tensors(packed[1]), named[1])
    assert_equal(buffers.tensors(third), named[2])


def members_of(count: int, device: torch.device) -> list[Future[BroadcastGroup]]:
    """The members of a group, by rank, when all have connected or failed; every member is a thread of this process."""
    store = open_store("127.0.0.1")
    meeting = Meeting("127.0.0.1", store.port, count)
    with ThreadPoolExecutor(count) as threads:
        source = threads.submit(BroadcastGroup, store, 0, count, device)
        return [source, *(threads.submit(BroadcastGroup.joined, meeting, rank, device) for rank in range(1, count))]


def group_of(count: int) -> list[BroadcastGroup]:
    """A group over gloo, by rank."""
    return [member.result() for member in members_of(count, CPU)]


def test_every_member_has_what_the_source_sent() -> None:
    group = group_of(3)
    for value in (5, 9):
        buffers = [torch.full((1000,), value if rank == 0 else 0, dtype=torch.uint8) for rank in range(3)]
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(BroadcastGroup.broadcast, group, buffers))
        assert all(bool((buffer == value).all()) for buffer in buffers)


def test_a_member_that_left_ends_the_broadcast_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_broadcast, "_BASE_SECONDS", 10 * LONG)
    source, other = group_of(2)
    other.abort()
    with pytest.raises(BroadcastError, match="dropped"):
        other.broadcast(torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(BroadcastError, match="gloo"):
        source.broadcast(torch.zeros(2**24, dtype=torch.uint8))


def test_a_member_that_does_not_answer_ends_the_wait_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_broadcast, "_BASE_SECONDS", 0.5)
    _, receiver = group_of(2)
    began = time.monotonic()
    with pytest.raises(BroadcastError, match="gloo"):
        receiver.broadcast(torch.zeros(8, dtype=torch.uint8))
    assert time.monotonic() - began > 0.4


def test_members_that_do_not_come_are_an_error_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_broadcast, "JOIN_SECONDS", 0.5)
    store = open_store("127.0.0.1")
    with pytest.raises(BroadcastError, match="2 members"):
        BroadcastGroup(store, 0, 2, CPU)
    with pytest.raises(BroadcastError, match="does not answer"):
        BroadcastGroup.joined(Meeting("127.0.0.1", 1, 2), 1, CPU)


def test_nccl_waits_block_the_host_and_no_watchdog_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads the variable when a group is made; other groups of the process keep their own."""
    made = []

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, store: object, rank: int, size: int, options: object) -> None:
            made.append((rank, size, os.environ.get(VARIABLE)))

        def eager_connect_single_device(self, device: torch.device) -> None:
            made.append(device)

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(weight_broadcast.dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(weight_broadcast, "gpu_identity", str)
    for before in ("0", None):
        monkeypatch.delenv(VARIABLE, raising=False)
        if before is not None:
            monkeypatch.setenv(VARIABLE, before)
        BroadcastGroup(open_store("127.0.0.1"), 0, 1, gpu)
        assert made[-2:] == [(0, 1, "1"), gpu] and os.environ.get(VARIABLE) == before


def test_two_members_on_one_gpu_are_a_mistake_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_broadcast, "gpu_identity", str)
    errors = [member.exception() for member in members_of(2, torch.device("cuda", 0))]
    assert all(isinstance(error, ConfigError) and error.code == "R02" for error in errors)


def test_the_limit_grows_with_the_bucket() -> None:
    assert time_limit(0).total_seconds() == 30
    assert time_limit(512 * 2**20).total_seconds() == 62
