"""An adapter in the files that engines read, filled by parcels of weights."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from hone.errors import GenerationError

_OWN_NAME = ".default."
"""PEFT puts the adapter's name into its parameters, and leaves it out of its files."""
_PART = re.compile(r"\.lora_[AB]\.weight$")


class AdapterFolder:
    """A LoRA adapter in PEFT's layout, in a temporary directory.

    Attributes:
        path: of the directory.

    Args:
        shape: ``r`` and ``lora_alpha``.
    """

    def __init__(self, shape: Mapping[str, float]) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hone-adapter-")
        self.path, self._shape = self._directory.name, shape
        self._arrived: dict[str, Tensor] = {}
        self._names: set[str] = set()

    def begin(self) -> None:
        """A new version follows."""
        self._arrived = {}

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Keep copies of some of it."""
        self._arrived |= {name.replace(_OWN_NAME, "."): tensor.clone() for name, tensor in tensors}

    def finish(self) -> None:
        """Write the version.

        Raises:
            GenerationError: a part is missing, or something else came than an adapter.
        """
        arrived = set(self._arrived)
        foreign = sorted(name for name in arrived if not _PART.search(name)) or (["nothing"] if not arrived else [])
        if foreign:
            raise GenerationError(
                f"'{foreign[0]}' is no part of a LoRA adapter, which is what this engine takes",
                fix="actor_rollout_ref.rollout.merge_lora=true for an engine that takes whole weights",
            )
        modules = {name.split(".lora_")[0] for name in arrived}
        expected = self._names | {f"{module}.lora_{side}.weight" for module in modules for side in "AB"}
        if missing := sorted(expected - arrived):
            raise GenerationError(
                f"{len(missing)} of {len(expected)} weights of the adapter have not arrived, such as '{missing[0]}'",
                why="the engine would sample from a mixture of two policies",
                fix="publish every parameter of the adapter",
            )
        self._names = arrived
        modules_by_suffix = sorted({module.rsplit(".", 1)[-1] for module in modules})
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "target_modules": modules_by_suffix}
        save_file(self._arrived, Path(self.path, "adapter_model.safetensors"))
        Path(self.path, "adapter_config.json").write_text(json.dumps({**config, **self._shape}))
        self._arrived = {}

    def remove(self) -> None:
        """Remove the directory."""
        self._directory.cleanup()
