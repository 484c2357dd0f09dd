"""Arguments and options that several commands have."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from hone.errors import ConfigError, did_you_mean

Preset = Annotated[str | None, typer.Option(help="preset of the package, such as grpo; see `hone config presets`")]
ConfigPath = Annotated[
    str | None, typer.Option(help="directory of your YAML file, which sets only the keys that differ")
]
ConfigName = Annotated[str | None, typer.Option(help="name of your YAML file, with or without `.yaml`")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="check everything, print the plan, start nothing")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="key=value", help="overrides in Hydra's grammar; they take precedence")
]


CONSTRAINT_HELP = (
    "hold every answer to json_schema=@FILE, regex=EXPRESSION, choice=JSON_LIST, grammar=@FILE or json_object; "
    "a text is given directly or as @FILE"
)


class Kind(StrEnum):
    """The configuration trees, by command."""

    train = "train"
    sft = "sft"
    prefer = "prefer"
    reward_model = "reward-model"


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Of = Annotated[Kind, typer.Option("--of", help="command whose keys to use")]
ComputeDtype = Annotated[
    Dtype,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help=f"compute dtype: {', '.join(Dtype)}; auto is bfloat16 on a GPU that computes in it, else float32",
    ),
]


def _trust(context: typer.Context, trusted: bool) -> None:
    from hone.config.trust import trusting
    from hone.user_code import looking

    context.with_resource(looking())
    context.with_resource(trusting(trusted))


Trust = Annotated[
    bool, typer.Option("--trust", callback=_trust, help="run the code that the configuration names, now and later")
]


class DataKeys(TyperCommand):
    """A command that takes keys of the block ``data`` for its files and options, as in ``data.prompt_key=COLUMN``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, after putting options in the place of keys."""
        return super().parse_args(ctx, [word for given in args for word in self._words(given)])

    def _words(self, given: str) -> list[str]:
        options = {str(parameter.name): parameter.opts[0] for parameter in self.params}
        key, sign, _ = given.partition("=")
        key = "data.scorer" if key == "reward.scorer" else key
        files = next((name for name in ("data", "files", "file") if name in options), "")
        name = {"train_files": files, "val_files": "val" if "val" in options else files}.get(key[5:], key[5:])
        if not key.startswith("data.") or not sign or ("episodes" in options and name not in options):
            return [given]
        if name not in options:
            raise ConfigError(f"'{key}' is not an option of this command", fix=did_you_mean(name, options), where=given)
        from hone.config.overrides import override_value, parse_overrides

        read, problems = parse_overrides([given])
        if problems:
            raise problems[0]
        value = override_value(read[0])
        values = [] if value is None else value if isinstance(value, list) else [value]
        return [word for one in values for word in ([options[name]] if options[name][0] == "-" else []) + [str(one)]]


PromptKey = Annotated[str, typer.Option("--prompt-key", help="column of the prompt")]
AnswerKey = Annotated[
    str | None, typer.Option("--answer-key", help="column of the right answer; without it, reward_model.ground_truth")
]
RewardKey = Annotated[str, typer.Option("--reward-fn-key", help="column of the data source")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
RunName = Annotated[str, typer.Argument(help="run directory, or its name below the root")]
RUNS = Path("runs")
Root = Annotated[Path, typer.Option("--root", help="folder that holds the runs")]
Png = Annotated[Path | None, typer.Option("--png", help="also draw the curves into this file")]


def new_group(about: str) -> typer.Typer:
    """Return a group of commands, with the text of its ``--help``; one command alone is a group too."""
    group = typer.Typer(add_completion=False, no_args_is_help=True, help=about)
    group.callback()(lambda: None)
    return group


def require_defaults(context: typer.Context, names: Sequence[str], how: str, why: str) -> None:
    """Check that none of these options is given; ``how`` is what makes them useless, such as `with --train`."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            option = next(one.opts[0] for one in context.command.params if one.name == name)
            raise ConfigError(f"{option} has no effect {how}", why=why, fix=f"leave {option} out", where=option)
