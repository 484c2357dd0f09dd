"""Small random models whose tokenizer is byte-level BPE and splits text as a known one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from hone.apps.ops.gguf_export import SPLITS

TEXTS = ["the sum of 12 and 3 is 15", "Ünïcode, naïve: 東京 🙂", "def f(x):\n    return x + 1\n"] * 3
ROWS = 416


def byte_level_model(folder: Path, kind: str, splits: str = "gpt-2", width: int = 16, **changes: Any) -> Path:
    """Write a random model whose tokenizer splits text as a known one does."""
    names = {name: pattern for pattern, name in SPLITS.items()}
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner = Tokenizer(models.BPE(ignore_merges=splits == "llama-bpe"))
    inner.pre_tokenizer = {
        "gpt-2": whole,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole]),
    }.get(splits) or pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(names[splits]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|im_start|>"]
    inner.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    inner.add_tokens([AddedToken("<think>", special=False)])
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|end|>{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": width, "max_position_embeddings": 128}
    torch.manual_seed(0)
    settings = AutoConfig.for_model(kind, vocab_size=ROWS, **{**shape, "sliding_window": None, **changes})
    model = AutoModelForCausalLM.from_config(settings)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder
