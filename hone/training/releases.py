"""Releases: models that passed a gate, kept with where they come from, and which of them is current.

    releases/arith/            a shelf: all releases of one model
      0001/, 0002/             model directories, each with release.json (where it comes from) and gate.json (why it may be used)
      current -> 0002          link to the current release, replaced atomically
      history.jsonl            one line for each release and each rollback

``releases/arith/current`` is a model directory for every command: `hone serve`, `hone eval`, `hone gate --against`.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hone import __version__
from hone.errors import ConfigError, HoneError
from hone.insight.run_files import CONFIG, author, containing_run, disk_errors, now, read_run, write_atomically

log = logging.getLogger("hone")

RELEASE, GATE, CURRENT, HISTORY = "release.json", "gate.json", "current", "history.jsonl"
_NUMBER = re.compile(r"\d{4,}")
_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class Release:
    """One release of a shelf."""

    path: Path
    record: Mapping[str, Any]

    @property
    def number(self) -> int:
        return int(self.path.name)

    def check(self) -> None:
        """Raise ConfigError unless the files are those that passed the gate, those of an adapter's base model too."""
        base = self.record.get("base")
        parts = [(self.path, self.record["digest"]), *([(Path(base["path"]), base["digest"])] if base else [])]
        for path, digest in parts:
            if model_digest(path) != digest:
                raise ConfigError(
                    f"the files of release {self.number} are not those that passed the gate",
                    why=f"the SHA-256 of {path} differs from the one in {RELEASE}",
                    fix=f"restore {path}, or choose another release",
                    where="release",
                )


class Shelf:
    """All releases of one model; the first creates the directory."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()

    @classmethod
    def containing(cls, directory: str | Path) -> Shelf | None:
        """Return the shelf that a directory of a release, or ``current``, belongs to; None if it belongs to none."""
        directory = Path(directory).expanduser()
        if (directory / RELEASE).is_file():
            return cls(directory.absolute().parent)
        return cls(directory.absolute()) if (directory / CURRENT / RELEASE).is_file() else None

    def releases(self) -> list[Release]:
        folders = (folder for folder in self.path.glob("*") if _NUMBER.fullmatch(folder.name))
        return [_read(folder) for folder in sorted(folders, key=lambda folder: int(folder.name))]

    @property
    def current(self) -> Release | None:
        link = self.path / CURRENT
        return _read(link.resolve()) if link.exists() else None

    def release(self, number: int) -> Release:
        """Return the release of this number. Raises ConfigError: there is none."""
        every = self.releases()
        for release in every:
            if release.number == number:
                return release
        raise ConfigError(
            f"{self.path} has no release {number}",
            fix=f"one of {', '.join(str(release.number) for release in every)}" if every else "hone release make",
            where="release",
        )

    def at(self, directory: str | Path) -> Release:
        """Return the release in a directory: of the shelf, its ``current``, or of one release."""
        directory = Path(directory).expanduser()
        return _read((directory if (directory / RELEASE).is_file() else directory / CURRENT).resolve())

    def add(self, model: str, report: Path, *, note: str = "") -> Release:
        """Copy a model that passed its gate into the shelf, and make it current.

        Args:
            report: report of `hone gate` for these weights.

        Raises:
            ConfigError: the report refuses the model, or is about other weights.
            HoneError: the disk is full, or another process releases at the same time.
        """
        from hone.training.export import find_actor

        actor, verdict = find_actor(model), read_report(report)
        digest = model_digest(actor)
        _check_report(verdict, digest, report, model)
        number = max((release.number for release in self.releases()), default=0) + 1
        before = self.current
        record = {
            "release": number,
            "at": now(),
            "by": author(),
            "note": note,
            "hone": __version__,
            "model": str(Path(model).absolute()) if Path(model).exists() else model,
            "digest": digest,
            "base": _base(actor),
            **provenance(actor),
            "compared_with": before.number
            if before is not None and verdict.get("against_digest") == before.record["digest"]
            else None,
            "previous": before.number if before is not None else None,
        }
        target, unfinished = self.path / f"{number:04d}", self.path / f".{number:04d}.{os.getpid()}"
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copytree(actor, unfinished, ignore=shutil.ignore_patterns(RELEASE, GATE))
                write_atomically(unfinished / GATE, json.dumps(verdict, indent=1) + "\n")
                write_atomically(unfinished / RELEASE, json.dumps(record, indent=1) + "\n")
                unfinished.rename(target)
            except FileExistsError:
                raise HoneError(
                    f"release {number} was made by another process meanwhile", where=str(self.path), fix="try again"
                ) from None
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
        self.use(number, "released", note)
        return self.release(number)

    def rollback(self, *, to: int | None = None, note: str = "") -> Release:
        """Make an earlier release current: ``to``, or the one that was current before.

        Raises ConfigError: there is no earlier release.
        """
        current = self.current
        if to is None:
            to = current.record["previous"] if current is not None else None
        if to is None:
            raise ConfigError(
                f"{self.path} has no release before {'the current one' if current else 'its first'}",
                why="a rollback needs a release that was current before",
                fix="hone release make MODEL --shelf SHELF --report REPORT",
                where="release",
            )
        release = self.release(to)
        release.check()
        self.use(to, "rolled_back", note)
        return release

    def use(self, number: int, event: str, note: str = "") -> None:
        """Make a release current, and add a line to the history."""
        before = self.current
        with disk_errors(self.path):
            link = self.path / f".{CURRENT}.{os.getpid()}"
            link.unlink(missing_ok=True)
            link.symlink_to(f"{number:04d}")
            link.replace(self.path / CURRENT)
            line = {
                "at": now(),
                "event": event,
                "release": number,
                "before": before.number if before is not None else None,
                "by": author(),
                "note": note,
            }
            with (self.path / HISTORY).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def history(self) -> list[dict[str, Any]]:
        file = self.path / HISTORY
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def model_digest(directory: Path) -> str:
    """Return the SHA-256 over names and contents of the files of a model directory, without those of a release."""
    total = hashlib.sha256()
    for file in sorted(_files(directory)):
        total.update(f"{file.relative_to(directory).as_posix()} {_sha256(file)}\n".encode())
    return total.hexdigest()


def provenance(actor: Path) -> dict[str, Any]:
    """Return where a model comes from: its run and step, with hashes of configuration and data, and the agent contract.

    The values are None or empty for a model that belongs to no run.
    """
    run = containing_run(actor)
    if run is None:
        log.warning("'%s' is in no run directory: the release does not say from which run and data it comes", actor)
        return {"run": None, "agent_contract": {}}
    record, config = read_run(run), (run / CONFIG).read_bytes()
    files, missing = _data_files(yaml.safe_load(config), record)
    if missing:
        log.warning(
            "the release has no hash of %d training files that are not here: %s", len(missing), ", ".join(missing)
        )
    step = next((int(match[1]) for part in reversed(actor.parts) if (match := _STEP.fullmatch(part))), None)
    return {
        "run": {
            "path": str(run),
            "step": step,
            "config_sha256": hashlib.sha256(config).hexdigest(),
            "data_sha256": {str(file): _sha256(file) for file in files},
            "data_missing": missing,
            "data_changed": _changed_since(record, files),
            **{name: record.get(name) for name in ("started", "seed", "git", "versions", "rewards", "downloads")},
        },
        "agent_contract": record.get("agent_contract", {}),
    }


def read_report(path: Path) -> dict[str, Any]:
    """Return a report of `hone gate`. Raises ConfigError: the file is missing, or no such report."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(report, dict) or not {"passed", "conditions", "model_digest"} <= report.keys():
            raise ValueError("it has no verdict")
        return report
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"'{path}' is not a report of `hone gate`: {error}",
            why="only a model that passed its gate is released",
            fix="hone gate MODEL --suite gate.yaml --output report.json",
            where="--report",
        ) from error


