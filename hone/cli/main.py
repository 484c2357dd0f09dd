"""The ``hone`` command.

A command is one file of this folder with a module-level ``app = typer.Typer(add_completion=False)`` and a line in
:data:`COMMANDS`. The app holds either

- sub-commands (``@app.command("make")``), with ``@app.callback()`` when there is only one, or
- only a callback (``@app.callback(invoke_without_command=True)``), which is then the command.

Modules import heavy packages (torch, transformers, hydra) inside the command's function. A command with another exit code than 0
raises ``typer.Exit(code)``. A user's mistake is raised as a :class:`hone.errors.HoneError`; this module shows it once, without a
traceback.

Exit codes: 0 success; 1 a bug in Hone (with traceback); 2 a user's mistake; 3 a process of the run died or hung, and the run
can be resumed; 4 an alert or `hone stop` ended a run, or `hone gate` refuses a model; 130 interrupted.
"""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from hone import __version__
from hone.errors import HoneError
from hone.startup import collect_rarely


class Entry(NamedTuple):
    """Module of a command, and its line in ``--help``."""

    module: str
    help: str


class LazyGroup(TyperGroup):
    """A group for a table of :class:`Entry`; subclasses set ``table``.

    Listing and suggesting names uses placeholders with the help line; the module is imported when its command runs.
    """

    table: dict[str, Entry] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands in the order of the table."""
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the placeholder of a command; None for an unknown name."""
        entry = self.table.get(cmd_name)
        return TyperCommand(cmd_name, help=entry.help) if entry else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import and return the command that ``args`` names."""
        self.commands = {name: self.get_command(ctx, name) for name in self.table}  # for suggestions of names
        name, stand_in, rest = super().resolve_command(ctx, args)
        return (name, load(self.table[name].module), rest) if stand_in and name else (name, stand_in, rest)


def load(module: str) -> Any:
    """Import ``module`` and return the command of its ``app``.

    An app with a callback and no commands is a single command; typer would make it a group, which accepts no options after
    its first argument.
    """
    app: typer.Typer = importlib.import_module(module).app
    callback = app.registered_callback
    if callback is None or app.registered_commands or app.registered_groups:
        return get_command(app)
    single = typer.Typer(add_completion=False)
    single.command()(callback.callback)  # type: ignore[type-var]
    return get_command(single)


COMMANDS = {
    "train": Entry("hone.cli.train", "Train a model by reinforcement learning."),
    "sft": Entry("hone.cli.sft", "Fine-tune a model on conversations."),
    "prefer": Entry("hone.cli.prefer", "Train a model on preferences (dpo, kto, orpo, ...)."),
    "reward-model": Entry("hone.cli.reward_model", "Train a reward model on preference pairs."),
    "eval": Entry("hone.cli.evaluate", "Measure the accuracy of a model on a dataset."),
    "gate": Entry("hone.cli.gate", "Decide by a suite of checks whether a model may be released."),
    "release": Entry("hone.cli.release", "Keep models that passed their gate, serve them, and roll back."),
    "generate": Entry("hone.cli.generate", "Let a model answer prompts."),
    "serve": Entry("hone.cli.serve", "Serve a model with an OpenAI-compatible API."),
    "engines": Entry("hone.cli.engines", "Install, check, list and serve external inference engines."),
    "export": Entry("hone.cli.export", "Write a checkpoint's model as a Hugging Face directory."),
    "models": Entry("hone.cli.models", "Bring a pretrained model to this machine."),
    "init": Entry("hone.cli.init", "Make a small model with random weights."),
    "data": Entry("hone.cli.data", "Make, check, convert and inspect datasets."),
    "reward": Entry("hone.cli.reward", "Try a reward on answers of known quality."),
    "learn": Entry("hone.cli.learn", "Learn by doing: a course whose boxes check your files."),
    "doctor": Entry("hone.cli.doctor", "Check this machine: versions, devices, limits, packages, credentials."),
    "plan": Entry("hone.cli.plan", "Predict memory and step time of a run, and find its placement."),
    "archive": Entry("hone.cli.archive", "Import rollouts of other programs, and export those of a run."),
    "stop": Entry("hone.cli.stop", "Stop a run after its step, or at once with its tools."),
    "audit": Entry("hone.cli.audit", "Show and verify the log of an agent's tool calls."),
    "profile": Entry("hone.cli.profile", "Show where the time of a run goes, and what to change first."),
    "runs": Entry("hone.cli.runs", "List, show, compare and bisect runs; sheets and samples."),
    "twins": Entry("hone.cli.twins", "Train two configurations in pairs until one is better, or they are equal."),
    "sweep": Entry("hone.cli.sweep", "Train a grid or random draws of a configuration, and rank them."),
    "view": Entry("hone.cli.view", "Look at runs in a browser: curves, answers, tokens, episodes."),
    "episode": Entry("hone.cli.episode", "Continue a recorded episode from any of its turns."),
    "replay": Entry("hone.cli.replay", "Run a stored step again, from any of its stages, and compare."),
    "what-if": Entry("hone.cli.what_if", "Compute a stored step again with other methods, and compare."),
    "oracle": Entry("hone.cli.oracle", "Recompute a saved micro-batch in float64, and find where the run diverges."),
    "algorithms": Entry("hone.cli.algorithms", "List the methods, show one, recommend one."),
    "explain": Entry("hone.cli.explain", "Explain a key, a metric, a code, a method or a term of the field."),
    "config": Entry("hone.cli.config", "Show and explain configuration keys."),
}


LOOKING = ("runs", "archive", "profile", "export", "audit")
"""Commands that run no code of a run; those with `--trust` run what is trusted."""


class HoneGroup(LazyGroup):
    """The top-level commands."""

    table = COMMANDS

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in LOOKING:
            from hone.user_code import looking

            ctx.with_resource(looking())
        return super().resolve_command(ctx, args)


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


if __name__ == "__main__":
    main()
