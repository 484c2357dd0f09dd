"""`hone data check`, `stats`, `inspect` and `convert`: datasets before training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hone.preflight.dataset import DatasetReport

Files = Annotated[list[str], typer.Argument(help="dataset files (parquet, json, jsonl)")]
PromptKey = Annotated[str, typer.Option(help="column of the prompt")]
MessagesKey = Annotated[str, typer.Option(help="column of whole conversations")]
RewardKey = Annotated[str, typer.Option("--reward-fn-key", help="column of the data source")]
ImageKey = Annotated[str, typer.Option(help="column of images")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


def check(
    files: Files,
    val: Annotated[list[str] | None, typer.Option(help="validation file; may be repeated")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="tokenizer or model directory, to measure lengths in tokens, those of images too")
    ] = None,
    max_prompt_length: Annotated[int, typer.Option(help="longest prompt in tokens")] = 512,
    truncation: Annotated[str, typer.Option(help="error, drop or truncate: action for longer prompts")] = "error",
    batch_size: Annotated[int, typer.Option(help="prompts per step", min=1)] = 64,
    max_tool_characters: Annotated[int, typer.Option(help="longest tool result in characters")] = 2000,
    custom_reward: Annotated[bool, typer.Option(help="a custom reward function scores the rows")] = False,
    gate: Annotated[
        str | None, typer.Option(help="least shares of tool calls, of parse, tool and schema: parse=0.99,schema=0.99")
    ] = None,
    prompt_key: PromptKey = "prompt",
    messages_key: MessagesKey = "messages",
    reward_fn_key: RewardKey = "data_source",
    image_key: ImageKey = "images",
    html: Annotated[Path | None, typer.Option(help="write a report with histograms into this file")] = None,
    as_json: Json = False,
) -> None:
    """Check every row: columns, types, roles, ground truths, data sources, lengths, duplicates, overlap, tools.

    Exit code 2 when a run would not start with these files.
    """
    import json

    from hone.apps.lab.data.inspection import html_report
    from hone.data.checks import read_gates
    from hone.data.overlong import check_policy
    from hone.insight.run_files import disk_errors
    from hone.preflight.dataset import DatasetOptions, check_dataset

    check_policy(truncation)
    options = DatasetOptions(
        prompt_key=prompt_key,
        messages_key=messages_key,
        reward_fn_key=reward_fn_key,
        image_key=image_key,
        tokenizer=tokenizer,
        max_prompt_length=max_prompt_length,
        truncation=truncation,
        batch_size=batch_size,
        max_tool_characters=max_tool_characters,
        custom_reward=custom_reward,
        gates=read_gates(gate),
    )
    report = check_dataset(files, val or [], options)
    if html is not None:
        with disk_errors(html):
            html.write_text(
                html_report(", ".join(files), report.findings, report.numbers, report.lengths), encoding="utf-8"
            )
    if as_json:
        result = {"kinds": report.kinds, "findings": [f.as_json() for f in report.findings], "numbers": report.numbers}
        typer.echo(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        _print_report(report, files)
        if html is not None:
            typer.echo(f"wrote {html}")
    if report.stops:
        raise typer.Exit(2)


def clean(
    files: Files,
    out: Annotated[Path, typer.Option("--out", help="file for the rows that pass: .jsonl or .parquet")],
    rejected: Annotated[Path, typer.Option("--rejected", help=".jsonl file for the others, each with its reasons")],
    max_tool_characters: Annotated[int, typer.Option(help="longest tool result in characters")] = 2000,
    allow: Annotated[
        list[str] | None, typer.Option(help="kind of defect that does not reject a row; may be repeated")
    ] = None,
    messages_key: MessagesKey = "messages",
    as_json: Json = False,
) -> None:
    """Write the rows whose tool calls are sound, and a list of the others with the reasons.

    Example: hone data clean train.jsonl --out clean.jsonl --rejected rejected.jsonl
    """
    import json

    from hone.apps.lab.data.inspection import clean_files
    from hone.insight.run_files import disk_errors

    with disk_errors(out):
        counts = clean_files(
            files, out, rejected, messages_key=messages_key, limit=max_tool_characters, allowed=allow or ()
        )
    if as_json:
        typer.echo(json.dumps(counts.as_json(), indent=2))
        return
    reasons = "".join(f"\n  {kind}: {count} rows" for kind, count in counts.reasons.most_common())
    typer.echo(f"{out}: {counts.kept} rows; {rejected}: {counts.rejected} rows{reasons}")


def stats(
    files: Files,
    prompt_key: PromptKey = "prompt",
    messages_key: MessagesKey = "messages",
    reward_fn_key: RewardKey = "data_source",
    as_json: Json = False,
) -> None:
    """Print statistics of a dataset: rows, columns, data sources, forms, lengths, turns, roles, ground truths."""
    import json

    from hone.data.files import read_all
    from hone.data.statistics import statistics

    numbers = statistics(read_all(files), prompt_key=prompt_key, messages_key=messages_key, reward_fn_key=reward_fn_key)
    typer.echo(json.dumps(numbers, indent=2, ensure_ascii=False) if as_json else "\n".join(_lines(numbers)))


def inspect(
    file: Annotated[str, typer.Argument(help="dataset file (parquet, json, jsonl)")],
    tokenizer: Annotated[str, typer.Option(help="tokenizer or model directory")],
    row: Annotated[int, typer.Option(help="number of the first row to show", min=0)] = 0,
    count: Annotated[int, typer.Option(help="rows to show", min=1)] = 1,
    conversation: Annotated[
        bool, typer.Option("--conversation", help="the whole conversation, as `hone sft` sees it")
    ] = False,
    ids: Annotated[bool, typer.Option("--ids", help="also list every token with its id")] = False,
    template: Annotated[
        str | None, typer.Option(help="Jinja file of a chat template to use instead of the tokenizer's")
    ] = None,
    prompt_key: PromptKey = "prompt",
    messages_key: MessagesKey = "messages",
    image_key: ImageKey = "images",
    as_json: Json = False,
) -> None:
    """Show the tokens of rows in alternating shades, special tokens in magenta, tokens that the loss counts in green."""
    import dataclasses
    import json

    from hone.apps.lab.data.inspection import inspect_row
    from hone.data.files import read_all
    from hone.data.row_images import RowImages
    from hone.data.tokenizer import load_tokenizer
    from hone.errors import DataError

    rows = read_all(file)
    if row >= len(rows):
        raise DataError(f"row {row} of {len(rows)} rows", where=file, fix=f"--row {len(rows) - 1} or less")
    loaded = load_tokenizer(tokenizer, custom_chat_template=template)
    reader = RowImages.for_directory(image_key, tokenizer, loaded)
    images = None if reader.any_model else reader
    for shown in rows[row : row + count]:
        pieces = inspect_row(
            shown,
            loaded,
            prompt_key=prompt_key,
            messages_key=messages_key,
            conversation=conversation,
            images=images,
        )
        if as_json:
            typer.echo(json.dumps({"row": shown.where, "tokens": [dataclasses.asdict(piece) for piece in pieces]}))
        else:
            _print_pieces(shown.where, pieces, ids)


def convert(
    files: Annotated[list[Path], typer.Argument(help="files to convert (parquet, json, jsonl, csv, tsv)")],
    out: Annotated[Path, typer.Option("--out", help="file to write: .parquet or .jsonl")],
    source: Annotated[str, typer.Option("--from", help="auto, sharegpt, openai, alpaca or csv")] = "auto",
    target: Annotated[str, typer.Option("--to", help="chat, string, multi-turn, multimodal or messages")] = "chat",
    data_source: Annotated[
        str, typer.Option(help="data source to write to every row; it selects the scorer")
    ] = "exact_match",
    question: Annotated[str, typer.Option(help="column of the question, for csv")] = "question",
    answer: Annotated[str, typer.Option(help="column of the answer, for csv")] = "answer",
    system: Annotated[str | None, typer.Option(help="system message to put first")] = None,
    ground_truth: Annotated[
        str, typer.Option(help="part of the answer to use as ground truth: whole, '####', boxed or last-number")
    ] = "whole",
) -> None:
    """Convert published datasets (ShareGPT, OpenAI messages, Alpaca, CSV) to Hone's columns."""
    from hone.data.convert import Conversion
    from hone.data.convert import convert as run

    options = Conversion(source, target, data_source, question, answer, system, ground_truth)
    written, left_out = run(files, out, options)
    reasons = "".join(f", {count} left out ({reason})" for reason, count in left_out.items())
    typer.echo(f"{out}: {written} rows{reasons}")


