"""Expert parallelism: each rank of a group holds some experts of every layer; tokens travel to them and back.

    tokens of this rank -> (token, expert) pairs, sorted by expert -> all-to-all -> this rank's experts
                        <- weighted by the router, added up        <- all-to-all <-

It works on transformers' experts modules, which hold all experts in one parameter and are called with
``(hidden [T, H], chosen experts [T, K], their weights [T, K])``: Qwen3-MoE, Mixtral, GPT-OSS and others.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hone.errors import ModelError

SIZE_KEY = "actor_rollout_ref.actor.expert_parallel_size"


def experts_of(model: nn.Module) -> list[nn.Module]:
    """The experts modules of ``model``: those that hold their experts in parameters of their own, one slice each."""
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, "num_experts", None), int)
        and (own := dict(module.named_parameters(recurse=False)))
        and all(parameter.dim() > 1 and parameter.shape[0] == module.num_experts for parameter in own.values())
        and "expert" in type(module).__name__.lower()
    ]


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Divide the experts of every layer over ``mesh``; returns the experts modules.

    Raises:
        ModelError: the model has no experts, or their number does not divide.
    """
    found = experts_of(model)
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no experts to divide over {mesh.size()} ranks",
            where=SIZE_KEY,
            fix=f"{SIZE_KEY}=1",
        )
    for experts in found:
        count = int(experts.num_experts)  # type: ignore[arg-type]
        if count % mesh.size():
            raise ModelError(
                f"{count} experts cannot be divided over {mesh.size()} ranks",
                where=SIZE_KEY,
                fix=f"{SIZE_KEY}=<a divisor of {count}>",
            )
        for name, parameter in list(experts.named_parameters(recurse=False)):
            divided = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))
        experts.num_experts = count // mesh.size()  # type: ignore[assignment]
        experts.forward = types.MethodType(_dispatched(type(experts).forward, mesh.get_group()), experts)
    return found


def _dispatched(compute: Callable[..., Tensor], group: ProcessGroup) -> Callable[..., Tensor]:
    """The forward pass of an experts module whose experts are divided over ``group``; ``compute`` is its own forward."""

    def forward(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        ranks, each = dist.get_world_size(group), experts.num_experts
        expert_of = chosen.flatten()
        order = expert_of.argsort(stable=True)
        token_of = order // chosen.shape[1]
        sent = torch.bincount(expert_of // each, minlength=ranks)
        arriving = torch.empty_like(sent)
        dist.all_to_all_single(arriving, sent, group=group)
        there, here = sent.tolist(), arriving.tolist()
        rows = _AllToAll.apply(hidden[token_of], there, here, group)
        expert = expert_of.new_empty(len(rows))
        dist.all_to_all_single(expert, expert_of[order] % each, here, there, group=group)
        # one row more, of zeros: a rank that no token came to still uses its parameters, as the sum of gradients expects
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        expert = torch.cat([expert, expert.new_zeros(1)])[:, None]
        with _local_parameters(experts):
            computed = compute(experts, rows, expert, rows.new_ones(len(rows), 1))[:-1]
        back = _AllToAll.apply(computed, here, there, group)
        weighted = back * weights.flatten()[order, None]
        return torch.zeros_like(hidden).index_add(0, token_of, weighted.to(hidden.dtype))

    return forward


@contextlib.contextmanager
def _local_parameters(experts: nn.Module) -> Iterator[None]:
    """Within the block the module's parameters are this rank's experts as plain tensors."""
    kept = dict(experts._parameters)
    local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in kept.items()}
    experts._parameters.update(local)  # type: ignore[arg-type]
    try:
        yield
    finally:
        experts._parameters.update(kept)


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks: ``there[r]`` of this rank's to rank r, ``here[r]`` from it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: list[int], here: list[int], group: ProcessGroup) -> Tensor:
        ctx.settings = (there, here, group)
        received = rows.new_empty(sum(here), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), here, there, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        there, here, group = ctx.settings
        received = grads[0].new_empty(sum(there), *grads[0].shape[1:])
        dist.all_to_all_single(received, grads[0].contiguous(), there, here, group=group)
        return received, None, None, None
