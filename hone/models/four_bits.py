"""A frozen base in 4 or 8 bits: packed while it is read, and unpacked matrix by matrix to compute.

A block of 64 numbers of a matrix has one float32 scale. In NF4 (Dettmers et al. 2023) each number is the index of one of 16 values, 0.5625 bytes
a number; in int8 it is the nearest of 255 multiples of a 127th of the largest, 1.0625 bytes.
The kernels of NF4 are those of bitsandbytes. Its own layer is not used: it repacks weights and has other kernels where nothing is trained, so
engine and trainer would compute different numbers from the same bytes. Here both unpack the matrix and multiply with it.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.config.limits import PACKED_BLOCK, PACKED_BYTES
from hone.errors import ConfigError, ModelError
from hone.extras import install_command
from hone.models.recurrent import bypassed_linears

RECORD = "base_quantization.json"
"""File of a saved adapter with the method and the packed weights of the base that it was trained on."""


class PackedLinear(nn.Linear):
    """A frozen linear layer that holds its matrix packed: ``weight`` has its numbers, ``scales`` one float32 a block.

    Args:
        linear: the layer whose place it takes, with or without storage. :meth:`pack` fills it.
        method: "nf4" or "int8".
    """

    scales: Tensor

    def __init__(self, linear: nn.Linear, method: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.method = linear.in_features, linear.out_features, method
        count = linear.in_features * linear.out_features
        blocks = -(-count // PACKED_BLOCK)
        shape, dtype = (((count + 1) // 2, 1), torch.uint8) if method == "nf4" else ((blocks, PACKED_BLOCK), torch.int8)
        packed = torch.empty(shape, dtype=dtype, device=linear.weight.device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("scales", torch.empty(blocks))
        self.bias = linear.bias

    @torch.no_grad()
    def pack(self, values: Tensor) -> None:
        """Hold these values, rounded."""
        if values.shape != (self.out_features, self.in_features):
            raise ModelError(
                f"a matrix has shape {list(values.shape)} in the files and {[self.out_features, self.in_features]} in the model",
                where="model.path",
                fix="check that the directory holds config.json and *.safetensors of one model",
            )
        packed, scales = _packed(values.to(self.weight.device, torch.float32), self.method)
        self.weight.copy_(packed)
        self.scales = scales

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix, unpacked."""
        shape = (self.out_features, self.in_features)
        return _unpacked(self.weight.detach(), self.scales, shape, dtype, self.method)

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        return _Matmul.apply(input.to(dtype), self)  # type: ignore[no-any-return]


class _Matmul(torch.autograd.Function):
    """A matmul with an unpacked matrix, which the backward pass unpacks again."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, layer: PackedLinear) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(states.dtype)
        return F.linear(states, layer.values(states.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient @ ctx.layer.values(gradient.dtype), None


def require_package(method: str, key: str = "model.quantization") -> None:
    """Raise ConfigError if the method needs bitsandbytes, which is not installed."""
    if method == "nf4" and find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"{key}=nf4 needs the package bitsandbytes, which is not installed",
            where=key,
            fix=f"{install_command('quantization')}, {key}=int8, or {key}=none",
        )


def pack_layers(model: nn.Module, layers: list[nn.Module], method: str) -> None:
    """Replace the linear layers within these modules of ``model`` by packed ones, which are empty until they are filled.

    Raises ModelError: there are none, or a mixture of experts has its matrices elsewhere.
    """
    inside = {id(module) for layer in layers for module in layer.modules()}
    bypassed = set(bypassed_linears(model))
    linears = [
        name
        for name, module in model.named_modules()
        if id(module) in inside and type(module) is nn.Linear and name not in bypassed
    ]
    held = sum(model.get_submodule(name).weight.numel() for name in linears)  # type: ignore[union-attr]
    matrices = sum(p.numel() for layer in layers for p in layer.parameters() if p.dim() > 1)
    if 2 * held < matrices or not linears:
        raise ModelError(
            f"{type(model).__name__} has {held / max(1, matrices):.0%} of its layers' numbers in linear layers, which alone are packed",
            why="experts and convolutions hold theirs in other shapes, so packing would save little",
            where="model.quantization",
            fix="model.quantization=none, or a dense model",
        )
    for name in linears:
        model.set_submodule(name, PackedLinear(model.get_submodule(name), method))  # type: ignore[arg-type]


def packed_layers(model: nn.Module) -> Iterator[tuple[str, PackedLinear]]:
    """Yield the packed layers by their names in the model without adapters."""
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            yield name.removeprefix("base_model.model.").removesuffix(".base_layer"), module


def rounded(values: Tensor, method: str) -> Tensor:
    """Return a matrix as a packed layer computes with it, in float32."""
    return _unpacked(*_packed(values.float(), method), tuple(values.shape), torch.float32, method)


def write_record(model: nn.Module, directory: Path) -> None:
    """Write next to an adapter which weights of its base are packed, and how; nothing if none is."""
    packed = dict(packed_layers(model))
    if packed:
        method = next(iter(packed.values())).method
        record = {"method": method, "block": PACKED_BLOCK, "weights": [f"{name}.weight" for name in packed]}
        (directory / RECORD).write_text(json.dumps(record, indent=1))


def packed_base(adapter: Path) -> tuple[str, frozenset[str]]:
    """Return how the base of an adapter was packed ("none" if it was not), and the names of its packed weights.

    Raises ModelError: they were packed in another form.
    """
    file = adapter / RECORD
    if not file.is_file():
        return "none", frozenset()
    record = json.loads(file.read_text())
    method, block = record.get("method"), record.get("block")
    if method not in PACKED_BYTES or block != PACKED_BLOCK:
        raise ModelError(
            f"the base of this adapter was packed as {method} in blocks of {block}; this Hone packs "
            f"{' or '.join(PACKED_BYTES)} in {PACKED_BLOCK}",
            where=str(file),
            fix="use the Hone that trained it",
        )
    return method, frozenset(record["weights"])


def _packed(values: Tensor, method: str) -> tuple[Tensor, Tensor]:
    if method == "int8":
        blocks = F.pad(values.flatten(), (0, -values.numel() % PACKED_BLOCK)).view(-1, PACKED_BLOCK)
        scales = blocks.abs().amax(1) / 127
        return (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8), scales
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(
        values.contiguous(), blocksize=PACKED_BLOCK, compress_statistics=False, quant_type=method
    )
    return packed, state.absmax


def _unpacked(packed: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype, method: str) -> Tensor:
    if method == "int8":
        return (packed * scales.float()[:, None]).flatten()[: math.prod(shape)].view(shape).to(dtype)
    from bitsandbytes.functional import QuantState, dequantize_4bit

    narrow = dtype if dtype in (torch.float32, torch.bfloat16, torch.float16) else torch.float32
    state = QuantState(scales.float(), torch.Size(shape), blocksize=PACKED_BLOCK, quant_type=method, dtype=narrow)
    return dequantize_4bit(packed, state).to(dtype)