# -------------------------------------------------------------------------------------------------------------- output


def _print_report(report: DatasetReport, files: list[str]) -> None:
    typer.echo(f"{', '.join(files)}: for {' and '.join(report.kinds)}")
    typer.echo("\n".join(_lines(report.numbers)))
    for finding in report.findings:
        typer.echo(f"\n{finding.severity} {finding.error.render()}")
    if not report.findings:
        typer.echo("\nno problems in these rows")


def _lines(numbers: dict[str, Any]) -> list[str]:
    width = max(map(len, numbers))
    return [f"{name.replace('_', ' '):<{width}}  {_words(value)}" for name, value in numbers.items()]


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(
            f"{name} {entry:g}" if isinstance(entry, float) else f"{name} {entry}" for name, entry in value.items()
        )
    return str(value)


def _print_pieces(where: str, pieces: list[Any], ids: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    learned = sum(piece.learned for piece in pieces)
    console.print(Text(f"{where}: {len(pieces)} tokens, {learned} learned from", style="bold"))
    shades = ("on grey23", "on grey15")
    text = Text()
    for number, piece in enumerate(pieces):
        colour = "green" if piece.learned else "magenta" if piece.special else "default"
        text.append(piece.text, style=f"{colour} {shades[number % 2]}")
    console.print(text)
    if ids:
        for number, piece in enumerate(pieces):
            mark = "learned" if piece.learned else "special" if piece.special else ""
            console.print(Text(f"{number:>6} {piece.token:>8}  {piece.text!r:<24} {mark}"))
