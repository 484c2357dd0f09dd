"""Show a row as the model sees it: its tokens, and which of them carry loss."""

from __future__ import annotations

import functools
import html
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hone.data.assistant_mask import render_conversations
from hone.data.chat import Messages, render_prompt, render_texts, special_tokens, strings_to_messages
from hone.data.chat_formats import ChatFormat, chat_format
from hone.data.checks import check_calls, conversations, ground_truths, prompts, same_prompt, text_of
from hone.data.checks.rows import answer_text
from hone.data.checks.tools import PROBLEMS
from hone.data.files import Row, read_all, read_rows
from hone.data.images import IMAGE_MARK, REST_OF_IMAGE, ImageData, content_text, is_image, place_of
from hone.data.messages import check_messages, plain, schemas_of
from hone.data.row_images import RowImages
from hone.data.seeding import derive_seed
from hone.data.tokenizer import decoded
from hone.errors import ConfigError, DataError, Finding, did_you_mean
from hone.rewards.scorers.text_shape import SCRIPTS, language_score


@dataclass
class CleanCounts:
    """Numbers of rows: kept, rejected, and rejected by reason (a row may have several)."""

    kept: int = 0
    rejected: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        return {"kept": self.kept, "rejected": self.rejected, "reasons": dict(self.reasons)}


def clean_files(
    files: Sequence[str],
    out: Path,
    rejected: Path,
    *,
    messages_key: str,
    limit: int,
    allowed: Sequence[str] = (),
    prompt_key: str = "prompt",
    answer_key: str | None = None,
    repeated: str | None = None,
    against: Sequence[str] = (),
    longest: int | None = None,
    language: str | None = None,
) -> CleanCounts:
    """Divide the rows of files by the soundness of prompts, answers and tool calls; columns are written as the files have them.

    Rejected rows have their uid, place and reasons. A prompt or conversation that no run takes is of kind R42, a missing answer of
    kind R44.

    Args:
        files: what is read, in this order.
        out: file of the rows that pass.
        rejected: file of the others.
        messages_key: column of conversations.
        limit: characters of the longest tool result.
        allowed: kinds of defects that reject no row.
        prompt_key: column of the prompt.
        answer_key: column of the right answer.
        repeated: ``exact`` or ``near`` (:func:`~hone.data.checks.same_prompt`) rejects a prompt that an earlier row has (``duplicate``).
        against: files whose prompts are rejected (``overlap``), such as those of validation.
        longest: characters of the longest right answer or last message (``long_answer``).
        language: whose script half the letters of each prompt and last message must have (``language``).

    Raises:
        OSError: a file cannot be written.
    """
    for kind in allowed:
        if kind not in (*PROBLEMS, "R42", "R44"):
            raise ConfigError(f"'{kind}' is not a kind of defect", fix=did_you_mean(kind, PROBLEMS), where="--allow")
    if out.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(
            f"{out} is neither .jsonl nor .parquet", fix=f"--out {out.with_suffix('.jsonl')}", where="--out"
        )
    read = {Path(file).resolve(): str(file) for file in (*files, *against)}
    for option, path, taken in (("--out", out, read), ("--rejected", rejected, {**read, out.resolve(): str(out)})):
        if (lost := taken.get(path.resolve())) is not None:
            raise ConfigError(
                f"{option} {path} is {lost}", why="it would be lost", fix=f"{option} a new file", where=option
            )
    if repeated not in (None, "exact", "near"):
        raise ConfigError(
            f"'{repeated}' is not exact or near", fix="--drop-duplicates exact", where="--drop-duplicates"
        )
    language = language and re.split("[-_]", language.lower())[0]  # en-US is en
    if language is not None and language not in SCRIPTS:
        raise ConfigError(
            f"'{language}' is not a known language", fix=did_you_mean(language, SCRIPTS), where="--language"
        )
    rows = read_all(list(files), answer_key=answer_key)
    columns = {name for row in rows for name in row.values}
    form = (prompts, prompt_key) if prompt_key in columns else (conversations, messages_key)
    check = check_calls(rows, messages_key=messages_key, limit=limit)
    stored = read_all(list(files), as_stored=True)
    same = functools.partial(same_prompt, key=form[1], image_key="images", near=repeated == "near")
    held_out = {same(row) for row in read_all(list(against))} if against else set[int]()
    counts, kept, lines, earlier = CleanCounts(), list[int](), [], set[int]()
    for number, row in enumerate(stored):
        bad = [(d.kind, d.detail) for d in check.defects.get(number, ()) if PROBLEMS[d.kind].stops]
        problems = [*form[0]([rows[number]], form[1])] if form[1] in columns else []
        problems += ground_truths([rows[number]], required=True, answer_key=answer_key) if answer_key else ()
        bad += [(one.error.code, one.error.what.removeprefix("1 of 1 rows: ")) for one in problems if one.stops]
        bad = [(kind, detail) for kind, detail in bad if kind not in allowed]
        if (prompt := same(rows[number])) in held_out:
            bad.append(("overlap", f"the prompt occurs in {', '.join(against)}"))
        if repeated and prompt in earlier:
            bad.append(("duplicate", "an earlier row has this prompt"))
        elif not bad:
            earlier.add(prompt)
        if longest is not None and (length := len(_answer(rows[number], messages_key))) > longest:
            bad.append(("long_answer", f"the answer has {length} characters"))
        bad += [("language", detail) for detail in _other_script(rows[number], form[1], language) if language]
        if not bad:
            kept.append(number)
            continue
        counts.reasons.update({kind for kind, _ in bad})
        reasons = [{"kind": kind, "detail": detail} for kind, detail in bad]
        lines.append({"uid": row.uid, "where": row.where, "reasons": reasons, "row": row.values})
    counts.kept, counts.rejected = len(kept), len(lines)
    for path in (out, rejected):
        path.parent.mkdir(parents=True, exist_ok=True)
    _write_rows(files, kept, out)
    rejected.write_text(
        "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines), encoding="utf-8"
    )
    return counts


