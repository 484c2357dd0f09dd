"""`hone data`: make, check, convert and inspect datasets; train tokenizers; test chat templates; mine preference pairs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hone.cli.options import AnswerKey, DataKeys, Json, PromptKey, RewardKey, new_group
from hone.cli.output import print_json
from hone.errors import ConfigError, DataError
from hone.insight.run_files import disk_errors

if TYPE_CHECKING:
    from hone.apps.lab.data.check import DatasetReport


app = new_group(
    "Make, check, convert and inspect datasets; train tokenizers; test chat templates; mine preference pairs."
)


@app.command("make")
def make(
    task: Annotated[
        str,
        typer.Argument(
            help="arithmetic, digit_sequence, countdown, programs, shapes, reasoning_gym:<dataset>, calculator, multi_hop, book, search_qa, or "
            "environment:<name>"
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="directory for train.parquet and val.parquet")],
    options: Annotated[list[str] | None, typer.Argument(help="options of the task, key=value")] = None,
    size: Annotated[int, typer.Option(help="training problems")] = 10000,
    val_size: Annotated[int, typer.Option(help="held-out problems")] = 256,
    seed: Annotated[int, typer.Option(help="seed of the problems")] = 1,
) -> None:
    """Make a dataset of problems with checkable answers; no network is needed."""
    from hone.agents import tasks
    from hone.data.tasks.make import make_task, write_task

    assert tasks.__all__  # importing them registers them
    train, val = write_task(make_task(task, options or []), out, size=size, val_size=val_size, seed=seed)
    typer.echo(f"{train}: {size} problems\n{val}: {val_size} problems, none of them in the training data")


@app.command("tokenizer")
def tokenizer(
    files: Annotated[list[Path], typer.Option("--files", help="dataset file to learn from; may be repeated")],
    out: Annotated[Path, typer.Option("--out", help="tokenizer directory to write")],
    vocab_size: Annotated[int, typer.Option(help="total number of tokens, at least 260")] = 512,
    template: Annotated[
        str,
        typer.Option(
            help="chat template: chatml, chatml_tools (shows tools), in the shape of a family's qwen3, function_gemma or harmony "
            "(GPT-OSS), or a Jinja file"
        ),
    ] = "chatml",
) -> None:
    """Train a small byte-level BPE tokenizer (each digit a token) with a chat template."""
    from hone.apps.lab.data.inspection import train_tokenizer

    trained = train_tokenizer(files, out, vocab_size=vocab_size, template=template)
    typer.echo(f"{out}: {len(trained)} tokens, end of sequence {trained.eos_token}, chat template {template}")


@app.command("pairs")
def pairs(
    run: Annotated[Path, typer.Argument(help="run directory of `hone train` with rollouts")],
    out: Annotated[Path, typer.Option("--out", help="directory for train.parquet and val.parquet")],
    margin: Annotated[float, typer.Option(help="least difference of scores in a pair")] = 0.0,
    val_share: Annotated[float, typer.Option(help="share of the prompts held out for validation")] = 0.1,
    per_prompt: Annotated[int, typer.Option(help="most pairs of one prompt")] = 4,
    form: Annotated[
        str | None,
        typer.Option("--as", help="messages, or tokens (exactly those sampled); by default messages where prompts are"),
    ] = None,
    seed: Annotated[int, typer.Option(help="seed of the split")] = 1,
) -> None:
    """Make preference pairs for `hone prefer` from a run's rollouts: good and bad answers to one prompt."""
    from hone.apps.lab.rewards.comparison import mine_pairs, write_pairs

    mined = mine_pairs(run, margin=margin, val_share=val_share, per_prompt=per_prompt, form=form, seed=seed)
    left_out = "".join(f", {count} left out ({reason})" for reason, count in mined.left_out.items())
    typer.echo(f"{run}: {mined.samples} answers to {mined.prompts} prompts{left_out}")
    for path, rows in zip(write_pairs(mined, out), (mined.train, mined.val), strict=False):
        typer.echo(f"{path}: {len(rows)} pairs of {len({row['uid'] for row in rows})} prompts")


Files = Annotated[list[str], typer.Argument(help="dataset files (parquet, json, jsonl, csv)")]
MessagesKey = Annotated[str, typer.Option(help="column of whole conversations")]
ImageKey = Annotated[str, typer.Option(help="column of images")]


