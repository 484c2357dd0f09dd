"""User-facing errors: one message that says what is wrong, why it matters and how to fix it.

Raise :class:`HoneError` (or a subclass) for a mistake that the user can fix. The command line prints the message and exits
with code 2; ``--debug`` shows the traceback. A bug in Hone should raise an ordinary Python exception. A run whose process was
killed or hangs ends with code 3, one that an alert of ``insight.stop_on`` or `hone stop` ended with code 4; both can be resumed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXIT_FAILED = 3
"""Exit code of a run that lost a process or hung."""
EXIT_STOPPED = 4
"""Exit code of a run that an alert of ``insight.stop_on`` or `hone stop` ended; the same command resumes it."""


class HoneError(Exception):
    """A mistake that the user can fix.

    Args:
        what: the problem, with numbers and names ("ppo_mini_batch_size=48 does not divide train_batch_size=64").
        why: why it matters ("the last mini-batch would have more weight per sample").
        fix: the exact fix ("actor_rollout_ref.actor.ppo_mini_batch_size=32").
        code: stable identifier for the documentation ("R13", "E-data-column").
        where: key, file or row concerned.
    """

    code = "E-user"
    exit_code = 2

    def __init__(self, what: str, *, why: str = "", fix: str = "", code: str | None = None, where: str = "") -> None:
        self.what, self.why, self.fix, self.where = what, why, fix, where
        self.code = code or type(self).code
        super().__init__(self.render())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all attributes, for an error that a worker process raises and the driver shows."""
        return _as_raised, (type(self), self.args, vars(self))

    def render(self) -> str:
        """Return the message as shown to the user: ``CODE where: what. why. Fix: ...``"""
        head = f"{self.code} {self.where}: {self.what}" if self.where else f"{self.code}: {self.what}"
        lines = [head]
        if self.why:
            lines.append(f"  Why it matters: {self.why}")
        if self.fix:
            lines.append(f"  Fix: {self.fix}")
        return "\n".join(lines)


def _as_raised(kind: type[HoneError], args: tuple[Any, ...], state: dict[str, Any]) -> HoneError:
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(state)
    return error


class ConfigError(HoneError):
    """A key, a value or a combination of values is wrong."""

    code = "E-config"


class UnknownMethod(ConfigError):
    """A method named by the configuration does not exist or cannot be imported."""


class DataError(HoneError):
    """A dataset file, column or row is wrong."""

    code = "E-data"


class ModelError(HoneError):
    """A model directory, tokenizer or adapter is wrong."""

    code = "E-model"


class RewardError(HoneError):
    """A reward function cannot be loaded, or fails more than the run tolerates."""

    code = "E-reward"


class GenerationError(HoneError):
    """A generation request cannot be served."""

    code = "E-generation"


class RequestError(GenerationError):
    """A generation request is invalid, or exceeds a limit: the mistake of the one who sent it.

    Args:
        field: invalid parameter of the request.
    """

    code = "E-request"

    def __init__(self, what: str, *, field: str = "", **parts: Any) -> None:
        super().__init__(what, **parts)
        self.field = field


class EpisodeError(HoneError):
    """An episode broke: a tool, an environment or an agent loop raised."""

    code = "E-episode"


class CheckpointError(HoneError):
    """A checkpoint cannot be written or read."""

    code = "E-checkpoint"


class InvariantError(HoneError):
    """An invariant of training is violated; the results of the run are not reliable."""

    code = "D-invariant"


class ProcessError(HoneError):
    """A process of the run died or hung, and the run cannot continue."""

    code = "E-process"
    exit_code = EXIT_FAILED


class NoVerdict(Exception):
    """A missing verdict on a response: what should have judged it failed, so nothing is known about its worth.

    A reward function may return or raise it; a tool, an environment or an agent loop may raise it. The response is tried again,
    and then left out of its group and of training. It never counts as 0.

    Args:
        reason: what failed, such as "the sandbox did not start".

    Attributes:
        cause: kind of failure, a value of :class:`hone.rewards.score.Cause`.
    """

    cause = "infrastructure"

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Finding:
    """Result of a check: the message, and whether it stops the run or is a warning."""

    error: HoneError
    stops: bool

    @property
    def severity(self) -> str:
        """``error`` or ``warning``."""
        return "error" if self.stops else "warning"

    def as_json(self) -> dict[str, str]:
        """Return the parts of the message by name."""
        e = self.error
        return {
            "code": e.code,
            "severity": self.severity,
            "where": e.where,
            "what": e.what,
            "why": e.why,
            "fix": e.fix,
        }


def did_you_mean(name: str, known: Iterable[str], *, limit: int = 3) -> str:
    """Return ``"Did you mean a, b?"`` for the names nearest to ``name``, or a list of all names when none is near."""
    known = sorted(set(known))
    ends = name.endswith(
        (".yaml", ".yml", ".json", ".jsonl", ".py", ".parquet", ".csv")
    )  # equal ends do not make files near
    stems = {(entry.rpartition(".")[0] or entry) if ends else entry: entry for entry in known}
    near = difflib.get_close_matches(name.rpartition(".")[0] if ends else name, stems, n=limit, cutoff=0.5)
    near = [stems[stem] for stem in near]
    if near:
        return f"Did you mean {', '.join(near)}?"
    shown = ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")
    return f"Known: {shown}" if known else "Nothing is registered."


def near_path(text: str) -> str:
    """Return which existing paths of the same folder have a similar name, as a question, or "".

    >>> near_path("no/such/folder")
    ''
    """
    folder = Path(text).parent
    try:
        here = [] if Path(text).exists() or not folder.is_dir() else [entry.name for entry in folder.iterdir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(Path(text).name, here, cutoff=0.7)
    return f"Did you mean {', '.join(str(folder / name) for name in near)}?" if near else ""
