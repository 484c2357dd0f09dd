"""Datasets, configurations and headers of weight files for tests of preflight."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from hone.preflight import RULES, Evidence
from hone.preflight.machine import GIB, Machine
from hone.preflight.rules import Finding

SMALL_MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "max_position_embeddings": 2048,
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
"""config.json of a model of a few thousand parameters."""

SOUND_MACHINE = Machine(cpus=8, affinity=8, quota=None, memory=64 * GIB, shared_memory=8 * GIB, open_files=1 << 20)
"""A machine without problems."""


def safetensors_head(shapes: dict[str, list[int]]) -> bytes:
    """Return the header of a weight file, without values of tensors."""
    head = json.dumps(
        {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    )
    return struct.pack("<Q", len(head)) + head.encode()


def rows(count: int = 10) -> list[dict[str, Any]]:
    """Return rows of chat messages for `hone train` and `hone sft`."""
    return [
        {
            "prompt": [{"role": "user", "content": f"{number} + 1 = ?"}],
            "messages": [
                {"role": "user", "content": f"{number} + 1 = ?"},
                {"role": "assistant", "content": str(number + 1)},
            ],
            "data_source": "exact",
            "reward_model": {"ground_truth": str(number + 1)},
        }
        for number in range(count)
    ]


def write_rows(file: Path, content: list[dict[str, Any]]) -> Path:
    """Write a JSON-lines file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in content))
    return file


def change(config: Any, changes: dict[str, Any]) -> Any:
    """Set keys by their paths and return the configuration."""
    for path, value in changes.items():
        *blocks, last = path.split(".")
        owner = config
        for block in blocks:
            owner = getattr(owner, block)
        assert hasattr(owner, last), path
        setattr(owner, last, value)
    return config


def findings_of(check: Any, config: Any, evidence: Evidence | None = None) -> list[Finding]:
    """Return the findings of one rule, with its code."""
    (entry,) = [entry for entry in RULES if entry.check is check]
    return list(entry.run(config, evidence or Evidence(config)))
