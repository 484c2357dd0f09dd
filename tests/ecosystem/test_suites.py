"""`hone eval --suite` and `trainer.val_suites` with lm-eval and inspect-ai: scores are those of the packages' own files, and of Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.capitals import CAPITALS, LABELS, LM_EVAL
from support.environments import foreign_python
from support.launch import Ended, hone, set_environment
from support.tiny_runs import make_tiny_runs, rl_words
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.long("hone/agents/suites.py", "hone/trainers/validator.py")
INSPECT = Path(__file__).parents[1] / "support" / "foreign" / "inspect_tasks.py"
PACKAGES = ("inspect-ai==0.3.285", "openai==3.57.0")


def offline() -> None:
    set_environment({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": ""})


@pytest.fixture(scope="module")
def rows(tasks: Path) -> Path:
    """Rows for inspect's tasks."""
    lines = [
        {"question": f"What is the capital of {country}?", "answer": cities[label], "cities": cities, "letter": "ABC"[label]}
        for (country, cities), label in zip(CAPITALS.items(), LABELS, strict=True)
    ]  # fmt: skip
    path = tasks / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def right_choices(model: Path, count: int) -> int:
    """Choices whose city has the largest log-prob by Transformers."""
    words, network = (
        AutoTokenizer.from_pretrained(model),
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
    )
    right = 0
    for (country, cities), label in list(zip(CAPITALS.items(), LABELS, strict=True))[:count]:
        begin, scores = f"The capital of {country} is", []
        for city in cities:
            ids, start = words(f"{begin} {city}")["input_ids"], len(words(begin)["input_ids"])
            with torch.no_grad():
                every = network(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1)
            scores.append(every.gather(1, torch.tensor(ids[start:])[:, None]).sum().item())
        right += max(range(len(cities)), key=scores.__getitem__) == label
    return right


def evaluate(folder: Path, model: Path, *words: object) -> tuple[Ended, dict[str, Any]]:
    ended = hone("eval", model, *words, "--json", "--dtype", "float32", log=folder / "log", cwd=folder, prepare=offline)
    begin = ended.output.rfind("\n{\n")
    return ended, json.loads(ended.output[begin : ended.output.rindex("}") + 1]) if begin >= 0 else {}


def test_tasks_of_lm_eval(model: Path, tasks: Path, tmp_path: Path) -> None:
    suite = f"lm-eval:hone_capitals,hone_written --include_path {tasks} --log_samples"
    python = foreign_python("lm-eval", LM_EVAL)
    ended, told = evaluate(
        tmp_path, model, "--suite", suite, "--suite-python", python, "--output", "scores", "--max-samples", 5
    )
    assert ended.code == 0, ended.output
    (own,) = (tmp_path / "scores").rglob("results_*.json")
    results = json.loads(own.read_text())["results"]
    assert told["val-suite/lm-eval/hone_capitals/acc"] == results["hone_capitals"]["acc,none"]
    assert told["val-suite/lm-eval/hone_capitals/acc"] == right_choices(model, 5) / 5 > 0
    written = [
        json.loads(line) for line in next((tmp_path / "scores").rglob("samples_hone_written*")).read_text().splitlines()
    ]
    right = sum(row["filtered_resps"][0] == row["target"] for row in written)
    assert (
        told["val-suite/lm-eval/hone_written/exact_match"] == results["hone_written"]["exact_match,none"] == right / 5
    )
    assert all(told[f"val-suite/lm-eval/{task}/samples"] == 5 for task in ("hone_capitals", "hone_written"))
    assert told["val-suite/lm-eval/version"] == LM_EVAL.rpartition("=")[2]


