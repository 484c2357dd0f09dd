"""`hone learn`: a course whose boxes check themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hone.cli.options import new_group

if TYPE_CHECKING:
    from hone.apps.learn.progress import Progress

app = new_group(
    "Learn reinforcement learning for language models by doing: boxes with a text, a task, and a check of your files."
)

Language = Annotated[
    str, typer.Option("--language", help="language of the texts: en, or another that exists", envvar="HONE_LANGUAGE")
]
Name = Annotated[str | None, typer.Argument(metavar="[BOX]", help="a box; by default the next one")]


@app.command("list")
def list_boxes(language: Language = "en") -> None:
    """List the entries, and every box with its part."""
    from hone.apps.learn.progress import ENTRIES
    from hone.apps.learn.texts import PARTS, boxes

    for entry in ENTRIES.values():
        typer.echo(f"hone learn start {entry.name:8} {entry.title}: {len(entry.stops)} boxes")
    for part, title in PARTS.items():
        typer.echo(f"\n{title}")
        for box in boxes().values():
            if box.part == part:
                typer.echo(f"  {box.name:20} {box.text(language).title}")


@app.command("start")
def start(entry: Annotated[str, typer.Argument(help="new, sft or agents; see `hone learn list`")]) -> None:
    """Start the course in this folder, or change the entry; passed boxes stay passed."""
    from hone.apps.learn.progress import FILE, FOLDER, Progress, find_entry, read_progress, write_progress

    chosen = find_entry(entry)
    progress = read_progress() if (FOLDER / FILE).exists() else Progress(entry)
    progress.entry = entry
    write_progress(progress)
    typer.echo(f"{FOLDER / FILE}: {chosen.title}, {len(chosen.stops)} boxes over 30 days")
    typer.echo("Read the next box with `hone learn next`; work in this folder, and check with `hone learn check`.")


@app.command("next")
def next_box(box: Name = None, language: Language = "en") -> None:
    """Show the text of the next box: two minutes of reading, and a task."""
    from hone.apps.learn.progress import NEEDS, read_progress
    from hone.apps.learn.texts import find_box

    progress = read_progress()
    name = box or progress.current
    if name is None:
        typer.echo(f"All {len(progress.way.stops)} boxes of this entry are passed.")
        return
    text = find_box(name).text(language)
    if text.language != language:
        typer.echo(f"(There is no text in {language} for this box yet; this is the English one.)\n", err=True)
    days = {stop.box: stop for stop in progress.way.stops}
    place = f", week {days[name].week}, day {days[name].day}" if name in days else ""
    typer.secho(f"{text.title}  ({name}{place})", bold=True)
    if NEEDS.get(name, name) not in {name, *progress.passed}:
        typer.echo(f"It uses the results of the box {NEEDS[name]}, which is not passed.")
    for section, (heading, body) in text.sections.items():
        if section != "Hint":
            typer.secho(f"\n{heading}", bold=True)
            typer.echo(body)
    typer.echo("\n`hone learn check` checks it, `hone learn hint` helps.")


@app.command("hint")
def hint(box: Name = None, language: Language = "en") -> None:
    """Show the hint of the next box."""
    from hone.apps.learn.progress import read_progress
    from hone.apps.learn.texts import find_box

    name = box or read_progress().current
    typer.echo(find_box(name).text(language).body("Hint") if name else "All boxes of this entry are passed.")


@app.command("check")
def check(
    box: Name = None,
    answer: Annotated[
        list[str] | None, typer.Option("--answer", help="answer to a question of the quiz; repeat it in their order")
    ] = None,
    language: Language = "en",
) -> None:
    """Check the next box: your files, your runs, and your answers to its quiz.

    Exit code 2 with what was expected and what was seen when the box is not done. Example: hone learn check --answer 0.25
    """
    import sys

    from hone.apps.learn.progress import read_progress, write_progress
    from hone.apps.learn.work import run_check

    progress = read_progress()
    name = box or progress.current
    if name is None:
        _done(progress)
        return
    ask = _prompting(name, language) if sys.stdin.isatty() else None
    measured = run_check(name, answer or (), ask)
    progress.add(name, measured)
    write_progress(progress)
    typer.echo(f"{name}: passed. {measured}")
    _done(progress)


def _prompting(name: str, language: str):
    """Return a function that asks a question at the terminal, in the reader's language."""
    from hone.apps.learn.texts import find_box

    questions = find_box(name).text(language).questions

    def ask(question: str) -> str:
        number = int(question.partition(".")[0])
        return typer.prompt(f"{number}. {questions[number - 1]}")

    return ask


def _done(progress: Progress) -> None:
    ahead = progress.current
    whole = len(progress.way.stops)
    passed = sum(name in progress.passed for name in progress.way.boxes)
    typer.echo(f"{passed} of {whole} boxes. " + (f"Next: {ahead}" if ahead else "That was the last one."))


@app.command("progress")
def show_progress(language: Language = "en") -> None:
    """Show which boxes are passed, by week and day, with what was measured."""
    from hone.apps.learn.progress import read_progress
    from hone.apps.learn.texts import find_box

    progress = read_progress()
    week = 0
    for stop in progress.way.stops:
        if stop.week != week:
            week = stop.week
            typer.secho(f"Week {week}", bold=True)
        passed = progress.passed.get(stop.box)
        title = find_box(stop.box).text(language).title
        typer.echo(f"  [{'x' if passed else ' '}] day {stop.day:2}  {stop.box:20} {title}")
        if passed:
            typer.echo(f"{'':16}{passed['at'][:10]}: {passed['measured']}")
    _done(progress)
