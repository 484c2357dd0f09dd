"""Expert parallelism: each rank of a group has some experts of every layer; tokens are sent to them and back.

    tokens of this rank -> (token, expert) pairs, sorted by expert -> all-to-all -> this rank's experts
                        <- weighted by the router, summed          <- all-to-all <-

It works on transformers' experts modules, which have all experts in one parameter and are called with
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
    """Return the experts modules of ``model``, whose parameters have one slice per expert."""
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, "num_experts", None), int)
        and (parameters := dict(module.named_parameters(recurse=False)))
        and all(parameter.dim() > 1 and parameter.shape[0] == module.num_experts for parameter in parameters.values())
        and "expert" in type(module).__name__.lower()
    ]


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Divide the experts of every layer over ``mesh`` and return the experts modules.

    Raises:
        ModelError: the model has no experts, or their number is not divisible.
    """
    modules = experts_of(model)
    if not modules:
        raise ModelError(
            f"{type(model).__name__} has no experts to divide over {mesh.size()} ranks",
            where=SIZE_KEY,
            fix=f"{SIZE_KEY}=1",
        )
    for experts in modules:
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
    return modules


def _dispatched(compute: Callable[..., Tensor], group: ProcessGroup) -> Callable[..., Tensor]:
    """Return the forward pass of an experts module divided over ``group``; ``compute`` is its original forward."""

    def forward(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        ranks, each = dist.get_world_size(group), experts.num_experts
        expert_of = chosen.flatten()
        order = expert_of.argsort(stable=True)
        token_of = order // chosen.shape[1]
        sent = torch.bincount(expert_of // each, minlength=ranks)
        arriving = torch.empty_like(sent)
        dist.all_to_all_single(arriving, sent, group=group)
        sent_counts, received_counts = sent.tolist(), arriving.tolist()
        rows = _AllToAll.apply(hidden[token_of], sent_counts, received_counts, group)
        expert = expert_of.new_empty(len(rows))
        dist.all_to_all_single(expert, expert_of[order] % each, received_counts, sent_counts, group=group)
        # an additional row of zeros, so that a rank without tokens uses its parameters, which the gradient sum requires
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        expert = torch.cat([expert, expert.new_zeros(1)])[:, None]
        with _local_parameters(experts):
            computed = compute(experts, rows, expert, rows.new_ones(len(rows), 1))[:-1]
        back = _AllToAll.apply(computed, received_counts, sent_counts, group)
        weighted = back * weights.flatten()[order, None]
        return torch.zeros_like(hidden).index_add(0, token_of, weighted.to(hidden.dtype))

    return forward


@contextlib.contextmanager
def _local_parameters(experts: nn.Module) -> Iterator[None]:
    """Replace the module's parameters by this rank's experts as plain tensors inside the block."""
    kept = dict(experts._parameters)
    local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in kept.items()}
    experts._parameters.update(local)  # type: ignore[arg-type]
    try:
        yield
    finally:
        experts._parameters.update(kept)


class _AllToAll(torch.autograd.Function):
    """Exchange of rows: ``sent_counts[r]`` rows to rank r, ``received_counts[r]`` rows from it."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent_counts: list[int], received_counts: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.settings = (sent_counts, received_counts, group)
        received = rows.new_empty(sum(received_counts), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), received_counts, sent_counts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sent_counts, received_counts, group = ctx.settings
        received = grads[0].new_empty(sum(sent_counts), *grads[0].shape[1:])
        dist.all_to_all_single(received, grads[0].contiguous(), sent_counts, received_counts, group=group)
        return received, None, None, None
