"""Arguments and options that several commands have."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

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
    Dtype, typer.Option("--dtype", help="compute dtype; auto is bfloat16 on a GPU that computes in it, else float32")
]


def _trust(context: typer.Context, trusted: bool) -> None:
    from hone.config.trust import trusting
    from hone.user_code import looking

    context.with_resource(looking())
    context.with_resource(trusting(trusted))


Trust = Annotated[
    bool, typer.Option("--trust", callback=_trust, help="run the code that the configuration names, now and later")
]
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
