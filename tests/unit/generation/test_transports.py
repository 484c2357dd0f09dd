"""Weights on their way into an engine's process: every transport gives what the slow one gives."""

from __future__ import annotations

import faulthandler
import gc
import json
import multiprocessing
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.messages import raises
from support.patience import SOON
from torch import Tensor, nn

from hone.errors import ConfigError, GenerationError
from hone.generation.remote import gpus
from hone.generation.remote.transports import (
    CHUNKS_IN_FLIGHT,
    FileSender,
    Mappings,
    Route,
    buckets,
    make_sender,
    open_chunk,
    share_parameters,
)

KINDS = ("shared_memory", "file", "socket")
shapes = st.lists(st.integers(0, 5), max_size=3)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8])


def tensors(drawn):
    generator = torch.Generator().manual_seed(0)
    return [
        (f"layer.{number}", torch.randint(0, 100, shape, generator=generator).to(dtype))
        for number, (shape, dtype) in enumerate(drawn)
    ]


@examples(30)
@given(st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=5), st.sampled_from(KINDS))
def test_tensors_arrive_as_they_were_sent(drawn, kind):
    sent, sender = tensors(drawn), make_sender(kind, same_machine=True)
    try:
        chunk = json.loads(json.dumps(sender.pack(sent)))
        with open_chunk(chunk) as arrived:
            assert [name for name, _ in arrived] == [name for name, _ in sent]
            for (_, got), (_, wanted) in zip(arrived, sent, strict=True):
                assert got.dtype == wanted.dtype and torch.equal(got, wanted)
    finally:
        sender.close()


def open_files() -> Counter[str]:
    """What this process has open, without what other tests left for the collector."""
    gc.collect()
    return Counter(str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink())


@pytest.mark.parametrize("kind", KINDS)
def test_a_sender_is_used_again_and_leaves_nothing(kind, tmp_path):
    before = open_files()
    sender = FileSender(str(tmp_path)) if kind == "file" else make_sender(kind, same_machine=True)
    for size in (10, 1000, 3):
        with open_chunk(sender.pack([("w", torch.full((size,), float(size)))])) as arrived:
            assert torch.equal(arrived[0][1], torch.full((size,), float(size)))
    assert len(list(tmp_path.rglob("*.safetensors"))) <= CHUNKS_IN_FLIGHT
    del arrived
    sender.close()
    assert not list(tmp_path.iterdir()) and not open_files() - before


@examples(20)
@given(st.lists(st.integers(1, 3000), min_size=CHUNKS_IN_FLIGHT + 1, max_size=8), st.sampled_from(KINDS))
def test_chunks_in_flight_keep_their_contents(sizes, kind):
    sender, mappings, under_way = make_sender(kind, same_machine=True), Mappings(), []
    try:
        for number, size in enumerate(sizes):
            under_way.append((sender.pack([("w", torch.full((size,), float(number)))]), size, number))
            for chunk, long, value in under_way[-CHUNKS_IN_FLIGHT:]:
                with open_chunk(chunk, mappings) as ((_, got),):
                    assert torch.equal(got, torch.full((long,), float(value)))
                del got
    finally:
        sender.close()


def test_a_mapping_is_used_again_until_other_memory_is_at_its_place():
    mappings, sender = Mappings(), make_sender("shared_memory", same_machine=True)

    def seen(sender, size):
        chunks = [sender.pack([("w", torch.full((size,), float(size)))]) for _ in range(CHUNKS_IN_FLIGHT)]
        with open_chunk(chunks[0], mappings) as ((_, got),):
            assert torch.equal(got, torch.full((size,), float(size)))
            return got.untyped_storage().data_ptr()

    place = seen(sender, 500)
    assert seen(sender, 400) == place  # it is large enough
    seen(sender, 5000)
    sender.close()
    another = make_sender("shared_memory", same_machine=True)  # takes the same number of a file
    seen(another, 600)
    another.close()


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 200))
def test_buckets_hold_everything_once_and_in_order(sizes, most):
    named = [(str(number), torch.zeros(size, dtype=torch.uint8)) for number, size in enumerate(sizes)]
    cut = list(buckets(named, most))
    assert [name for bucket, _ in cut for name, _ in bucket] == [name for name, _ in named]
    assert [last for _, last in cut] == [False] * (len(cut) - 1) + [True]
    for bucket, _ in cut:
        assert len(bucket) <= 1 or sum(tensor.nbytes for _, tensor in bucket) <= most


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 30))
def test_a_block_that_fits_stays_together(counts, most):
    named = [
        (f"layers.{block}.part{number}.weight", torch.zeros(1, dtype=torch.uint8))
        for block, count in enumerate(counts)
        for number in range(count)
    ]
    for bucket, _ in buckets(named, most):
        for block in {name.split(".")[1] for name, _ in bucket}:
            inside = sum(name.split(".")[1] == block for name, _ in bucket)
            assert inside == counts[int(block)] or counts[int(block)] > most


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 5), nn.Linear(5, 7, bias=False)
        self.same = self.head


