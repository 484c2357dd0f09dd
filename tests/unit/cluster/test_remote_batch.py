"""The driver's bookkeeping of a batch against the batch itself: whatever is done to both, workers put together the same rows."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.messages import raises
from support.models import random_batch

from hone.cluster.columns import decode, decode_named, encode, encode_named, stored
from hone.cluster.ray import host as hosts
from hone.cluster.ray.host import WorkerHost
from hone.cluster.remote_batch import RemoteBatch, RowInfo
from hone.data.batch import Batch, same_column
from hone.data.ragged import Ragged
from hone.data.types import Sample, StopReason, Trajectory
from hone.rewards.sources import with_conversation


@dataclasses.dataclass(frozen=True)
class Ref:
    """A reference that one can wait for, as Ray's are."""

    number: int
    store: Any = dataclasses.field(compare=False)

    def __await__(self):
        async def get():
            return self.store[self.number]

        return get().__await__()


@pytest.fixture
def store(monkeypatch):
    """An object store in a dict; what it holds has gone through the encoding."""
    objects: dict[int, Any] = {}

    def put(value: Any) -> Ref:
        objects[len(objects)] = value
        return Ref(len(objects) - 1, objects)

    monkeypatch.setattr(hosts.ray, "put", put)
    return objects


def remote(parts: list[Batch]) -> RemoteBatch:
    """Batches that workers have stored, as the driver sees the whole."""
    restored = [stored(part, hosts.ray.put) for part in parts]
    block = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    row = np.concatenate([np.arange(len(part)) for part in parts])
    return RemoteBatch.from_stored(restored, RowInfo.concat([part.info for part in restored if part.info]), block, row)


def fetched(batch: RemoteBatch, parts: list[np.ndarray], *, objects: bool = True) -> list[Batch]:
    worker: Any = WorkerHost()

    async def get() -> list[Batch]:
        return [await worker._resolved(shard) for shard in batch.shards(parts, objects=objects)]

    return asyncio.run(get())


def same(one: Batch, other: Batch) -> bool:
    return sorted(one.names()) == sorted(other.names()) and all(
        same_column(one[name], other[name]) for name in one.names()
    )


@given(data=st.data())
def test_the_same_operations_give_the_same_rows(data):
    with pytest.MonkeyPatch.context() as patch:
        objects: dict[int, Any] = {}

        def put(value: Any) -> Ref:
            objects[len(objects)] = value
            return Ref(len(objects) - 1, objects)

        patch.setattr(hosts.ray, "put", put)
        sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        parts = [
            random_batch(size, seed=number).with_columns(note=[f"{number}.{row}" for row in range(size)])
            for number, size in enumerate(sizes)
        ]
        here, there = Batch.concat(parts), remote(parts)
        for _ in range(data.draw(st.integers(0, 5))):
            here, there = step(data, here, there)
            assert (
                len(here) == len(there)
                and here.uids == there.uids
                and sorted(here.names()) == sorted([*there.names(), "uid"])
            )
            assert there.info.responses.tolist() == here.ragged("response_ids").lengths.tolist()
        cut = data.draw(st.integers(0, len(here) - 1))
        shards = [np.arange(cut, len(here)), np.arange(cut + 1)]
        for rows, restored in zip(shards, fetched(there, shards), strict=True):
            assert same(restored, here.reorder(rows.tolist()))


def step(data, here: Batch, there: RemoteBatch):
    kind = data.draw(st.sampled_from(["reorder", "slice", "rename", "updated", "concat", "select"]))
    if kind == "reorder":
        rows = data.draw(st.lists(st.integers(0, len(here) - 1), min_size=1, max_size=6))
        return here.reorder(rows), there.reorder(rows)
    if kind == "slice":
        start = data.draw(st.integers(0, len(here) - 1))
        return here.slice(start, len(here)), there.slice(start, len(here))
    if kind == "rename" and "noise" in here:
        return here.rename({"noise": "sound"}), there.rename({"noise": "sound"})
    if kind == "select":
        kept = [name for name in there.names() if name != "returns"]
        return here.select(*kept, "uid"), there.select(*kept)
    if kind == "concat":
        again = there if "sound" in here else remote([here])  # its columns made together, not one after the other
        return Batch.concat([here, here]), RemoteBatch.concat([there, again])
    fresh = here.ragged("response_ids").with_values(torch.randn(len(here.ragged("response_ids").values)))
    new = Batch({"values": fresh, "number": torch.arange(len(here))})
    blocks = stored(new, hosts.ray.put)
    added = RemoteBatch.from_stored([blocks], there.info, np.zeros(len(here), np.int64), np.arange(len(here)))
    return here.updated(new), there.updated(added)


