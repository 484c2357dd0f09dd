"""Checks and statistics of a dataset without a configuration: all that its columns allow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hone.data import checks
from hone.data.chat import strings_to_messages
from hone.data.files import NO_SOURCE, BadLines, Row, read_all
from hone.data.row_images import RowImages
from hone.data.statistics import characters, mean_and_quantiles, statistics
from hone.data.tokenizer import load_tokenizer
from hone.errors import DataError, Finding, HoneError
from hone.preflight.rows import unknown_sources
from hone.preflight.rules import warning, with_code
from hone.preflight.template import rendered
from hone.progress import progress

KINDS = {"rl": "prompt", "sft": "messages", "prefer": "chosen"}  # uses of a dataset, and the column that each needs


@dataclass(frozen=True)
class DatasetOptions:
    """Options of `hone data check`."""

    prompt_key: str = "prompt"
    messages_key: str = "messages"
    reward_fn_key: str = "data_source"
    image_key: str = "images"
    tokenizer: str | None = None
    max_prompt_length: int = 512
    truncation: str = "error"
    batch_size: int = 64
    max_tool_characters: int = 2000
    custom_reward: bool = False
    gates: Mapping[str, float] = field(default_factory=dict)
    agents: tuple[str, ...] = (
        "single_turn",
        "single_turn_agent",
        "tool_agent",
        "interaction",
        "environment",
        "program",
    )
    answer_key: str | None = None
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"


@dataclass
class DatasetReport:
    """Result of a check of a dataset."""

    kinds: list[str]  # possible uses of the dataset
    findings: list[Finding]  # errors first, then warnings
    numbers: dict[str, Any]  # statistics of the checked files, see :func:`hone.data.statistics.statistics`
    # characters of each prompt or conversation for histograms; with a tokenizer also tokens
    lengths: dict[str, list[int]] = field(default_factory=dict)

    @property
    def stops(self) -> bool:
        return any(finding.stops for finding in self.findings)


def check_dataset(files: Sequence[str], val_files: Sequence[str], options: DatasetOptions) -> DatasetReport:
    """Check dataset files.

    Raises:
        DataError: a file cannot be read or has no usable column.
        ModelError: the tokenizer cannot be loaded.
    """
    bad_lines = BadLines()
    rows, val = (read_all(list(split), bad_lines, answer_key=options.answer_key) for split in (files, val_files))
    columns = {name for row in rows for name in row.values}
    names = {"rl": options.prompt_key, "sft": options.messages_key, "prefer": options.chosen_key}
    kinds = [kind for kind, column in names.items() if column in columns]
    if "rl" in kinds and options.reward_fn_key not in columns and len(kinds) > 1:
        kinds.remove("rl")  # the prompt belongs to a pair
    if not kinds:
        raise DataError(
            f"there is no column {', '.join(names.values())}; the columns are {', '.join(sorted(columns))}",
            where=str(files[0]),
            fix="--prompt-key, --messages-key or --chosen-key NAME; or convert other forms with `hone data convert`",
            code="R42",
        )
    findings = list(_unreadable_lines(bad_lines))
    if "rl" in kinds:
        for row in (*rows, *val):
            row.values.setdefault(options.reward_fn_key, NO_SOURCE)
    images = _row_images(options)
    findings += [*checks.media(rows, images.refused), *checks.media(val, images.refused)]
    shown = [checks.check_images(split, _columns(kinds, options), images) for split in (rows, val)]
    findings += [finding for check in shown for finding in check.findings()]
    lengths: dict[str, list[int]] = {}
    with progress("checking rows", (len(kinds) + 2) * len(rows)) as bar:
        for kind in kinds:
            findings += {"rl": _prompts, "sft": _conversations, "prefer": _pairs}[kind](rows, val, options)
            bar.advance(len(rows))
        if "rl" in kinds:
            lengths["prompt_characters"] = [characters(row.values.get(options.prompt_key)) for row in rows]
            findings += _tokens(rows, options, lengths, shown[0])
        elif "sft" in kinds:
            lengths["conversation_characters"] = [characters(row.values.get(options.messages_key)) for row in rows]
        if "sft" in kinds:
            findings += _renderings(rows, options, lengths, shown[0])
        bar.advance(len(rows))
        calls = checks.check_calls(
            rows,
            messages_key=options.messages_key,
            limit=options.max_tool_characters,
            pairs=(options.chosen_key, options.rejected_key),
        )
        findings += checks.call_findings(rows, calls, stops=False)
        findings += _gates(calls, options.gates)
        numbers = statistics(
            rows, prompt_key=options.prompt_key, messages_key=options.messages_key, reward_fn_key=options.reward_fn_key
        )
        numbers |= calls.numbers() if calls.calls or calls.defects else {}
        if shown[0].rows:
            numbers["images"] = {"rows": shown[0].rows, "images": len(shown[0].sizes)}
        numbers |= {name: mean_and_quantiles(values) for name, values in shown[0].measured().items()}
        bar.advance(len(rows))
    return DatasetReport(kinds, sorted(findings, key=lambda f: not f.stops), numbers, lengths)


def _row_images(options: DatasetOptions) -> RowImages:
    if options.tokenizer is None:
        return RowImages(options.image_key, None, any_model=True)
    return RowImages.for_directory(options.image_key, options.tokenizer, load_tokenizer(options.tokenizer))


def _columns(kinds: Sequence[str], options: DatasetOptions) -> tuple[str, ...]:
    """Return the columns whose messages have the places of a row's images."""
    if "rl" in kinds:
        return (options.prompt_key,)
    return (options.messages_key,) if "sft" in kinds else (options.prompt_key, options.chosen_key)


