"""Convert published dataset formats to Hone's columns.

    from       recognized by                                      row
    sharegpt   a list of {"from": ..., "value": ...}              conversation
    openai     a list of {"role": ..., "content": ...}            conversation
    alpaca     instruction, input (may be empty), output          one question and its answer
    trl        prompt and completion, texts or messages           conversation
    csv        named columns                                      one question and its answer

    to          prompt
    string      the question as plain text
    chat        the messages up to the first question
    multi-turn  the messages up to the last question
    multimodal  as multi-turn, every content a list of parts; <image>, <video> and <audio> become separate parts
    messages    no prompt, only the whole conversation (for `hone sft`)

Every row also gets the whole conversation as ``messages``, and the last answer (or a value extracted from it) as ground truth. Images of
a row are kept in a column ``images``, with the content of their files. Other columns stay, for rewards that take them by name.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hone.data.answers import after_hashes, boxed, find_numbers, read_number
from hone.data.files import column_of, read_all
from hone.data.images import IMAGE_MARK, IMAGE_PARTS, read_image
from hone.data.media import COLUMNS as MEDIA_COLUMNS
from hone.data.messages import as_json, plain, with_arguments
from hone.data.row_images import part_image
from hone.data.sharegpt import SYSTEM, Messages, is_sharegpt, messages_of_turns, schemas_in_full, unknown_turn
from hone.errors import ConfigError, DataError, did_you_mean

SOURCES = ("auto", "sharegpt", "openai", "alpaca", "trl", "csv")
TARGETS = ("chat", "string", "multi-turn", "multimodal", "messages")
_CONVERSATIONS = ("conversations", "conversation", "messages", "chat", "dialogue", "dialog")
_CONSUMED = {
    *(
        *_CONVERSATIONS,
        SYSTEM,
        "system",
        "instruction",
        "input",
        "output",
        "completion",
        "answer",
        "tools",
        "extra_info",
    ),
    *(name for names in MEDIA_COLUMNS.values() for name in names),
}
"""Columns whose content the converted row has elsewhere."""
_MEDIA = re.compile(r"<(image|video|audio)>")


@dataclass(frozen=True)
class Conversion:
    """Options of `hone data convert`."""

    source: str = "auto"  # a name of :data:`SOURCES`
    target: str = "chat"  # a name of :data:`TARGETS`
    data_source: str = "exact_match"  # written to every row; selects the scorer
    # column of the question (csv); ``extra_info.question`` is a field of a column of objects
    question: str = "question"
    answer: str = "answer"  # column of the answer (csv); fields as in ``question``
    system: str | None = None  # a system message to prepend, or None
    ground_truth: str = "whole"  # a name of :data:`GROUND_TRUTHS`


def _after_mark(text: str) -> str:
    line = after_hashes(text) or ""
    number = read_number(line)
    return number.text if number is not None else line


def _last_number(text: str) -> str:
    numbers = find_numbers(text)
    return numbers[-1].text if numbers else ""


GROUND_TRUTHS: dict[str, Callable[[str], str]] = {
    "whole": str.strip,
    "####": _after_mark,
    "boxed": lambda text: boxed(text) or "",
    "last-number": _last_number,
}
"""Extraction of the ground truth from the last answer, by name."""


def convert(files: Sequence[Path], out: Path, options: Conversion) -> tuple[int, dict[str, int]]:
    """Convert dataset files and write one, parquet or JSON lines by the ending of ``out``.

    Returns:
        The number of rows written, and the number of rows left out for each reason.

    Raises:
        DataError: a file cannot be read, its format is not recognized, or no row is left.
        ConfigError: an option is unknown.
    """
    for name, value, choices in (("--from", options.source, SOURCES), ("--to", options.target, TARGETS),
                               ("--ground-truth", options.ground_truth, GROUND_TRUTHS)):  # fmt: skip
        if value not in choices:
            raise ConfigError(
                f"'{value}' is not one of {', '.join(choices)}", where=name, fix=did_you_mean(value, choices)
            )
    rows, left_out = [], {}
    for file in files:
        for stored in read_all(file, as_stored=True):
            record = {name: plain(value) for name, value in stored.values.items()}
            row = _row(record, file, len(rows), options, as_text=out.suffix != ".parquet")
            if isinstance(row, str):
                left_out[row] = left_out.get(row, 0) + 1
            else:
                rows.append(row)
    if not rows:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise DataError(
            f"no row is left ({reasons})", where=str(files[0]), fix="see the forms in `hone data convert --help`"
        )
    _write(rows, out)
    return len(rows), left_out


def _row(record: dict[str, Any], file: Path, number: int, options: Conversion, as_text: bool) -> dict[str, Any] | str:
    """Return the converted row, or the reason for leaving it out; ``as_text`` stores images as text."""
    messages = _conversation(record, file, options)
    if isinstance(messages, str):
        return messages
    # as text: a parquet file would give each call the keys of all
    messages = [with_arguments(message, as_json) for message in messages]
    if options.system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": options.system}, *messages]
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        return "without an answer"
    last = len(roles) - 1 - roles[::-1].index("assistant")
    answer = messages[last]["content"]
    try:
        images = _images(record, file, as_text)
    except DataError:
        return "with an image that cannot be read"
    tools: dict[str, Any] = {}
    if record.get("tools"):
        schemas = schemas_in_full(record["tools"])
        tools["tools"] = schemas if isinstance(schemas, str) else json.dumps(schemas, ensure_ascii=False)
    shown: dict[str, Any] = ({"images": images} if images else {}) | tools
    others = {name: value for name, value in record.items() if name not in {*_CONSUMED, options.question}}
    if options.target == "messages":
        made = {"messages": messages, "data_source": options.data_source} | shown
        return _miscounted(messages, images) or others | made
    if "user" not in roles[:last]:
        return "without a question"
    end = roles.index("assistant", roles.index("user")) if options.target in ("chat", "string") else last
    prompt, answer = messages[:end], (messages[end]["content"] if options.target in ("chat", "string") else answer)
    truth = GROUND_TRUTHS[options.ground_truth](answer)
    if not truth:
        return f"without a ground truth ({options.ground_truth})"
    shaped: Any = prompt
    if options.target == "string":
        shaped = "\n\n".join(message["content"] for message in prompt)
    extra = record.get("extra_info")
    row = others | {
        "prompt": shaped,
        "data_source": options.data_source,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {**(extra if isinstance(extra, dict) else {}), "index": number, "answer": answer},
    }
    if options.target != "multimodal":
        return _miscounted(prompt, images) or row | {"messages": messages} | shown
    media = {kind: _media(record, kind) for kind in MEDIA_COLUMNS} | {"image": images}
    row["prompt"] = [m | {"content": _parts(m["content"])} for m in prompt]
    row["messages"] = [
        *row["prompt"],
        messages[last] | {"content": [{"type": "text", "text": answer}] if answer else []},
    ]
    marks = [part["type"] for message in row["prompt"] for part in message["content"] if part["type"] != "text"]
    for kind, items in media.items():
        if marks.count(kind) != len(items):
            return f"with {marks.count(kind)} marks <{kind}> in the prompt and {len(items)} {kind}s"
    return row | {f"{kind}s": items for kind, items in media.items() if items} | tools


def _conversation(record: dict[str, Any], file: Path, options: Conversion) -> Messages | str:
    """Return the messages of a record, or the reason for leaving it out."""
    source = options.source if options.source != "auto" else _source_of(record, file, options)
    if source in ("sharegpt", "openai", "trl"):
        turns = _turns_of_trl(record) if source == "trl" else _turns(record)
        if not turns:
            return "without a conversation"
        if unknown_turn(turns) is not None:
            return "with a role that is not known"
        try:
            return messages_of_turns(turns, record.get(SYSTEM))
        except ValueError:
            return "with a turn without text, or a call that cannot be read"
    question, answer = (
        ("\n\n".join(part for part in (record.get("instruction"), record.get("input")) if part), record.get("output"))
        if source == "alpaca"
        else (column_of(record, options.question), column_of(record, options.answer))
    )
    if not str(question or "").strip() or not str(answer or "").strip():
        return "without question or answer"
    system = record.get("system")
    first = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    return [*first, {"role": "user", "content": str(question)}, {"role": "assistant", "content": str(answer)}]


def _turns(record: dict[str, Any]) -> list[Any] | None:
    return next((record[name] for name in _CONVERSATIONS if isinstance(record.get(name), list) and record[name]), None)


def _turns_of_trl(record: dict[str, Any]) -> list[Any]:
    """Return the turns of a prompt and its completion; texts are what the user and the assistant say."""
    turns: list[Any] = []
    for name, role in (("prompt", "user"), ("completion", "assistant")):
        said = record.get(name)
        turns += said if isinstance(said, list) else [{"role": role, "content": said}]
    return turns


def _source_of(record: dict[str, Any], file: Path, options: Conversion) -> str:
    turns = _turns(record)
    if turns and isinstance(turns[0], dict):
        return "sharegpt" if is_sharegpt(turns) else "openai"
    if "instruction" in record and "output" in record:
        return "alpaca"
    if "prompt" in record and "completion" in record:
        return "trl"
    if all(name in record or column_of(record, name) is not None for name in (options.question, options.answer)):
        return "csv"
    raise DataError(
        f"the format is not recognized; the columns are {', '.join(record) or '(none)'}",
        where=str(file),
        fix="--question NAME --answer NAME for columns with other names, or --from sharegpt, openai, alpaca or trl",
    )


def _parts(content: str) -> list[dict[str, str]]:
    """Split content into parts: text, and one part for each mark."""
    parts = []
    for number, piece in enumerate(_MEDIA.split(content)):
        if number % 2:
            parts.append({"type": piece})
        elif piece.strip():
            parts.append({"type": "text", "text": piece.strip()})
    return parts


def _media(record: dict[str, Any], kind: str) -> list[Any]:
    value = next((record[name] for name in MEDIA_COLUMNS[kind] if record.get(name)), [])
    return value if isinstance(value, list) else [value]


def _miscounted(messages: Messages, images: Sequence[Any]) -> str:
    """Return why a row whose marks do not match its images is left out; empty if they match."""
    marks = sum(message["content"].count(IMAGE_MARK) for message in messages) if images else 0
    return f"with {marks} marks {IMAGE_MARK} in the messages and {len(images)} images" if marks != len(images) else ""


def _images(record: dict[str, Any], file: Path, as_text: bool) -> list[Any]:
    """Return the images of a record with the content of their files: in Hugging Face's form, or as ``data:`` URLs."""
    values = _media(record, "image") or [part_image(part) for part in _image_parts(record)]
    images = [read_image(value, str(file), file.parent).content for value in values if value is not None]
    if as_text:
        return [f"data:;base64,{base64.b64encode(content).decode()}" for content in images]
    return [{"bytes": content, "path": None} for content in images]


def _image_parts(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    turns = next((record[name] for name in _CONVERSATIONS if isinstance(record.get(name), list)), [])
    contents = (turn.get("content") for turn in turns if isinstance(turn, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return (part for part in parts if isinstance(part, dict) and part.get("type") in IMAGE_PARTS)


def _write(rows: list[dict[str, Any]], out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), out)
        elif out.suffix == ".jsonl":
            out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        else:
            raise DataError(f"'{out}' ends in '{out.suffix}'", where="--out", fix="--out FILE.parquet or FILE.jsonl")
    except pa.ArrowException as error:
        raise DataError(
            f"a column has values of several types ({error})",
            where=str(out),
            fix="--out FILE.jsonl, or one type for all rows",
        ) from error
    except OSError as error:
        raise DataError(
            f"cannot be written: {error.strerror or error}", where=str(out), fix="--out FILE elsewhere"
        ) from error
