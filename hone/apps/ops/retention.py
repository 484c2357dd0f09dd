"""Retention: which checkpoints and archived samples of ended runs may be deleted, and which must stay."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hone.errors import HoneError
from hone.insight.run_files import CONFIG, read_run
from hone.insight.run_lock import is_held
from hone.text import read_yaml
from hone.training.checkpoints.store import CheckpointStore
from hone.training.releases import Shelf, model_digest

_STEP = re.compile(r"step_(\d+)\.(?:parquet|txt)")
DAY = 86400.0


@dataclass(frozen=True)
class Rules:
    """Rules of retention."""

    # newest checkpoints that each run keeps, at least 1; None keeps all. The best one stays too, and those that replays
    # need.
    checkpoints: int | None = None
    rollout_days: float | None = None  # age in days from which archived samples are deleted; None keeps all
    shelves: Sequence[Path] = ()  # folders of releases; runs from which they come keep everything


@dataclass(frozen=True)
class Surplus:
    """Files of one run that the rules do not keep."""

    run: Path
    kept_because: str = ""  # reason why everything stays; empty otherwise
    checkpoints: tuple[int, ...] = ()  # steps of checkpoints
    rollouts: tuple[Path, ...] = ()  # files with samples
    size: int = 0  # bytes of all of it


def surplus_of(run: Path, rules: Rules, *, at: float | None = None) -> Surplus:
    """Return what the rules do not keep of a run; ages count from ``at``, in seconds since the epoch, or from now."""
    try:
        if is_held(run) or read_run(run)["status"] == "running":
            return Surplus(run, "it is running")
        config: dict[str, Any] = read_yaml((run / CONFIG).read_text(encoding="utf-8"))
        store = _store(run, config, rules)
        checkpoints = tuple(store.surplus())
        kept = _is_elsewhere(run, store, checkpoints) or _released(run, store, checkpoints, rules.shelves)
    except (HoneError, OSError, LookupError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        return Surplus(run, f"it cannot be read: {str(error).splitlines()[0]}")
    if kept:
        return Surplus(run, kept)
    now = time.time() if at is None else at
    needed = {f"step_{step}" for step in (config.get("trainer") or {}).get("save_steps_for_replay") or ()}
    rollouts = tuple(
        file
        for folder in ("rollouts", "validation")
        if not (run / folder).is_symlink()
        for file in sorted((run / folder).glob("step_*"))
        if rules.rollout_days is not None
        and not file.is_symlink()
        and _STEP.fullmatch(file.name)
        and file.stem not in needed
        and now - file.stat().st_mtime > rules.rollout_days * DAY
    )
    size = sum(sum((store.root / f"step_{step}").sizes().values()) for step in checkpoints)
    return Surplus(run, "", checkpoints, rollouts, size + sum(file.stat().st_size for file in rollouts))


def delete(surplus: Surplus, rules: Rules) -> None:
    """Delete what the rules do not keep of a run, unless a process trains in it meanwhile."""
    if surplus.kept_because or is_held(surplus.run):
        return
    for file in surplus.rollouts:
        file.unlink(missing_ok=True)
    if surplus.checkpoints:
        _store(surplus.run, read_yaml((surplus.run / CONFIG).read_text(encoding="utf-8")), rules).retire()


def _store(run: Path, config: dict[str, Any], rules: Rules) -> CheckpointStore:
    trainer = config.get("trainer") or {}
    replays = [step - 1 for step in trainer.get("save_steps_for_replay") or () if step > 1]
    root, best = trainer.get("checkpoint_dir") or run / "checkpoints", trainer.get("best_ckpt_mode") or "max"
    return CheckpointStore(root, rules.checkpoints, best=best, always=replays)


def _is_elsewhere(run: Path, store: CheckpointStore, checkpoints: Sequence[int]) -> str:
    """Return why checkpoints may be those of another run; empty where they are below the run, or name it in their configuration."""
    root = store.root
    if root.is_local and is_held(root.local_path):
        return f"a process trains in {root}"
    folders = [root.local_path, *(root.local_path / f"step_{step}" for step in checkpoints)] if root.is_local else []
    if links := [str(folder) for folder in folders if folder.is_symlink()]:
        return f"{links[0]} is a link"
    if root.is_local and root.local_path.resolve() == run.resolve() / "checkpoints":
        return ""
    for step in checkpoints:
        owner = read_yaml((root / f"step_{step}").read_text(CONFIG))["trainer"]["default_local_dir"]
        if Path(owner).resolve() != run.resolve():
            return f"{root}/step_{step} is a checkpoint of {owner}"
    return ""


def _released(run: Path, store: CheckpointStore, checkpoints: Sequence[int], shelves: Sequence[Path]) -> str:
    """Return which releases come from the run; those whose source is not known are compared by their weights."""
    folders = [run.resolve(), *([store.root.local_path.resolve()] if store.root.is_local else [])]
    actors = [store.root.local_path / f"step_{step}" / "actor" for step in checkpoints] if store.root.is_local else []
    released = []
    for shelf in shelves:
        for release in Shelf(shelf).releases():
            record = release.record
            sources = [
                (record.get("run") or {}).get("path"),
                record.get("model"),
                (record.get("base") or {}).get("path"),
            ]
            known = [Path(source).resolve() for source in sources if source is not None and Path(source).exists()]
            if any(source.is_relative_to(folder) for source in known for folder in folders) or (
                not known and any(record.get("digest") == model_digest(actor) for actor in actors)
            ):
                released.append(f"{shelf} {release.number}")
    return f"release {', '.join(released)} comes from it" if released else ""
