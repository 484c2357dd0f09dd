"""Weights on their way into an engine's process: every transport gives what the slow one gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.errors import ConfigError, GenerationError
from hone.generation.remote.transports import FileSender, buckets, make_sender, opened

KINDS = ("shared_memory", "file", "socket")
shapes = st.lists(st.integers(0, 5), max_size=3)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8])


def tensors(drawn):
    generator = torch.Generator().manual_seed(0)
    return [
        (f"layer.{number}", torch.randint(0, 100, shape, generator=generator).to(dtype))
        for number, (shape, dtype) in enumerate(drawn)
    ]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=5), st.sampled_from(KINDS))
def test_what_arrives_is_what_was_sent(drawn, kind):
    sent, sender = tensors(drawn), make_sender(kind, 1000, same_machine=True)
    try:
        parcel = json.loads(json.dumps(sender.pack(sent)))
        with opened(parcel) as arrived:
            assert [name for name, _ in arrived] == [name for name, _ in sent]
            for (_, got), (_, wanted) in zip(arrived, sent, strict=True):
                assert got.dtype == wanted.dtype and torch.equal(got, wanted)
    finally:
        sender.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sender_is_used_again_and_leaves_nothing(kind, tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    sender = FileSender(100, str(tmp_path)) if kind == "file" else make_sender(kind, 100, same_machine=True)
    for size in (10, 1000, 3):
        with opened(sender.pack([("w", torch.full((size,), float(size)))])) as arrived:
            assert torch.equal(arrived[0][1], torch.full((size,), float(size)))
    assert len(list(tmp_path.rglob("*.safetensors"))) <= 1
    del arrived
    sender.close()
    assert not list(tmp_path.iterdir()) and len(list(Path("/proc/self/fd").iterdir())) == before


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 200))
def test_buckets_hold_everything_once_and_in_order(sizes, most):
    named = [(str(number), torch.zeros(size, dtype=torch.uint8)) for number, size in enumerate(sizes)]
    cut = list(buckets(named, most))
    assert [name for bucket, _ in cut for name, _ in bucket] == [name for name, _ in named]
    assert [last for _, last in cut] == [False] * (len(cut) - 1) + [True]
    for bucket, _ in cut:
        assert len(bucket) <= 1 or sum(tensor.nbytes for _, tensor in bucket) <= most


def test_weights_that_are_not_where_they_should_be_are_an_error():
    for kind in ("shared_memory", "file"):
        with (
            pytest.raises(GenerationError, match="does not find new weights"),
            opened({"transport": kind, "path": "/nowhere/at/all", "bytes": 64, "pieces": [], "names": []}),
        ):
            pass


def test_the_way_is_chosen_by_where_the_engine_is():
    assert type(make_sender("auto", 1, same_machine=True)).__name__ == "SharedMemorySender"
    assert type(make_sender("auto", 1, same_machine=False)).__name__ == "SocketSender"
    with pytest.raises(ConfigError, match="'nccl' yet"):
        make_sender("nccl", 1, same_machine=True)
