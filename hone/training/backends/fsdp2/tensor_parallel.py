"""Tensor parallelism: the matrices of a layer are sharded over ranks, by the plan of the Hugging Face model.

    x (the same on all ranks) -> q, k, v, gate, up: sharded by output, each rank has its heads
                              -> o, down: sharded by input, partial sums added over the ranks -> the same on all ranks

Adapters are sharded like their matrix. The embedding and the output layer are sharded by vocabulary; log-probs are then
computed from the shards (:mod:`hone.algorithms.logits`).
"""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from hone.errors import ModelError
from hone.models.registry import tensor_plan_of

SIZE_KEY = "actor_rollout_ref.actor.tensor_model_parallel_size"
PARTIAL = "replicated_with_grad_allreduce"


def apply_tensor_parallel(model: PreTrainedModel, mesh: DeviceMesh) -> list[nn.Module]:
    """Shard ``model``, adapters included, over ``mesh``.

    Returns modules with whole weights on every rank that see only this rank's heads: their gradients are partial sums
    for :func:`add_partial_gradients`.

    Raises ModelError: the model has no plan or an unsupported one, or its number of heads is not divisible.
    """
    decoder = model.get_decoder()
    plan = _plan(model, mesh.size())
    partial: list[nn.Module] = []
    for name, module in decoder.named_modules():
        style = plan.get(re.sub(r"\.\d+\.", ".*.", name))
        if style == PARTIAL:
            partial.append(module)
        elif style is not None:
            for linear, parallel_style in _linear_layers(name, module, style):
                parallelize_module(linear, mesh, parallel_style, src_data_rank=None)
    _shard_vocabulary(model, mesh)
    return partial


def add_partial_gradients(modules: list[nn.Module], group: ProcessGroup) -> None:
    """Sum the gradients of ``modules`` over the ranks of ``group``, in one collective."""
    grads = [_local(weight.grad) for module in modules for weight in module.parameters() if weight.grad is not None]
    if not grads:
        return
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=group)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _plan(model: PreTrainedModel, size: int) -> dict[str, str]:
    """Return the parallel style by module pattern in the decoder, without experts, which expert parallelism divides."""
    config = model.get_decoder().config
    plan = tensor_plan_of(config.model_type, config)
    if not plan:
        raise ModelError(
            f"{type(model).__name__} has no tensor-parallel plan",
            why="the plan of the model says which matrices can be sharded, and how",
            where=SIZE_KEY,
            fix=f"{SIZE_KEY}=1",
        )
    heads = {"attention": config.num_attention_heads, "key-value": getattr(config, "num_key_value_heads", None)}
    for kind, count in heads.items():
        if count is not None and count % size:
            raise ModelError(
                f"{count} {kind} heads cannot be divided over {size} tensor-parallel ranks",
                where=SIZE_KEY,
                fix=f"{SIZE_KEY}=<a common divisor of {', '.join(str(n) for n in heads.values() if n)}>",
            )
    return {pattern: style for pattern, style in plan.items() if ".experts" not in pattern}


def _linear_layers(name: str, module: nn.Module, style: str) -> list[tuple[nn.Module, ParallelStyle]]:
    """Return the linear layers of a planned module with their style: itself, or a base layer and its adapters."""
    styles: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "rowwise": RowwiseParallel(),
        "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    }
    if style not in styles:
        raise ModelError(
            f"the model's tensor-parallel plan has style '{style}' for {name}, which is not supported",
            where=SIZE_KEY,
            fix=f"{SIZE_KEY}=1",
        )
    parallel_style = styles[style]
    if not hasattr(module, "base_layer"):
        return [(module, parallel_style)]
    adapters = module.lora_B if style.startswith("colwise") else module.lora_A
    assert isinstance(module.base_layer, nn.Module) and isinstance(adapters, nn.ModuleDict)
    return [(module.base_layer, parallel_style), *((adapter, parallel_style) for adapter in adapters.values())]


def _shard_vocabulary(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shard embedding and output layer by vocabulary and keep tied ones tied; unsupported or indivisible layers stay whole."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    tied = output is not None and output.weight is embedding.weight
    divides = model.config.get_text_config().vocab_size % mesh.size() == 0
    plain_embedding, plain_output = divides and type(embedding) is nn.Embedding, divides and type(output) is nn.Linear
    if plain_embedding and (plain_output or not tied):
        parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate()), src_data_rank=None)
    elif tied:
        return
    if plain_output and isinstance(output, nn.Linear):
        parallelize_module(output, mesh, ColwiseParallel(output_layouts=Replicate()), src_data_rank=None)
        if tied:
            output.weight = embedding.get_parameter("weight")
