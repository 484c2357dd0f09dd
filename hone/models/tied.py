"""Tied embeddings under an adapter that changes one of the two: then input and output are two matrices."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from hone.config.model import ModelConfig
from hone.models.loading import causal_lm, model_settings, policy_factory
from hone.models.streaming import empty_model


def parts_embeddings(model: nn.Module) -> bool:
    """Return whether an adapter changes one of two tied embeddings, so that input and output are two matrices."""
    inner = causal_lm(model)
    ends = [inner.get_input_embeddings(), inner.get_output_embeddings()]
    bases = [_without_adapter(end) for end in ends if end is not None]
    weights = [getattr(base, "weight", None) for base in bases]  # a pipeline stage may have one end only
    tied = len(weights) == 2 and weights[0] is not None and weights[0] is weights[1]
    return tied and any(end is not base for end, base in zip(ends, bases, strict=True))


def will_part_embeddings(config: ModelConfig) -> bool:
    """Return :func:`parts_embeddings` of the policy that a configuration loads, without reading its weights."""
    if config.lora_adapter_path:
        file = Path(config.lora_adapter_path, "adapter_config.json")
        saved = json.loads(file.read_text()) if file.is_file() else {}
        chosen = [saved.get("target_modules"), saved.get("modules_to_save")]
    else:
        chosen = [config.target_modules if config.lora_rank > 0 else None]
    chosen = [names for names in chosen if names and names != "all-linear"]
    if not chosen:
        return False
    model = empty_model(policy_factory(config), model_settings(config), trust_remote_code=config.trust_remote_code)
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    if len(ends) < 2 or ends[0].weight is not ends[1].weight:
        return False
    paths = [name for name, module in model.named_modules() if module in ends]
    return any(_selects(names, path) for names in chosen for path in paths)


def _selects(names: str | list[str], path: str) -> bool:
    """Return whether names of modules, or a regular expression, select the module of a path, as PEFT reads them."""
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in names)


def untie(model: PreTrainedModel) -> None:
    """Give the output embedding a matrix of its own, equal to that of the input."""
    head = _without_adapter(model.get_output_embeddings())
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    for settings in (model.config, model.config.get_text_config()):
        settings.tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def merge_adapter(model: PeftModel) -> PreTrainedModel:
    """Merge the adapter into its base; tied embeddings are untied if it changes one of them."""
    if parts_embeddings(model):
        untie(causal_lm(model))
    return model.merge_and_unload()  # type: ignore[no-any-return, operator]


def _without_adapter(module: Any) -> Any:
    """Return the module of the base model inside a module with an adapter."""
    return getattr(module, "base_layer", getattr(module, "original_module", module))
