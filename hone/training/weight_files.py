"""Tensors of a Hugging Face directory's safetensors files, and a plain LoRA adapter to merge into them."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from hone.training.checkpoints.tensor_files import TensorFile, TensorSpec

_PREFIX = "base_model.model."


class WeightFolder:
    """Tensors of a model directory, read one at a time."""

    def __init__(self, files: dict[str, TensorFile]) -> None:
        self._files = files
        self.specs: dict[str, TensorSpec] = {name: file.specs[name] for name, file in files.items()}

    @classmethod
    def open(cls, directory: Path, stack: contextlib.ExitStack) -> WeightFolder | None:
        """Open the files until ``stack`` closes them; return None if the directory has no safetensors."""
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        elif (directory / "model.safetensors").is_file():
            names = ["model.safetensors"]
        else:
            return None
        files: dict[str, TensorFile] = {}
        for name in names:
            file = TensorFile(stack.enter_context((directory / name).open("rb")), str(directory / name))
            files |= dict.fromkeys(file.specs, file)
        return cls(files)

    def read(self, name: str) -> Tensor:
        """Return one tensor."""
        return self._files[name].read(name)


@dataclass(frozen=True)
class PlainLora:
    """A LoRA adapter that only adds ``scaling * B @ A`` to linear layers (Hu et al. 2021).

    Attributes:
        sides: A and B of each adapted weight.
        scaling: alpha / r, or alpha / sqrt(r) if rank-stabilised.
    """

    sides: dict[str, tuple[Tensor, Tensor]]
    scaling: float

    @classmethod
    def read(cls, directory: Path) -> PlainLora | None:
        """Read the adapter of a PEFT directory; return None if it is not plain."""
        config = json.loads((directory / "adapter_config.json").read_text())
        file = directory / "adapter_model.safetensors"
        if not _is_plain(config) or not file.is_file():
            return None
        layers: dict[str, dict[str, Tensor]] = {}
        for name, tensor in load_file(file).items():
            layer, _, side = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
            if side not in ("lora_A", "lora_B") or tensor.dim() != 2:
                return None
            layers.setdefault(f"{layer}.weight", {})[side] = tensor.float()
        rank = config["r"]
        scaling = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
        return cls({name: (sides["lora_A"], sides["lora_B"]) for name, sides in layers.items()}, scaling)

    def fits(self, weights: WeightFolder) -> bool:
        """Return whether the files have every adapted weight with its name and shape."""
        shapes = {name: (up.shape[0], down.shape[1]) for name, (down, up) in self.sides.items()}
        return all(name in weights.specs and weights.specs[name].shape == shape for name, shape in shapes.items())

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight with its adapter, in float32; other weights unchanged."""
        if name not in self.sides:
            return weight
        down, up = self.sides[name]
        return weight.float() + (up @ down) * self.scaling


def _is_plain(config: dict[str, Any]) -> bool:
    others = (
        "use_dora",
        "use_qalora",
        "fan_in_fan_out",
        "modules_to_save",
        "rank_pattern",
        "alpha_pattern",
        "lora_bias",
    )
    others += ("target_parameters", "trainable_token_indices", "layer_replication", "alora_invocation_tokens")
    usual_start = config.get("init_lora_weights") in (True, False, "gaussian")
    return (
        config.get("peft_type") == "LORA"
        and config.get("bias", "none") == "none"
        and usual_start
        and not any(config.get(name) for name in others)
    )
