"""Streams of whole parameters of a sharded or replicated model: one collective per bucket, one bucket in memory.

With ``dtype=torch.bfloat16`` matrices are cast before they are gathered and sent, which halves their bytes. Vectors (norms, biases)
keep their dtype: they are a thousandth of the bytes, and Hone's engine computes with them in float32.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hone.config.limits import GATHER_BUCKET_BYTES
from hone.models.loading import causal_lm
from hone.models.streaming import piece, sharded_dim
from hone.models.tied import parts_embeddings


def whole_weights(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter by its name in the module; matrices in ``dtype``, or with None in their own."""
    yield from in_buckets(_cast(model.named_parameters(), dtype))


def adapter_weights(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    adapters = (pair for pair in model.named_parameters() if ".lora_" in pair[0])
    yield from in_buckets(_cast(adapters, dtype))


def merged_weights(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of the model with merged adapters: ``W + scale * B @ A`` for an adapted ``W``.

    An adapted matrix is merged in its own dtype and cast to ``dtype`` afterwards.
    """
    inner = causal_lm(model)
    layers = {
        f"{name}.base_layer.weight": layer for name, layer in inner.named_modules() if isinstance(layer, LoraLayer)
    }
    wrapped = {name: module for name, module in inner.named_modules() if isinstance(module, ModulesToSaveWrapper)}
    merged = {f"{name}.modules_to_save.{module.active_adapter}.": f"{name}." for name, module in wrapped.items()}
    replaced = tuple(f"{name}.{part}." for name in wrapped for part in ("original_module", "modules_to_save"))
    names = {
        name: next((to + name.removeprefix(start) for start, to in merged.items() if name.startswith(start)), name)
        for name, _ in inner.named_parameters(remove_duplicate=not parts_embeddings(model))
        if ".lora_" not in name and (not name.startswith(replaced) or name.startswith(tuple(merged)))
    }
    base = ((name, inner.get_parameter(name)) for name in names)
    for name, value in in_buckets(_cast(base, dtype, but=layers)):
        if (layer := layers.get(name)) is not None:
            for adapter in layer.active_adapters:
                value = value + layer.scaling[adapter] * _delta(layer, adapter)
            value = in_dtype(value, dtype)
        yield names[name].replace(".base_layer.", "."), value


def _delta(layer: LoraLayer, adapter: str) -> Tensor:
    """Return ``B @ A`` in the orientation of the adapted matrix: an embedding has it transposed."""
    embeds = adapter in layer.lora_embedding_A
    sides: list[tuple[str, Any]] = [
        (side, (embedding[adapter] if embeds else linear[adapter].weight))
        for side, linear, embedding in (
            ("B", layer.lora_B, layer.lora_embedding_B),
            ("A", layer.lora_A, layer.lora_embedding_A),
        )
    ]
    whole = dict(in_buckets(sides))
    return (whole["B"] @ whole["A"]).T if embeds else whole["B"] @ whole["A"]


def _cast(
    named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None, but: Container[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in named:
        yield name, tensor if name in but else in_dtype(tensor.detach(), dtype)


def in_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a matrix of floating-point numbers in ``dtype``, and other tensors unchanged."""
    narrows = dtype is not None and tensor.is_floating_point() and tensor.dim() > 1
    return tensor.to(dtype) if narrows else tensor


@torch.no_grad()
def in_buckets(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names with whole tensors. Collective: every rank of the tensors' meshes iterates to the end."""
    bucket: list[tuple[str, Tensor]] = []
    used = 0
    for name, tensor in named:
        size = tensor.numel() * tensor.element_size()
        if bucket and used + size > GATHER_BUCKET_BYTES:
            yield from _gather_bucket(bucket)
            bucket, used = [], 0
        bucket.append((name, tensor.detach()))
        used += size
    yield from _gather_bucket(bucket)


def _gather_bucket(bucket: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """All-gather the shards of :func:`hone.models.streaming.local_part`, over the outermost mesh dimension first."""
    tensors = {name: _local(tensor) for name, tensor in bucket}
    sharded = {name: tensor for name, tensor in bucket if isinstance(tensor, DTensor)}
    for dimension in range(max((tensor.device_mesh.ndim for tensor in sharded.values()), default=0)):
        by_group: dict[tuple[str, torch.dtype], list[str]] = {}
        for name, tensor in sharded.items():
            if dimension < tensor.device_mesh.ndim and sharded_dim(tensor, dimension) is not None:
                ranks = tensor.device_mesh.get_group(dimension).group_name
                by_group.setdefault((ranks, tensor.dtype), []).append(name)
        for names in by_group.values():
            tensors |= _gather({name: (tensors[name], sharded[name]) for name in names}, dimension)
    yield from tensors.items()


def _gather(shards: dict[str, tuple[Tensor, DTensor]], dimension: int) -> dict[str, Tensor]:
    """All-gather ``(this rank's shard, parameter)`` over one mesh dimension, in one collective."""
    _, first = next(iter(shards.values()))
    mesh = first.device_mesh
    ranks = mesh.size(dimension)
    padded = {name: _padded(shard, parameter, dimension) for name, (shard, parameter) in shards.items()}
    local = torch.cat([shard.flatten() for shard in padded.values()])
    received = local.new_empty(ranks * local.numel())
    dist.all_gather(list(received.chunk(ranks)), local, group=mesh.get_group(dimension))
    whole: dict[str, Tensor] = {}
    start = 0
    for name, shard in padded.items():
        _, parameter = shards[name]
        dim, size = _sharded_size(parameter, dimension)
        rows = received.view(ranks, -1)[:, start : start + shard.numel()].reshape(ranks, *shard.shape)
        whole[name] = torch.cat([rows[rank].narrow(dim, 0, piece(size, ranks, rank)[1]) for rank in range(ranks)], dim)
        start += shard.numel()
    return whole


def _padded(shard: Tensor, parameter: DTensor, dimension: int) -> Tensor:
    dim, size = _sharded_size(parameter, dimension)
    _, longest = piece(size, parameter.device_mesh.size(dimension), 0)
    padding = shard.new_zeros(*shard.shape[:dim], longest - shard.shape[dim], *shard.shape[dim + 1 :])
    return torch.cat([shard, padding], dim)


def _sharded_size(parameter: DTensor, dimension: int) -> tuple[int, int]:
    """Return the tensor dimension that is sharded over mesh ``dimension``, and its size before that sharding.

    Inner mesh dimensions are sharded first.
    """
    dim, mesh = sharded_dim(parameter, dimension), parameter.device_mesh
    assert dim is not None
    size = parameter.shape[dim]
    for inner in reversed(range(dimension + 1, mesh.ndim)):
        if sharded_dim(parameter, inner) == dim:
            _, size = piece(size, mesh.size(inner), mesh.get_local_rank(inner))
    return dim, size


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard on the device of its mesh (offloaded shards are on the host)."""
    return tensor.to_local().to(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor


STREAMS = {"all": whole_weights, "adapter": adapter_weights, "merged": merged_weights}