def _gates(calls: checks.CallCheck, gates: Mapping[str, float]) -> Iterator[Finding]:
    failed = calls.failed_gates(gates)
    if failed:
        yield _error(
            "R81",
            f"shares of {calls.calls} tool calls are below their gates: {', '.join(failed)}",
            why="the model learns what it sees, so its calls would fail as often",
            fix="`hone data clean FILES --out clean.jsonl --rejected rejected.jsonl` keeps the rows that pass",
            where="--gate",
        )


def _unreadable_lines(bad_lines: BadLines) -> Iterator[Finding]:
    if not bad_lines.count:
        return
    listed = "; ".join(f"{path} line {number}: {reason}" for path, number, reason in bad_lines.first)
    others = bad_lines.count - len(bad_lines.first)
    path, number, _ = bad_lines.first[0]
    yield _error(
        "R42",
        f"{bad_lines.count} lines are not JSON: {listed}" + (f"; and {others} more" if others else ""),
        where=f"{path}, line {number}",
        why="a run stops when it reads the first of them; the other rows were checked",
        fix="write these lines again, or remove them",
    )


def _prompts(rows: list[Row], val: list[Row], options: DatasetOptions) -> Iterator[Finding]:
    named = any(row.values[options.reward_fn_key] != NO_SOURCE for row in rows)  # else the run names scorer or function
    for split in (rows, val):
        yield from checks.prompts(split, options.prompt_key)
        yield from checks.source_names(split, options.reward_fn_key)
        yield from checks.tool_schemas(split, options.prompt_key)
        yield from checks.agent_names(split, options.agents)
        yield from checks.tool_names(split, ())
        truths = checks.ground_truths(split, not options.custom_reward, answer_key=options.answer_key)
        yield from (Finding(one.error, one.stops and (named or options.answer_key is not None)) for one in truths)
    if not options.custom_reward:
        sources = unknown_sources([*rows, *val], options.reward_fn_key)
        yield from (Finding(one.error, one.stops and named) for one in sources)
    yield from checks.duplicates(rows, options.prompt_key, options.image_key)
    yield from checks.overlap(rows, val, options.prompt_key, options.image_key)
    yield from checks.rare_sources(rows, options.reward_fn_key, options.batch_size)
    if len(rows) < options.batch_size:
        few = warning(
            f"{len(rows)} rows do not fill one batch of {options.batch_size}",
            why="incomplete batches are dropped, so an epoch would have 0 steps",
            fix=f"data.train_batch_size={len(rows)} or less (here --batch-size), or more data",
            where="data.train_batch_size",
        )
        yield with_code(few.error, "R46", stops=False)


def _conversations(rows: list[Row], val: list[Row], options: DatasetOptions) -> Iterator[Finding]:
    for split in (rows, val):
        yield from checks.conversations(split, options.messages_key)
    yield from checks.duplicates(rows, options.messages_key, options.image_key)
    yield from checks.overlap(rows, val, options.messages_key, options.image_key)


