"""Chat formats for small tokenizers: a template, and the tokens that its vocabulary needs.

``chatml`` and ``chatml_tools`` are as short as possible. The others copy the marks, order and token names of a model
family's template, so that a small model is trained and parsed like a large one of the family.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hone.errors import ModelError, did_you_mean

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class ChatFormat:
    """A chat template and its vocabulary."""

    template: str  # Jinja text
    pad: str  # padding token
    end: str  # token that ends a turn, the end-of-sequence token
    special: tuple[str, ...]  # further tokens that no text contains
    marks: tuple[str, ...] = ()  # separate tokens that occur in decoded text
    bos: str | None = None  # token that begins a sequence, one of ``special``
    wordy: bool = False  # whether the template adds words (about tools, for example) that a vocabulary should contain

    @property
    def all_special(self) -> tuple[str, ...]:
        return (self.pad, *self.special, self.end)


_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CHATML_TOOLS = (
    "{%- if tools or messages[0]['role'] == 'system' -%}"
    "{{- '<|im_start|>system\n' -}}"
    "{%- if messages[0]['role'] == 'system' -%}{{- messages[0]['content'] -}}{%- endif -%}"
    "{%- for tool in tools or [] -%}{{- '\n' -}}{{- tool['function'] | tojson -}}{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] != 'system' or not loop.first -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') -}}"
    "{%- for call in message['tool_calls'] or [] -%}"
    """{{- '<tool_call>{"name": "' + call['function']['name'] + '", "arguments": ' -}}"""
    "{{- call['function']['arguments'] | tojson -}}{{- '}</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
"""ChatML that shows tools, calls and results in as few tokens as possible."""


def _chatml(template: str) -> ChatFormat:
    marks = tuple(mark for mark in ("<tool_call>", "</tool_call>") if mark in template)
    return ChatFormat(template, "<|pad|>", "<|im_end|>", ("<|endoftext|>", "<|im_start|>"), marks)


def _file(name: str) -> str:
    return (_HERE / f"{name}.jinja").read_text(encoding="utf-8").rstrip("\n")


CHAT_FORMATS: dict[str, ChatFormat] = {
    "chatml": _chatml(_CHATML),
    "chatml_tools": _chatml(_CHATML_TOOLS),
    "qwen3": ChatFormat(
        _file("qwen3"),
        pad="<|endoftext|>",
        end="<|im_end|>",
        special=("<|im_start|>",),
        marks=("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
        wordy=True,
    ),
    "function_gemma": ChatFormat(
        _file("function_gemma"),
        pad="<pad>",
        end="<end_of_turn>",
        special=(
            "<bos>", "<eos>", "<start_of_turn>", "<start_function_declaration>", "<end_function_declaration>",
            "<start_function_call>", "<end_function_call>", "<start_function_response>", "<end_function_response>",
            "<escape>",
        ),
        bos="<bos>",
        wordy=True,
    ),
    "harmony": ChatFormat(
        _file("harmony"),
        pad="<|endoftext|>",
        end="<|return|>",
        special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"),
        wordy=True,
    ),
}  # fmt: skip
"""Formats by name."""


def chat_format(name: str) -> ChatFormat:
    """Return the format called ``name``; a Jinja template, or the path of one, uses the tokens of ``chatml``. Raises
    ModelError: see :func:`read_template`.
    """
    return CHAT_FORMATS.get(name) or _chatml(read_template(name))


def read_template(named: str) -> str:
    """Return a chat template given as Jinja text, as the path of a file, or as the name of a format.

    Raises ModelError: the text has no Jinja tags, and is neither a file nor a name.
    """
    if named in CHAT_FORMATS:
        return CHAT_FORMATS[named].template
    if "{{" in named or "{%" in named:
        return named
    if not Path(named).is_file():
        raise ModelError(
            f"chat template '{named}' is neither a name, nor an existing file, nor Jinja text",
            fix=f"{did_you_mean(named, CHAT_FORMATS)} Or model.custom_chat_template=PATH of a Jinja file",
        )
    return Path(named).read_text(encoding="utf-8")


def needed_tokens(named: str) -> list[str]:
    """Return the tokens that a vocabulary needs for the format called ``named``; none for another template."""
    known = CHAT_FORMATS.get(named)
    return [token for token in known.all_special if token in known.template] if known else []
