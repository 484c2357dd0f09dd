"""A pretrained model of 135 million weights: what a user does with one works on it, and learns."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.real_model import smollm2
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import hone

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not os.environ.get("HONE_TEST_REAL"),
        reason="HONE_TEST_REAL=1 runs it: 2 minutes with all cores, many times that with the one core of a test process",
    ),
]
COUNTRIES = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Norway": "Oslo", "Egypt": "Cairo", "Peru": "Lima"}
LORA = {"lora_rank": 8, "lr": 1e-3, "dtype": "bfloat16"}


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
    run = hone.sft(model, rows, steps=8, out=tmp_path / "sft", train_batch_size=6, max_length=96, **LORA)
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
