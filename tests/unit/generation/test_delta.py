"""What changed of weights, put into the former ones, is the new ones, bit for bit; what is not, is refused."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.messages import raises

from hone.generation.remote.delta import Differences, apply, as_entry, as_tensors, change_of, checksum_of
from hone.generation.remote.transports import make_sender, open_chunk
from hone.generation.server.serve import Mirror

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@st.composite
def versions(draw):
    """A weight and the next version of it: any bits of any dtype (NaN and both zeros too), any entries changed."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 7), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    size = torch.Size(shape).numel() * dtype.itemsize
    highest = 2 if dtype == torch.bool else 256
    old, other = (torch.randint(0, highest, (size,), generator=generator, dtype=torch.uint8) for _ in range(2))
    share = draw(st.sampled_from([0.0, 0.05, 0.5, 1.0]))
    new = torch.where(torch.rand(size, generator=generator) < share, other, old)
    old, new = (raw.view(dtype).view(shape) for raw in (old, new))
    if len(shape) == 2 and draw(st.booleans()):  # not contiguous
        old, new = old.T, new.T
    return old, new


@examples(150)
@given(versions())
def test_a_delta_applied_to_the_former_weight_gives_the_new_one(pair):
    old, new = pair
    change = change_of(new, old)
    assert torch.equal(bits(change.new), bits(new)) and change.checksum == checksum_of(new.contiguous())
    sent = sum(tensor.nbytes for _, tensor in as_tensors("w", change))
    assert sent <= new.nbytes
    if change.gaps is not None:
        target = old.clone(memory_format=torch.contiguous_format)
        apply(change.gaps, change.values, target)
        assert torch.equal(bits(target), bits(new))


@pytest.mark.parametrize("places", [[0], [65535], [65536], [3, 70_000, 70_001, 300_000], [399_999], []])
def test_distant_changes_are_applied_at_their_positions(places):
    old = torch.zeros(400_000, dtype=torch.bfloat16)
    new = old.clone()
    new[places] = -1.5
    change = change_of(new, old)
    assert change.changed == len(places) and change.gaps is not None
    apply(change.gaps, change.values, old)
    assert torch.equal(old, new)
    assert change.gaps.numel() <= len(places) + 400_000 // 65_536


def test_a_delta_that_does_not_fit_is_refused():
    old = torch.zeros(100)
    new = old.clone()
    new[99] = 1
    change = change_of(new, old)
    for gaps, values, target in (
        (change.gaps, change.values, torch.zeros(99)),
        (change.gaps.repeat(2), change.values, torch.zeros(200)),
    ):
        with raises(ValueError, target.numel()):
            apply(gaps, values, target)


@examples(20)
@given(
    st.lists(versions(), min_size=1, max_size=4),
    st.sampled_from(("shared_memory", "file", "socket")),
    st.booleans(),
)
def test_a_mirror_returns_the_whole_weights_after_deltas(pairs, kind, tied):
    """Two versions through every transport; ``tied``: one tensor under two names."""
    names = [f"w{number}" for number in range(len(pairs))]
    old, new = (dict(zip(names, side, strict=True)) for side in zip(*pairs, strict=True))
    if tied:
        old["tied"], new["tied"] = old["w0"], new["w0"]
    sender, mirror = make_sender(kind, same_machine=True), Mirror()
    try:
        for weights, since in ((old, Differences(lambda name: None)), (new, Differences(old.get))):
            changes = {name: since.change(name, weight) for name, weight in weights.items()}
            chunk = sender.pack([one for name, change in changes.items() for one in as_tensors(name, change)])
            entries = [as_entry(name, change) for name, change in changes.items()]
            whole = mirror.apply(*json.loads(json.dumps([chunk, entries])))
            assert whole is not None
            with open_chunk(whole) as arrived:
                assert [name for name, _ in arrived] == list(weights)
                for name, got in arrived:
                    wanted = weights[name]
                    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
                    assert torch.equal(bits(got), bits(wanted))
    finally:
        sender.close()
        mirror.close()


def test_a_mirror_refuses_wrong_checksums_and_takes_the_whole_weight_afterwards():
    old, new = torch.randn(64, 64), torch.randn(64, 64)
    new[:60] = old[:60]
    sender, mirror = make_sender("socket", same_machine=True), Mirror()

    def take(change, **wrong):
        return mirror.apply(sender.pack(as_tensors("w", change)), [{**as_entry("w", change), **wrong}])

    delta, whole = change_of(new, old), change_of(new, None)
    assert delta.gaps is not None
    assert take(delta) is None, "there is no former version"
    assert take(change_of(old, None)) is not None
    assert take(delta, shape=[32, 128]) is None
    assert take(delta, checksum=delta.checksum ^ 1) is None, "one bit is wrong"
    assert take(whole) is not None
    assert take(change_of(old, torch.zeros_like(old)), checksum=1) is None
    assert take(change_of(old, None)) is not None and take(delta) is not None
