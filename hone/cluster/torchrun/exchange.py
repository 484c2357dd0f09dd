"""Messages between ranks besides the collectives of their models: results, errors, and decisions of the first rank.

They travel as JSON and safetensors over torch's own transport, whose ranks meet at the launcher's store. Nothing that arrives is
unpickled, and no port is opened here.
"""

from __future__ import annotations

import functools
import json
import os
import struct
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, BroadcastOptions, PrefixStore, ProcessGroupGloo, Store
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from hone.cluster.failures import is_broken_collective
from hone.cluster.torchrun.ranks import LaunchedRank
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.errors import HoneError
from hone.generation.remote.messages import error_as_message

Value = TypeVar("Value")

PATIENCE = timedelta(days=7)
"""Time to wait for another rank; a rank that ended is noticed at once, and one that hangs by the watchdog."""
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
"""Variable with the number of times that torchrun has started the ranks again."""
_LENGTH = struct.Struct("<Q")


class FailedElsewhere(Exception):
    """Error of a run that cannot continue, for a reason that another rank says."""


class OtherRankFailed(Exception):
    """Error of another rank, with its traceback."""


class Ranks:
    """Exchange between this rank and the others.

    Attributes:
        launched: this process.
        store: store of the launcher, for the group of the models.
        lost: returns the error for a rank that has ended without a word.

    Args:
        launched: this process.
    """

    def __init__(self, launched: LaunchedRank) -> None:
        common, _, _ = next(rendezvous("env://"))
        store = PrefixStore(os.environ.get(ATTEMPT, "0"), common)  # an earlier attempt left its addresses
        self.launched, self.store = launched, PrefixStore("models", store)
        self.lost: Callable[[], Exception] = FailedElsewhere
        self._groups = [self._group(PrefixStore(name, store)) for name in ("calls", "aside")]

    def decided(self, decide: Callable[[], Any]) -> Any:
        """Return what ``decide`` returns on the first rank, a value of JSON or a :class:`Batch`. Collective.

        Raises:
            FailedElsewhere: it raises on the first rank.
        """
        message: dict[str, Any] = {}
        if self.launched.rank == 0:
            try:
                message = {"value": decide()}
            except Exception:
                self._broadcast(packed({"failed": True}))
                raise
        heard = self._broadcast(packed(message))
        if "value" not in heard:
            raise FailedElsewhere
        return heard["value"]

    def together(self, do: Callable[[], Value], *, gather: bool = True, aside: bool = False) -> list[Value]:
        """Do something on every rank; return the results of all, in the order of ranks. Collective.

        Args:
            do: returns a value of JSON or a :class:`Batch`; with ``gather`` false any value, and this rank's is in each place.
            gather: whether the results are exchanged, too.
            aside: whether a thread does this during other exchanges.

        Raises:
            Exception: the cause of the failure, if a rank failed: first a user's mistake, last what follows from another rank's end.
            FailedElsewhere: on ranks other than the first.
        """
        value: Any = None
        error: Exception | None = None
        try:
            value = do()
        except Exception as raised:  # noqa: BLE001 - all ranks hear of it
            error = raised
            if torch.distributed.is_initialized() and not aside:
                torch.distributed.destroy_process_group()  # the others would wait for this rank in their collectives
        message = {"value": value if gather else None} if error is None else {"error": _described(error)}
        answers = self._gathered(packed(message), aside)
        failures = {rank: answer["error"] for rank, answer in enumerate(answers) if "error" in answer}
        if not failures:
            return [answer["value"] for answer in answers] if gather else [value] * self.launched.world
        if self.launched.rank != 0:
            raise FailedElsewhere from error
        rank = min(failures, key=lambda rank: (failures[rank]["follows"], "parts" not in failures[rank], rank))
        raise error if rank == 0 and error is not None else _rebuilt(rank, failures[rank])

    def close(self) -> None:
        """Disconnect. A group whose threads still run at the end of the interpreter would abort it."""
        self._groups.clear()
        joined_ranks.cache_clear()

    def _group(self, store: Store) -> Any:
        return ProcessGroupGloo(store, self.launched.rank, self.launched.world, default_pg_timeout)

    def _broadcast(self, data: bytes) -> dict[str, Any]:
        """Return what the first rank sends."""
        options = BroadcastOptions()
        options.rootRank, options.timeout = 0, PATIENCE
        length = torch.tensor([len(data)])
        self._done(lambda: self._groups[0].broadcast([length], options))
        body = _bytes(data) if self.launched.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
        self._done(lambda: self._groups[0].broadcast([body], options))
        return unpacked(body.numpy().tobytes())

    def _gathered(self, data: bytes, aside: bool) -> list[dict[str, Any]]:
        """Return what each rank sends."""
        lengths = self._all_gathered(torch.tensor([len(data)]), aside)
        longest = max(int(length) for length in lengths)
        bodies = self._all_gathered(_bytes(data.ljust(longest, b"\0")), aside)
        return [unpacked(body.numpy().tobytes()[: int(n)]) for body, n in zip(bodies, lengths, strict=True)]

    def _all_gathered(self, tensor: Tensor, aside: bool) -> list[Tensor]:
        options = AllgatherOptions()
        options.timeout = PATIENCE
        received = [torch.empty_like(tensor) for _ in range(self.launched.world)]
        self._done(lambda: self._groups[aside].allgather([received], [tensor], options))
        return received

    def _done(self, start: Callable[[], Any]) -> None:
        """Wait for a collective, which fails when a rank has ended."""
        try:
            start().wait()
        except RuntimeError as error:
            raise (self.lost() if self.launched.rank == 0 else FailedElsewhere()) from error


