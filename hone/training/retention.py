"""Retention: which checkpoints and archived samples of ended runs may be deleted, and which must stay."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hone.insight.run_files import CONFIG, read_run
from hone.insight.run_lock import is_held
from hone.training.checkpoints.store import CheckpointStore
from hone.training.releases import Shelf

_STEP = re.compile(r"step_(\d+)\.(?:parquet|txt)")
DAY = 86400.0


@dataclass(frozen=True)
class Rules:
    """Rules of retention.

    Attributes:
        checkpoints: newest checkpoints that each run keeps, at least 1; None keeps all. The best one stays too, and those that replays need.
        rollout_days: age in days from which archived samples are deleted; None keeps all.
        shelves: folders of releases; runs from which they come keep everything.
    """

    checkpoints: int | None = None
    rollout_days: float | None = None
    shelves: Sequence[Path] = ()


@dataclass(frozen=True)
class Surplus:
    """Files of one run that the rules do not keep.

    Attributes:
        run: its directory.
        kept_because: reason why everything stays; empty otherwise.
        checkpoints: steps of checkpoints.
        rollouts: files with samples.
        size: bytes of all of it.
    """

    run: Path
    kept_because: str = ""
    checkpoints: tuple[int, ...] = ()
    rollouts: tuple[Path, ...] = ()
    size: int = 0


def surplus_of(run: Path, rules: Rules, *, at: float | None = None) -> Surplus:
    """Return what the rules do not keep of a run.

    Args:
        run: run directory.
        rules: rules of retention.
        at: time in seconds since the epoch from which ages count; None is now.
    """
    if is_held(run) or read_run(run)["status"] == "running":
        return Surplus(run, "it is running")
    released = [f"{shelf} {number}" for shelf, number in _released(rules.shelves) if _is_of(shelf, number, run)]
    if released:
        return Surplus(run, f"release {', '.join(released)} comes from it")
    config: dict[str, Any] = yaml.safe_load((run / CONFIG).read_text(encoding="utf-8"))
    store = _store(run, config, rules)
    checkpoints = tuple(store.surplus())
    now = time.time() if at is None else at
    needed = {f"step_{step}" for step in (config.get("trainer") or {}).get("save_steps_for_replay") or ()}
    rollouts = tuple(
        file
        for folder in ("rollouts", "validation")
        for file in sorted((run / folder).glob("step_*"))
        if rules.rollout_days is not None
        and _STEP.fullmatch(file.name)
        and file.stem not in needed
        and now - file.stat().st_mtime > rules.rollout_days * DAY
    )
    size = sum(sum((store.root / f"step_{step}").sizes().values()) for step in checkpoints)
    return Surplus(run, "", checkpoints, rollouts, size + sum(file.stat().st_size for file in rollouts))


def delete(surplus: Surplus, rules: Rules) -> None:
    """Delete what the rules do not keep of a run."""
    if surplus.kept_because:
        return
    for file in surplus.rollouts:
        file.unlink(missing_ok=True)
    if surplus.checkpoints:
        config = yaml.safe_load((surplus.run / CONFIG).read_text(encoding="utf-8"))
        _store(surplus.run, config, rules).retire()


def _store(run: Path, config: dict[str, Any], rules: Rules) -> CheckpointStore:
    trainer = config.get("trainer") or {}
    replays = [step - 1 for step in trainer.get("save_steps_for_replay") or () if step > 1]
    root, best = trainer.get("checkpoint_dir") or run / "checkpoints", trainer.get("best_ckpt_mode") or "max"
    return CheckpointStore(root, rules.checkpoints, best=best, always=replays)


def _released(shelves: Sequence[Path]) -> Iterator[tuple[Path, int]]:
    for path in shelves:
        for release in Shelf(path).releases():
            yield path, release.number


def _is_of(shelf: Path, number: int, run: Path) -> bool:
    source = Shelf(shelf).release(number).record.get("run") or {}
    return source.get("path") is not None and Path(source["path"]).resolve() == run.resolve()
