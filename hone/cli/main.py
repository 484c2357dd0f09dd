"""The ``hone`` command.

A command has a line in :data:`COMMANDS`, which names a module of this folder, and in it a function, or a group of commands
(:func:`hone.cli.options.new_group`).

Modules import heavy packages (torch, transformers, hydra) inside the command's function. A command with another exit code than 0
raises ``typer.Exit(code)``. A user's mistake is raised as a :class:`hone.errors.HoneError`; this module shows it once, without a
traceback.

Exit codes: 0 success; 1 a bug in Hone (with traceback); 2 a user's mistake; 3 a process of the run died or hung, and the run
can be resumed; 4 an alert or `hone stop` ended a run, or `hone gate` refuses a model; 130 interrupted.
"""

from __future__ import annotations

import functools
import importlib
import logging
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from hone import __version__
from hone.errors import HoneError
from hone.startup import collect_rarely, interrupt, quiet_imports


class Entry(NamedTuple):
    """Place of a command (``module:name``), and its line in ``--help``."""

    place: str
    help: str


def load(place: str) -> Any:
    """Import the module of a command and return the command or group."""
    module, _, name = place.partition(":")
    return _click(getattr(importlib.import_module(f"hone.cli.{module}"), name))


@functools.cache
def _click(command: Any) -> Any:
    """Return the command of a function, or the group of a Typer application."""
    if not isinstance(command, typer.Typer):
        from hone.cli.options import DataKeys

        single = typer.Typer(add_completion=False)
        single.command(cls=DataKeys if command.__name__ == "evaluate" else None)(command)
        command = single
    return get_command(command)


GROUPS = {
    "Train": {
        "train": Entry("programs:train", "Train a model by reinforcement learning."),
        "sft": Entry("programs:sft", "Fine-tune a model on conversations."),
        "prefer": Entry("programs:prefer", "Train a model on preferences (dpo, kto, orpo, ...)."),
        "reward-model": Entry("programs:reward_model", "Train a reward model on preference pairs."),
        "sweep": Entry("trials:sweep", "Train a grid or random draws of a configuration, and rank them."),
        "twins": Entry("trials:twins", "Train two configurations in pairs until one is better, or they are equal."),
    },
    "Use a model": {
        "generate": Entry("answers:generate", "Let a model answer prompts."),
        "chat": Entry("answers:chat", "Talk with a model, turn by turn."),
        "eval": Entry("answers:evaluate", "Measure the accuracy of a model on a dataset."),
        "serve": Entry("serve:serve", "Serve a model with an OpenAI-compatible API."),
        "export": Entry("models:export", "Write a checkpoint's model as a Hugging Face directory."),
        "gate": Entry("release:gate", "Decide by a suite of checks whether a model may be released."),
        "release": Entry("release:app", "Keep models that passed their gate, serve them, and roll back."),
        "engines": Entry("engines:app", "Install, check, list and serve external inference engines."),
        "models": Entry("models:app", "Bring a pretrained model to this machine."),
        "init": Entry("models:init", "Make a small model with random weights."),
    },
    "Data and rewards": {
        "data": Entry("data:app", "Make, check, convert and inspect datasets."),
        "reward": Entry("reward:app", "Try a reward on answers of known quality."),
        "env": Entry("environments:app", "List the environments that answer a model's turns."),
    },
    "Look into a run": {
        "view": Entry("looking:view", "Look at runs in a browser: curves, answers, tokens, episodes."),
        "runs": Entry("runs:app", "List, show, compare and bisect runs; sheets and samples."),
        "profile": Entry("profile:profile", "Show where the time of a run goes, and what to change first."),
        "stop": Entry("run_control:stop", "Stop a run after its step, or at once with its tools."),
        "audit": Entry("looking:audit", "Show and verify the log of an agent's tool calls."),
        "archive": Entry("looking:app", "Import rollouts of other programs, and export those of a run."),
    },
    "Repeat a step or an episode": {
        "replay": Entry("stored:replay", "Run a stored step again, from any of its stages, and compare."),
        "trace": Entry("stored:trace", "Follow one prompt of a stored step, from its tokens to the loss."),
        "what-if": Entry("stored:what_if", "Compute a stored step again with other methods, and compare."),
        "oracle": Entry("stored:oracle", "Recompute a saved micro-batch in float64, and find where the run diverges."),
        "episode": Entry("stored:app", "Continue a recorded episode from any of its turns."),
    },
    "Before a run": {
        "plan": Entry("plan:plan", "Predict memory and step time of a run, and find its placement."),
        "doctor": Entry("doctor:doctor", "Check this machine: versions, devices, limits, packages, credentials."),
        "config": Entry("config:app", "Show and explain configuration keys."),
        "explain": Entry("explain:explain", "Explain a key, a metric, a code, a method or a term of the field."),
        "algorithms": Entry("explain:app", "List the methods, show one, recommend one."),
        "learn": Entry("learn:app", "Learn by doing: a course whose boxes check your files."),
    },
}
"""The commands under the headings of ``hone --help``."""
COMMANDS = {name: entry for commands in GROUPS.values() for name, entry in commands.items()}


