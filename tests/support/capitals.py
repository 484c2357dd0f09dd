"""Tasks of lm-eval about capitals: one of choosing, and one of writing."""

from __future__ import annotations

import json
from pathlib import Path

LM_EVAL = "lm-eval[api]==0.4.13"
CAPITALS = {
    "France": ["Paris", "Lyon", "Nice"],
    "Italy": ["Milan", "Rome", "Naples"],
    "Australia": ["Sydney", "Melbourne", "Canberra"],
    "Brazil": ["Rio de Janeiro", "Brasília", "São Paulo"],
    "Japan": ["Tokyo", "Kyoto", "Osaka"],
    "Turkey": ["Istanbul", "Izmir", "Ankara"],
}
LABELS = [0, 1, 2, 1, 0, 2]
CHOOSE = """task: hone_capitals
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: multiple_choice
test_split: test
doc_to_text: "The capital of {{country}} is"
doc_to_choice: "{{cities}}"
doc_to_target: label
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
WRITE = """task: hone_written
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: generate_until
test_split: test
doc_to_text: "The capital of {{country}} is"
doc_to_target: " {{cities[label]}}"
generation_kwargs: {until: [",", "."], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def write_tasks(folder: Path) -> Path:
    """Write both tasks and their rows; return the folder."""
    rows = [
        {"country": country, "cities": cities, "label": label}
        for (country, cities), label in zip(CAPITALS.items(), LABELS, strict=True)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("choose", CHOOSE), ("write", WRITE)):
        (folder / f"{name}.yaml").write_text(text.replace("FILE", str(folder / "rows.jsonl")))
    return folder