def _other_script(row: Row, key: str, language: str | None) -> Iterator[str]:
    """Yield what of a row is mostly in another script than the one of ``language``."""
    if language is None:
        return
    texts = {"the prompt": answer_text(plain(row.values.get(key)), "user"), "the answer": _answer(row, key)}
    texts |= {column: answer_text(plain(row.values.get(column))) for column in ("chosen", "rejected", "completion")}
    for what, text in texts.items():
        script = language_score("", text, language=language)
        if script["letters"] and script["score"] < 0.5:
            yield f"{script['score']:.0%} of the letters of {what} are in the script of '{language}'"


@dataclass(frozen=True)
class Split:
    """Rows of each part of a split, and the groups that were kept whole."""

    train: int
    val: int
    train_groups: int
    val_groups: int
    ending: str  # of the files: .parquet if all inputs are, else .jsonl


def split_files(
    files: Sequence[str], out: Path, *, share: float, by: str = "template", prompt_key: str = "prompt", seed: int = 1
) -> Split:
    """Write train and val into ``out``, as parquet if all files are, else as JSON lines; rows of one group are in the same part.

    Args:
        share: of the rows that are held out; groups in a random order fill them.
        by: ``template`` (:func:`template_of` the prompt), ``prompt``, or a column with dots, such as ``extra_info.template``.

    Raises:
        DataError: there is one group alone, a row lacks prompt or column, or JSON cannot hold a value.
        ConfigError: the share is not between 0 and 1, or a file exists.
    """
    if not 0 < share < 1:
        raise ConfigError(f"--val-share {share:g} is not between 0 and 1", fix="--val-share 0.1", where="--val-share")
    rows, groups = read_all(list(files)), {}
    for number, row in enumerate(rows):
        groups.setdefault(_group_of(row, by, prompt_key), []).append(number)
    if len(groups) < 2:
        raise DataError(
            f"all {len(rows)} rows are of one group by {by}",
            why="no row could be held out without its like in the training data",
            fix=f"--by {'COLUMN that distinguishes tasks' if by == 'prompt' else 'prompt, or --by COLUMN that distinguishes tasks'}",
            where="--by",
        )
    ending = ".parquet" if all(str(file).endswith(".parquet") for file in files) else ".jsonl"
    places = [out / f"{name}{ending}" for name in ("train", "val")]
    if taken := next((place for place in places if place.exists()), None):
        raise ConfigError(f"{taken} exists", why="it would be lost", fix="--out a new folder", where="--out")
    order = sorted(groups, key=lambda name: derive_seed(seed, "split", name))
    val, count = set[str](), 0
    for name in order[:-1]:
        if count + len(groups[name]) / 2 <= share * len(rows):
            val.add(name)
            count += len(groups[name])
    val = val or {min(order, key=lambda name: len(groups[name]))}
    parts = [sorted(n for name in order if (name in val) == side for n in groups[name]) for side in (False, True)]
    out.mkdir(parents=True, exist_ok=True)
    for place, part in zip(places, parts, strict=True):
        _write_rows(files, part, place)
    return Split(len(parts[0]), len(parts[1]), len(groups) - len(val), len(val), ending)


