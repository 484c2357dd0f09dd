"""EleutherAI's lm-eval against `hone serve`: its tasks have the scores that transformers gives the same model."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support.capitals import CAPITALS, LABELS
from support.capitals import LM_EVAL as PACKAGE
from support.environments import foreign_python
from support.patience import LONG
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.long("hone/agents/serving", "hone/training/prompt_log_probs.py")


def evaluate(url: str, tasks: Path, out: Path, *options: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """What lm-eval measured of each task, and its samples."""
    python = foreign_python("lm-eval", PACKAGE)
    command = [python, "-m", "lm_eval", "run", "--include_path", str(tasks), "--output_path", str(out), "--log_samples"]
    environment = {**os.environ, "HF_HOME": str(out / "home"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    ran = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=LONG, cwd=tasks)
    assert ran.returncode == 0, ran.stderr[-3000:]
    (measured,) = out.rglob("results_*.json")
    samples = {
        path.name.split("_2")[0].removeprefix("samples_"): sorted(
            map(json.loads, path.read_text().splitlines()), key=lambda row: row["doc_id"]
        )
        for path in out.rglob("samples_*.jsonl")
    }
    return json.loads(measured.read_text())["results"], samples


@pytest.mark.parametrize("options", ["", ",tokenized_requests=False,num_concurrent=3"], ids=["tokens", "texts"])
def test_scores_are_those_of_transformers(url: str, model: Path, tasks: Path, tmp_path: Path, options: str) -> None:
    asked = f"model=smollm2,base_url={url}/v1/completions,tokenizer_backend=remote{options}"
    arguments = ["--model", "local-completions", "--model_args", asked, "--tasks", "hone_capitals,hone_written"]
    arguments += [] if options else ["--batch_size", "4"]
    results, samples = evaluate(url, tasks, tmp_path / "out", *arguments)
    words = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    right = written = 0
    for number, (country, cities) in enumerate(CAPITALS.items()):
        begin = f"The capital of {country} is"
        context = words(begin)["input_ids"]
        told = [(float(value), greedy) for ((value, greedy),) in samples["hone_capitals"][number]["resps"]]
        expected, greedy = [], []
        for city in cities:
            ids = words(f"{begin} {city}")["input_ids"]
            with torch.no_grad():
                every = network(torch.tensor([ids])).logits[0].log_softmax(-1)[len(context) - 1 : -1]
            own = every.gather(1, torch.tensor(ids[len(context) :])[:, None])[:, 0]
            expected.append(own.sum().item())
            greedy.append(bool((own == every.amax(-1)).all()))
        assert [value for value, _ in told] == pytest.approx(expected, abs=2e-3)
        assert [str(said) == "True" for _, said in told] == greedy
        right += max(range(3), key=expected.__getitem__) == LABELS[number]
        text = network.generate(torch.tensor([context]), max_new_tokens=8, do_sample=False)[0, len(context) :]
        text = words.decode(text, skip_special_tokens=True).split(",")[0].split(".")[0]
        assert samples["hone_written"][number]["resps"] == [[text]]
        written += text == f" {cities[LABELS[number]]}"
    assert results["hone_capitals"]["acc,none"] == right / len(CAPITALS) >= 0.5
    assert results["hone_written"]["exact_match,none"] == written / len(CAPITALS)


def test_chats_are_written_for_its_tasks(url: str, tasks: Path, tmp_path: Path) -> None:
    asked = f"model=smollm2,base_url={url}/v1/chat/completions,num_concurrent=2"
    arguments = ["--model", "local-chat-completions", "--model_args", asked, "--apply_chat_template"]
    results, samples = evaluate(url, tasks, tmp_path / "out", *arguments, "--tasks", "hone_written")
    assert 0 <= results["hone_written"]["exact_match,none"] <= 1
    assert sum(bool(row["resps"][0][0]) for row in samples["hone_written"]) == len(CAPITALS)