@app.command(cls=DataKeys)
def check(
    files: Files,
    val: Annotated[list[str] | None, typer.Option(help="validation file; may be repeated")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="tokenizer or model directory, to measure lengths in tokens, those of images too")
    ] = None,
    max_prompt_length: Annotated[int, typer.Option(help="longest prompt in tokens")] = 512,
    truncation: Annotated[
        str, typer.Option(help="error, drop, or truncate at the left, right or middle: action for longer prompts")
    ] = "error",
    batch_size: Annotated[int, typer.Option(help="prompts per step", min=1)] = 64,
    max_tool_characters: Annotated[int, typer.Option(help="longest tool result in characters")] = 2000,
    custom_reward: Annotated[
        bool, typer.Option("--custom-reward", help="a custom reward function scores the rows")
    ] = False,
    gate: Annotated[
        str | None, typer.Option(help="least shares of tool calls, of parse, tool and schema, with commas: parse=0.99")
    ] = None,
    prompt_key: PromptKey = "prompt",
    answer_key: AnswerKey = None,
    messages_key: MessagesKey = "messages",
    reward_fn_key: RewardKey = "data_source",
    image_key: ImageKey = "images",
    chosen_key: Annotated[str, typer.Option(help="column of the better answer of a pair")] = "chosen",
    rejected_key: Annotated[str, typer.Option(help="column of the worse answer of a pair")] = "rejected",
    html: Annotated[Path | None, typer.Option(help="write a report with histograms into this file")] = None,
    as_json: Json = False,
) -> None:
    """Check every row: columns, types, roles, ground truths, data sources, lengths, duplicates, overlap, tools.

    Exit code 2 when a run would not start with these files.
    """
    from hone.apps.lab.data.check import DatasetOptions, check_dataset
    from hone.apps.lab.data.inspection import html_report
    from hone.data.checks import read_gates
    from hone.data.tokenizing import check_policy

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
        answer_key=answer_key,
        chosen_key=chosen_key,
        rejected_key=rejected_key,
    )
    report = check_dataset(files, val or [], options)
    if html is not None:
        with disk_errors(html):
            html.write_text(
                html_report(", ".join(files), report.findings, report.numbers, report.lengths), encoding="utf-8"
            )
    if as_json:
        result = {"kinds": report.kinds, "findings": [f.as_json() for f in report.findings], "numbers": report.numbers}
        print_json(result)
    else:
        _print_report(report, files)
        if html is not None:
            typer.echo(f"wrote {html}")
    if report.stops:
        raise typer.Exit(2)


@app.command(cls=DataKeys)
def clean(
    files: Files,
    out: Annotated[Path, typer.Option("--out", help="file for the rows that pass: .jsonl or .parquet")],
    rejected: Annotated[Path, typer.Option("--rejected", help=".jsonl file for the others, each with its reasons")],
    max_tool_characters: Annotated[int, typer.Option(help="longest tool result in characters")] = 2000,
    allow: Annotated[
        list[str] | None, typer.Option(help="kind of defect that does not reject a row; may be repeated")
    ] = None,
    drop_duplicates: Annotated[
        str | None, typer.Option(help="exact or near (case, blanks, marks at the end): leave out repeated prompts")
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(help="file whose prompts are left out, as of validation; may be repeated")
    ] = None,
    max_answer_characters: Annotated[int | None, typer.Option(help="longest right answer or last message")] = None,
    language: Annotated[
        str | None,
        typer.Option(help="en, zh, ru, ...: prompts and answers with most letters of another script are rejected"),
    ] = None,
    prompt_key: PromptKey = "prompt",
    answer_key: AnswerKey = None,
    messages_key: MessagesKey = "messages",
    as_json: Json = False,
) -> None:
    """Write the rows with sound prompts, answers and tool calls, and a list of the others with the reasons.

    Example: hone data clean train.jsonl --drop-duplicates exact --out clean.jsonl --rejected rejected.jsonl
    """
    from hone.apps.lab.data.inspection import clean_files

    with disk_errors(out):
        counts = clean_files(
            files,
            out,
            rejected,
            messages_key=messages_key,
            limit=max_tool_characters,
            allowed=allow or (),
            prompt_key=prompt_key,
            answer_key=answer_key,
            repeated=drop_duplicates,
            against=against or (),
            longest=max_answer_characters,
            language=language,
        )
    if as_json:
        print_json(counts.as_json())
        return
    reasons = "".join(f"\n  {kind}: {count} rows" for kind, count in counts.reasons.most_common())
    typer.echo(f"{out}: {counts.kept} rows; {rejected}: {counts.rejected} rows{reasons}")