def _check_report(verdict: Mapping[str, Any], digest: str, report: Path, model: str) -> None:
    refused = [f"{one['check']}.{one['name']}" for one in verdict["conditions"] if not one["passed"]]
    if not verdict["passed"] or refused or not verdict["conditions"]:
        raise ConfigError(
            f"the gate refused the model: {', '.join(refused) or 'no condition was checked'}",
            why="a released model serves users",
            fix="train further, or change the suite and let its reviewers know",
            where=str(report),
        )
    if verdict["model_digest"] != digest:
        raise ConfigError(
            f"the report is about other weights: {verdict['model_digest'][:12]}, but '{model}' has {digest[:12]}",
            why="the verdict says nothing about these",
            fix=f"hone gate {model} --suite gate.yaml --output {report}",
            where=str(report),
        )


def _data_files(config: Mapping[str, Any], record: Mapping[str, Any]) -> tuple[list[Path], list[str]]:
    """Return the training files of a run that are on this machine, and those that are not; paths begin where the run did."""
    named = (config.get("data") or {}).get("train_files") or []
    folder = Path((record.get("starts") or [{}])[-1].get("cwd", ""))
    files = [folder / file for file in ([named] if isinstance(named, str) else named)]
    return [file for file in files if file.is_file()], [str(file) for file in files if not file.is_file()]


def _changed_since(record: Mapping[str, Any], files: Sequence[Path]) -> list[str]:
    """Return the files that were changed after the start of a run, so that their hashes say nothing about it."""
    started = datetime.datetime.fromisoformat(record["started"]).timestamp()
    return [str(file) for file in files if file.stat().st_mtime > started]


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _base(actor: Path) -> dict[str, str] | None:
    """Return path and digest of an adapter's base model, which is not copied; None for complete weights."""
    from hone.training.export import base_of_adapter

    base = base_of_adapter(actor)
    return None if base is None else {"path": str(base.absolute()), "digest": model_digest(base)}


def _files(directory: Path) -> Iterator[Path]:
    for file in directory.rglob("*"):
        if file.is_file() and file.name not in (RELEASE, GATE):
            yield file


def _read(folder: Path) -> Release:
    try:
        return Release(folder, json.loads((folder / RELEASE).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise HoneError(
            f"the release cannot be read: {error}",
            where=str(folder),
            fix="restore release.json, or remove the directory",
        ) from error
