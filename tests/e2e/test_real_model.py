"""A pretrained model of 135 million weights: what a user does with one works on it, and learns."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from support.choice import CORE
from support.forked_python import Forks
from support.launch import hone as hone_command
from support.patience import LONG
from support.real_model import smollm2
from support.serve import serving
from support.world import run_record
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

import hone
from hone.cli.main import app

pytestmark = pytest.mark.long("hone/models/loading.py", "hone/training/export.py", "hone/hub")
ROOT = Path(__file__).resolve().parents[2]
COUNTRIES = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Norway": "Oslo", "Egypt": "Cairo", "Peru": "Lima"}
LORA = {"lora_rank": 8, "lr": 1e-3}
PLAN_TOLERANCE = 0.2
"""Share by which the plan may miss the measured memory of the process."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2(tmp_path_factory)


def asked(country: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is the capital of {country}?"}]


def test_it_knows_what_it_was_trained_on(model: Path) -> None:
    (answer,) = hone.generate(model, "What is the capital of France?", max_tokens=12)
    assert "Paris" in answer.text
    assert len(answer.log_probs) == len(answer.token_ids) and all(value <= 0 for value in answer.log_probs)


def test_imitation_learns_a_style_that_export_keeps(model: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": [*asked(country), {"role": "assistant", "content": f"{city}, matey!"}]}
        for country, city in COUNTRIES.items()
    ]
    run = hone.sft(
        model, rows, steps=8, out=tmp_path / "sft", train_batch_size=6, max_length=96, dtype="bfloat16", **LORA
    )
    losses = [row["train/loss"] for row in run.metrics if "train/loss" in row]
    assert losses[-1] < 0.5 * losses[0]
    (answer,) = hone.generate(run, "What is the capital of Portugal?", max_tokens=16)
    assert "matey" in answer.text
    from hone.training.export import export

    export(run.path, tmp_path / "merged", dtype="bfloat16")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    ids = AutoTokenizer.from_pretrained(tmp_path / "merged").apply_chat_template(
        asked("Portugal"), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    reply = merged.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1] :].tolist()
    assert reply[: len(answer.token_ids) - 1] == answer.token_ids[:-1]


def test_a_file_for_llama_cpp_answers_as_the_model(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from hone.apps.ops.gguf_export import export_gguf

    gaps = {}
    for kind in ("f16", "q8_0", "q4_1"):
        lines: list[str] = []
        export_gguf(model, tmp_path / f"{kind}.gguf", kind, report=lines.append)
        gaps[kind] = float(re.search(r"differ by (\S+)", lines[-1])[1])  # type: ignore[index]
    assert gaps["f16"] < 1e-4 and gaps["q8_0"] < 0.1 and gaps["q4_1"] < 0.05, gaps  # its weights were published in q4_1
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer.apply_chat_template(
        asked("France"), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    replies = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **file)
        .generate(**ids, max_new_tokens=24, do_sample=False)
        .tolist()
        for folder, file in ((model, {}), (tmp_path, {"gguf_file": "f16.gguf"}))
    ]
    assert replies[0] == replies[1]


def pairs() -> list[dict[str, Any]]:
    return [
        {
            "prompt": asked(country),
            "chosen": [{"role": "assistant", "content": f"{city}."}],
            "rejected": [{"role": "assistant", "content": f"The capital of {country} is, as everybody knows, {city}."}],
        }
        for country, city in COUNTRIES.items()
    ]


def test_preferences_shift_towards_the_chosen(model: Path, tmp_path: Path) -> None:
    run = hone.prefer(model, pairs(), steps=4, out=tmp_path / "dpo", train_batch_size=6, max_length=96, **LORA)
    losses = [row["train/loss"] for row in run.metrics if "train/loss" in row]
    assert losses[0] == pytest.approx(0.6931, abs=1e-2) and losses[-1] < 0.5