@functools.cache
def joined_ranks() -> Ranks:
    """Return this process's exchange with the other ranks; the first call connects them. Collective."""
    return Ranks(LaunchedRank.from_environment())


def packed(message: dict[str, Any]) -> bytes:
    """Convert a message: JSON values, of which ``value`` may be a :class:`Batch`."""
    batch, tensors = message.get("value"), dict[str, Tensor]()
    if isinstance(batch, Batch):
        others: dict[str, list[Any]] = {}
        for name in batch.names():
            column = batch[name]
            if isinstance(column, Ragged):
                tensors |= {f"{name}/values": column.values, f"{name}/offsets": column.offsets}
            elif isinstance(column, Tensor):
                tensors[name] = column
            else:
                others[name] = column
        message = {"names": batch.names(), "columns": others, "meta": dict(batch.meta)}
    head = json.dumps(message).encode()
    body = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    return _LENGTH.pack(len(head)) + head + body


def unpacked(data: bytes) -> dict[str, Any]:
    """Restore the message of :func:`packed`."""
    (length,) = _LENGTH.unpack_from(data)
    message = json.loads(data[_LENGTH.size : _LENGTH.size + length])
    if "columns" not in message:
        return message
    tensors = load(data[_LENGTH.size + length :])

    def column(name: str) -> Any:
        if name in message["columns"]:
            return message["columns"][name]
        return tensors[name] if name in tensors else Ragged(tensors[f"{name}/values"], tensors[f"{name}/offsets"])

    return {"value": Batch({name: column(name) for name in message["names"]}, **message["meta"])}


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _described(error: Exception) -> dict[str, Any]:
    """Return an error in values of JSON."""
    description: dict[str, Any] = {
        "text": "".join(traceback.format_exception(error)),
        "follows": is_broken_collective(error),
    }
    if isinstance(error, HoneError):
        description |= {"parts": error_as_message(error), "exit_code": error.exit_code}
    return description


def _rebuilt(rank: int, description: dict[str, Any]) -> Exception:
    """Return the error that another rank described."""
    if "parts" not in description:
        return OtherRankFailed(f"rank {rank} failed:\n{description['text']}")
    error = HoneError(**description["parts"])
    error.exit_code = description["exit_code"]
    return error