def command_words() -> dict[str, list[str]]:
    """Return the options of each command, and the commands of each group, by words such as ``runs show``."""

    def walk(command: Any, words: str) -> Iterator[tuple[str, list[str]]]:
        below = getattr(command, "commands", {})
        options = [name for option in command.params for name in (*option.opts, *option.secondary_opts)]
        yield words, [*below, *(name for name in options if name.startswith("--")), "--help"]
        for name, inner in below.items():
            yield from walk(inner, f"{words} {name}")

    return dict(entry for name in COMMANDS for entry in walk(load(COMMANDS[name].place), name))


LOOKING = ("runs", "archive", "profile", "export", "audit")
"""Commands that run no code of a run; those with `--trust` run what is trusted."""


class HoneGroup(TyperGroup):
    """The top-level commands: a placeholder with its line of help, until the command runs and its module is imported."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the placeholder of a command; None for an unknown name."""
        entry = COMMANDS.get(cmd_name)
        heading = next((heading for heading, commands in GROUPS.items() if cmd_name in commands), None)
        return TyperCommand(cmd_name, help=entry.help, rich_help_panel=heading) if entry else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import and return the command that ``args`` names."""
        if args[0] in LOOKING:
            from hone.user_code import looking

            ctx.with_resource(looking())
        self.commands = {name: self.get_command(ctx, name) for name in COMMANDS}  # for suggestions of names
        name, stand_in, rest = super().resolve_command(ctx, args)
        return (name, load(COMMANDS[name].place), rest) if stand_in and name else (name, stand_in, rest)


app = typer.Typer(cls=HoneGroup, add_completion=False, no_args_is_help=True)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hone {__version__}")
        raise typer.Exit


@app.callback()
def hone(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Also show the traceback of a user error; may follow the command.")
    ] = False,
) -> None:
    """Reinforcement learning for language models, from a laptop CPU to a cluster of GPUs."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit; a user's mistake gives one message, no traceback, and exit code 2."""
    collect_rarely()
    arguments, debug = _without_debug(sys.argv[1:] if arguments is None else arguments)
    log_to_stderr()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background jobs ignore it
        signal.signal(signal.SIGINT, interrupt)
    command: Any = typer.main.get_command(app)
    try:
        command.main(args=arguments, prog_name="hone")
    except HoneError as error:
        from hone.cluster.torchrun.ranks import let_first_speak

        let_first_speak()
        if debug:
            traceback.print_exception(error)
        else:
            _show(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def _without_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """Remove ``--debug`` from the arguments before a ``--``; return them and whether it was there."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [word for word in arguments[:end] if word != "--debug"]
    return kept + arguments[end:], len(kept) < end


def _show(error: HoneError) -> None:
    """Write an error to stderr, with brackets as literal text."""
    from rich.console import Console
    from rich.text import Text

    text = Text(error.render())
    text.highlight_regex(r"(?m)^[A-Z][-\w]*(?=[ :])", "bold red")
    text.highlight_regex(r"(?m)^  (Why it matters|Fix):", "bold")
    Console(stderr=True, highlight=False, soft_wrap=True).print(text)


class _StderrHandler(logging.Handler):
    """A handler that writes to the current ``sys.stderr``, so that a live progress line is not broken."""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        sys.stderr.write(f"{prefix}{self.format(record)}\n")


def log_to_stderr() -> None:
    """Show the messages of the package on stderr, once."""
    logger = logging.getLogger("hone")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(_StderrHandler())
        logger.propagate = False
        quiet_imports()


if __name__ == "__main__":
    main()
