"""The checkpoints of one run: saved during training, visible only when complete, the newest and the best kept.

A save is ``begin``, ``publish`` in a thread, and perhaps ``rate``. It writes weights, then config, state and manifest. On a disk a checkpoint is written under another name and renamed; in an object store its manifest comes last.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import yaml

from hone.errors import CheckpointError
from hone.training.checkpoints.checkpoint import (
    BEST,
    FORMAT,
    MANIFEST,
    Checkpoint,
    best_record,
    complete_steps,
    files_named,
)
from hone.training.checkpoints.checksums import collect_checksums, sealed
from hone.training.checkpoints.storage import Storage


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        keep: number of newest checkpoints to keep; None keeps all. The best one is kept in addition.
        background: whether :meth:`publish` returns at once.
    """

    def __init__(
        self,
        root: str | Path | Storage,
        keep: int | None,
        *,
        best: str = "max",
        background: bool = True,
        always: Collection[int] = (),
    ) -> None:
        self.root, self.keep, self._best_is = Storage(root), keep, best
        self._background, self._always = background, frozenset(always)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def steps(self) -> list[int]:
        return complete_steps(self.root)

    def open(self, step: int) -> Checkpoint:
        return Checkpoint.open(self.root / f"step_{step}")

    def latest(self) -> Checkpoint | None:
        steps = self.steps()
        return self.open(steps[-1]) if steps else None

    def best(self) -> tuple[int, float] | None:
        """Return step and value of the best checkpoint by its metric, the earlier of equals; None if none was measured."""
        measured = [(step, value) for step in self.steps() if (value := self._value(step)) is not None]
        choose = max if self._best_is == "max" else min
        return choose(measured, key=lambda pair: pair[1]) if measured else None

    # saving ----------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> Storage:
        """Wait for the previous save and return the directory for checkpoint ``step``.

        Raises CheckpointError: the previous save failed, or the storage cannot be written.
        """
        self.wait()
        try:
            self._clear_leftovers()
            if not self.root.is_local:
                self._remove(step)
            partial = self._partial(step)
            partial.make()
        except OSError as error:
            raise self._explain(error, error.errno or errno.EIO, step) from error
        return partial

    def publish(
        self,
        step: int,
        state: dict[str, Any],
        config: dict[str, Any],
        write: Callable[[], object],
        *,
        metric: str | None = None,
        value: float | None = None,
    ) -> None:
        """Complete checkpoint ``step`` after ``write()``, which fills the directory that :meth:`begin` returned.

        Args:
            state: of the trainer; copied now.
            write: writes the weights; called in the background.
            value: of this metric at this step; None if it was not measured.

        Raises:
            CheckpointError: without ``background``, the disk is full or cannot be written; earlier checkpoints are intact.
        """
        texts = {
            "config.yaml": yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
            "state.json": json.dumps(state, indent=1),
        }
        manifest = {"format": FORMAT, "step": step, "metric": metric, "value": value}
        self._failure = None
        self._in_thread(step, self._run, step, texts, manifest, write)

    def rate(self, step: int, metric: str, value: float) -> None:
        """Set the metric of a published checkpoint, which was measured after :meth:`publish`. Raises CheckpointError:
        without ``background``, the manifest cannot be written.
        """
        self._in_thread(step, self._rate, self._thread, step, metric, value)

    def _in_thread(self, step: int, work: Callable[..., None], *arguments: Any) -> None:
        self._thread = threading.Thread(target=work, args=arguments, name=f"checkpoint-{step}", daemon=True)
        self._thread.start()
        if not self._background:
            self.wait()

    def wait(self) -> None:
        """Wait until the running save has ended.

        Raises CheckpointError: the save failed; earlier checkpoints are intact.
        """
        if self._thread is not None:
            self._thread.join()
            self.check()

    def check(self) -> None:
        """Raise the error of a save that has failed in the background, once."""
        if self._thread is None or self._thread.is_alive():
            return
        self._thread, failure, self._failure = None, self._failure, None
        if failure is not None:
            raise failure

    def _run(self, step: int, texts: dict[str, str], manifest: dict[str, Any], write: Callable[[], object]) -> None:
        try:
            try:
                write()
                self._seal(step, texts, manifest)
                self._mark_best(str(manifest["metric"]))
                self.retire()
            except Exception as error:
                number = _system_error(error)
                if number is None:
                    raise
                raise self._explain(error, number, step) from error
            finally:
                if self.root.is_local:
                    shutil.rmtree(self._partial(step).local_path, ignore_errors=True)
        except BaseException as error:  # noqa: BLE001  # raised in the thread that trains
            self._failure = error

    def _rate(self, saving: threading.Thread | None, step: int, metric: str, value: float) -> None:
        """Set the metric in the thread, after the save has ended."""
        if saving is not None:
            saving.join()
        if self._failure is not None:
            return
        try:
            checkpoint = self.root / f"step_{step}"
            manifest = json.loads(checkpoint.read_text(MANIFEST))
            checkpoint.replace_text(
                MANIFEST, json.dumps(sealed({**manifest, "metric": metric, "value": value}), indent=1)
            )
            self._mark_best(metric)
            self.retire()
        except OSError as error:
            self._failure = self._explain(error, error.errno or errno.EIO, step)
        except BaseException as error:  # noqa: BLE001  # raised in the thread that trains
            self._failure = error

    def _seal(self, step: int, texts: dict[str, str], manifest: dict[str, Any]) -> None:
        partial = self._partial(step).recording()
        checksums = collect_checksums(partial)
        self._require_all(partial, step)
        for name, text in texts.items():
            partial.write_text(name, text)
        checksums |= partial.recorded
        manifest = {**manifest, "files": partial.sizes(), "sha256": dict(sorted(checksums.items()))}
        partial.replace_text(MANIFEST, json.dumps(sealed(manifest), indent=1))
        if self.root.is_local:
            partial.sync()
            self._remove(step)
            partial.local_path.rename((self.root / f"step_{step}").local_path)
            self.root.sync()

    def _require_all(self, partial: Storage, step: int) -> None:
        """Check that the files of all ranks are in one directory."""
        files = partial.sizes()
        missing = sorted(files_named(partial, files) - files.keys())
        if missing or not files:
            raise CheckpointError(
                f"the checkpoint of step {step} is incomplete: {', '.join(missing[:3]) or 'all files'} of other processes "
                f"are not in '{partial}'",
                why="nodes that write to separate disks leave incomplete checkpoints",
                where="trainer.checkpoint_dir",
                fix="trainer.checkpoint_dir=<directory that all nodes share, or URL of an object store>",
            )

    def _partial(self, step: int) -> Storage:
        return self.root / (f".partial-step_{step}" if self.root.is_local else f"step_{step}")

    def _explain(self, error: Exception, number: int, step: int) -> CheckpointError:
        reason = str(error)
        if number in (errno.ENOSPC, errno.EDQUOT):
            reason = "the disk is full"
            if self.root.is_local:
                path = self.root.local_path
                free = shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free
                reason += f" ({free / 2**20:.0f} MiB free)"
        try:
            kept = ", ".join(f"step_{s}" for s in self.steps()) or "none"
        except OSError:
            kept = "their list cannot be read"
        return CheckpointError(
            f"cannot save the checkpoint of step {step} in '{self.root}': {reason}",
            why=f"the run cannot be resumed beyond its earlier checkpoints ({kept}), which are untouched",
            fix="free space, or set trainer.checkpoint_dir=<another disk or URL> or trainer.max_ckpt_to_keep=1; then run again",
        )

    # keeping ---------------------------------------------------------------------------------------------------------

    def set_aside_after(self, step: int) -> list[int]:
        """Rename checkpoints after ``step``, so that a run that resumes there does not take them for its newest.

        On a disk they become ``abandoned_step_<N>``; in an object store, where a rename is a copy, their manifest becomes
        ``abandoned.json``. Return their steps.
        """
        later = [other for other in self.steps() if other > step]
        for other in later:
            directory, aside = self.root / f"step_{other}", self.root / f"abandoned_step_{other}"
            if self.root.is_local:
                aside.remove()
                directory.local_path.rename(aside.local_path)
            else:
                directory.write_text("abandoned.json", directory.read_text(MANIFEST))
                directory.remove_file(MANIFEST)
        best = best_record(self.root) if later else None
        if best is not None:
            self._mark_best(best["metric"])
        return later

    def _value(self, step: int) -> float | None:
        try:
            return json.loads((self.root / f"step_{step}").read_text(MANIFEST)).get("value")
        except (
            FileNotFoundError,
            ValueError,
            AttributeError,
        ):  # damaged: cannot be the best; opening it reports the damage
            return None

    def _mark_best(self, metric: str) -> None:
        best = self.best()
        if best is not None:
            self.root.replace_text(BEST, json.dumps({"step": best[0], "metric": metric, "value": best[1]}, indent=1))
            self.root.sync()
        else:
            self.root.remove_file(BEST)

    def surplus(self) -> list[int]:
        """Return the steps of the checkpoints that are not kept: neither among the newest, nor the best, nor always kept."""
        best = self.best()
        kept = self._always if best is None else self._always | {best[0]}
        return [] if self.keep is None else [step for step in self.steps()[: -self.keep] if step not in kept]

    def retire(self) -> None:
        for step in self.surplus():
            self._remove(step)

    def _remove(self, step: int) -> None:
        """Delete a checkpoint, if it exists; after an interruption the rest is not taken for a checkpoint."""
        checkpoint = self.root / f"step_{step}"
        if not self.root.is_local:
            checkpoint.remove_file(MANIFEST)
            checkpoint.remove()
        elif checkpoint.local_path.exists():
            renamed = self.root / f".partial-old_step_{step}"
            checkpoint.local_path.rename(renamed.local_path)
            renamed.remove()

    def _clear_leftovers(self) -> None:
        for name in self.root.names():
            directory = self.root / name
            incomplete = re.fullmatch(r"step_\d+", name) and not self.root.is_local and not directory.is_file(MANIFEST)
            if name.startswith(".partial-") or (incomplete and not directory.is_file("abandoned.json")):
                directory.remove()


def _system_error(error: Exception) -> int | None:
    """Return the errno of a failed write, None if the error has another cause.

    Libraries written in Rust (safetensors, tokenizers) have the errno only in the text of their exceptions.
    """
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    named = re.search(r"\(os error (\d+)\)", str(error))
    return int(named[1]) if named else None
