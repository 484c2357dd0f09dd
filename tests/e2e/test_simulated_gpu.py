"""Whole programs, unchanged, on a simulated GPU: their tokens are those of the CPU, and their numbers too within rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.launch import hone
from support.once import made_once
from support.simulated_cuda.build import compiler
from support.simulated_cuda.machine import Machine
from support.tiny_runs import make_tiny_runs, offline_words, rl_words
from support.world import metrics, records

pytestmark = [
    pytest.mark.simulated_cuda,
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
OFFLINE = {
    "sft": (),
    "prefer": (),
    "reward-model": (),
}


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
    words = (*overrides, "trainer.val_before_train=false")
    ended = machine.hone(*rl_words(tiny, device, *words, "trainer.device=cuda", model=model, rows=rows), folder=tiny)
    assert ended.code == 0, ended.output
    assert ended.counters.launches.total() > 500
    on_host = rl_words(tiny, host, *words, "trainer.device=cpu", model=model, rows=rows)
    expected = hone(*on_host, log=tmp_path / "host.log", cwd=tiny)
    assert expected.code == 0, expected.output
    for step in (1, 2):
        tokens = [record["response_ids"] for record in records(device, step)]
        assert tokens == [record["response_ids"] for record in records(host, step)] and len(tokens) == 12
    assert_same_numbers(metrics(device), metrics(host))


@pytest.mark.parametrize("program", OFFLINE)
def test_offline_training(machine: Machine, tiny: Path, tmp_path: Path, program: str) -> None:
    device, host = tmp_path / "device", tmp_path / "host"
    ended = machine.hone(*offline_words(program, tiny, device, "trainer.device=cuda"), folder=tiny)
    assert ended.code == 0, ended.output
    assert ended.counters.launches.total() > 500
    expected = hone(*offline_words(program, tiny, host, "trainer.device=cpu"), log=tmp_path / "host.log", cwd=tiny)
    assert expected.code == 0, expected.output
    assert_same_numbers(metrics(device), metrics(host))
