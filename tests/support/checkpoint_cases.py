"""What ranks do in tests of checkpoints: models of several layouts, trained a little, saved, read back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW, Optimizer
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from hone.training.checkpoints.model_state import ModelStager
from hone.training.checkpoints.shards import ShardStager, load_shards
from hone.training.checkpoints.storage import Storage

SHAPE = {
    "vocab_size": 37,  # divides by nothing
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
}
LAYOUTS = ("one", "fsdp", "hybrid", "tensor")


def fresh_model(*, tied: bool = False) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=tied))


def laid_out(model: nn.Module, layout: str) -> nn.Module:
    """The model over all ranks."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    layers = inner.model.layers
    if layout == "one":
        return model
    if layout in ("fsdp", "hybrid"):
        mesh = init_device_mesh(
            "cpu",
            (world,) if layout == "fsdp" else (world, 1),
            mesh_dim_names=("a", "b")[: 1 if layout == "fsdp" else 2],
        )
        for part in (*layers, model):
            fully_shard(part, mesh=mesh)
        return model
    mesh = init_device_mesh(
        "cpu",
        (world,) if layout == "tensor" else (world // 2, 2),
        mesh_dim_names=("data", "tensor")[-1 if layout == "tensor" else 0 :],
    )
    tensor = mesh if layout == "tensor" else mesh["tensor"]
    plan = {
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
    }
    plan |= {
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
    }
    for layer in layers:
        parallelize_module(layer, tensor, plan | {"mlp.down_proj": RowwiseParallel()})
    if layout == "both":
        for part in (*layers, model):
            fully_shard(part, mesh=mesh["data"])
    return model


def update(model: nn.Module, optimizer: AdamW, seed: int) -> None:
    """One optimizer update with gradients drawn for the whole model, the same in every layout."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in (p for p in model.parameters() if p.requires_grad):
        whole = torch.randn(parameter.shape, generator=generator)
        parameter.grad = _like(whole, parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _like(whole: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return whole.to(parameter.dtype)
    zero = torch.zeros_like(parameter)
    empty = zero.to_local()
    # the piece of `whole` that this rank's shard is, found by carrying positions along
    positions = torch.arange(whole.numel(), dtype=torch.float64).reshape(whole.shape)
    mine = positions_of(parameter, positions)
    empty.copy_(whole.reshape(-1)[mine.long()].reshape(empty.shape))
    return zero


def positions_of(parameter: DTensor, positions: Tensor) -> Tensor:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    for axis, (start, length) in enumerate(zip(offset, shape, strict=True)):
        positions = positions.narrow(axis, min(start, positions.shape[axis]), length)
    return positions.reshape(-1)


def whole_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Every weight and every tensor of the optimizer, whole."""

    def whole(tensor: Tensor) -> Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()

    state = {name: whole(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"{key}/{name}"] = whole(value)
    return state


def build(
    layout: str, directory: Path | None = None, *, lora: bool = False, tied: bool = False
) -> tuple[nn.Module, AdamW]:
    """A fresh model, or the one saved in a checkpoint, over all ranks, with its optimizer."""
    model: Any = fresh_model(tied=tied)
    if directory is not None and not lora:
        model = AutoModelForCausalLM.from_pretrained(directory / "actor", dtype=torch.float32)
        assert isinstance(model, PreTrainedModel)
    if lora:
        config = LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", init_lora_weights=False)
        torch.manual_seed(1)
        model = (
            get_peft_model(model, config)
            if directory is None
            else PeftModel.from_pretrained(model, directory / "actor", is_trainable=True)
        )
    model = laid_out(model, layout)
    trained = [p for p in model.parameters() if p.requires_grad]
    kinds = ([p for p in trained if isinstance(p, DTensor) == divided] for divided in (False, True))
    return model, AdamW([{"params": kind} for kind in kinds if kind], lr=1e-2, fused=layout != "both")


def train_and_save(directory: Path, layout: str, **kind: bool) -> dict[str, Tensor]:
    """Two updates, a checkpoint; then training goes on while it is written. Returns what was to be saved."""
    model, optimizer = build(layout, **kind)
    stager = ModelStager(model, optimizer)
    update(model, optimizer, 1)
    stager.stage(str(directory / "first"), "actor")()
    update(model, optimizer, 2)
    expected = whole_state(model, optimizer)
    write = stager.stage(str(directory), "actor")
    update(model, optimizer, 3)
    write()
    if dist.is_initialized():
        dist.barrier()
    return expected


def read_back(directory: Path, layout: str, **kind: bool) -> dict[str, Tensor]:
    """What a layout finds in a checkpoint."""
    model, optimizer = build(layout, directory, **kind)
    ModelStager(model, optimizer).restore(str(directory), "actor")
    return whole_state(model, optimizer)


def same_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert that the two hold the same numbers, bit for bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# tensors of any shape ---------------------------------------------------------------------------------------------

Placing = tuple[tuple[int, ...], tuple[int | None, ...]]
"""Sizes of the mesh, and the axis that each of its dimensions divides (None: all hold the whole)."""


def spread(whole: Tensor, placing: Placing) -> Tensor:
    sizes, axes = placing
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()).reshape(sizes))
    return distribute_tensor(whole, mesh, [Replicate() if axis is None else Shard(axis) for axis in axes])


def reshard(directory: Path, cases: list[tuple[tuple[int, ...], Placing, Placing]]) -> list[bool]:
    """Save each tensor in its first placing, read it in its second; whether it came back the same."""
    wholes = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, (shape, _, _) in enumerate(cases)]
    saved = {f"t{i}/x": spread(wholes[i], before) for i, (_, before, _) in enumerate(cases)}
    ShardStager().stage(saved, {}, Storage(directory))()
    dist.barrier()
    read = {f"t{i}/x": spread(torch.zeros(shape), after) for i, (shape, _, after) in enumerate(cases)}
    load_shards(read, Storage(directory))
    return [torch.equal(read[f"t{i}/x"].full_tensor(), whole) for i, whole in enumerate(wholes)]


def count_collectives(directory: Path) -> tuple[int, int]:
    """How many object collectives the first and the second staging of the same optimizer state make."""
    model, optimizer = build("fsdp")
    update(model, optimizer, 1)
    calls: list[str] = []
    originals: dict[str, Callable[..., Any]] = {n: getattr(dist, n) for n in ("gather_object", "scatter_object_list")}
    tensors = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in model.named_parameters()}
    stager, counts = ShardStager(), []
    for name, original in originals.items():
        setattr(dist, name, lambda *a, _f=original, **k: (calls.append("x"), _f(*a, **k))[1])
    try:
        for _ in range(2):
            stager.stage(tensors, {}, Storage(directory))
            counts.append(len(calls))
            calls.clear()
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return counts[0], counts[1]


def keeps_odd_state(directory: Path) -> str:
    """What is said of an optimizer whose state of a divided parameter has another shape."""
    from hone.errors import ConfigError

    model, optimizer = build("fsdp")
    update(model, optimizer, 1)
    parameter = next(iter(optimizer.state))
    optimizer.state[parameter]["row"] = torch.zeros(7)
    try:
        ModelStager(model, optimizer).stage(str(directory), "actor")
    except ConfigError as error:
        return error.what
    return ""
