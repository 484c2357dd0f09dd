"""Translation of a configuration of LLaMA-Factory to one of `hone sft`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hone.apps.verl.importing.translation import Line, Translation
from hone.apps.verl.launch import Trouble
from hone.config.check import yaml_value
from hone.config.migration import LLAMA_FACTORY, Outcome, Reading, read_by
from hone.config.sft import SFTConfig
from hone.errors import did_you_mean

_DEFAULTS: dict[str, Any] = {
    "data.max_length": 2048,
    "data.truncation": "right",
    "data.train_batch_size": 8,
    "model.enable_gradient_checkpointing": True,
    "optim.lr": 5e-5,
    "optim.weight_decay": 0.0,
    "trainer.total_epochs": 3,
}
"""Where LLaMA-Factory's defaults differ from Hone's."""
_LORA_RANK = 8
"""LLaMA-Factory's rank of adapters; alpha is twice the rank."""


def is_llama_factory(tree: Mapping[str, Any]) -> bool:
    """Return whether a mapping of keys is a configuration of LLaMA-Factory."""
    return "model_name_or_path" in tree


def import_llama_factory(tree: Mapping[str, Any]) -> Translation:
    """Translate the keys of a file; those without an entry are not understood."""
    translation = Translation("sft")
    for key, value in tree.items():
        text, entry = f"{key}: {yaml_value(value)}", LLAMA_FACTORY.find(key)
        if entry is None:
            near = did_you_mean(key, [name for name in LLAMA_FACTORY.paths() if name not in tree])
            translation.not_understood.append(Trouble(0, f"{text}: unknown key; {near}"))
            continue
        reading: Reading = read_by(entry, key, value, tree, SFTConfig)
        translation.lines.append(Line(0, text, reading))
        if reading.outcome is not Outcome.UNKNOWN:
            translation.values |= reading.sets
    _complete(translation, tree)
    return translation


def _complete(translation: Translation, tree: Mapping[str, Any]) -> None:
    """Add LLaMA-Factory's defaults that differ from Hone's, and what a file cannot say."""
    values = translation.values
    if tree.get("finetuning_type", "lora") == "lora":
        if "model.lora_rank" not in values:
            translation.add("model.lora_rank", _LORA_RANK, "LLaMA-Factory's default")
        if "model.lora_alpha" not in values:
            translation.add(
                "model.lora_alpha", 2 * values["model.lora_rank"], "twice the rank, LLaMA-Factory's default"
            )
    else:
        translation.leave_out("model.lora_rank", "finetuning_type=full")
    for key, value in _DEFAULTS.items():
        if key not in values:
            translation.add(key, value, "LLaMA-Factory's default")
    if "optim.lr_scheduler_type" not in values:
        what = "LLaMA-Factory's default schedule is linear; optim.lr_scheduler_type is constant or cosine"
        translation.remarks.append(Trouble(0, what))
    what = "data.train_batch_size is for one device: multiply it by the number of devices of the run"
    translation.remarks.append(Trouble(0, what))