def test_chats_of_lm_eval(model: Path, tasks: Path, tmp_path: Path) -> None:
    suite = f"lm-eval:{tasks}/write.yaml --num_fewshot 1 --apply_chat_template"
    python = foreign_python("lm-eval", LM_EVAL)
    ended, told = evaluate(tmp_path, model, "--suite", suite, "--suite-python", python, "--output", "scores")
    assert ended.code == 0, ended.output
    (results,) = (tmp_path / "scores").rglob("results_*.json")
    record = json.loads(results.read_text())
    assert record["config"]["model"] == "local-chat-completions" and record["n-shot"]["hone_written"] == 1
    assert told["val-suite/lm-eval/hone_written/exact_match"] == record["results"]["hone_written"]["exact_match,none"]
    assert told["val-suite/lm-eval/hone_written/samples"] == len(CAPITALS)


def test_a_file_of_lm_eval_that_cannot_be_scored_is_an_error(model: Path, tasks: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text((tasks / "choose.yaml").read_text().replace("rows.jsonl", "none.jsonl"))
    python = foreign_python("lm-eval", LM_EVAL)
    ended, told = evaluate(tmp_path, model, "--suite", f"lm-eval:{broken}", "--suite-python", python)
    assert ended.code == 2 and "E-suite" in ended.output and not told


def test_tasks_of_inspect(model: Path, rows: Path, tmp_path: Path) -> None:
    suite = f"inspect:{INSPECT}@chat,{INSPECT}@choices -T rows={rows}"
    python = foreign_python("inspect-ai", *PACKAGES)
    ended, told = evaluate(tmp_path, model, "--suite", suite, "--suite-python", python, "--output", "scores")
    assert ended.code == 0, ended.output
    logs = {
        log["eval"]["task"]: log
        for log in map(json.loads, (path.read_text() for path in tmp_path.glob("scores/inspect-*/*.json")))
    }
    for task, scorer in (("chat", "includes"), ("choices", "choice")):
        samples = logs[task]["samples"]
        right = sum(sample["scores"][scorer]["value"] == "C" for sample in samples)
        assert told[f"val-suite/inspect/{task}/{scorer}/accuracy"] == pytest.approx(right / len(samples))
        assert told[f"val-suite/inspect/{task}/samples"] == len(samples) == len(CAPITALS)
    assert told["val-suite/inspect/chat/includes/accuracy"] > 0
    assert told["val-suite/inspect/version"] == PACKAGES[0].rpartition("=")[2]


def test_suites_during_training(tasks: Path, rows: Path, tmp_path: Path) -> None:
    root, run = make_tiny_runs(tmp_path), tmp_path / "run"
    suites = [f"lm-eval:{tasks}/choose.yaml", f"inspect:{INSPECT}@chat -T rows={rows}"]
    pythons = {"lm-eval": foreign_python("lm-eval", LM_EVAL), "inspect": foreign_python("inspect-ai", *PACKAGES)}
    own = (
        f"trainer.val_suites={json.dumps(suites)}",
        f"trainer.suite_python={{lm-eval: {pythons['lm-eval']}, inspect: {pythons['inspect']}}}",
    )
    often = ("trainer.test_freq=2", "trainer.save_freq=2", "trainer.val_before_train=false", "data.val_max_samples=4")
    ended = hone(*rl_words(root, run, *own, *often), log=tmp_path / "log", cwd=tmp_path, prepare=offline)
    assert ended.code == 0, ended.output
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (told,) = [line for line in lines if "val-suite/failed" in line]
    assert told["step"] == 2 and told["val-suite/failed"] == 0
    assert told["val-suite/lm-eval/hone_capitals/acc"] == right_choices(run / "checkpoints" / "step_2" / "actor", 4) / 4
    assert told["val-suite/lm-eval/hone_capitals/samples"] == told["val-suite/inspect/chat/samples"] == 4
    assert 0 <= told["val-suite/inspect/chat/includes/accuracy"] <= 1
    scores = json.loads((run / "suites" / "step_2" / "scores.json").read_text())
    assert [(score["suite"], score["task"]) for score in scores] == [("lm-eval", "hone_capitals"), ("inspect", "chat")]
