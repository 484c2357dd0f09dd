"""Shared code of the training commands: from the command line to a checked configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import typer

if TYPE_CHECKING:
    from hone.config.preference import PreferenceConfig, RewardModelConfig
    from hone.config.sft import SFTConfig
    from hone.config.tree import RLConfig
    from hone.config.trees import AnyConfig

Downloads = dict[str, list[dict[str, Any]]]
Tree = TypeVar("Tree", bound="RLConfig | SFTConfig | PreferenceConfig | RewardModelConfig")
Trained = TypeVar("Trained", bound="AnyConfig")


def checked_config(
    tree: type[Tree],
    overrides: list[str] | None,
    preset: str | None,
    config_path: str | None,
    config_name: str | None,
) -> tuple[Tree, Downloads]:
    """Load the configuration, check it, and print the plan of its batches; also return a record of each download by key."""
    from hone.cluster.torchrun.ranks import follows
    from hone.preflight import check

    config, downloads = local_config(tree, overrides, preset, config_path, config_name)
    if not follows(config):
        check(config)
        announce(config)
    return config, downloads


def announce(config: AnyConfig) -> None:
    """Print the plan of the run's batches, and the dtype that it computes in."""
    from hone.preflight import batch_plan, training_rows
    from hone.preflight.environment import describe_dtype, on_cpu

    typer.echo(batch_plan(config, training_rows(config), on_cpu=on_cpu(config)))
    typer.echo(f"dtype: {describe_dtype(config)}")


def local_config(
    tree: type[Tree],  # root of the configuration
    overrides: list[str] | None,
    preset: str | None,
    config_path: str | None,
    config_name: str | None,
    *,
    weights: bool = True,  # download weights, too
) -> tuple[Tree, Downloads]:
    """Load the configuration, and download what it names on the hub; also return a record of each download by key."""
    from hone.config import load_with_provenance
    from hone.hub.resolve import resolve_names

    config, _ = load_with_provenance(
        tree, overrides or [], preset=preset, config_path=config_path, config_name=config_name, by_method=True
    )
    return config, resolve_names(config, weights=weights)


def run_training(config: Trained, downloads: Downloads, train: Callable[[Trained], int]) -> int:
    """Train in the run's directory, which no other process may use meanwhile; return the exit code.

    The predicted memory and the downloads of the run are written there first; `hone runs show` reads them.
    """
    from hone.cluster.torchrun.ranks import follows
    from hone.insight.run_directory import RunDirectory
    from hone.preflight.plan.local import planned
    from hone.trainers.session import lock_run

    if follows(config):
        return train(config)
    with lock_run(config.trainer):
        RunDirectory(config.trainer.default_local_dir).expect(planned(config), downloads)
        return train(config)
