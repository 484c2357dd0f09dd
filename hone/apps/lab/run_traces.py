"""Reading of a run directory for :mod:`hone.apps.lab.comparison.divergence`, step by step."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hone.apps.lab.compare import Run
from hone.apps.lab.comparison.divergence import RunTrace
from hone.apps.lab.run_scores import stored_samples
from hone.errors import HoneError
from hone.insight.archive.read import open_archive
from hone.insight.coverage.reading import read_coverage
from hone.insight.run_files import COVERAGE_FILE

_STEP = re.compile(r"step_(\d+)")


def read_trace(run: Run) -> RunTrace:
    """Return the trace of a run; samples, micro-batches and weights are read step by step."""
    archive = open_archive(run.path / "rollouts")
    samples = stored_samples(archive.folder)
    return RunTrace(
        config=run.config,
        circumstances=_circumstances(run.record),
        draws=_draws(run.path),
        samples={step: _listed(read) for step, read in samples.items()},
        micro_batches=_readers(run.path / "microbatches", _micro_batch),
        metrics={int(row["step"]): row for row in run.metrics},
        weights=_readers(run.path / "checkpoints", _weights),
        partial=[step for step in samples if not archive.complete(step)],
    )


def _circumstances(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what surrounds a run, from ``run.json``."""
    hardware = record.get("hardware") or {}
    git = record.get("git") or {}
    return {
        **{f"version of {name}": version for name, version in (record.get("versions") or {}).items()},
        **{name: hardware[name] for name in ("cpu", "gpus") if name in hardware},
        **{f"git {name}": value for name, value in git.items()},
        "reward code": sorted((record.get("rewards") or {}).values()),
        "agent contract": record.get("agent_contract") or {},
        "downloads": record.get("downloads") or {},
        "resumed at": [entry.get("from_step") for entry in record.get("resumed") or ()],
    }


def _draws(path: Path) -> dict[int, list[str]]:
    """Return the uids whose draws ended in each step, in the order of the draws."""
    if not (path / COVERAGE_FILE).exists():
        return {}
    by_step: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for draw in read_coverage(path).draws:
        by_step[draw.step].append((draw.draw, draw.uid))
    return {step: [uid for _, uid in sorted(draws)] for step, draws in by_step.items()}


def _listed(read: Callable[[], Any]) -> Callable[[], list[dict[str, Any]]]:
    return lambda: list(read())


def _readers(folder: Path, read: Callable[[Path], dict[str, Any]]) -> dict[int, Callable[[], dict[str, Any]]]:
    """Return a reader for each ``step_N`` below a folder."""

    def reader(path: Path) -> Callable[[], dict[str, Any]]:
        return lambda: read(path)

    matches = [(_STEP.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return {int(match[1]): reader(path) for match, path in matches if match}


def _micro_batch(path: Path) -> dict[str, Any]:
    """Return the facts of a saved micro-batch: its size and packed tokens, then the loss and its gradients."""
    try:
        about = json.loads((path / "about.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise HoneError(
            f"the saved micro-batch cannot be read: {error}", where=str(path), fix="remove the folder", code="E-runs"
        ) from None
    packed = tensor_prints([path / "computed.safetensors"])
    return {
        **{f"{name} of the micro-batch": count for name, count in about["totals"].items()},
        **{f"packed {name}": packed[name][0] for name in ("input_ids", "position_ids") if name in packed},
        "loss of the micro-batch": about["loss"],
        **{f"gradient norm of {name}": norm for name, norm in about["gradient_norms"].items()},
    }


def _weights(path: Path) -> dict[str, tuple[str, float]]:
    files = sorted((path / "actor").glob("*.safetensors")) or sorted((path / "model").glob("*.safetensors"))
    return tensor_prints(files)


def tensor_prints(files: list[Path]) -> dict[str, tuple[str, float]]:
    """Return the hash and the L2 norm of every tensor of safetensors files."""
    import torch
    from safetensors import SafetensorError, safe_open

    prints = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in sorted(tensors.keys()):
                    tensor = tensors.get_tensor(name).contiguous()
                    digest = hashlib.sha256(tensor.flatten().view(torch.uint8).numpy()).hexdigest()[:16]
                    prints[name] = digest, float(tensor.double().norm())
        except (OSError, SafetensorError) as error:
            raise HoneError(
                f"the file cannot be read: {error}", where=str(file), fix="remove the damaged checkpoint", code="E-runs"
            ) from None
    return prints