@app.command(cls=DataKeys)
def split(
    files: Files,
    out: Annotated[Path, typer.Option("--out", help="directory for train and val, parquet of parquet, else jsonl")],
    val_share: Annotated[float, typer.Option(help="share of the rows held out")] = 0.1,
    by: Annotated[
        str,
        typer.Option(
            help="what no two parts share: template (prompts equal but for numbers, quotations and capitalised words), prompt, or a "
            "column such as extra_info.kind"
        ),
    ] = "template",
    seed: Annotated[int, typer.Option(help="seed of the order of groups")] = 1,
    prompt_key: PromptKey = "prompt",
) -> None:
    """Hold out rows whose template, prompt or column no training row has, so that validation shows what was learned, not remembered."""
    from hone.apps.lab.data.inspection import split_files

    with disk_errors(out):
        parts = split_files(files, out, share=val_share, by=by, prompt_key=prompt_key, seed=seed)
    held_out = parts.val / (parts.train + parts.val)
    typer.echo(f"{out}/train{parts.ending}: {parts.train} rows of {parts.train_groups} groups by {by}")
    typer.echo(f"{out}/val{parts.ending}: {parts.val} rows of {parts.val_groups} others, {held_out:.1%} of all")
    if abs(held_out - val_share) > 0.25 * val_share:
        typer.echo(f"not {val_share:.1%}: groups are kept whole; a finer --by has smaller ones")


@app.command(cls=DataKeys)
def stats(
    files: Files,
    prompt_key: PromptKey = "prompt",
    answer_key: AnswerKey = None,
    messages_key: MessagesKey = "messages",
    reward_fn_key: RewardKey = "data_source",
    as_json: Json = False,
) -> None:
    """Print statistics of a dataset: rows, columns, data sources, forms, lengths, turns, roles, ground truths."""
    from hone.data.files import read_all
    from hone.data.statistics import statistics

    rows = read_all(files, answer_key=answer_key)
    numbers = statistics(rows, prompt_key=prompt_key, messages_key=messages_key, reward_fn_key=reward_fn_key)
    if as_json:
        print_json(numbers)
    else:
        typer.echo("\n".join(_lines(numbers)))


@app.command(cls=DataKeys)
def inspect(
    file: Annotated[str, typer.Argument(help="dataset file (parquet, json, jsonl, csv)")],
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


@app.command()
def convert(
    files: Annotated[list[Path], typer.Argument(help="files to convert (parquet, json, jsonl, csv, tsv)")],
    out: Annotated[Path, typer.Option("--out", help="file to write: .parquet or .jsonl")],
    source: Annotated[
        str, typer.Option("--from", help="auto, sharegpt, openai, alpaca, trl (prompt and completion) or csv")
    ] = "auto",
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
    """Convert published datasets (ShareGPT, OpenAI messages, Alpaca, TRL, CSV) to Hone's columns."""
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


@app.command()
def template(
    model: Annotated[Path, typer.Argument(help="model or tokenizer directory")],
    tools: Annotated[bool, typer.Option("--tools/--no-tools", help="also test tools, calls and results")] = True,
    custom_chat_template: Annotated[
        str | None, typer.Option("--template", help="Jinja file to use instead of the tokenizer's template")
    ] = None,
    renderer: Annotated[str, typer.Option(help="as multi_turn.renderer: auto, text_tools, or a family")] = "auto",
    parser: Annotated[str, typer.Option("--format", help="as multi_turn.format: auto, or a tool-call format")] = "auto",
    kwargs: Annotated[
        str, typer.Option("--kwargs", help='extra arguments of the template as JSON, like {"enable_thinking": false}')
    ] = "{}",
    as_json: Json = False,
) -> None:
    """Test whether a chat template is append-only, ends turns, shows tools and results, and has parseable calls.

    Exit code 2 when the template cannot be used to train on conversations.
    """
    import json

    from hone.apps.lab.data.verdict import examine
    from hone.data.tokenizer import load_tokenizer, stop_tokens

    form = "--kwargs '{\"enable_thinking\": false}'"
    try:
        arguments = json.loads(kwargs)
    except ValueError as error:
        raise ConfigError(f"--kwargs is not JSON: {error}", fix=form) from error
    if not isinstance(arguments, dict):
        raise ConfigError(f"--kwargs is {kwargs}, not a JSON object", fix=form)
    tokenizer = load_tokenizer(model, custom_chat_template=custom_chat_template)
    report = examine(
        tokenizer,
        stop_tokens(tokenizer, str(model)),
        tools=tools,
        renderer=renderer,
        parser=parser,
        template_kwargs=arguments,
    )
    if as_json:
        print_json(report.as_json())
    else:
        typer.echo(f"renderer {report.renderer}, tool-call format {report.parser}")
        for check in report.checks:
            typer.echo(f"{check.outcome.value:<6} {check.name}: {check.detail}")
        typer.echo(f"verdict: {report.verdict}")
    if not report.usable:
        raise typer.Exit(2)
