"""What the commands that train have in common: from the command line to a configuration that may run."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import typer

if TYPE_CHECKING:
    from hone.config.preference import PreferenceConfig, RewardModelConfig
    from hone.config.sft import SFTConfig
    from hone.config.tree import RLConfig
    from hone.config.trees import AnyConfig

Tree = TypeVar("Tree", bound="RLConfig | SFTConfig | PreferenceConfig | RewardModelConfig")


def checked_config(
    tree: type[Tree],
    overrides: list[str] | None,
    preset: str | None,
    config_path: str | None,
    config_name: str | None,
) -> Tree:
    """Load the configuration, check it, and print the plan of its batches.

    Raises:
        HoneError: what the user has to mend first.
    """
    from hone.config import load_config
    from hone.preflight import batch_plan, check, training_rows

    config = load_config(tree, overrides or [], preset=preset, config_path=config_path, config_name=config_name)
    check(config)
    typer.echo(batch_plan(config, training_rows(config)))
    return config


def note_plan(config: AnyConfig) -> None:
    """Write what the run is predicted to hold into its directory, for `hone runs show` to compare."""
    from hone.insight.run_directory import RunDirectory
    from hone.preflight.plan.local import planned

    RunDirectory(config.trainer.default_local_dir).expect(planned(config))
