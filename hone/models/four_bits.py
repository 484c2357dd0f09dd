"""A frozen base in 4 bits (NF4; Dettmers et al. 2023): packed while it is read, and unpacked matrix by matrix to compute.

A block of 64 numbers of a matrix has one float32 scale, and each number the index of one of 16 values: 0.5625 bytes a number.
The kernels are those of bitsandbytes. Its own layer is not used: it repacks weights and has other kernels where nothing is trained, so
engine and trainer would compute different numbers from the same bytes. Here both unpack the matrix and multiply with it.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.config.limits import PACKED_BLOCK
from hone.errors import ConfigError, ModelError
from hone.extras import install_command
from hone.models.recurrent import bypassed_linears

METHOD = "nf4"

RECORD = "base_quantization.json"
"""File of a saved adapter with the method and the packed weights of the base that it was trained on."""


class PackedLinear(nn.Linear):
    """A frozen linear layer that holds its matrix packed: ``weight`` has two numbers a byte, ``scales`` one float32 a block.

    Args:
        linear: the layer whose place it takes, with or without storage. :meth:`pack` fills it.
    """

    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        count = linear.in_features * linear.out_features
        packed = torch.empty((count + 1) // 2, 1, dtype=torch.uint8, device=linear.weight.device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("scales", torch.empty(-(-count // PACKED_BLOCK)))
        self.bias = linear.bias

    @torch.no_grad()
    def pack(self, values: Tensor) -> None:
        """Hold these values, rounded to 4 bits."""
        if values.shape != (self.out_features, self.in_features):
            raise ModelError(
                f"a matrix has shape {list(values.shape)} in the files and {[self.out_features, self.in_features]} in the model",
                where="model.path",
                fix="check that the directory holds config.json and *.safetensors of one model",
            )
        packed, scales = _packed(values.to(self.weight.device, torch.float32))
        self.weight.copy_(packed)
        self.scales = scales

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix, unpacked."""
        narrow = dtype in (torch.float32, torch.bfloat16, torch.float16)
        return _unpacked(
            self.weight.detach(),
            self.scales,
            (self.out_features, self.in_features),
            dtype if narrow else torch.float32,
        ).to(dtype)

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


def require_package(key: str = "model.quantization") -> None:
    """Raise ConfigError if bitsandbytes is not installed."""
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"{key}=nf4 needs the package bitsandbytes, which is not installed",
            where=key,
            fix=f"{install_command('quantization')}, or {key}=none",
        )


def pack_layers(model: nn.Module, layers: list[nn.Module]) -> None:
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
            why="experts and convolutions hold theirs in other shapes, so 4 bits would save little",
            where="model.quantization",
            fix="model.quantization=none, or a dense model",
        )
    for name in linears:
        model.set_submodule(name, PackedLinear(model.get_submodule(name)))  # type: ignore[arg-type]


def packed_layers(model: nn.Module) -> Iterator[tuple[str, PackedLinear]]:
    """Yield the packed layers by their names in the model without adapters."""
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            yield name.removeprefix("base_model.model.").removesuffix(".base_layer"), module


def rounded(values: Tensor) -> Tensor:
    """Return a matrix as a packed layer computes with it, in float32."""
    return _unpacked(*_packed(values.float()), tuple(values.shape), torch.float32)


def write_record(model: nn.Module, directory: Path) -> None:
    """Write next to an adapter which weights of its base are packed; nothing if none is."""
    names = [f"{name}.weight" for name, _ in packed_layers(model)]
    if names:
        record = {"method": METHOD, "block": PACKED_BLOCK, "weights": names}
        (directory / RECORD).write_text(json.dumps(record, indent=1))


def packed_weights(adapter: Path) -> frozenset[str]:
    """Return the weights of the base that were packed when an adapter was trained, by their names in the model.

    Raises ModelError: they were packed in another form.
    """
    file = adapter / RECORD
    if not file.is_file():
        return frozenset()
    record = json.loads(file.read_text())
    form = record.get("method"), record.get("block")
    if form != (METHOD, PACKED_BLOCK):
        raise ModelError(
            f"the base of this adapter was packed as {form[0]} in blocks of {form[1]}; this Hone packs {METHOD} in {PACKED_BLOCK}",
            where=str(file),
            fix="use the Hone that trained it",
        )
    return frozenset(record["weights"])


def _packed(values: Tensor) -> tuple[Tensor, Tensor]:
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(
        values.contiguous(), blocksize=PACKED_BLOCK, compress_statistics=False, quant_type=METHOD
    )
    return packed, state.absmax


def _unpacked(packed: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    state = QuantState(scales.float(), torch.Size(shape), blocksize=PACKED_BLOCK, quant_type=METHOD, dtype=dtype)
    return dequantize_4bit(packed, state)
