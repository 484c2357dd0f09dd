"""A small model with random weights whose chat template shows tools."""

from __future__ import annotations

from pathlib import Path

from support.launch import hone
from support.world import World


def tools_model(world: World, folder: Path) -> Path:
    """Make tokenizer and model in a folder; return the model's directory."""
    for number, arguments in enumerate(
        [
            ("data", "tokenizer", "--files", world.conversations, "--out", folder / "tokenizer", "--vocab-size", 300,
             "--template", "chatml_tools"),
            ("init", "--arch", "qwen3", "--size", "200k", "--tokenizer", folder / "tokenizer", "--out", folder / "model"),
        ]
    ):  # fmt: skip
        ended = hone(*arguments, log=folder / f"make{number}.log")
        assert ended.code == 0, ended.output
    return folder / "model"
