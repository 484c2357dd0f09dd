"""Safetensors files as streams on any storage: written one tensor at a time, read in chunks.

The format (https://huggingface.co/docs/safetensors): eight bytes with the length of a JSON header, the header with dtype,
shape and offsets of each tensor, then the tensors. The safetensors library needs a whole local file; here only one tensor
is in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

import torch
from torch import Tensor

from hone.errors import CheckpointError
from hone.insight import activity
from hone.training.checkpoints.storage import as_bytes

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_LONGEST_HEADER = 100 * 2**20  # limit of the safetensors library


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # of the tensor, or of its chunk in this file

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> TensorSpec:
        return cls(tensor.dtype, tuple(tensor.shape))

    @classmethod
    def named(cls, dtype: str, shape: Sequence[int]) -> TensorSpec:
        return cls(_BY_NAME[dtype], tuple(shape))


def write_tensors(
    file: IO[bytes],
    specs: Mapping[str, TensorSpec],
    value: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a whole safetensors file.

    Args:
        specs: of the tensors, in this order except that wide elements come first, so that all are aligned.
        value: returns the tensor of a name; called once for each.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    specs = dict(sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize))
    for name, spec in specs.items():
        header[name] = {"dtype": DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": [end, end + spec.size]}
        end += spec.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for name, spec in specs.items():
        tensor = value(name)
        if TensorSpec.from_tensor(tensor) != spec:
            raise ValueError(f"{name} is {TensorSpec.from_tensor(tensor)}, but its spec is {spec}")
        file.write(_bytes_of(tensor))
        activity.tick()


class TensorFile:
    """A safetensors file open for reading any rectangular chunk of any tensor.

    Raises CheckpointError: it is not a safetensors file.
    """

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file, self._name = file, name
        try:
            length = int.from_bytes(as_bytes(file, 8), "little")
            if length > _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(as_bytes(file, length))
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self.specs = {key: TensorSpec.named(about["dtype"], about["shape"]) for key, about in header.items()}
            self._starts = {key: 8 + length + about["data_offsets"][0] for key, about in header.items()}
        except (ValueError, KeyError, TypeError, EOFError) as error:
            raise CheckpointError(f"'{name}' is not a safetensors file: {type(error).__name__}: {error}") from error

    def read(self, key: str, offsets: Sequence[int] | None = None, lengths: Sequence[int] | None = None) -> Tensor:
        """Return a tensor, or its chunk of shape ``lengths`` at ``offsets``.

        Only the rows (along the first axis) of the chunk are read.
        """
        spec, start = self.specs[key], self._starts[key]
        if offsets is None or lengths is None or not spec.shape:
            return self._rows(spec, start)
        row = TensorSpec(spec.dtype, spec.shape[1:])
        rows = self._rows(TensorSpec(spec.dtype, (lengths[0], *row.shape)), start + offsets[0] * row.size)
        for axis in range(1, len(spec.shape)):
            rows = rows.narrow(axis, offsets[axis], lengths[axis])
        return rows

    def _rows(self, spec: TensorSpec, start: int) -> Tensor:
        activity.tick()
        self._file.seek(start)
        try:
            content = bytearray(as_bytes(self._file, spec.size))
        except EOFError as error:
            raise CheckpointError(f"'{self._name}' is damaged: {error}") from error
        if not content:
            return torch.empty(spec.shape, dtype=spec.dtype)
        return torch.frombuffer(content, dtype=spec.dtype).reshape(spec.shape)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, without a copy if it is contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
