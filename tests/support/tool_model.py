"""A small model that has learnt one conversation with a tool by heart."""

from __future__ import annotations

from pathlib import Path

import torch
from support.templates import tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from hone.agents.rendering import renderer_for

NAME = "qwen2_5"
QUESTION = {"role": "user", "content": "How is the weather in Rome?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
RESULT = {"role": "tool", "tool_call_id": "call_0", "name": "get_weather", "content": "sunny"}
ANSWER = "It is sunny in Rome.<|im_end|>"


def make_tool_model(folder: Path, steps: int = 120) -> Path:
    """Train it and save it as a Hugging Face directory; a few seconds."""
    known, renderer = tokenizer(NAME), renderer_for(tokenizer(NAME))
    prompt = renderer.prompt([QUESTION], [WEATHER])
    call, answer = (known(text, add_special_tokens=False)["input_ids"] for text in (CALL, ANSWER))
    bridge = renderer.bridge(call, [RESULT], [WEATHER])
    ids = torch.tensor([[*prompt, *call, *bridge, *answer]])
    labels = torch.tensor([[-100] * len(prompt) + call + [-100] * len(bridge) + answer])
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(known),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        eos_token_id=known.eos_token_id,
        pad_token_id=known.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.02, f"the conversation is not learnt: loss {loss.item():.3f}"
    model.save_pretrained(folder)
    known.save_pretrained(folder)
    return folder
