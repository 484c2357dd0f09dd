"""A Python that stands in for one with lm-eval: its only task is the log-prob of a text that the endpoint echoes."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path

import torch

IDS = [40, 41, 42, 43, 44, 45]
"""Tokens of the text."""
VERSION = "0.4.99"
PROGRAM = """#!{python}
import json, sys, urllib.request
from pathlib import Path

words = sys.argv[1:]
if words[0] == "-I":  # asked which packages it has
    print(json.dumps({{name: {version!r} if name == "lm-eval" else None for name in words[3:]}}))
    sys.exit()
with Path({calls!r}).open("a") as file:
    file.write(json.dumps(words) + chr(10))
if len(Path({calls!r}).read_text().splitlines()) in {fails}:
    sys.exit("the task cannot be downloaded")
options = dict(zip(words, words[1:]))
model = dict(part.split("=", 1) for part in options["--model_args"].split(","))
body = {{"model": model["model"], "prompt": {ids}, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}}
headers = {{"Content-Type": "application/json"}}
answer = urllib.request.urlopen(urllib.request.Request(model["base_url"], json.dumps(body).encode(), headers))
score = sum(json.load(answer)["choices"][0]["logprobs"]["token_logprobs"][1:-1])
values = {{"alias": "a", "sample_len": 9, "acc,none": score, "acc_stderr,none": "N/A", "exact_match,strict-match": 0.5}}
task, limit = options["--tasks"], int(options["--limit"])
record = {{"results": {{task: values}}, "versions": {{task: 1.0}}, "group_subtasks": {{}}}}
record["n-samples"] = {{task: {{"original": 9, "effective": limit}}}}
folder = Path(options["--output_path"]) / model["model"]
folder.mkdir()
(folder / "results_2026.json").write_text(json.dumps(record))
"""


def stand_in(folder: Path, fails: Collection[int] = ()) -> Path:
    """Write the interpreter; its runs of these numbers fail, from 1. Its arguments are lines of ``calls`` in the folder."""
    python = folder / "python"
    calls = str(folder / "calls")
    python.write_text(
        PROGRAM.format(python=sys.executable, version=VERSION, calls=calls, fails=list(fails), ids=IDS),
        encoding="utf-8",
    )
    python.chmod(0o755)
    return python


def expected_score(model: Path) -> float:
    """The score by transformers."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        log_probs = network(torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(1, torch.tensor(IDS[1:])[:, None]).sum().item()
