"""Loading of this rank's part of a model directory into Megatron's modules, without the whole model in any process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel

from hone.config.model import ModelConfig
from hone.errors import ModelError
from hone.models.loading import VALUE_SETTINGS, load_empty, value_head
from hone.training.backends.megatron.cpu import on_device
from hone.training.backends.megatron.groups import Groups
from hone.training.backends.megatron.mapping import WeightMap
from hone.training.backends.megatron.model import Stage
from hone.training.backends.protocol import ModelKind


@dataclass(frozen=True)
class LoadedStage:
    """This rank's part of a model.

    Attributes:
        stage: with weights.
        skeleton: the Hugging Face model without storage, for its configuration and names.
        weights: which numbers of the stage are which Hugging Face parameter.
    """

    stage: Stage
    skeleton: PreTrainedModel
    weights: WeightMap

    @property
    def parameters(self) -> dict[str, Tensor]:
        """This rank's parameters by Megatron's names."""
        return dict(self.stage.named_parameters())


def load_stage(kind: ModelKind, model: ModelConfig, groups: Groups, device: torch.device) -> LoadedStage:
    """Build this rank's pipeline stage and fill it from the safetensors files, one tensor at a time. Collective.

    Raises:
        ModelError: the model cannot be loaded.
    """
    valued = kind == "value"
    if valued:
        skeleton, files = load_empty(AutoModelForTokenClassification, model, **VALUE_SETTINGS)
        value_head(skeleton)
    else:
        skeleton, files = load_empty(AutoModelForCausalLM, model)
    with on_device(device):
        stage = Stage(skeleton, groups, device, valued=valued)
    if kind != "frozen" and model.enable_gradient_checkpointing:
        stage.checkpoint_layers(model.gradient_checkpointing_keeps)
    shapes = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
    weights = WeightMap(skeleton.config, shapes, groups)
    parameters = dict(stage.named_parameters())
    for name, dim in weights.divided().items():  # Megatron does so when it initialises parameters
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameters[name])
        parameters[name].tensor_model_parallel, parameters[name].partition_dim = True, dim  # type: ignore[attr-defined]
    missing = weights.fill(parameters, files.tensors())
    for name in [name for name in missing if valued and name.startswith("score.")]:
        parameters[name].detach().zero_()
        missing.discard(name)
    if missing:
        raise ModelError(
            f"the weights lack {len(missing)} tensors, {min(missing)} among them",
            why="they would be random",
            where="model.path",
            fix="check that the directory holds config.json and *.safetensors of one model",
        )
    return LoadedStage(stage, skeleton, weights)