def _group_of(row: Row, by: str, prompt_key: str) -> str:
    if by not in ("template", "prompt"):
        value: Any = row.values
        for name in by.split("."):
            value = plain(value).get(name) if isinstance(plain(value), dict) else None
        if value is None:
            raise DataError(
                f"the row has no value of '{by}'", where=row.where, fix="--by template, or a column that every row has"
            )
        return str(value)
    prompt = plain(row.values.get(prompt_key))
    text = answer_text(prompt, "user") or (text_of(prompt) if prompt else "")
    if not text:
        raise DataError(
            f"there is no prompt in column '{prompt_key}'",
            where=row.where,
            fix="--prompt-key NAME of the column of prompts or messages; `hone data clean` leaves out rows without",
            code="R42",
        )
    return template_of(text) if by == "template" else text


_QUOTED = re.compile(r"(?<!\w)(?:\"[^\"]*\"|'[^'\n]*'|`[^`]*`|“[^”]*”|«[^»]*»|「[^」]*」)(?!\w)")
_NUMBER_OR_WORD = re.compile(r"-?\d[\w.,:/]*|\w+")


def template_of(text: str) -> str:
    """Return what texts made from one template share: numbers, quotations and capitalised words are blanks.

    In a text of capitals alone only numbers and quotations are.

    >>> template_of('Ann has 12 plums.') == template_of('Éva has 7 plums.')
    True
    """
    capitals = text.isupper()

    def blank(match: re.Match[str]) -> str:
        word = match[0]
        names = word[0].isupper() and not capitals
        return "_" if names or word.lstrip("-")[:1].isdigit() else word

    return " ".join(_NUMBER_OR_WORD.sub(blank, _QUOTED.sub('"', text)).split())


def _write_rows(files: Sequence[str], numbers: Sequence[int], path: Path) -> None:
    """Write rows of files, by their numbers over all of them; parquet of parquet keeps every type.

    Raises:
        DataError: a value cannot be held by JSON.
    """
    if path.suffix == ".parquet" and all(str(file).endswith(".parquet") for file in files):
        import pyarrow as pa
        import pyarrow.parquet as pq

        tables = [pq.read_table(file) for file in files]
        pq.write_table(pa.concat_tables(tables, promote_options="default").take(list(numbers)), path)
        return
    stored = read_all(list(files), as_stored=True)
    _write([stored[number].values for number in numbers], path)


def _answer(row: Row, messages_key: str) -> str:
    """Return the right answer of a row, else the last message of its conversation, as text."""
    truth, messages = plain(row.values.get("reward_model")), plain(row.values.get(messages_key))
    answer = truth.get("ground_truth") if isinstance(truth, dict) else None
    if answer is None and isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        answer = messages[-1].get("content")
    if isinstance(answer, list) and any(isinstance(part, dict) for part in answer):
        return content_text(answer)
    return "" if answer is None else text_of(answer)


def _write(rows: list[dict[str, Any]], path: Path) -> None:
    if path.suffix == ".jsonl":
        path.write_text(_json_lines(rows), encoding="utf-8")
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)


def _json_lines(rows: list[dict[str, Any]]) -> str:
    try:
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    except TypeError as error:
        raise DataError(
            f"JSON lines cannot hold a value: {error}", why="it would be written as text", fix="--out FILE.parquet"
        ) from error