def test_a_reward_model_orders_answers_in_a_padded_batch(model: Path, tmp_path: Path) -> None:
    run = hone.train_reward_model(
        model, pairs(), steps=4, out=tmp_path / "rm", train_batch_size=6, max_length=96, lr=2e-5, dtype="bfloat16"
    )
    words = AutoTokenizer.from_pretrained(run.model_path)
    scorer = AutoModelForSequenceClassification.from_pretrained(run.model_path, dtype=torch.float32)
    assert words.pad_token_id == scorer.config.pad_token_id != words.eos_token_id
    (pair, *_) = pairs()
    texts = [
        words.apply_chat_template([*pair["prompt"], *pair[name]], tokenize=False) for name in ("chosen", "rejected")
    ]
    with torch.no_grad():
        chosen, rejected = scorer(**words(texts, padding=True, return_tensors="pt")).logits[:, 0].tolist()
    assert chosen > rejected


@pytest.mark.long(*CORE)
def test_reinforcement_raises_the_reward(model: Path, tmp_path: Path) -> None:
    def short(solution_str: str, **unused: Any) -> float:
        return max(0.0, 1.0 - len(solution_str) / 120)

    rows = [{"prompt": asked(country)} for country in [*COUNTRIES, "Chile", "Japan"]]
    run = hone.train(
        model, rows, reward=short, steps=10, out=tmp_path / "grpo", train_batch_size=4, n=4, max_prompt_length=64,
        max_response_length=32, **LORA,
    )  # fmt: skip
    rewards = [row["critic/rewards/mean"] for row in run.metrics]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.05
    assert max(row["actor/ppo_kl"] for row in run.metrics) < 1


RUN_ALONE = """
import sys, hone
model, out, rank, dtype = sys.argv[1:]
rows = [{"prompt": f"What is the capital of {name}?"} for name in ("France", "Italy", "Spain", "Chile")]
hone.train(
    model, rows, reward=lambda solution_str, **columns: float(len(solution_str)), steps=2, out=out, train_batch_size=4,
    n=4, max_prompt_length=64, max_response_length=24, lora_rank=int(rank), lr=1e-6, dtype=dtype,
    ignore_eos=True,
)
"""


@pytest.mark.parametrize(("rank", "dtype"), [(8, "bfloat16"), (0, "float32")])
def test_the_plan_is_what_its_process_holds(model: Path, tmp_path: Path, rank: int, dtype: str) -> None:
    program = [sys.executable, "-c", RUN_ALONE, str(model), str(tmp_path / "run"), str(rank), dtype]
    subprocess.run(program, check=True, timeout=2 * LONG)
    record = json.loads((tmp_path / "run/run.json").read_text())
    (plan,), (held,) = record["plan"], record["memory"].values()
    assert plan["peak_gib"] == pytest.approx(held["peak"] - held["bare"], rel=PLAN_TOLERANCE)


def test_engine_and_trainer_agree(model: Path) -> None:
    arguments = ["engines", "mismatch", "--model", str(model), "--samples", "4", "--tokens", "16", "--json"]
    ran = CliRunner().invoke(app, arguments)
    result = json.loads(ran.stdout)
    assert (result["verdict"], result["samples"], result["tokens"]) == ("good", 4, 16)
    assert 16 <= result["compared_tokens"] <= 64
    assert result["metrics"]["training/rollout_probs_diff_max"] < 1e-4


def test_its_template_is_good_for_conversations_and_tools_need_the_text_renderer(model: Path) -> None:
    def verdict(*options: str) -> tuple[int, dict[str, Any]]:
        ran = CliRunner().invoke(app, ["data", "template", str(model), "--json", *options])
        return ran.exit_code, json.loads(ran.stdout)

    (code, plain), (tools_code, tools), (text_code, text) = (
        verdict("--no-tools"),
        verdict(),
        verdict("--renderer", "text_tools"),
    )
    assert (code, tools_code, text_code) == (0, 2, 0)
    assert {check["outcome"] for check in plain["checks"]} == {"ok"}
    assert {check["outcome"] for check in text["checks"]} == {"ok", "note"}
    assert [check["name"] for check in tools["checks"] if check["outcome"] == "fails"] == ["tools"]


