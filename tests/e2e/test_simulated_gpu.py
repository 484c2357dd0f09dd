"""Whole programs, unchanged, on a simulated GPU: their tokens are those of the CPU, and their numbers too within rounding."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.archives import records
from support.choice import CORE
from support.launch import hone
from support.once import made_once
from support.simulated_cuda.build import compiler
from support.simulated_cuda.machine import HONE, Machine
from support.tiny_runs import make_tiny_runs, offline_words, rl_words
from support.world import metrics, steps_saved

pytestmark = [
    pytest.mark.simulated_cuda("hone/models", "hone/generation/native", "hone/training/engine.py"),
    pytest.mark.skipif(
        compiler() is None, reason="no C++ compiler for the driver of the simulated GPU (CXX, c++, g++)"
    ),
]

POLICY = "actor_rollout_ref.actor"
RL = {
    "grpo": ("model", "prompts", ()),
    "ppo": ("model", "prompts", ("algorithm.adv_estimator=gae", "actor_rollout_ref.model.enable_gradient_checkpointing=true",
            "actor_rollout_ref.model.enable_activation_offload=true", f"{POLICY}.use_kl_loss=true")),
    "lora": ("model", "prompts", ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.rollout.top_p=0.9",
             "algorithm.use_kl_in_reward=true")),
    "moe": ("moe", "prompts", ()),
    "agent": ("model", "calls", ("actor_rollout_ref.rollout.multi_turn.enable=true", "data.max_prompt_length=400", "data.max_response_length=80",
              "actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn=8",
              "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2",
              "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml")),
    "hf": ("model", "prompts", ("actor_rollout_ref.rollout.name=hf",)),
}  # fmt: skip
RESUMED = ("ppo",)
"""Saved after the first step on the GPU, and resumed there."""
EXACT = ("--dtype", "float32")
"""By default a GPU computes in bfloat16."""
OFFLINE = ("sft", "prefer", "reward-model")


@pytest.fixture(scope="module")
def machine():
    with Machine() as machine:
        yield machine


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "tiny", make_tiny_runs)


def assert_same_numbers(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Every number of every step, but those of time and memory, agrees within 1e-4."""
    assert [row["step"] for row in rows] == [row["step"] for row in expected] and rows
    for row, other in zip(rows, expected, strict=True):
        assert sorted(row) == sorted(other)
        far = {n: (row[n], v) for n, v in other.items() if abs(row[n] - v) > 1e-4 * max(1.0, abs(v))}
        assert not far, f"step {row['step']}"


@pytest.mark.parametrize("case", RL)
def test_reinforcement_learning(machine: Machine, tiny: Path, tmp_path: Path, case: str) -> None:
    model, rows, overrides = RL[case]
    device, host = tmp_path / "device", tmp_path / "host"
    words = ("trainer.val_before_train=false", *overrides)
    on_device = rl_words(tiny, device, *words, "trainer.device=cuda", model=model, rows=rows)
    if case in RESUMED:
        first = machine.hone(*on_device, "trainer.total_training_steps=1", "trainer.save_freq=1", folder=tiny)
        assert first.code == 0, first.output
        assert steps_saved(device) == [1]
    ended = machine.hone(*on_device, folder=tiny)
    assert ended.code == 0, ended.output
    assert ended.counters.launches.total() > 500
    on_host = rl_words(tiny, host, *words, "trainer.device=cpu", model=model, rows=rows)
    expected = hone(*on_host, log=tmp_path / "host.log", cwd=tiny)
    assert expected.code == 0, expected.output
    for step in (1, 2):
        tokens = [record["response_ids"] for record in records(device, step)]
        assert tokens == [record["response_ids"] for record in records(host, step)] and len(tokens) == 12
    assert_same_numbers(metrics(device), metrics(host))


@pytest.mark.simulated_cuda(*CORE)
def test_bfloat16_agrees_with_its_engine(machine: Machine, tiny: Path, tmp_path: Path) -> None:
    """What a GPU computes by default. Engine and trainer compute a layer by the same operators, so they differ as float32 sums do."""
    words = rl_words(tiny, tmp_path / "run", "trainer.val_before_train=false", "trainer.device=cuda")
    words.remove("actor_rollout_ref.actor.dtype=float32")
    ended = machine.hone(*words, folder=tiny)
    assert ended.code == 0, ended.output
    assert any("_varlen_attn_backward" in place for place in ended.counters.launches)
    gaps = [row["training/rollout_log_probs_diff_max"] for row in metrics(tmp_path / "run")]
    assert 0 < max(gaps) < 1e-5


