"""Rules about checkpoints: that the one to go on from is of this model, and that new ones can be written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.config.trees import TREES, AnyConfig
from hone.errors import HoneError
from hone.preflight.evidence import Evidence, model_block
from hone.preflight.rules import Finding, Stage, error, rule

if TYPE_CHECKING:
    from hone.training.checkpoints.storage import Storage

_SHAPE = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_PROBE = ".hone-can-write-here"


@rule("R55", *TREES.values(), stage=Stage.FILES)
def checkpoint_of_this_model(config: AnyConfig, evidence: Evidence) -> Iterator[Finding]:
    """The checkpoint that the run would go on from holds the model that it names."""
    try:
        found = resumed(config)
        saved = None if found is None else _json(found / "actor", "config.json")
        adapter = None if found is None else _json(found / "actor", "adapter_config.json")
    except HoneError as problem:
        yield Finding(problem, stops=True)
        return
    except OSError:  # R75 says that the storage does not answer
        return
    if found is None:
        return
    block, model = model_block(config)
    wanted = evidence.model_settings
    if saved and wanted:
        saved = {**saved.get("text_config", {}), **saved}
        differ = [f"{key} {saved[key]} there, {wanted[key]} here" for key in _SHAPE if _differ(key, saved, wanted)]
        if differ:
            yield _another_model(
                f"'{found}' holds another model than {block}.path={model.path}: {', '.join(differ)}", found
            )
    rank = model.lora_rank or (-1 if model.lora_adapter_path else 0)
    if adapter is not None and rank == 0:
        yield _another_model(f"'{found}' holds an adapter (r={adapter.get('r')}), and {block}.lora_rank=0", found)
    elif saved and adapter is None and rank:
        yield _another_model(
            f"'{found}' holds all weights and no adapter, and {block}.lora_rank={model.lora_rank}", found
        )
    elif adapter is not None and rank > 0 and adapter.get("r") != rank:
        yield _another_model(
            f"'{found}' holds an adapter with r={adapter.get('r')}, and {block}.lora_rank={rank}", found
        )


@rule("R75", *TREES.values(), stage=Stage.ENVIRONMENT)
def storage_can_be_written(config: AnyConfig) -> Iterator[Finding]:
    """Checkpoints that go elsewhere than to the run directory can be written there."""
    from hone.training.checkpoints.storage import Storage

    wanted = config.trainer.checkpoint_dir
    if wanted is None or config.trainer.save_freq == 0:
        return
    try:
        storage = Storage(wanted)
        problem = _local_obstacle(storage.local_path) if storage.is_local else _remote_obstacle(storage)
    except HoneError as found:
        yield Finding(found, stops=True)
        return
    if problem:
        yield error(
            f"trainer.checkpoint_dir={wanted} cannot be written: {problem}",
            why="the run would train to its first checkpoint and stop there",
            fix="check address, credentials and permissions, or trainer.checkpoint_dir=null for the run directory",
            where="trainer.checkpoint_dir",
        )


def resumed(config: AnyConfig) -> Storage | None:
    """Return where the checkpoint lies that a run would go on from, None for a fresh start.

    Raises:
        HoneError: trainer.resume_from_path names none.
        OSError: the storage cannot be read.
    """
    from hone.training.checkpoints.checkpoint import complete_steps, find_checkpoint
    from hone.training.checkpoints.storage import Storage

    trainer = config.trainer
    if trainer.resume_mode == "resume_path":
        return find_checkpoint(trainer.resume_from_path).storage if trainer.resume_from_path else None
    if trainer.resume_mode == "disable":
        return None
    root = Storage(trainer.checkpoint_dir or Path(trainer.default_local_dir).expanduser() / "checkpoints")
    steps = complete_steps(root)
    return root / f"step_{steps[-1]}" if steps else None


def _another_model(what: str, found: Storage) -> Finding:
    return error(
        what,
        why="its weights and optimizer state do not fit this run",
        fix="name the model that the checkpoint was made from; or trainer.experiment_name=<another name> for a new run",
        where=str(found),
    )


def _differ(key: str, saved: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return key in saved and key in wanted and saved[key] != wanted[key]


def _json(directory: Storage, name: str) -> dict[str, Any] | None:
    if not directory.is_file(name):
        return None
    try:
        content = json.loads(directory.read_text(name))
    except ValueError:  # damaged: opening the checkpoint says so
        return None
    return content if isinstance(content, dict) else None


def _local_obstacle(directory: Path) -> str:
    absolute = directory.expanduser().absolute()
    existing = next(path for path in (absolute, *absolute.parents) if path.exists())
    if not existing.is_dir():
        return f"{existing} is not a directory"
    return "" if os.access(existing, os.W_OK) else f"{existing} is write-protected"


def _remote_obstacle(storage: Storage) -> str:
    """Write a file of no bytes and take it away again."""
    try:
        storage.write_text(_PROBE, "")
        storage.remove_file(_PROBE)
    except OSError as problem:
        return str(problem)
    return ""
