"""Proof that an exported directory holds the trained model: its tensors, and its logits where a model fits in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from hone.errors import CheckpointError
from hone.models.streaming import WeightFiles
from hone.models.tied import merge_adapter
from hone.training.checkpoints.storage import Storage
from hone.training.checkpoints.tensor_files import TensorFile

TOLERANCE = 1e-3  # largest difference of logits, as a share of the largest logit
PROMPT_TOKENS = 16


def prove_tensors(target: Storage, names: Mapping[str, str], expected: Callable[[str], Tensor]) -> int:
    """Compare the tensors of written files, given as the file of each name, with those expected; return their number.

    Raises CheckpointError: one differs or is missing.
    """
    with contextlib.ExitStack() as stack:
        files = {file: TensorFile(stack.enter_context(target.open(file)), file) for file in sorted(set(names.values()))}
        for name, file in names.items():
            right = expected(name)
            if name not in files[file].specs or not _equal(files[file].read(name), right):
                raise _refused(target, f"the tensor '{name}' in {file} is not the trained one")
    return len(names)


def prove_model(target: Storage, directory: Path, model: Any) -> int:
    """Compare the tensors of a written directory with those of the model in memory; return their number. Raises
    CheckpointError: one differs or is missing.
    """
    right = model.state_dict()
    seen = set()
    for name, value in WeightFiles(directory, model).tensors():
        if name not in right or not _equal(value, right[name]):
            raise _refused(target, f"the tensor '{name}' is not the trained one")
        seen.add(name)
    named = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if missing := sorted(named - seen - set(model.all_tied_weights_keys)):
        raise _refused(target, f"{len(missing)} trained tensors are missing, such as '{missing[0]}'")
    return len(seen)


def prove_logits(target: Storage, trained: Callable[[], Any], factory: Any, dtype: torch.dtype) -> float:
    """Compare the logits of a written directory with those of the trained model; return their largest difference.

    In a narrow dtype the written model is compared with the trained one whose merged weights are rounded. ``trained``:
    loads the trained model in float32, its adapter not merged.

    Raises CheckpointError: they differ, or the directory lacks weights.
    """
    model = trained().eval()
    ids = _prompt(model.config)
    right = _logits(model, ids)
    allowed = limit = TOLERANCE * max(1.0, float(right.abs().max()))
    if dtype != torch.float32:
        model = merge_adapter(model).eval() if hasattr(model, "peft_config") else model
        _check(target, _logits(model, ids), right, limit)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype).float()
        rounded = _logits(model, ids)
        allowed, right = limit + 0.5 * float((rounded - right).abs().max()), rounded
    del model
    written, report = factory.from_pretrained(
        target.local_path, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    if report["missing_keys"]:
        raise _refused(target, f"the files lack '{min(report['missing_keys'])}'")
    return _check(target, _logits(written.eval(), ids), right, allowed)


def fits_in_memory(directory: Path) -> bool:
    """Return whether this machine has the memory for a model of these files in float32, and half as much again."""
    sizes = 0
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as stream:
            sizes += sum(spec.size // spec.dtype.itemsize * 4 for spec in TensorFile(stream, str(file)).specs.values())
    return sizes * 1.5 < psutil.virtual_memory().available


def _prompt(config: Any) -> Tensor:
    """Return a fixed prompt without special tokens ``[1, T]``, such as the placeholder of an image."""
    special = {value for name, value in _flat(config.to_dict()) if name.endswith(("token_id", "token_index"))}
    usual = [token for token in range(config.get_text_config().vocab_size) if token not in special]
    return torch.tensor([[usual[37 * place % len(usual)] for place in range(PROMPT_TOKENS)]])


def _flat(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    nested = [pair for value in values.values() if isinstance(value, dict) for pair in _flat(value)]
    return [(str(name), value) for name, value in values.items() if isinstance(value, int)] + nested


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids).logits
    return logits


def _check(target: Storage, written: Tensor, right: Tensor, limit: float) -> float:
    gap = float((written - right).abs().max()) if written.shape == right.shape else float("nan")
    if not gap <= limit:
        raise _refused(target, f"its logits differ by {gap:.3g} from those of the trained model (limit {limit:.3g})")
    return gap


def _equal(written: Tensor, right: Tensor) -> bool:
    return written.dtype == right.dtype and written.shape == right.shape and torch.equal(written, right)


def _refused(target: Storage, what: str) -> CheckpointError:
    return CheckpointError(
        f"the export to '{target}' was removed: {what}",
        why="the directory would be another model than the one that was trained",
        fix="export again; if the same appears, keep the adapter separate (--no-merge) and report it",
    )