def test_what_checkpointing_keeps_changes_no_number(machine: Machine, tiny: Path, tmp_path: Path) -> None:
    """Attention is launched once a layer instead of twice."""
    rows, launches = {}, {}
    for keeps in ("nothing", "attention"):
        checkpointing = ("enable_gradient_checkpointing=true", f"gradient_checkpointing_keeps={keeps}")
        words = [f"actor_rollout_ref.model.{key}" for key in checkpointing]
        words = rl_words(tiny, tmp_path / keeps, "trainer.val_before_train=false", "trainer.device=cuda", *words)
        words.remove("actor_rollout_ref.actor.dtype=float32")
        ended = machine.hone(*words, folder=tiny)
        assert ended.code == 0, ended.output
        rows[keeps] = metrics(tmp_path / keeps)
        forward = {
            place: n
            for place, n in ended.counters.launches.items()
            if "_varlen_attn" in place and "backward" not in place
        }
        launches[keeps] = sum(forward.values())
    assert launches["attention"] < launches["nothing"]
    assert_same_numbers(rows["attention"], rows["nothing"])


@pytest.mark.parametrize("program", OFFLINE)
def test_offline_training(machine: Machine, tiny: Path, tmp_path: Path, program: str) -> None:
    device, host = tmp_path / "device", tmp_path / "host"
    ended = machine.hone(*offline_words(program, tiny, device, "trainer.device=cuda"), folder=tiny)
    assert ended.code == 0, ended.output
    assert ended.counters.launches.total() > 500
    expected = hone(*offline_words(program, tiny, host, "trainer.device=cpu"), log=tmp_path / "host.log", cwd=tiny)
    assert expected.code == 0, expected.output
    assert_same_numbers(metrics(device), metrics(host))


def test_generate_eval_and_serve(machine: Machine, tiny: Path, tmp_path: Path) -> None:
    """Sampled answers, scores and an answer over HTTP are those of the CPU."""
    model, prompt = tiny / "model", "What is 1 + 1?"
    generate = ("generate", model, prompt, "--max-tokens", 8, "--temperature", 1, "--n", 2, "--json", "--raw", *EXACT)
    greedy = ("generate", model, prompt, "--max-tokens", 8, "--json", "--raw")
    evaluate = ("eval", model, "--data", tiny / "prompts.jsonl", "--max-response-length", 8, "--max-samples", 3, "--json",
                "--reward", f"{tiny}/tiny_reward.py:tokens_with_e", *EXACT)  # fmt: skip
    on_host = [hone(*words, log=tmp_path / "host.log", cwd=tiny).output for words in (generate, evaluate, greedy)]
    on_device = [machine.hone(*words, folder=tiny) for words in (generate, evaluate)]
    assert [ended.code for ended in on_device] == [0, 0], on_device
    assert all(ended.counters.launches.total() > 100 for ended in on_device)
    for line, other in zip(json_lines(on_device[0].output), json_lines(on_host[0]), strict=True):
        assert line["token_ids"] == other["token_ids"] and len(line["token_ids"]) > 1
    scores, expected = (json.loads(text[text.index("{") :]) for text in (on_device[1].output, on_host[1]))
    assert scores == pytest.approx(expected, rel=1e-4) and scores
    default = machine.hone(*greedy, folder=tiny)
    assert default.code == 0, default.output
    (rounded,), (exact,) = json_lines(default.output), json_lines(on_host[2])
    assert 1e-5 < abs(rounded["log_probs"][0] - exact["log_probs"][0]) < 0.1, "bfloat16 without an option"
    server = machine.start(HONE, ["serve", model, "--port", 0, *EXACT], tiny)
    try:
        server.wait_until(lambda: "/v1" in server.log.read_text())
        address = re.search(r"at (http://127\.0\.0\.1:\d+)/v1", server.log.read_text())
        assert address is not None, server.log.read_text()
        body = {"model": "model", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"{address[1]}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            text = json.load(answer)["choices"][0]["text"]
    finally:
        server.signal(signal.SIGTERM)
        server.wait()
    assert text == exact["text"]


def json_lines(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]
