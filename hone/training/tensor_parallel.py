"""Tensor parallelism: the matrices of a layer cut over ranks, by the plan that the Hugging Face model brings.

    x (the same on all ranks) -> q, k, v, gate, up: cut by output, each rank its heads
                              -> o, down: cut by input, partial sums added up over the ranks -> the same on all ranks

Adapters follow the matrix they belong to. The embedding and the output layer are cut by vocabulary; log-probs are then
computed from the pieces (:mod:`hone.algorithms.vocabulary`).
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

SIZE_KEY = "actor_rollout_ref.actor.tensor_model_parallel_size"
PARTIAL = "replicated_with_grad_allreduce"


def apply_tensor_parallel(model: PreTrainedModel, mesh: DeviceMesh) -> list[nn.Module]:
    """Cut ``model`` (adapters in place) over ``mesh``.

    Returns:
        Modules whose weights are whole on every rank but see only that rank's heads: their gradients are partial sums, which
        :func:`add_partial_gradients` brings together.

    Raises:
        ModelError: the model has no plan, a plan of another kind, or heads that do not divide.
    """
    decoder = model.get_decoder()
    plan = _plan(model, mesh.size())
    partial: list[nn.Module] = []
    for name, module in decoder.named_modules():
        style = plan.get(re.sub(r"\.\d+\.", ".*.", name))
        if style == PARTIAL:
            partial.append(module)
        elif style is not None:
            for part, how in _parts(name, module, style):
                parallelize_module(part, mesh, how, src_data_rank=None)
    _cut_vocabulary(model, mesh)
    return partial


def add_partial_gradients(modules: list[nn.Module], group: ProcessGroup) -> None:
    """Sum the gradients of ``modules`` over the ranks of ``group``, all in one message."""
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
    """Module pattern below the decoder to style; experts are left whole (expert parallelism divides them)."""
    config = model.get_decoder().config
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise ModelError(
            f"{type(model).__name__} has no tensor-parallel plan",
            why="which matrices may be cut, and how, is the model's knowledge",
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


def _parts(name: str, module: nn.Module, style: str) -> list[tuple[nn.Module, ParallelStyle]]:
    """The linear layers of a planned module, with what happens to each: itself, or a base and its adapters."""
    styles: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "rowwise": RowwiseParallel(),
        "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    }
    if style not in styles:
        raise ModelError(
            f"the model's tensor-parallel plan wants '{style}' for {name}, which is not supported",
            where=SIZE_KEY,
            fix=f"{SIZE_KEY}=1",
        )
    how = styles[style]
    if not hasattr(module, "base_layer"):
        return [(module, how)]
    adapters = module.lora_B if style.startswith("colwise") else module.lora_A
    assert isinstance(module.base_layer, nn.Module) and isinstance(adapters, nn.ModuleDict)
    return [(module.base_layer, how), *((adapter, how) for adapter in adapters.values())]


def _cut_vocabulary(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Cut embedding and output layer by vocabulary; one parameter stays one. What is of another kind, or does not divide,
    stays whole."""
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
