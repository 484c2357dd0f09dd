"""Files written as streams are safetensors to the library of that name, and pieces read are the pieces asked for."""

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from support.messages import raises

from hone.errors import CheckpointError
from hone.training.checkpoints.tensor_files import DTYPES, TensorFile, TensorSpec, write_tensors


def written(tensors: dict[str, torch.Tensor], metadata=None) -> bytes:
    file = io.BytesIO()
    write_tensors(file, {name: TensorSpec.from_tensor(t) for name, t in tensors.items()}, tensors.__getitem__, metadata)
    return file.getvalue()


def random(shape, dtype, seed: int) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50
    return values > 0 if dtype is torch.bool else values.abs().to(dtype) if dtype is torch.uint8 else values.to(dtype)


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@given(st.lists(st.tuples(shapes, st.sampled_from(sorted(DTYPES, key=str))), max_size=6))
def test_the_library_reads_what_we_write_and_we_read_what_it_writes(drawn):
    tensors = {f"t{i}": random(shape, dtype, i) for i, (shape, dtype) in enumerate(drawn)}
    theirs = load(written(tensors, {"note": "kept"}))
    ours = TensorFile(io.BytesIO(save(tensors)), "file")
    assert theirs.keys() == ours.specs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        for found in (theirs[name], ours.read(name)):
            assert found.dtype == tensor.dtype and found.shape == tensor.shape
            if found.numel():
                assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert TensorFile(io.BytesIO(written(tensors, {"note": "kept"})), "file").metadata["note"] == "kept"


@st.composite
def pieces(draw):
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    offsets = [draw(st.integers(0, n - 1)) for n in shape]
    lengths = [draw(st.integers(1, n - start)) for n, start in zip(shape, offsets, strict=True)]
    return shape, offsets, lengths


@given(pieces())
def test_any_piece_is_the_slice(piece):
    shape, offsets, lengths = piece
    whole = random(shape, torch.float32, 0)
    slices = tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))
    file = TensorFile(io.BytesIO(written({"other": torch.ones(3), "w": whole})), "file")
    assert torch.equal(file.read("w", offsets, lengths), whole[slices])


def test_tensors_that_are_not_contiguous():
    whole = random((4, 6), torch.float32, 0)
    assert torch.equal(load(written({"w": whole.t()[1:4]}))["w"], whole.t()[1:4])


def test_a_tensor_that_differs_from_its_spec_is_a_bug():
    with raises(ValueError, "w", "(2,)", "(3,)"):
        write_tensors(io.BytesIO(), {"w": TensorSpec(torch.float32, (2,))}, lambda _name: torch.ones(3))


@pytest.mark.parametrize(
    "content", [b"", b"\x08", b"\xff" * 40, b"\x02" + b"\0" * 7 + b"[]", b"\x04" + b"\0" * 7 + b"nope"]
)
def test_another_file_than_safetensors_is_one_error(content):
    with raises(CheckpointError, "some file", "safetensors"):
        TensorFile(io.BytesIO(content), "some file")


def test_a_file_that_ends_too_early_is_damaged():
    file = TensorFile(io.BytesIO(written({"w": torch.ones(100)})[:-1]), "some file")
    with raises(CheckpointError, "some file", "damaged"):
        file.read("w")
