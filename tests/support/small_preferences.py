"""The smallest preference run: the model of :mod:`support.small_sft`, and 32 pairs of random words."""

from __future__ import annotations

import json
import random
from pathlib import Path

from support.small_sft import make_small_sft, small_sft_settings


def make_small_preferences(root: Path) -> Path:
    """Write ``model``, ``rows.jsonl`` and ``pairs.jsonl`` below a directory, and return it."""
    make_small_sft(root)
    draw = random.Random(0)

    def words(count: int) -> str:
        return " ".join(f"w{draw.randint(3, 50)}" for _ in range(count))

    rows = []
    for number in range(3, 35):
        prompt = [{"role": "user", "content": f"w{number} {words(draw.randint(0, 3))}"}]
        sides = ([{"role": "assistant", "content": words(draw.randint(1, 5))}] for _ in range(2))
        rows.append({"prompt": prompt, **dict(zip(("chosen", "rejected"), sides, strict=True))})
    (root / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def small_preference_settings(root: Path, run: Path, *overrides: str) -> list[str]:
    """Settings of a run over these pairs that validates and saves after each of its steps."""
    files = (f"data.train_files={root}/pairs.jsonl", f"data.val_files={root}/pairs.jsonl")
    return [*small_sft_settings(root, run), *files, *overrides]
