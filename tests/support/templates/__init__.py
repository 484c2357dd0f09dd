"""Chat templates in the shapes of well-known model families, each with a small tokenizer that has the family's tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hone.data.chat_formats import CHAT_FORMATS

_HERE = Path(__file__).parent
_SPLIT = r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEXT = (
    'The tool returned a result. {"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n\n'
    "assistant\nuser\nsystem\nfunctions.get_weather to=assistant commentary json analysis final\n</tool_response>\n"
    "It is sunny in Rome and it will rain tomorrow. Let me think of it.\n"
) * 4


@dataclass(frozen=True)
class Shape:
    """What the tokenizer of a family has: special tokens (the end of a sequence first), and added ones that are none."""

    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    bos: str | None = None
    metaspace: bool = False


_QWEN = Shape(
    ("<|im_end|>", "<|endoftext|>", "<|im_start|>"),
    ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)
_LLAMA = Shape(
    ("<|eot_id|>", "<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"),
    bos="<|begin_of_text|>",
)  # fmt: skip
_DEEPSEEK = Shape(
    ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
    (
        "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
        "<｜tool▁sep｜>",
    ),
    bos="<｜begin▁of▁sentence｜>",
)  # fmt: skip
SHAPES = {
    "qwen2_5": _QWEN,
    "qwen3": _QWEN,
    "qwen3_coder": _QWEN,
    "llama3_1": _LLAMA,
    "llama3_2_pythonic": _LLAMA,
    "gemma3": Shape(("<end_of_turn>", "<eos>", "<bos>", "<start_of_turn>"), bos="<bos>", metaspace=True),
    "function_gemma": Shape(
        ("<end_of_turn>", "<eos>", "<bos>", "<start_of_turn>", "<start_function_declaration>", "<end_function_declaration>",
         "<start_function_call>", "<end_function_call>", "<start_function_response>", "<end_function_response>", "<escape>"),
        bos="<bos>",
        metaspace=True,
    ),
    "gemma4": Shape(
        ("<turn|>", "<eos>", "<bos>", "<|turn>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
         "<tool_response|>", '<|"|>', "<|channel>", "<channel|>", "<|think|>"),
        bos="<bos>",
        metaspace=True,
    ),
    "harmony": Shape(
        ("<|return|>", "<|endoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"),
    ),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v3_1": _DEEPSEEK,
    "kimi_k2": Shape(
        ("<|im_end|>", "[EOS]", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
         "<|tool_call_argument_begin|>"),
    ),
}  # fmt: skip
"""Templates by name."""


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a template in the list."""
    return tokenizer_with(template_of(name), SHAPES[name])


def template_of(name: str) -> str:
    """Return a template: of the package where it has one of that name, else of this folder."""
    if name in CHAT_FORMATS:
        return CHAT_FORMATS[name].template
    return (_HERE / f"{name}.jinja").read_text(encoding="utf-8").rstrip("\n")


def tokenizer_with(template: str, shape: Shape) -> PreTrainedTokenizerFast:
    """Return a small tokenizer with the tokens of ``shape`` and any chat template."""
    backend = _metaspace() if shape.metaspace else _byte_level()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in shape.special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in shape.added])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=shape.special[0],
        pad_token=shape.special[1],
        bos_token=shape.bos,
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = template
    return made


def _byte_level() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, min_frequency=2
    )
    backend.train_from_iterator([_TEXT], trainer)
    return backend


def _metaspace() -> Tokenizer:
    """In the manner of SentencePiece: spaces are a letter, and bytes are the last resort."""
    normalizer, split = normalizers.Replace(" ", "▁"), pre_tokenizers.Split(Regex("\n+"), "isolated")
    learnt = Tokenizer(models.BPE())
    learnt.normalizer, learnt.pre_tokenizer = normalizer, split
    learnt.train_from_iterator([_TEXT], trainers.BpeTrainer(vocab_size=300, show_progress=False, min_frequency=2))
    model = json.loads(learnt.to_str())["model"]
    vocabulary = [*(f"<0x{byte:02X}>" for byte in range(256)), *sorted(model["vocab"], key=model["vocab"].get)]
    backend = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(vocabulary)},
            merges=[tuple(merge) for merge in model["merges"]],
            byte_fallback=True,
        )
    )
    backend.normalizer, backend.pre_tokenizer = normalizer, split
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend
