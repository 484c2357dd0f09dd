"""Shared code of the training commands: from the command line to a checked configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import typer

if TYPE_CHECKING:
    from hone.config.preference import PreferenceConfig, RewardModelConfig
    from hone.config.sft import SFTConfig
    from hone.config.tree import RLConfig
    from hone.config.trees import AnyConfig

Tree = TypeVar("Tree", bound="RLConfig | SFTConfig | PreferenceConfig | RewardModelConfig")
Trained = TypeVar("Trained", bound="AnyConfig")


def checked_config(
    tree: type[Tree],
    overrides: list[str] | None,
    preset: str | None,
    config_path: str | None,
    config_name: str | None,
) -> Tree:
    """Load the configuration, check it, and print the plan of its batches.

    Raises:
        HoneError: the configuration has errors.
    """
    from hone.config import load_config
    from hone.preflight import batch_plan, check, training_rows
    from hone.preflight.device import on_cpu

    config = load_config(tree, overrides or [], preset=preset, config_path=config_path, config_name=config_name)
    check(config)
    typer.echo(batch_plan(config, training_rows(config), on_cpu=on_cpu(config)))
    return config


def run_training(config: Trained, train: Callable[[Trained], int]) -> int:
    """Train in the run's directory, which no other process may use meanwhile; return the exit code.

    The predicted memory of the run is written there first, for comparison in `hone runs show`.

    Raises:
        HoneError: another process trains in the directory, or any other mistake of the user.
    """
    from hone.insight.run_directory import RunDirectory
    from hone.preflight.plan.local import planned
    from hone.trainers.session import lock_run

    with lock_run(config.trainer):
        RunDirectory(config.trainer.default_local_dir).expect(planned(config))
        return train(config)