def test_shared_parameters_are_read_in_place_and_no_file_is_left_open():
    before = open_files()
    model, mappings, sender = Tied(), Mappings(), make_sender("shared_memory", same_machine=True)
    wanted = [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]
    assert share_parameters(model) and model.same.weight is model.head.weight
    assert [(name, p.tolist()) for name, p in model.named_parameters()] == [(n, p.tolist()) for n, p in wanted]
    named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    assert [len(bucket) for bucket, _ in buckets(named, 1, sender.bytes_to_copy)] == [3], "nothing is copied"
    chunk = json.loads(json.dumps(sender.pack(named)))
    with open_chunk(chunk, mappings) as arrived:
        assert all(torch.equal(got, wanted) for (_, got), (_, wanted) in zip(arrived, named, strict=True))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model.first(torch.ones(3)).sum().backward()
        optimizer.step()
        assert torch.equal(arrived[0][1], model.first.weight) and not torch.equal(model.first.weight, wanted[0][1])
    mixed = sender.pack([named[0], ("other", torch.ones(2))])
    assert (
        mixed["path"] != chunk["path"]
        and len(list(buckets([*named, ("o", torch.ones(2))], 1, sender.bytes_to_copy))) == 2
    )
    with open_chunk(mixed, mappings) as arrived:
        assert torch.equal(arrived[0][1], model.first.weight)
    del arrived, named, model, optimizer, mappings
    sender.close()
    assert not open_files() - before


def test_an_engine_cannot_write_to_shared_parameters():
    model, sender = nn.Linear(2, 2), make_sender("shared_memory", same_machine=True)
    assert share_parameters(model)
    chunk = sender.pack([("weight", model.weight.detach())])

    def write() -> None:
        faulthandler.disable()
        with open_chunk(chunk) as ((_, weight),):
            weight.fill_(7)

    process = multiprocessing.get_context("fork").Process(target=write)
    process.start()
    process.join(SOON)
    assert process.exitcode == -signal.SIGSEGV and not bool((model.weight == 7).any())


def test_a_missing_file_of_weights_is_an_error():
    for kind in ("shared_memory", "file"):
        with (
            raises(GenerationError, "/nowhere/at/all", "checkpoint_engine.backend=socket"),
            open_chunk({"transport": kind, "path": "/nowhere/at/all", "bytes": 64, "places": [], "names": []}),
        ):
            pass


def test_the_transport_depends_on_the_engines_machine():
    for backend in ("auto", "cuda_ipc"):
        assert type(make_sender(backend, same_machine=True)).__name__ == "SharedMemorySender"
        assert type(make_sender(backend, same_machine=False)).__name__ == "SocketSender"
    with raises(ConfigError, "checkpoint_engine.backend=nccl", "shared_memory", where="actor_rollout_ref.rollout"):
        make_sender("nccl", same_machine=True)


ON_GPU = cast(Tensor, SimpleNamespace(device=torch.device("cuda", 0)))


@pytest.mark.parametrize("backend", ["auto", "cuda_ipc"])
@pytest.mark.parametrize(
    ("options", "obstacle"),
    [
        ({"gpus": ["a"]}, ""),
        ({"gpus": ["a"], "same_machine": False}, "another machine"),
        ({"gpus": ["a"], "delta": True}, "checkpoint_engine.delta"),
        ({"gpus": []}, "does not load weights on a GPU"),
        ({"gpus": ["a", "b"]}, "2 GPUs"),
        ({"gpus": ["b"]}, "another GPU"),
    ],
)
def test_weights_stay_on_a_gpu_only_where_the_engine_has_it(monkeypatch, caplog, backend, options, obstacle):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-a"))
    route = Route(backend, engine="native", **{"same_machine": True, "delta": False, **options})
    route.begin(torch.ones(2))
    assert route.direct is None, "these weights are on the host"
    for _ in range(2):
        route.begin(ON_GPU)
    assert (route.obstacle == "") is (obstacle == "") and obstacle in route.obstacle
    assert (route.direct is None) is bool(obstacle) and route.untested is route.direct
    assert [obstacle in record.message for record in caplog.records] == [True] * (
        backend == "cuda_ipc" and bool(obstacle)
    )
    if not obstacle:
        assert route.sender_for([("w", ON_GPU)]) is None, "unknown whether the engine can map its memory"
        route.opened()
        assert route.untested is None and route.sender_for([("w", ON_GPU)]) is route.direct
        assert route.sender_for([("w", ON_GPU), ("v", torch.ones(2))]) is route.sender_for([]) is None
        route.fall_back("no permission")
        assert (route.fallbacks, route.direct, route.sender_for([("w", ON_GPU)])) == (1, None, None)
        route.begin(ON_GPU)
        assert route.direct is None and [record.message.count("no permission") for record in caplog.records] == [1]
    assert route.pack([("w", torch.ones(2))])["transport"] == route.transport != "cuda_ipc"
    route.close()


@pytest.mark.parametrize("backend", ["shared_memory", "file", "socket"])
def test_a_named_transport_is_used_without_a_warning(caplog, backend):
    route = Route(backend, engine="native", gpus=["a"], same_machine=True, delta=False)
    route.begin(ON_GPU)
    assert (route.direct, route.obstacle, caplog.records) == (None, "", [])
    route.close()


@pytest.mark.parametrize(
    ("visible", "expected"), [("0,1", ["a", "b"]), ("1", ["b"]), ("GPU-b,GPU-a", ["b", "a"]), ("", [])]
)
def test_gpus_are_named_as_this_process_numbers_them(monkeypatch, visible, expected):
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: ["GPU-a", "GPU-b"])
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.visible_uuids() == expected


def test_a_machine_without_the_management_library_names_no_gpus(monkeypatch):
    def missing():
        raise OSError("libnvidia-ml.so.1")

    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", missing)
    assert gpus.visible_uuids() == []
