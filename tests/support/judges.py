"""A tiny language model that has learnt by heart how to judge."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from hone.apps.lab.data.inspection import train_tokenizer
from hone.data.chat import render_prompt

RUBRIC = "{question}: {response}?"


def write_judge(directory: Path, question: str, judgements: Mapping[str, str], *, steps: int = 80) -> Path:
    """Train a model that answers :data:`RUBRIC`, filled with the question and each response, with its judgement.

    Returns:
        ``directory``, which holds the model, its tokenizer and the rubric (``rubric.txt``).
    """
    directory.mkdir(parents=True)
    (directory / "rubric.txt").write_text(RUBRIC)
    asked = [[{"role": "user", "content": f"{question}: {response}?"}] for response in judgements]
    rows = [{"messages": [*ask, {"role": "assistant", "content": "Score: fine"}]} for ask in asked]
    (directory / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = train_tokenizer([directory / "texts.jsonl"], directory, vocab_size=300)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=96, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    prompts = [render_prompt(tokenizer, ask) for ask in asked]
    answers = [[*tokenizer(said)["input_ids"], tokenizer.eos_token_id] for said in judgements.values()]
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids, labels = torch.zeros(len(prompts), longest, dtype=torch.int64), torch.full((len(prompts), longest), -100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end], labels[row, len(prompt) : end] = torch.tensor(prompt + answer), torch.tensor(answer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
    assert loss < 0.05, loss
    model.save_pretrained(directory)
    return directory
