"""Requests about the replicas of a running run: files in its directory, because the run may be on another machine.

<run>/replicas.request.json   a request of `hone runs engines`, until the run takes it; a newer one replaces it
<run>/replicas.json           the run's answer to the last request
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hone.errors import HoneError
from hone.insight.run_files import now, write_atomically

REQUEST, ANSWER, _TAKEN = "replicas.request.json", "replicas.json", ".replicas.request.json.taken"


@dataclass(frozen=True)
class ReplicaRequest:
    """Request to report on the replicas, and to change their number."""

    replicas: int | None = None  # wanted number per rollout worker; None changes nothing
    key: str = field(default_factory=lambda: uuid.uuid4().hex)  # identity of the request, which its answer repeats


@dataclass(frozen=True)
class ReplicaAnswer:
    """Answer of the run."""

    key: str
    wanted: int  # wanted number of replicas per rollout worker
    limit: int  # maximum of that number
    # report on each replica: number, worker, state, requests, limit, version of its weights, starts, problem
    replicas: list[dict[str, Any]]
    # what, why and fix of the error if the request was refused; empty otherwise
    refused: dict[str, str] = field(default_factory=dict)
    at: str = field(default_factory=now)  # time of the answer


def send_request(run: Path, request: ReplicaRequest) -> None:
    """Write a request for the run in this directory.

    Raises HoneError: the directory is not writable, or the disk is full.
    """
    write_atomically(run / REQUEST, json.dumps(asdict(request)))


def take_request(run: Path) -> ReplicaRequest | None:
    """Take the request out of a run directory; None without one. Raises HoneError: the file is not a request."""
    taken = run / _TAKEN
    try:
        (run / REQUEST).rename(taken)
    except FileNotFoundError:
        return None
    try:
        request = ReplicaRequest(**json.loads(taken.read_text(encoding="utf-8")))
        if type(request.replicas) not in (int, type(None)):
            raise ValueError(f"replicas is {request.replicas!r}, not a whole number")
        return request
    except (ValueError, TypeError) as error:
        raise HoneError(
            f"the file is not a request: {error}", where=str(run / REQUEST), fix="hone runs engines RUN --replicas N"
        ) from None
    finally:
        taken.unlink()


def withdraw_request(run: Path) -> None:
    (run / REQUEST).unlink(missing_ok=True)


def write_answer(run: Path, answer: ReplicaAnswer) -> None:
    write_atomically(run / ANSWER, json.dumps(asdict(answer), indent=2))


def read_answer(run: Path, key: str) -> ReplicaAnswer | None:
    """Return the answer to the request with this key; None while there is none."""
    try:
        answer = ReplicaAnswer(**json.loads((run / ANSWER).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    return answer if answer.key == key else None
