"""Checks of the rows of a dataset: images, lengths of prompts, repetitions, ground truths, and the roles of messages.

Measure prompts in tokens, without tokenizing those that cannot be too long.

A token covers at least one byte of text (byte-level and byte-fallback tokenizers alike). A prompt whose rendered bytes
do not exceed the limit is therefore not too long. Only the others are rendered and tokenized, the longest first.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.data.chat import render_texts, token_counts
from hone.data.files import ANSWER_COLUMNS, NO_SOURCE, Row
from hone.data.images import content_text
from hone.data.media import KINDS, media_error, media_of
from hone.data.messages import check_messages, plain, unwrapped
from hone.data.row_images import PlaceError, RowImages
from hone.errors import DataError, Finding, did_you_mean
from hone.text import read_yaml


@dataclass(frozen=True)
class Problem:
    """A kind of problem of rows: its code, why it matters, the fix, and whether it stops a run."""

    code: str
    what: str
    why: str
    fix: str
    stops: bool = True


def problems_of(section: str) -> dict[str, Problem]:
    """Return a section of ``problems.yaml``, problems by name."""
    table = read_yaml(Path(__file__).with_name("problems.yaml").read_text(encoding="utf-8"))[section]
    return {name: Problem(*texts[:4], stops=len(texts) == 4) for name, texts in table.items()}


PROBLEMS = problems_of("rows")


@dataclass
class Tally:
    """Rows with problems, by kind.

    >>> tally = Tally(3)
    >>> tally.add(Row("a:1", "a.jsonl, row 1", {}), Problem("R44", "ground_truth is ''", "why", "fix"))
    >>> [finding.error.what for finding in tally.findings()]
    ["1 of 3 rows: ground_truth is ''"]
    """

    total: int
    counts: dict[Problem, int] = field(default_factory=dict)
    first: dict[Problem, tuple[str, str]] = field(default_factory=dict)

    def add(self, row: Row, problem: Problem, detail: str = "") -> None:
        """Count ``row`` under ``problem``; ``detail`` is shown for the first such row."""
        self.counts[problem] = self.counts.get(problem, 0) + 1
        self.first.setdefault(problem, (row.where, detail))

    def findings(self, least: int = 1) -> Iterator[Finding]:
        """Yield one finding per problem that at least ``least`` rows have, the most frequent first."""
        for problem, count in sorted(self.counts.items(), key=lambda item: -item[1]):
            if count >= least:
                where, detail = self.first[problem]
                what = f"{count} of {self.total} rows: {problem.what}" + (f" (first: {detail})" if detail else "")
                error = DataError(what, why=problem.why, fix=problem.fix, where=where, code=problem.code)
                yield Finding(error, problem.stops)


@dataclass
class ImageCheck:
    """Images of the rows of a dataset."""

    rows: int = 0
    sizes: list[tuple[int, int]] = field(default_factory=list)  # width and height of each image, in pixels
    tokens: list[int] = field(default_factory=list)  # tokens of each image; empty without a model
    misplaced: list[DataError] = field(default_factory=list)  # errors of rows with another number of places than images
    unreadable: list[DataError] = field(default_factory=list)  # errors of rows with an image that cannot be read
    # messages with a part at the place of each image, by row number
    placed: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    # tokens that a row's images take besides their placeholders, by row number
    extra_tokens: dict[int, int] = field(default_factory=dict)

    def measured(self) -> dict[str, list[int]]:
        """Return width, height and tokens of the images, by name; without what is not known."""
        widths, heights = [width for width, _ in self.sizes], [height for _, height in self.sizes]
        values = {"image_width": widths, "image_height": heights, "tokens_per_image": self.tokens}
        return {name: numbers for name, numbers in values.items() if numbers}

    def findings(self) -> Iterator[Finding]:
        """Yield one finding for each kind of problem; each stops a run."""
        for what, problems in (
            ("have other numbers of places than images", self.misplaced),
            ("have an image that cannot be read", self.unreadable),
        ):
            if problems:
                first = problems[0]
                yield Finding(
                    DataError(
                        f"{len(problems)} of {self.rows} rows with images {what}; the first: {first.what}",
                        why=first.why,
                        fix=first.fix,
                        where=first.where,
                        code=PlaceError.code,
                    ),
                    stops=True,
                )


def check_images(rows: Sequence[Row], columns: Sequence[str], images: RowImages) -> ImageCheck:
    """Read the images of all rows that have some. ``columns``: columns of messages, in which places are counted
    together.
    """
    check = ImageCheck()
    for number, row in enumerate(rows):
        messages = _messages_of_columns(row.values, columns)
        if messages is None or not (media_of(row.values)["image"] or plain(row.values.get(images.key))):
            continue
        check.rows += 1
        try:
            check.placed[number], shown = images.place(messages, row)
            check.sizes += [image.open().size for image in shown]
        except PlaceError as problem:
            check.misplaced.append(problem)
        except DataError as problem:
            check.unreadable.append(DataError(problem.what, why=problem.why, fix=problem.fix, where=row.where))
        else:
            if images.processor is not None:
                tokens = [len(images.processor.tokens(image)) for image in shown]
                check.tokens += tokens
                check.extra_tokens[number] = images.processor.count_more(check.placed[number], shown)
    return check


def _messages_of_columns(values: Mapping[str, Any], columns: Sequence[str]) -> list[dict[str, Any]] | None:
    """Return the messages of the columns; None if a column has malformed ones, which another check reports."""
    messages: list[dict[str, Any]] = []
    try:
        for column in columns:
            value = plain(values.get(column))
            if isinstance(value, list) and value and isinstance(value[0], dict):
                messages += check_messages(value, where="", column=column)
    except DataError:
        return None
    return messages or None


def media(rows: Sequence[Row], refused: Collection[str] = KINDS) -> Iterator[Finding]:
    """Yield one finding for all rows with media of the refused kinds."""
    counted = [(row.where, media_of(row.values)) for row in rows]
    kept = [(where, Counter({kind: n for kind, n in kinds.items() if kind in refused})) for where, kinds in counted]
    with_media = [(where, kinds) for where, kinds in kept if kinds]
    if with_media:
        total = sum((kinds for _, kinds in with_media), Counter[str]())
        yield Finding(media_error(total, with_media[0][0], f"{len(with_media)} of {len(rows)} rows have"), stops=True)


MOST_TOKENIZED = 4000  # largest number of rows that are tokenized
_MESSAGE_BYTES = 64  # bytes that a chat template may add per message, in addition to those of an empty conversation


@dataclass
class PromptLengths:
    """Measured lengths of prompts."""

    rows: int
    limit: int
    overlong: list[int] = field(default_factory=list)  # token lengths of rows over the limit, longest first
    exact: bool = True  # whether all rows that could exceed it were tokenized
    longest: str = ""  # place of the longest row
    with_system: int = 0  # number of overlong rows that begin with a system message
    refused: list[tuple[str, str]] = field(default_factory=list)  # errors of the chat template, with the row

    @property
    def p99(self) -> int | None:
        rank = max(0, self.rows // 100 - 1)
        return self.overlong[rank] if rank < len(self.overlong) else None

    def describe(self) -> str:
        """Return, for example, ``412 of 7473 prompts are longer than 512 tokens (longest 701, 99th percentile 640)``."""
        at_least = "" if self.exact else "at least "
        p99 = f", 99th percentile {self.p99}" if self.p99 else ""
        return (
            f"{at_least}{len(self.overlong)} of {self.rows} prompts are longer than {self.limit} tokens "
            f"(longest {self.overlong[0]}{p99})"
        )


def prompt_lengths(
    rows: Sequence[Row],
    key: str,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    chat_template_kwargs: dict[str, Any] | None = None,
    extra: Sequence[int] | None = None,
) -> PromptLengths:
    """Measure the prompts in column ``key`` against ``limit`` tokens, with their chat template.

    ``extra`` are the tokens that each row's images take besides their placeholders.
    """
    extra = extra or [0] * len(rows)
    lengths = PromptLengths(len(rows), limit)
    frame = _frame(tokenizer, chat_template_kwargs)
    bounds = [(_bytes(row.values.get(key), frame) + extra[number], number) for number, row in enumerate(rows)]
    candidates = sorted((bound, number) for bound, number in bounds if bound > limit)[::-1]
    lengths.exact = len(candidates) <= MOST_TOKENIZED
    numbers = [number for _, number in candidates[:MOST_TOKENIZED]]
    chosen = [rows[number] for number in numbers]
    texts = _lengths(chosen, key, tokenizer, chat_template_kwargs, lengths)
    measured = []
    for number, row, length in zip(numbers, chosen, texts, strict=True):
        if length is not None and length + extra[number] > limit:
            measured.append((length + extra[number], row))
    measured.sort(key=lambda pair: -pair[0])
    lengths.overlong = [length for length, _ in measured]
    lengths.longest = measured[0][1].where if measured else ""
    lengths.with_system = sum(_has_system(row.values.get(key)) for _, row in measured)
    return lengths


def overlong_prompts(lengths: PromptLengths, policy: str) -> Iterator[Finding]:
    """Report the effect of ``data.truncation`` on prompts over the limit (R45), and lost system messages (R36)."""
    if not lengths.overlong:
        return
    share = len(lengths.overlong) / lengths.rows
    fix = f"data.max_prompt_length={lengths.overlong[0]}"
    if policy == "error":
        yield _finding("R45", lengths, "the run stops when it reads them", f"{fix}, or data.truncation=drop", True)
    elif policy in ("truncate", "left") and lengths.with_system:
        why = f"{lengths.with_system} of them begin with a system message, and truncation removes the beginning"
        yield _finding("R36", lengths, why, f"{fix}, or data.truncation=drop", True)
    elif share > 0.05:
        effect = "dropped" if policy == "drop" else f"truncated ({policy})"
        yield _finding("R45", lengths, f"{share:.0%} of the data are {effect}", fix, False)


def _finding(code: str, lengths: PromptLengths, why: str, fix: str, stops: bool) -> Finding:
    return Finding(DataError(lengths.describe(), why=why, fix=fix, where=lengths.longest, code=code), stops)


def _frame(tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any] | None) -> int:
    """Return the bytes that the template adds to a short conversation, including generation prompt and system message."""
    try:
        (text,) = render_texts(tokenizer, [[{"role": "user", "content": "x"}]], True, kwargs)
    except DataError:
        return 0
    return len(text.encode())


def _bytes(value: Any, frame: int) -> int:
    """Return an upper bound on the tokens of a prompt."""
    if isinstance(value, str):
        return _size(value) + 2
    if not isinstance(value, list):
        return 0
    if value and isinstance(value[0], int):
        return len(value)
    return frame + sum(_message_bytes(message) + _MESSAGE_BYTES for message in value)


def _message_bytes(message: Any) -> int:
    if isinstance(message, dict) and all(type(part) is str for part in message.values()):
        return sum(map(_size, message.values()))
    return _size(str(message))


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _lengths(
    rows: Sequence[Row],
    key: str,
    tokenizer: PreTrainedTokenizerBase,
    kwargs: dict[str, Any] | None,
    lengths: PromptLengths,
) -> list[int | None]:
    """Return the tokens of each prompt, None where the template refuses it."""
    values = [unwrapped(row.values[key]) for row in rows]
    texts: list[str | None] = [value if isinstance(value, str) else None for value in values]
    for number, (row, value) in enumerate(zip(rows, values, strict=True)):
        if isinstance(value, list) and value and isinstance(value[0], dict):
            try:
                texts[number] = render_texts(tokenizer, [value], True, kwargs)[0]
            except DataError as error:
                lengths.refused.append((row.where, error.what))
    rendered = [text for text in texts if text is not None]
    counts = iter(token_counts(tokenizer, rendered))
    return [
        next(counts) if text is not None else len(value) if value and isinstance(value[0], int) else None
        for text, value in zip(texts, values, strict=True)
    ]


def _has_system(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and value[0].get("role") == "system"


FEW_PAIRS, ONE_SIDED, LONG_PROMPT = 50, 0.7, 20
"""Pairs below which their shape tells nothing, the share that differs one way and is reported, characters of a prompt that is copied."""
_FENCED = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_MARKS = re.compile(r"^(?:#{1,6} |\s*[-*+] |\s*\d+[.)] |```|\|)|\*\*[^*\s][^*\n]*\*\*", re.MULTILINE)
UNITS = {"longer": "characters", "more formatted": "marks of headings, lists, tables, code and bold text"}
FIXES = {
    "longer": "; val/rewards/accuracies_longer against accuracies_shorter shows what length contributes",
    "more formatted": ", or answers without marks on both sides",
}
MANY_DUPLICATES = 0.05  # share of repeated prompts above which a warning is given


def duplicates(rows: Sequence[Row], key: str, image_key: str) -> Iterator[Finding]:
    """Warn when more than 5 % of the prompts in column ``key``, with their images, repeat an earlier row."""
    counts = Counter(same_prompt(row, key, image_key) for row in rows)
    repeated = len(rows) - len(counts)
    if repeated > MANY_DUPLICATES * len(rows):
        often, what = max(counts.values()), "conversations" if key == "messages" else "prompts"
        yield _warning(
            f"{repeated} of {len(rows)} training {what} ({repeated / len(rows):.0%}) repeat an earlier one "
            f"(one occurs {often} times)",
            why="repeated rows weigh more than others, and a pass over the data visits them several times",
            fix="`hone data clean FILE --drop-duplicates exact --out NEW.jsonl --rejected REST.jsonl`",
        )


def overlap(train: Sequence[Row], val: Sequence[Row], key: str, image_key: str) -> Iterator[Finding]:
    """Warn when prompts of the validation rows, with their images, occur in the training rows."""
    train_keys = {same_prompt(row, key, image_key) for row in train} if val else set()
    repeated = [row for row in val if same_prompt(row, key, image_key) in train_keys]
    if repeated:
        yield _warning(
            f"{len(repeated)} of {len(val)} validation prompts ({len(repeated) / len(val):.0%}) occur in the training data",
            why="validation would also measure memorization",
            fix="`hone data clean TRAIN --against VAL --out NEW.jsonl --rejected REST.jsonl`",
            where=repeated[0].where,
        )


def pair_shapes(
    rows: Sequence[Row], prompt_key: str, sides: tuple[str, str] = ("chosen", "rejected")
) -> Iterator[Finding]:
    """Warn when most chosen answers differ from the rejected ones in length or form, or repeat their prompt.

    Args:
        sides: columns of the chosen and of the rejected answer.
    """
    pairs = [tuple(answer_text(plain(row.values.get(side))) for side in sides) for row in rows]
    pairs = [pair for pair in pairs if all(pair)]
    if len(pairs) < FEW_PAIRS:
        return
    marks = [tuple(len(_MARKS.findall(_FENCED.sub("```", text))) for text in pair) for pair in pairs]
    for what, numbers in (("longer", [(len(a), len(b)) for a, b in pairs]), ("more formatted", marks)):
        more, less = (sum(sign * (a - b) > 0 for a, b in numbers) for sign in (1, -1))
        if max(more, less) > ONE_SIDED * len(pairs):
            side, other = sides if more > less else sides[::-1]
            totals = [sum(one) / len(numbers) for one in zip(*numbers, strict=True)]
            yield _warning(
                f"the {side} answer is {what} than the {other} one in {max(more, less)} of {len(pairs)} pairs "
                f"(on average {totals[0]:.4g} {sides[0]}, {totals[1]:.4g} {sides[1]}; {UNITS[what]})",
                why="a policy can learn this in place of what makes an answer good",
                fix=f"pairs of both kinds{FIXES[what]}",
                where=side,
            )
    questions = [answer_text(plain(row.values.get(prompt_key) or row.values.get(sides[0])), "user") for row in rows]
    copied = [row for row, text in zip(rows, questions, strict=True) if _repeats(row, sides[0], text)]
    if len(copied) > 0.05 * len(pairs):
        yield _warning(
            f"{len(copied)} of {len(pairs)} {sides[0]} answers repeat their whole prompt",
            why="the policy would learn to copy",
            fix="remove the prompt from these answers, or leave the rows out",
            where=copied[0].where,
        )


def _repeats(row: Row, column: str, prompt: str) -> bool:
    return len(prompt) >= LONG_PROMPT and prompt in answer_text(plain(row.values.get(column)))


def answer_text(value: Any, role: str = "assistant") -> str:
    """Return a text as it is, and of messages what those of a role say."""
    if isinstance(value, str):
        return value
    messages = [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
    return "\n".join(content_text(one.get("content")) for one in messages if one.get("role") == role)


def rare_sources(rows: Sequence[Row], key: str, batch_size: int) -> Iterator[Finding]:
    """Warn about data sources that occur in a batch less than once in ten steps."""
    counts = Counter(str(row.values.get(key)) for row in rows)
    rare = {name: count for name, count in counts.items() if count * batch_size < 0.1 * len(rows)}
    if rare:
        shown = ", ".join(f"'{name}' ({count})" for name, count in sorted(rare.items(), key=lambda item: item[1])[:5])
        yield _warning(
            f"{len(rare)} of {len(counts)} data sources are rare among {len(rows)} rows: {shown}",
            why=f"with {batch_size} prompts per step, the policy gets them less than once in ten steps",
            fix="more rows of them, or leave them out",
        )


def text_of(value: Any) -> str:
    """Return a prompt as text, equal for equal prompts."""
    return value if isinstance(value, str) else json.dumps(plain(value), sort_keys=True, default=str)


def same_prompt(row: Row, key: str, image_key: str, *, near: bool = False) -> int:
    """Return a number that is equal for equal prompts with equal images; for messages, role and content count.

    ``near``: also for prompts that differ in case, in blanks that part no words, or in the marks at their end.
    """
    value, images = row.values.get(key), plain(row.values.get(image_key))
    as_read = _without_form if near else str
    if isinstance(value, list) and all(
        isinstance(item, dict) and isinstance(item.get("content"), str) for item in value
    ):
        text = hash(tuple((item.get("role"), as_read(item["content"])) for item in value))
    else:
        text = hash(as_read(text_of(value)))
    return hash((text, _image_hash(images))) if images else text


def _without_form(text: str) -> str:
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return re.sub(r" (?=\W)|(?<=\W) ", "", text).rstrip(".!?。！？")


def _image_hash(value: Any) -> int:
    if isinstance(value, dict):
        return hash(tuple((name, _image_hash(value[name])) for name in sorted(value)))
    return hash(tuple(map(_image_hash, value)) if isinstance(value, list) else value)


def _warning(what: str, *, why: str, fix: str, where: str = "") -> Finding:
    return Finding(DataError(what, why=why, fix=fix, where=where, code="R47"), stops=False)


def source_names(rows: Sequence[Row], key: str) -> Iterator[Finding]:
    """Check that column ``key`` names the kind of problem, and that reward_model and extra_info are objects."""
    tally = Tally(len(rows))
    for row in rows:
        if not isinstance(row.values.get(key), str):
            tally.add(row, PROBLEMS["no_source"], f"{row.values.get(key)!r}")
        for name in ("reward_model", "extra_info"):
            value = row.values.get(name)
            if value is not None and not isinstance(value, dict):
                tally.add(row, PROBLEMS["no_object"], f"{name} is a {type(value).__name__}")
    yield from tally.findings()


def unknown_sources(
    rows: Sequence[Row], key: str, is_known: Callable[[str], bool], known: Collection[str]
) -> Iterator[Finding]:
    """Report data sources without a scorer; ``known`` are the names to suggest."""
    counts = Counter(str(row.values.get(key)) for row in rows if isinstance(row.values.get(key), str))
    for source, count in counts.most_common():
        if not is_known(source):
            what = f"data_source '{source}' ({count} rows) has no reward. {did_you_mean(source, known)}"
            what = f"{count} rows name no data source, so no scorer" if source == NO_SOURCE else what
            yield Finding(
                DataError(
                    what,
                    why="answers to these rows cannot be scored",
                    fix="write the column, or reward.scorer=NAME for all rows, or "
                    "reward.custom_reward_function.path=FILE.py",
                    where=key,
                    code="R43",
                ),
                stops=True,
            )


def ground_truths(
    rows: Sequence[Row],
    required: bool,
    complaint: Callable[[Row, Any], str | None] = lambda row, truth: None,
    *,
    answer_key: str | None = None,
    others: Callable[[], Collection[str]] = tuple,
) -> Iterator[Finding]:
    """Report rows without a ground truth, or with one that the scorer cannot read.

    Args:
        required: whether every row needs one (true for built-in scorers; a custom function may not need it).
        complaint: returns the problem with the ground truth of a row, or None.
        answer_key: column that the ground truths are of.
        others: returns columns that the rows lack, but the files have; one may hold the answers if no row has a ground truth.
    """
    tally, truths = Tally(len(rows)), [truth_of(row) for row in rows]
    problem = PROBLEMS["no_truth"] if required else PROBLEMS["some_truth"]
    if all(map(is_missing, truths)):
        if not required:
            return
        columns = {*others(), *(name for row in rows for name in row.values)}
        problem = replace(problem, fix=answer_fix(columns) or problem.fix)
    for row, truth in zip(rows, truths, strict=True):
        if is_missing(truth):
            tally.add(row, problem, f"column '{answer_key}'" if answer_key else "")
        elif reason := complaint(row, truth):
            unread = Problem(
                "R44",
                "the scorer cannot read reward_model.ground_truth",
                "every answer to these rows would count as an error",
                "write it as the scorer expects it",
            )
            tally.add(row, unread, f"{str(truth)[:60]!r}: {reason}")
    yield from tally.findings()


def truth_of(row: Row) -> Any:
    """Return the ground truth of a row; None without one."""
    reward = plain(row.values.get("reward_model"))
    return unwrapped(reward.get("ground_truth")) if isinstance(reward, dict) else None


def answer_fix(columns: Collection[str]) -> str:
    """Return how to name the right answers, if a column may hold them; else an empty text."""
    named = next((name for name in ANSWER_COLUMNS if name in columns), None)
    return f"data.answer_key={named}, if the column '{named}' holds the right answers" if named else ""


def is_missing(truth: Any) -> bool:
    """Return whether a ground truth is empty: null, NaN, an empty string or list."""
    return (
        truth is None
        or truth != truth
        or (isinstance(truth, str | list | dict) and not (truth.strip() if isinstance(truth, str) else truth))
    )


ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "observation", "ipython"})
_TOOL_ROLES = frozenset({"tool", "function", "observation", "ipython"})
_FORM = 'write messages as [{"role": "user", "content": "..."}, ...]'

_ROLE = Problem(
    "R42",
    "a message has a role that no chat template supports",
    "it is dropped or refused when the prompt is rendered",
    f"use one of {', '.join(sorted(ROLES - {'observation', 'ipython'}))}",
)


def prompts(rows: Sequence[Row], key: str) -> Iterator[Finding]:
    """Check the prompts in column ``key``: a string, token ids, or messages in a valid order."""
    tally = Tally(len(rows))
    for row in rows:
        value = unwrapped(row.values.get(key))
        if value is None or value in ("", []) or (isinstance(value, str) and not value.strip()):
            tally.add(row, PROBLEMS["no_prompt"], f"column '{key}'")
        elif not isinstance(value, str | list):
            tally.add(row, PROBLEMS["no_form"], f"a {type(value).__name__}")
        elif isinstance(value, list) and not all(type(item) is int for item in value):
            messages = _messages(tally, row, value, key)
            if messages and messages[-1]["role"] == "assistant":
                tally.add(row, PROBLEMS["answered"])
    yield from tally.findings()


def conversations(rows: Sequence[Row], key: str) -> Iterator[Finding]:
    """Check the conversations in column ``key``, which need an assistant message."""
    tally = Tally(len(rows))
    for row in rows:
        messages = _messages(tally, row, unwrapped(row.values.get(key)), key)
        if messages and all(message["role"] != "assistant" for message in messages):
            tally.add(row, PROBLEMS["no_answer"])
        elif messages and messages[-1]["role"] != "assistant":
            tally.add(row, PROBLEMS["open_end"])
    yield from tally.findings()


def _messages(tally: Tally, row: Row, value: Any, key: str) -> list[dict[str, Any]]:
    """Return the messages of a row, none if they are malformed, and count their problems."""
    try:
        messages = check_messages(value, where=row.where, column=key)
    except DataError as error:
        tally.add(row, PROBLEMS["no_messages"], error.what)
        return []
    for problem, detail in dict(_problems(messages)).items():
        tally.add(row, problem, detail)
    return messages


def _problems(messages: list[dict[str, Any]]) -> Iterator[tuple[Problem, str]]:
    called = False
    for index, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES:
            yield _ROLE, f"message {index} has the role '{role}'"
        if role in ("system", "developer") and index > 0 and messages[index - 1]["role"] not in ("system", "developer"):
            yield PROBLEMS["system"], f"message {index}"
        if role == "user" and index > 0 and messages[index - 1]["role"] == "user":
            yield PROBLEMS["two_users"], f"messages {index - 1} and {index}"
        if role == "user" and isinstance(message["content"], str) and not message["content"].strip():
            yield PROBLEMS["empty"], f"message {index}"
        if role == "assistant":
            called = bool(message.get("tool_calls")) or "call" in str(message["content"]).lower()
        if role in _TOOL_ROLES and not called:
            yield PROBLEMS["orphan"], f"message {index}"
