"""Training a small byte-level BPE tokenizer and saving it as a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hone.data.files import Row, read_rows
from hone.data.messages import check_messages, plain, schemas_of
from hone.data.tokenizer import read_template
from hone.errors import DataError, ModelError, did_you_mean

START, END, END_OF_TEXT, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|pad|>"
SPECIAL = (PAD, END_OF_TEXT, START, END)
SMALLEST = 256 + len(SPECIAL)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TOOLS = (
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
"""ChatML that shows tools, calls and results in as few tokens as it can: for small models that learn to use tools."""

_COLUMNS = ("messages", "prompt", "text", "tools")
TEMPLATES = {"chatml": CHATML, "chatml_tools": CHATML_TOOLS}
_MARKS = ("<tool_call>", "</tool_call>")
"""Tokens of their own where the chat template has them; ordinary ones, so that decoded text keeps them."""


def train_tokenizer(
    files: Sequence[str | Path], out: Path, *, vocab_size: int = 512, template: str = "chatml"
) -> PreTrainedTokenizerFast:
    """Train on the text of dataset files, tool calls and the schemas of a column ``tools`` included, and save to ``out``.

    Any text can be encoded (every byte is a token) and digits are tokens of their own, so that numbers keep their places.
    The same files give the same tokenizer. The end-of-sequence token is ``<|im_end|>``.

    Args:
        files: parquet, json or jsonl files with a column ``messages``, or else ``prompt``, or else ``text``; and plain
            text files (``.txt``).
        out: directory to write.
        vocab_size: tokens in all, 256 bytes and 4 special ones among them; fewer when the text has no more to merge.
        template: ``chatml``, ``chatml_tools`` (which shows tools), or a Jinja chat template, or the path of one.

    Raises:
        DataError: a file or column is wrong, vocab_size is below 260, or the folder cannot be written.
        ModelError: the template is neither known nor a file.
    """
    chat_template = _chat_template(template)
    marks = [mark for mark in _MARKS if mark in chat_template]
    if vocab_size < SMALLEST + len(marks):
        raise DataError(
            f"--vocab-size {vocab_size} is too small: 256 bytes and {len(SPECIAL) + len(marks)} special tokens need "
            f"{SMALLEST + len(marks)}",
            fix="--vocab-size 512",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(marks),  # type: ignore[call-arg]
        special_tokens=list(SPECIAL),  # type: ignore[call-arg]
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # type: ignore[call-arg]
        show_progress=False,  # type: ignore[call-arg]
    )
    tokenizer.train_from_iterator(_texts(files), trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START, END_OF_TEXT],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    try:
        fast.save_pretrained(out)
    except OSError as error:
        raise DataError(f"cannot write: {error}", where=str(out), fix="choose another folder with --out") from error
    return fast


def _chat_template(template: str) -> str:
    if template in TEMPLATES:
        return TEMPLATES[template]
    if "{" in template or Path(template).is_file():
        return read_template(template)
    raise ModelError(
        f"unknown chat template '{template}'", fix=f"{did_you_mean(template, TEMPLATES)} Or name a Jinja file."
    )


def _texts(files: Sequence[str | Path]) -> Iterator[str]:
    plain_texts = [Path(file) for file in files if Path(file).suffix == ".txt"]
    datasets = [file for file in files if Path(file).suffix != ".txt"]
    for path in plain_texts:
        try:
            yield from path.read_text(encoding="utf-8").splitlines(keepends=True)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot be read: {error}", where=str(path), fix="name a text file in UTF-8") from error
    for row in read_rows(datasets, required=(), optional=_COLUMNS) if datasets else ():
        found = False
        for text in _row_texts(row):
            found = True
            yield text
        if not found:
            raise DataError(
                "no text: none of the columns 'messages', 'prompt' and 'text' holds any",
                where=row.where,
                fix="name files with one of these columns",
            )


def _row_texts(row: Row) -> Iterator[str]:
    column: str | None = next((name for name in _COLUMNS[:3] if row.values.get(name)), None)
    if column is None:
        return
    value: Any = plain(row.values[column])
    if isinstance(value, str):
        yield value
        return
    for message in check_messages(value, where=row.where, column=column):
        if isinstance(message["content"], str):
            yield f"{message['role']}\n{message['content']}"
        for call in message.get("tool_calls", ()):
            function = call.get("function", call)
            yield f'{{"name": "{function.get("name")}", "arguments": {_json_text(function.get("arguments"))}}}'
    for schema in schemas_of(row.values.get("tools"), row.where) or ():
        yield json.dumps(schema.get("function", schema))


def _json_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