def test_a_tool_is_shown_as_text_or_by_a_template_that_has_tools(model: Path, tmp_path: Path) -> None:
    def run(*words: object) -> str:
        ended = hone_command(*words, log=tmp_path / "log", cwd=ROOT)
        assert ended.code == 0, ended.output
        return ended.output

    data, example = tmp_path / "data", "examples/calculator_agent"
    run("data", "make", "calculator", "guesses=0", "max_number=99", "--out", data, "--size", 200, "--val-size", 8)
    tools = (
        "multi_turn.enable=true",
        f"multi_turn.tool_config_path={example}/tools.yaml",
        "multi_turn.max_assistant_turns=2",
    )
    lengths = ("--max-prompt-length", 300, "--max-response-length", 40)
    run(
        "eval",
        model,
        "--data",
        data / "val.parquet",
        "--max-samples",
        2,
        *lengths,
        *tools,
        "multi_turn.renderer=text_tools",
    )
    sft, grpo = (["--config-path", example, "--config-name", name] for name in ("real_sft", "real_grpo"))
    rows = f"data.train_files={data}/train.parquet"
    run(
        "sft",
        *sft,
        f"model.path={model}",
        rows,
        f"trainer.default_local_dir={tmp_path}/sft",
        "trainer.total_training_steps=10",
    )
    run("export", tmp_path / "sft", "--out", tmp_path / "imitator")
    steps = ("trainer.total_training_steps=1", "trainer.test_freq=-1", "trainer.val_before_train=false")
    batch = ("data.train_batch_size=4", "ppo_mini_batch_size=4", "rollout.n=2", "reward.scorer=exact_match")
    out = f"trainer.default_local_dir={tmp_path}/grpo"
    run("train", *grpo, f"actor_rollout_ref.model.path={tmp_path}/imitator", rows, *steps, *batch, out)
    (step,) = hone.Run(tmp_path / "grpo").metrics
    assert step["tool/calls/mean"] > 0.5 and step["critic/rewards/mean"] > 0.25


@pytest.mark.long(*CORE)
def test_it_is_served(model: Path, forks: Forks, tmp_path: Path) -> None:
    with serving(forks, model, tmp_path / "log") as address:
        body = {"model": model.name, "messages": asked("France"), "max_tokens": 12, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), headers=headers)
        with urllib.request.urlopen(request, timeout=LONG) as answer:
            reply = json.load(answer)
    assert "Paris" in reply["choices"][0]["message"]["content"]
    assert reply["usage"]["completion_tokens"] <= 12


def test_the_readme_runs(model: Path, tmp_path: Path) -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    (command,) = re.findall(r"^hone (train .*?--pilot)$", page, re.M | re.S)
    (tmp_path / "smollm2-135m").symlink_to(model)
    fewer = program.replace("steps=12", "steps=2").replace('"train_batch_size": 16', '"train_batch_size": 4')
    assert fewer.count("=2,") == fewer.count(": 4,") == 1
    subprocess.run([sys.executable, "-c", fewer], check=True, timeout=LONG, cwd=tmp_path)
    assert run_record(tmp_path / "runs/sums")["status"] == "finished"
    assert not (tmp_path / "runs/sums/alerts.jsonl").exists(), "a newcomer's first run warns of nothing"
    questions = (f"What is {a} + {b}?,{a + b}\n" for a in range(1, 21) for b in range(1, 21))
    (tmp_path / "questions.csv").write_text("question,answer\n" + "".join(questions))
    (tmp_path / "my_reward.py").write_text(program[program.index("def ") : program.index("small =")])
    words = shlex.split(command.replace("\\\n", " "))
    assert {"steps=12", "out=runs/sums", "train_batch_size=16"} <= {*words}, "the run of the six lines"
    words[words.index("out=runs/sums")] = "out=runs/pilot"
    ended = hone_command(*words, log=tmp_path / "pilot.log", cwd=tmp_path)
    assert ended.code == 0, ended.output


def test_the_example_runs(model: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(model)
    program = [sys.executable, "examples/real_model/run.py", "--out", str(tmp_path), "--seed", "3"]
    short = [
        "trainer.total_training_steps=1",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ]
    subprocess.run([*program, *short], check=True, timeout=LONG, cwd=ROOT)
    summary = json.loads((tmp_path / "grpo-3/summary.json").read_text())
    assert (summary["seed"], summary["steps"], summary["held_out_sums"]) == (3, 1, 64)
    assert 0.1 < summary["accuracy_before"] < 0.6
    assert (tmp_path / "grpo-3/curve.png").read_bytes().startswith(b"\x89PNG")
