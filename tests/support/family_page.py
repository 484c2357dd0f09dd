"""The table of families in docs/models.md, from tests/families.json."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from hone.text import replace_between

BEGIN = "<!-- Generated from tests/families.json by scripts/make_docs: do not edit from here -->"
END = "<!-- to here: families -->"
VERDICTS = Path(__file__).parents[1] / "families.json"
WIDE = 1e-5
"""Largest gap of log-probs that float32 explains."""


def families_page(existing: str) -> str:
    """Return the page with its table of families written anew between the markers; the rest stays."""
    groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for one in json.loads(VERDICTS.read_text(encoding="utf-8")):
        groups[_group(one)].append(one["kind"])
    lines = ["| Verdict | Why | Families |", "|---|---|---|"]
    for (verdict, why), kinds in sorted(
        groups.items(), key=lambda item: (ORDER.index(item[0][0]), -len(item[1]), item[0][1])
    ):
        lines.append(f"| {verdict} ({len(kinds)}) | {why} | {', '.join(f'`{kind}`' for kind in kinds)} |")
    return replace_between(existing, BEGIN, END, "\n".join(lines))


ORDER = ("trains", "trains with limits", "refused", "fails", "untried")


def _group(one: dict[str, Any]) -> tuple[str, str]:
    why = one["why"].rpartition(" cannot be trained or sampled from: ")[2]
    if one["verdict"] != "trains":
        return one["verdict"], why.replace("|", "\\|")
    limits = (
        [f"no LoRA: {one['adapter'].removeprefix('refused: ').partition('. ')[0]}"] if one["adapter"] != "yes" else []
    )
    limits += [f"engine and trainer differ by {one['gap']:.1g}"] if (one["gap"] or 0) > WIDE else []
    return ("trains with limits", "; ".join(limits).replace("|", "\\|")) if limits else ("trains", "")
