"""The training commands: from the command line to a checked configuration, and to a run of it."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from hone.cli.options import ConfigName, ConfigPath, DryRun, Overrides, Preset
from hone.config import TREES, RLConfig, load_with_provenance

if TYPE_CHECKING:
    from hone.config.offline import PreferenceConfig, RewardModelConfig, SFTConfig
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
    from hone.preflight.evidence import Evidence

    typer.echo(batch_plan(config, training_rows(config, Evidence(config).read_rows), on_cpu=on_cpu(config)))
    typer.echo(f"dtype: {describe_dtype(config)}")


def configured(
    tree: type[Tree],
    overrides: list[str] | None,
    preset: str | None,
    config_path: str | None,
    config_name: str | None,
) -> tuple[Tree, dict[str, str]]:
    """Load the configuration, and the origin of each value that is not a default."""
    return load_with_provenance(
        tree, overrides or [], preset=preset, config_path=config_path, config_name=config_name, by_method=True
    )


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
    config, _ = configured(tree, overrides, preset, config_path, config_name)
    return config, local_models_and_data(config, weights=weights)


def local_models_and_data(config: AnyConfig, *, weights: bool = True) -> Downloads:
    """Put local paths in the place of names of the hub, and models in that of runs; return a record of each download by key."""
    from hone.hub.resolve import named_runs, resolve_names

    if any(named_runs(config)):
        from hone.training.export import resolve_runs  # loads torch

        resolve_runs(config)
    return resolve_names(config, weights=weights)


def run_training(config: Trained, downloads: Downloads, train: Callable[[Trained], int]) -> int:
    """Train in the run's directory, which no other process may use meanwhile; return the exit code.

    The predicted memory and the downloads of the run are written there first; `hone runs show` reads them.
    """
    from hone.cluster.torchrun.ranks import follows
    from hone.insight.run_directory import RunDirectory
    from hone.preflight.plan.devices import planned
    from hone.trainers.session import lock_run

    if follows(config):
        return train(config)
    with lock_run(config.trainer):
        RunDirectory(config.trainer.default_local_dir).expect(planned(config), downloads)
        code = train(config)
    typer.echo("\n".join(_next_steps(config)))
    return code


def _next_steps(config: AnyConfig) -> list[str]:
    """Return where an ended run is, and the commands that one wants next."""
    from hone.insight.run_files import read_run
    from hone.training.checkpoints.store import CheckpointStore

    trainer, data = config.trainer, config.data
    record, run = read_run(Path(trainer.default_local_dir)), shlex.quote(str(trainer.default_local_dir))
    saved = CheckpointStore(trainer.checkpoint_dir or Path(trainer.default_local_dir) / "checkpoints", None).latest()
    lines = [f"the run is in {run}; next:", f"  hone view {run}"]
    if saved is not None and isinstance(config, RLConfig) and data.val_files:
        files = data.val_files if isinstance(data.val_files, str) else data.val_files[0]
        lines.append(f"  hone eval {run} --data {shlex.quote(files)}")
    elif saved is not None and not isinstance(config, TREES["reward-model"]):
        lines.append(f'  hone generate {run} "PROMPT"')
    if saved is None:
        return [*lines, "  it saved no checkpoint: the same command starts again"]
    again = "" if trainer.resume_mode == "auto" else " trainer.resume_mode=auto"
    if record.get("status") == "interrupted":
        return [*lines, f"  the same command{again and f' with{again}'} resumes it after step {saved.step}"]
    return [*lines, f"  the same command with{again} trainer.total_training_steps={2 * saved.step} continues it"]


def train(
    overrides: Overrides = None,
    preset: Preset = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
    dry_run: DryRun = False,
    pilot: Annotated[
        bool,
        typer.Option("--pilot", help="answer 32 prompts, report lengths, pass rate and dead groups, train nothing"),
    ] = False,
) -> None:
    """Train a model by reinforcement learning.

    Precedence: defaults < --preset < your file < key=value. Example:
    hone train model.path=MODEL data.train_files=train.parquet
    trains by GRPO; algorithm.adv_estimator=rloo by RLOO, with the keys that belong to it.
    """
    config, downloads = checked_config(RLConfig, overrides, preset, config_path, config_name)
    if pilot:
        from hone.trainers.pilot import describe, pilot_findings, run_pilot

        shown = run_pilot(config)
        typer.echo(describe(shown, config))
        for finding in pilot_findings(shown, config):
            typer.echo(f"{finding.severity} {finding.error.render()}")
    if dry_run:
        from hone.trainers.algorithm import Algorithm

        typer.echo("stages: " + " > ".join(stage.name for stage in Algorithm.planned(config) if stage.when))
    if dry_run or pilot:
        return
    from hone.trainers.rl import train

    raise typer.Exit(run_training(config, downloads, train))


def _over_a_dataset(command: str, trainer: str, about: str) -> Callable[..., None]:
    """Return a training command without generation; ``trainer`` is the module with its function ``train``."""

    def program(
        overrides: Overrides = None,
        preset: Preset = None,
        config_path: ConfigPath = None,
        config_name: ConfigName = None,
        dry_run: DryRun = False,
    ) -> None:
        config, downloads = checked_config(TREES[command], overrides, preset, config_path, config_name)
        if not dry_run:
            raise typer.Exit(run_training(config, downloads, importlib.import_module(trainer).train))

    program.__doc__ = about
    return program


sft = _over_a_dataset(
    "sft",
    "hone.trainers.sft",
    """Fine-tune a model on conversations; the loss counts assistant tokens only.

    Precedence: defaults < --preset < your file < key=value. Example:
    hone sft data.train_files=train.parquet model.path=MODEL optim.lr=1e-4
    """,
)
prefer = _over_a_dataset(
    "prefer",
    "hone.trainers.preference",
    """Train a model on preferences: pairs (dpo, ipo, orpo, simpo, cpo, ...) or labelled responses (kto).

    Precedence: defaults < --preset < your file < key=value. Example:
    hone prefer --preset dpo data.train_files=pairs/train.parquet model.path=MODEL
    """,
)
reward_model = _over_a_dataset(
    "reward-model",
    "hone.trainers.preference",
    """Train a scalar reward model on preference pairs (Bradley-Terry).

    Its directory, checkpoints/step_N/actor, is a Hugging Face sequence classifier with one label; `hone train` uses it as
    reward.reward_model.path. Example:
    hone reward-model data.train_files=pairs/train.parquet model.path=MODEL
    """,
)