def _renderings(
    rows: list[Row], options: DatasetOptions, lengths: dict[str, list[int]], images: checks.ImageCheck
) -> Iterator[Finding]:
    """Yield what the chat template refuses or leaves out in conversations without images, and record their lengths in tokens."""
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    if tokenizer is None or not tokenizer.chat_template:
        return
    plain_rows = [row for number, row in enumerate(rows) if number not in images.placed]
    tried = list(rendered(plain_rows, tokenizer, options.messages_key, "tools", {}))
    lengths["conversation_tokens"] = [one.tokens for one in tried if one.problem is None]
    refused = [(one.row.where, one.problem) for one in tried if one.problem is not None]
    yield from _refused(refused, f"{len(tried)} conversations")


def _pairs(rows: list[Row], val: list[Row], options: DatasetOptions) -> Iterator[Finding]:
    chosen, rejected = options.chosen_key, options.rejected_key
    for split in (rows, val):
        unusable = [row for row in split if row.values.get(chosen) == row.values.get(rejected)]
        if unusable:
            yield _error(
                "R42",
                f"{len(unusable)} of {len(split)} rows: {chosen} and {rejected} are equal, or one is missing",
                why="equal responses cannot be compared",
                fix="remove these rows",
                where=unusable[0].where,
            )
        yield from _refused(list(_refused_pairs(split, options)), f"{len(split)} rows")
    yield from checks.pair_shapes(rows, options.prompt_key, (chosen, rejected))


def _refused(problems: list[tuple[str, DataError]], checked: str) -> Iterator[Finding]:
    """Yield how many are refused, with the place and the error of the first."""
    if problems:
        where, first = problems[0]
        what = f"{len(problems)} of {checked} are refused; the first: {first.what}"
        yield _error("R39", what, why=first.why, fix=first.fix, where=where)


def _error(code: str, what: str, **parts: str) -> Finding:
    return Finding(DataError(what, code=code, **parts), stops=True)


def _refused_pairs(rows: list[Row], options: DatasetOptions) -> Iterator[tuple[str, DataError]]:
    """Yield the rows of preferences that training would refuse; without a tokenizer only those of another form."""
    from hone.data.preferences import PreferenceColumns, check_prompts, sides_of_row
    from hone.data.responses import render_sides

    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    columns = PreferenceColumns(options.prompt_key, options.chosen_key, options.rejected_key)
    for row in rows:
        if row.values.get(columns.chosen) == row.values.get(columns.rejected):
            continue
        try:
            sides = list(sides_of_row(row, columns))
            if tokenizer is not None and (tokenizer.chat_template or not any(side.is_chat for side in sides)):
                check_prompts(render_sides(sides, tokenizer), row.where)
        except DataError as problem:
            yield row.where, problem


def _tokens(
    rows: list[Row], options: DatasetOptions, lengths: dict[str, list[int]], images: checks.ImageCheck
) -> list[Finding]:
    """Return the findings about lengths in tokens with the chat template, and record the lengths; none without a tokenizer."""
    if options.tokenizer is None:
        return []
    tokenizer, key = load_tokenizer(options.tokenizer), options.prompt_key
    numbered = [(number, row) for number, row in enumerate(rows) if row.values.get(key)]
    extra = [images.extra_tokens.get(number, 0) for number, _ in numbered]
    with_prompt = [
        replace(row, values={**row.values, key: images.placed.get(number, row.values[key])}) for number, row in numbered
    ]
    strings_to_messages(with_prompt, key, tokenizer)
    try:
        measured = checks.prompt_lengths(with_prompt, key, tokenizer, options.max_prompt_length, extra=extra)
        all_lengths = checks.prompt_lengths(with_prompt[:2000], key, tokenizer, 0, extra=extra)
    except HoneError as error:
        return [Finding(error, stops=True)]
    lengths["prompt_tokens"] = all_lengths.overlong
    findings = list(checks.overlong_prompts(measured, options.truncation))
    if measured.refused:
        where, message = measured.refused[0]
        fix = "check the roles and their order, or use another chat template"
        findings.append(_error("R39", message, where=where, fix=fix))
    return findings