_BINS, _WIDTH, _HEIGHT = 40, 640, 140
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: left; }
.error { color: #b00020; font-weight: 600; } .warning { color: #8a5a00; font-weight: 600; }
rect { fill: #3366aa; } text { font-size: 11px; fill: #555; } pre { white-space: pre-wrap; }
"""


def html_report(
    title: str, findings: Sequence[Finding], numbers: Mapping[str, Any], lengths: Mapping[str, Sequence[int]]
) -> str:
    """Return the page as text; ``lengths`` are values to draw a histogram of, by name."""
    parts = [f"<h1>{html.escape(title)}</h1>", _findings(findings)]
    parts += [
        f"<h2>{html.escape(name.replace('_', ' '))}</h2>{histogram(values)}"
        for name, values in lengths.items()
        if values
    ]
    parts += [_table(name, value) for name, value in numbers.items()]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def histogram(values: Sequence[int]) -> str:
    """Return a histogram as SVG, with the minimum, middle and maximum below it."""
    low, high = min(values), max(values)
    width = max(1, high - low) / _BINS
    counts = [0] * _BINS
    for value in values:
        counts[min(_BINS - 1, int((value - low) / width))] += 1
    most, step = max(counts), _WIDTH / _BINS
    bars = "".join(
        f'<rect x="{number * step:.1f}" y="{_HEIGHT - _HEIGHT * count / most:.1f}" width="{step - 1:.1f}" '
        f'height="{_HEIGHT * count / most:.1f}"><title>{low + number * width:.0f} to {low + (number + 1) * width:.0f}: '
        f"{count}</title></rect>"
        for number, count in enumerate(counts)
    )
    marks = "".join(
        f'<text x="{x}" y="{_HEIGHT + 14}" text-anchor="{anchor}">{value:g}</text>'
        for x, anchor, value in ((0, "start", low), (_WIDTH / 2, "middle", (low + high) / 2), (_WIDTH, "end", high))
    )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 18}" width="{_WIDTH}" role="img">{bars}{marks}</svg>'


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return "<p>Nothing is wrong with these rows.</p>"
    rows = "".join(
        f'<tr><td class="{finding.severity}">{finding.severity}</td><td><pre>{html.escape(finding.error.render())}</pre></td></tr>'
        for finding in findings
    )
    return f"<h2>Findings</h2><table>{rows}</table>"


def _table(name: str, value: Any) -> str:
    items = value.items() if isinstance(value, Mapping) else [("", value)]
    rows = "".join(
        f"<tr><td>{html.escape(str(key))}</td><td>{html.escape(str(entry))}</td></tr>" for key, entry in items
    )
    return f"<h2>{html.escape(name.replace('_', ' '))}</h2><table>{rows}</table>"


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
                fix="name files with one of these columns; `hone data convert` makes them of questions and answers",
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


@dataclass(frozen=True)
class InspectedToken:
    """One token: its id, its text, whether it is special, and whether it carries loss."""

    token: int
    text: str
    special: bool
    learned: bool


def inspect_row(
    row: Row,  # row of a dataset file
    tokenizer: PreTrainedTokenizerBase,  # tokenizer, with a chat template if the row holds messages
    *,
    prompt_key: str = "prompt",
    messages_key: str = "messages",  # column of the conversation
    tools_key: str = "tools",  # column of the conversation's function schemas
    conversation: bool = False,  # show the conversation; implied if the row has no prompt
    chat_template_kwargs: dict[str, Any] | None = None,  # additional arguments of the chat template
    images: RowImages | None = None,  # reader of the row's images; None shows the text alone
) -> list[InspectedToken]:
    """Return the tokens of a row: of its prompt as generation sees it, or of its whole conversation as SFT sees it."""
    strings_to_messages([row], prompt_key, tokenizer, chat_template_kwargs)
    prompt, chat = plain(row.values.get(prompt_key)), plain(row.values.get(messages_key))
    tools = schemas_of(row.values.get(tools_key), row.where)
    shown_kwargs = {**(chat_template_kwargs or {}), **({"tools": tools} if tools else {})}
    if prompt is None and chat is None:
        raise DataError(
            f"no column '{prompt_key}' or '{messages_key}'; the columns are {', '.join(row.values)}",
            where=row.where,
            fix="name them with --prompt-key or --messages-key",
        )
    if chat is not None and (conversation or prompt is None):
        messages, shown = _placed(check_messages(chat, where=row.where, column=messages_key), row, images)
        ((ids, mask),) = render_conversations(tokenizer, [messages], shown_kwargs, [row.where])
    elif isinstance(prompt, str) or (isinstance(prompt, list) and all(type(item) is int for item in prompt)):
        ids = list(tokenizer(prompt, return_attention_mask=False)["input_ids"]) if isinstance(prompt, str) else prompt
        mask, shown = [0] * len(ids), () if images is None else images.of_text(row)
    else:
        messages, shown = _placed(check_messages(prompt, where=row.where, column=prompt_key), row, images)
        ids = render_prompt(tokenizer, messages, chat_template_kwargs)
        mask = [0] * len(ids)
    if images is not None:
        ids, mask = images.expand_masked(ids, mask, shown, row.where)
    special = special_tokens(tokenizer)
    return [
        InspectedToken(token, _text_of(tokenizer, token), token in special or is_image(token), bool(learned))
        for token, learned in zip(ids, mask, strict=True)
    ]


def _text_of(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    if is_image(token):
        return REST_OF_IMAGE if place_of(token) else IMAGE_MARK
    return decoded(tokenizer, [token]) or str(tokenizer.convert_ids_to_tokens(token))


def _placed(
    messages: list[dict[str, Any]], row: Row, images: RowImages | None
) -> tuple[list[dict[str, Any]], tuple[ImageData, ...]]:
    return (messages, ()) if images is None else images.place(messages, row)
