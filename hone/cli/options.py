"""Options that commands over a configuration share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

Preset = Annotated[str | None, typer.Option(help="preset of the package, such as grpo; see `hone config presets`")]
ConfigPath = Annotated[str | None, typer.Option(help="folder of your YAML file; it states only what differs")]
ConfigName = Annotated[str | None, typer.Option(help="name of your YAML file, `.yaml` may be left out")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="check everything, print the plan, start nothing")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="key=value", help="overrides in Hydra's grammar; they win over all")
]


class Kind(StrEnum):
    """The trees there are, by the command that takes them."""

    train = "train"
    sft = "sft"
    prefer = "prefer"
    reward_model = "reward-model"


Of = Annotated[Kind, typer.Option("--of", help="the command whose keys are meant")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
