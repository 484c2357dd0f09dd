"""Rules about the life of a run: checkpoints to resume from and to write, profiled steps, secrets, the webhook."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.config.environment import written_leaves
from hone.config.trees import AnyConfig, model_block
from hone.insight.redaction import is_secret_name, redact_entry
from hone.insight.webhook import is_address
from hone.preflight.evidence import Evidence
from hone.preflight.machine import write_problem
from hone.preflight.rules import Finding, Findings, Stage, error, rule, warning

if TYPE_CHECKING:
    from hone.training.checkpoints.storage import Storage


_LONG = 500
_SHAPE = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_PROBE = ".hone-can-write-here"


@rule("R55", Stage.FILES)
def checkpoint_of_this_model(config: AnyConfig, evidence: Evidence) -> Findings:
    """The checkpoint to resume from holds the configured model."""
    from hone.models.four_bits import RECORD

    try:
        checkpoint = resumed_checkpoint(config)
        saved = None if checkpoint is None else _read_json(checkpoint / "actor", "config.json")
        adapter = None if checkpoint is None else _read_json(checkpoint / "actor", "adapter_config.json")
    except OSError:  # R75 reports storage that cannot be reached
        return
    if checkpoint is None:
        return
    block, model = model_block(config)
    wanted = evidence.model_settings
    if saved and wanted:
        saved = {**saved.get("text_config", {}), **saved}
        differences = [f"{key}={saved[key]}, not {wanted[key]}" for key in _SHAPE if _differ(key, saved, wanted)]
        if differences:
            yield _another_model(
                f"'{checkpoint}' does not hold the model {block}.path={model.path}: {', '.join(differences)}",
                checkpoint,
            )
    rank = model.lora_rank or (-1 if model.lora_adapter_path else 0)
    if adapter is not None and rank == 0:
        yield _another_model(
            f"'{checkpoint}' holds an adapter (r={adapter.get('r')}), but {block}.lora_rank=0", checkpoint
        )
    elif saved and adapter is None and rank:
        yield _another_model(
            f"'{checkpoint}' holds full weights without an adapter, but {block}.lora_rank={model.lora_rank}", checkpoint
        )
    elif adapter is not None and rank > 0 and adapter.get("r") != rank:
        yield _another_model(
            f"'{checkpoint}' holds an adapter with r={adapter.get('r')}, but {block}.lora_rank={rank}", checkpoint
        )
    method = (_read_json(checkpoint / "actor", RECORD) or {}).get("method", "none")
    if adapter is not None and method != model.quantization:
        yield _another_model(
            f"'{checkpoint}' holds an adapter of a base packed as {method}, but {block}.quantization={model.quantization}",
            checkpoint,
        )


@rule("R75", Stage.ENVIRONMENT)
def storage_can_be_written(config: AnyConfig) -> Findings:
    """A checkpoint directory outside the run directory can be written."""
    from hone.training.checkpoints.storage import Storage

    checkpoint_dir = config.trainer.checkpoint_dir
    if checkpoint_dir is None or config.trainer.save_freq == 0:
        return
    storage = Storage(checkpoint_dir)
    problem = write_problem(storage.local_path) if storage.is_local else _remote_problem(storage)
    if problem:
        yield error(
            f"trainer.checkpoint_dir={checkpoint_dir} cannot be written: {problem}",
            why="the run would stop at its first checkpoint",
            fix="check address, credentials and permissions, or trainer.checkpoint_dir=null for the run directory",
            where="trainer.checkpoint_dir",
        )


def resumed_checkpoint(config: AnyConfig) -> Storage | None:
    """Return the location of the checkpoint that a run would resume from; None for a fresh start.

    Raises:
        HoneError: trainer.resume_from_path is not a checkpoint, or the checkpoint is damaged.
        OSError: the storage cannot be read.
    """
    from hone.training.checkpoints.checkpoint import Checkpoint, complete_steps, find_checkpoint
    from hone.training.checkpoints.storage import Storage

    trainer = config.trainer
    if trainer.resume_mode == "resume_path":
        return find_checkpoint(trainer.resume_from_path).storage if trainer.resume_from_path else None
    if trainer.resume_mode == "disable":
        return None
    root = Storage(trainer.checkpoint_dir or Path(trainer.default_local_dir).expanduser() / "checkpoints")
    steps = complete_steps(root)
    return Checkpoint.open(root / f"step_{steps[-1]}").storage if steps else None


def _another_model(what: str, checkpoint: Storage) -> Finding:
    return error(
        what,
        why="its weights and optimizer state do not fit this run",
        fix="configure the model that the checkpoint was made from; or trainer.experiment_name=<another name> for a new run",
        where=str(checkpoint),
    )


def _differ(key: str, saved: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return key in saved and key in wanted and saved[key] != wanted[key]


def _read_json(directory: Storage, name: str) -> dict[str, Any] | None:
    if not directory.is_file(name):
        return None
    try:
        content = json.loads(directory.read_text(name))
    except ValueError:  # damaged: opening the checkpoint reports it
        return None
    return content if isinstance(content, dict) else None


def _remote_problem(storage: Storage) -> str:
    """Write and remove an empty file; return the error, or an empty text."""
    try:
        storage.write_text(_PROBE, "")
        storage.remove_file(_PROBE)
    except OSError as problem:
        return str(problem)
    return ""


@rule("R56", Stage.FILES)
def long_runs_are_saved(config: AnyConfig, evidence: Evidence) -> Findings:
    """A long run saves checkpoints before its end."""
    trainer = config.trainer
    steps = trainer.total_training_steps or trainer.total_epochs * (
        len(evidence.train_rows) // config.data.train_batch_size
    )
    if trainer.save_freq == -1 and steps >= _LONG:
        yield warning(
            f"{steps} steps, but trainer.save_freq=-1 saves only at the end",
            why="a run that is killed starts again from step 0",
            fix=f"trainer.save_freq={max(1, steps // 20)}",
        )


@rule("R61")
def no_secrets_in_the_configuration(config: AnyConfig) -> Findings:
    """Credentials are in the environment, not in the configuration."""
    for path, value in written_leaves(config):
        if redact_entry(path, value) != value:
            inner = [name for name in value if is_secret_name(str(name))] if isinstance(value, dict) else []
            key = f"++{path}.{inner[0]}" if inner else path
            yield warning(
                f"{path} seems to hold a credential{f' ({inner[0]})' if inner else ''}",
                why="Hone redacts it in its files, but shell histories and scripts keep it",
                fix=f"read it from the environment: '{key}=${{oc.env:NAME}}', or os.environ['...'] where it is used",
                where=path,
            )


@rule("R92")
def the_webhook_is_an_address(config: AnyConfig) -> Findings:
    """insight.webhook is an http or https address, and insight.notify_end has one."""
    key, url = "insight.webhook", config.insight.webhook
    if url is None and config.insight.notify_end:
        yield error(
            f"insight.notify_end=true, and {key} is null",
            why="there is no address to send the end of the run to",
            fix="insight.notify_end=false, or insight.webhook='${oc.env:NAME}'",
            where=key,
        )
    if url is not None and not is_address(url):
        yield error(
            f"{key} is a text of {len(url)} characters that is not an http or https address",
            why="no alert and no failure of the run would reach anybody",
            fix="insight.webhook='${oc.env:NAME}', with NAME=https://... in the environment, or insight.webhook=null",
            where=key,
        )


@rule("R83")
def profiled_steps_exist(config: AnyConfig) -> Findings:
    """The steps of trainer.profile_steps belong to the run."""
    trainer, key = config.trainer, "trainer.profile_steps"
    last = trainer.total_training_steps
    outside = [step for step in trainer.profile_steps if step < 1 or (last is not None and step > last)]
    if outside:
        inside = [str(step) for step in trainer.profile_steps if step not in outside]
        yield warning(
            f"{key} has {outside}, but the steps are 1 to {last or 'the end'}",
            why="nothing is profiled for them",
            fix=f"{key}=[{', '.join(inside)}]",
        )
