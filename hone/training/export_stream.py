"""Whole parameters out of a divided model, one at a time."""

from __future__ import annotations

from collections.abc import Iterator

from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hone.training.model import causal_lm


def whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by the module's own name."""
    for name, parameter in model.named_parameters():
        yield name, whole(parameter)


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Only the parameters of LoRA adapters."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            yield name, whole(parameter)


def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters of the model without adapters that computes the same: ``W + scale * B @ A`` for an adapted ``W``."""
    inner = causal_lm(model)
    adapted = {
        f"{name}.base_layer.weight": layer for name, layer in inner.named_modules() if isinstance(layer, LoraLayer)
    }
    for name, parameter in inner.named_parameters():
        if ".lora_" in name:
            continue
        value = whole(parameter)
        if (layer := adapted.get(name)) is not None:
            for adapter in layer.active_adapters:
                up, down = (whole(side[adapter].get_parameter("weight")) for side in (layer.lora_B, layer.lora_A))
                value = value + layer.scaling[adapter] * (up @ down)
        yield name.replace(".base_layer.", "."), value


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor of which each rank holds a part; no copy of one that is whole."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