def test_objects_go_along_only_where_they_are_asked_for(store):
    batch = remote([random_batch(4, 0).with_columns(note=list("abcd"))])
    (lean,), (whole,) = (fetched(batch, [np.arange(4)], objects=objects) for objects in (False, True))
    assert "note" not in lean and lean.uids == ["p0", "p0", "p1", "p1"] and whole.objects("note") == list("abcd")


def test_a_whole_block_is_taken_without_a_copy(store):
    batch = remote([random_batch(4, 0), random_batch(3, 1)])
    rows = np.arange(4, 7)
    (shard,) = batch.shards([rows], objects=False)
    assert [layer.index for layer in shard.layers] == [None]
    (part,) = batch.shards([rows[:2]], objects=False)
    assert part.layers[0].index is not None, "a part of a block is not the block"


def episode(index: int, sample: Sample, length: int) -> Trajectory:
    ids = list(range(300, 300 + length))
    probs = [-0.1234567 * (t + 1) for t in range(length)]
    probs = torch.tensor(probs).tolist()  # what an engine reports is a float32
    return Trajectory(
        "u",
        index,
        sample.prompt_ids,
        ids,
        [1] * length,
        probs,
        probs,
        "text",
        StopReason.LENGTH,
        sample,
        [1] * length,
        0.5,
    )


def test_columns_of_every_kind_come_back_bit_for_bit():
    sample = Sample("u", [5, 6], [{"role": "user", "content": "?"}], "x", {"a": 1}, {"b": 2})
    columns: dict[str, Any] = {
        "ids": Ragged.from_rows([[1, 2], [], [3]], torch.int64),
        "probs": Ragged.from_rows([[0.5], [float("nan"), 1.0], [2.0]], torch.float32),
        "half": torch.tensor([1.5, -2.0, 3.25], dtype=torch.bfloat16),
        "flag": torch.tensor([True, False, True]),
        "episode": [episode(index, sample, length) for index, length in enumerate((3, 0, 2))],
        "objects": [{"x": 1}, None, "y"],
    }
    restored = decode(encode(columns))
    for name in ("ids", "probs", "half", "flag", "objects"):
        assert same_column(restored[name], columns[name]), name
    for one, other in zip(restored["episode"], columns["episode"], strict=True):
        for field in dataclasses.fields(Trajectory):
            mine, theirs = getattr(one, field.name), getattr(other, field.name)
            assert (list(mine) if isinstance(mine, memoryview) else mine) == theirs, field.name
        assert pickle.loads(pickle.dumps(with_conversation(one))) == with_conversation(other), "a reward worker gets it"
    assert restored["episode"][0].sample is restored["episode"][2].sample, "the answers to a prompt share it"


def test_named_tensors_keep_type_and_value():
    tensors = [("a", torch.randn(3, 2)), ("b", torch.randn(4).bfloat16())]
    for (name, tensor), (expected_name, expected) in zip(decode_named(encode_named(tensors)), tensors, strict=True):
        assert name == expected_name and tensor.dtype == expected.dtype and torch.equal(tensor, expected)


def test_batches_that_do_not_match(store):
    batch = remote([random_batch(4, 0)])
    with raises(ValueError, "4 rows", "2 rows"):
        batch.updated(batch.slice(0, 2))
    with pytest.raises(ValueError):
        RemoteBatch.concat([batch, batch.rename({"noise": "sound"})])
    with raises(KeyError, "'nothing'", "noise"):
        batch.select("nothing")


def test_a_worker_whose_beginning_failed_leaves_the_group_that_it_had_joined():
    """As when another worker is lost in between: the next beginning joins the ranks again."""
    if not torch.distributed.is_initialized():  # another test of this process may have left one
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    asyncio.run(WorkerHost().end())
    assert not torch.distributed.is_initialized()
