"""Whole parameters out of a model, divided or not: bucket by bucket, one collective a bucket, never more than one in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hone.training.model import causal_lm
from hone.training.streaming import piece, sharded_dim

BUCKET_BYTES = 256 * 2**20
"""Of whole parameters; a parameter that is larger is a bucket of its own."""


def whole_weights(model: nn.Module, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by the module's own name."""
    yield from in_buckets(model.named_parameters(), bucket_bytes)


def adapter_weights(model: nn.Module, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
    """Only the parameters of LoRA adapters."""
    yield from in_buckets((pair for pair in model.named_parameters() if ".lora_" in pair[0]), bucket_bytes)


def merged_weights(model: nn.Module, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
    """The parameters of the model without adapters that computes the same: ``W + scale * B @ A`` for an adapted ``W``."""
    inner = causal_lm(model)
    layers = {
        f"{name}.base_layer.weight": layer for name, layer in inner.named_modules() if isinstance(layer, LoraLayer)
    }
    base = (pair for pair in inner.named_parameters() if ".lora_" not in pair[0])
    for name, value in in_buckets(base, bucket_bytes):
        if (layer := layers.get(name)) is not None:
            for adapter in layer.active_adapters:
                sides = [("B", layer.lora_B[adapter]), ("A", layer.lora_A[adapter])]
                whole = dict(
                    in_buckets(((side, module.get_parameter("weight")) for side, module in sides), bucket_bytes)
                )
                value = value + layer.scaling[adapter] * (whole["B"] @ whole["A"])
        yield name.replace(".base_layer.", "."), value


@torch.no_grad()
def in_buckets(named: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """The same names with whole tensors. Collective: every rank of the tensors' meshes takes them all."""
    bucket: list[tuple[str, Tensor]] = []
    used = 0
    for name, tensor in named:
        size = tensor.numel() * tensor.element_size()
        if bucket and used + size > bucket_bytes:
            yield from _gathered(bucket)
            bucket, used = [], 0
        bucket.append((name, tensor.detach()))
        used += size
    yield from _gathered(bucket)


def _gathered(bucket: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """What :func:`hone.training.streaming.local_part` cut is put together: the outermost dimension of the mesh first."""
    found = {name: _local(tensor) for name, tensor in bucket}
    divided = {name: tensor for name, tensor in bucket if isinstance(tensor, DTensor)}
    for dimension in range(max((tensor.device_mesh.ndim for tensor in divided.values()), default=0)):
        together: dict[tuple[str, torch.dtype], list[str]] = {}
        for name, tensor in divided.items():
            if dimension < tensor.device_mesh.ndim and sharded_dim(tensor, dimension) is not None:
                ranks = tensor.device_mesh.get_group(dimension).group_name
                together.setdefault((ranks, tensor.dtype), []).append(name)
        for names in together.values():
            found |= _gather({name: (found[name], divided[name]) for name in names}, dimension)
    yield from found.items()


def _gather(parts: dict[str, tuple[Tensor, DTensor]], dimension: int) -> dict[str, Tensor]:
    """Put ``(this rank's part, the parameter)`` together over one dimension of the mesh, all in one message."""
    _, first = next(iter(parts.values()))
    mesh = first.device_mesh
    ranks = mesh.size(dimension)
    padded = {name: _padded(part, parameter, dimension) for name, (part, parameter) in parts.items()}
    own = torch.cat([part.flatten() for part in padded.values()])
    received = own.new_empty(ranks * own.numel())
    dist.all_gather(list(received.chunk(ranks)), own, group=mesh.get_group(dimension))
    whole: dict[str, Tensor] = {}
    start = 0
    for name, part in padded.items():
        _, parameter = parts[name]
        dim, size = _cut(parameter, dimension)
        rows = received.view(ranks, -1)[:, start : start + part.numel()].reshape(ranks, *part.shape)
        whole[name] = torch.cat([rows[rank].narrow(dim, 0, piece(size, ranks, rank)[1]) for rank in range(ranks)], dim)
        start += part.numel()
    return whole


def _padded(part: Tensor, parameter: DTensor, dimension: int) -> Tensor:
    """The part as long as the longest of its dimension of the mesh."""
    dim, size = _cut(parameter, dimension)
    _, longest = piece(size, parameter.device_mesh.size(dimension), 0)
    padding = part.new_zeros(*part.shape[:dim], longest - part.shape[dim], *part.shape[dim + 1 :])
    return torch.cat([part, padding], dim)


def _cut(parameter: DTensor, dimension: int) -> tuple[int, int]:
    """Which dimension of the tensor is cut over ``dimension`` of the mesh, and what it measures before that cut: the inner
    dimensions of the mesh have been cut before.
    """
    dim, mesh = sharded_dim(parameter, dimension), parameter.device_mesh
    assert dim is not None
    size = parameter.shape[dim]
    for inner in reversed(range(dimension + 1, mesh.ndim)):
        if sharded_dim(parameter, inner) == dim:
            _, size = piece(size, mesh.size(inner), mesh.get_local_rank(inner))
    return dim, size


def _local(tensor: Tensor) -> Tensor:
    """This rank's part, on the device where its mesh talks (offloaded shards are elsewhere)."""
    return tensor.to_local().to(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor


STREAMS = {"all": whole_weights, "adapter": adapter_weights, "merged": merged_weights}
"""What may be exported, by name."""
