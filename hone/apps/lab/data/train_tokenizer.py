"""Train a small byte-level BPE tokenizer and save it as a Hugging Face directory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hone.data.chat import Messages, render_texts
from hone.data.chat_formats import ChatFormat, chat_format
from hone.data.files import Row, read_rows
from hone.data.messages import check_messages, plain, schemas_of
from hone.errors import DataError

BYTES = 256
_COLUMNS = ("messages", "prompt", "text", "tools")


def train_tokenizer(
    files: Sequence[str | Path], out: Path, *, vocab_size: int = 512, template: str = "chatml"
) -> PreTrainedTokenizerFast:
    """Train on the text of dataset files, tool calls and the schemas of a column ``tools`` included, and save to ``out``.

    Any text can be encoded (every byte is a token). Digits are separate tokens, so that numbers keep their places.
    The same files give the same tokenizer. The end-of-sequence token is the one that ends a turn of the chat format.

    Files have a column ``messages``, else ``prompt``, else ``text``, or are plain text (``.txt``). ``vocab_size`` includes 256 bytes
    and the chat format's tokens; it is smaller if no merges are left. ``template`` is a name in
    :data:`~hone.data.chat_formats.CHAT_FORMATS`, a Jinja chat template, or the path of one.
    """
    form = chat_format(template)
    reserved = len(form.all_special) + len(form.marks)
    if vocab_size < BYTES + reserved:
        raise DataError(
            f"--vocab-size {vocab_size} is too small: {BYTES} bytes and {reserved} special tokens need {BYTES + reserved} entries",
            fix="--vocab-size 512",
        )
    fast = _tokenizer(_trained(_texts(files, form), form, vocab_size), form)
    try:
        fast.save_pretrained(out)
    except OSError as error:
        raise DataError(
            f"the tokenizer cannot be written: {error}", where=str(out), fix="choose another folder with --out"
        ) from error
    return fast


def _tokenizer(backend: Tokenizer, form: ChatFormat) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=form.bos,
        eos_token=form.end,
        pad_token=form.pad,
        additional_special_tokens=[token for token in form.special[::-1] if token != form.bos],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = form.template
    return tokenizer


def _trained(texts: Iterator[str], form: ChatFormat, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(form.marks),  # type: ignore[call-arg]
        special_tokens=list(form.all_special),  # type: ignore[call-arg]
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # type: ignore[call-arg]
        show_progress=False,  # type: ignore[call-arg]
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in form.marks])
    return tokenizer


def _texts(files: Sequence[str | Path], form: ChatFormat) -> Iterator[str]:
    plain_texts = [Path(file) for file in files if Path(file).suffix == ".txt"]
    datasets = [file for file in files if Path(file).suffix != ".txt"]
    for path in plain_texts:
        try:
            yield from path.read_text(encoding="utf-8").splitlines(keepends=True)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot be read: {error}", where=str(path), fix="name a text file in UTF-8") from error
    for row in read_rows(datasets, required=(), optional=_COLUMNS) if datasets else ():
        has_text = False
        for text in _row_texts(row, form):
            has_text = True
            yield text
        if not has_text:
            raise DataError(
                "the columns 'messages', 'prompt' and 'text' have no text",
                where=row.where,
                fix="name files with one of these columns",
            )


def _row_texts(row: Row, form: ChatFormat) -> Iterator[str]:
    column: str | None = next((name for name in _COLUMNS[:3] if row.values.get(name)), None)
    if column is None:
        return
    value: Any = plain(row.values[column])
    if isinstance(value, str):
        yield value
        return
    messages = check_messages(value, where=row.where, column=column)
    tools = schemas_of(row.values.get("tools"), row.where)
    if form.wordy:
        yield from _rendered(messages, tools, form)
        return
    for message in messages:
        if isinstance(message["content"], str):
            yield f"{message['role']}\n{message['content']}"
        for call in message.get("tool_calls", ()):
            function = call.get("function", call)
            yield f'{{"name": "{function.get("name")}", "arguments": {_json_text(function.get("arguments"))}}}'
    for schema in tools or ():
        yield json.dumps(schema.get("function", schema))


def _rendered(messages: Messages, tools: list[dict[str, Any]] | None, form: ChatFormat) -> list[str]:
    """Return the text between the format's tokens in a conversation rendered with its template."""
    blank = _tokenizer(Tokenizer(models.BPE()), form)
    (text,) = render_texts(blank, [messages], False, {"tools": tools} if tools else None)
    marks = sorted((*form.all_special, *form.marks), key=len, reverse=True)
    return [chunk for chunk in re.split("|".join(map(re.escape, marks)), text) if chunk]


def _json_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
