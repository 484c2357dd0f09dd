"""Interface of the rows that the runner decodes: entry, one token a step, removal.

Two implementations keep the KV cache in different ways: :class:`~hone.generation.native.contiguous.ContiguousRows` gives each row a
part of one tensor, :class:`~hone.generation.native.paged.rows.PagedRows` gives it pages of a pool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from hone.data.types import ExpertIds, StopReason
from hone.generation.native.sampler import Allowed, RowSampling
from hone.generation.native.scheduler import Admission, Job, Sampled
from hone.generation.native.sessions import SessionCache


class LastToken(NamedTuple):
    """A row that ends with one of the tokens of a step."""

    kept: int  # tokens of the step up to that one
    error: Exception | None = None  # why the row failed, or None


@dataclass(frozen=True)
class HostWork:
    """Work of the host in every step for some rows; None where no row needs it."""

    allowed: Callable[[], Allowed] | None = None  # returns the tokens that constraints allow
    # gets the row of each sampled token in order, the logits ``[N, V]`` and the sampling parameters
    keep_alternatives: Callable[[Sequence[int], Tensor, RowSampling], None] | None = None
    # gets the row of each sampled token in order, and the tokens that could be sampled, ``[N, V]`` bool
    keep_support: Callable[[Sequence[int], Tensor], None] | None = None
    # gets the sampled tokens of each row; returns the rows that end with them. Rows with a constraint have one token.
    follow: Callable[[Sequence[Sequence[int]]], Mapping[int, LastToken]] | None = None


class End(NamedTuple):
    """A row that ends."""

    row: int
    reason: StopReason
    error: Exception | None = None  # why it failed, or None


@dataclass(frozen=True)
class CacheLimits:
    """Limits of a KV cache."""

    max_num_seqs: int  # maximum of rows
    max_model_len: int  # maximum of tokens in prompt and response
    # capacity in tokens; None means ``max_num_seqs`` sequences of ``max_model_len``
    max_cache_tokens: int | None = None
    # share of the device's memory for the weights and the cache together; only a cache of pages is limited by it
    memory_share: float = 1.0

    @property
    def tokens(self) -> int:
        """Capacity in tokens."""
        return self.max_cache_tokens or self.max_num_seqs * self.max_model_len


Turn = TypeVar("Turn")  # what is kept of a turn of a session


class RowStore(ABC, Generic[Turn]):
    """The running rows and their KV cache."""

    max_cache_tokens: int  # capacity of the cache in tokens

    def __init__(self, sessions: SessionCache[Turn], stats: dict[str, int]) -> None:
        self.sessions, self._stats = sessions, stats  # kept turns, and counters to update
        self.running: list[Job] = []
        self.steps = 0  # number of decode steps so far
        # jobs that lost their row because the cache was full; the caller puts them back into the queue
        self.preempted: list[Job] = []

    @property
    @abstractmethod
    def cache_tokens(self) -> int:
        """Tokens that the allocated cache holds at most."""

    def num_sampled(self, job: Job) -> int:
        """Return the number of tokens sampled for a running job, those on their way included."""
        return self.steps - job.entered

    @abstractmethod
    def admission(self, waiting: Sequence[Job], version: int) -> Admission:
        """Return a test of which waiting jobs fit next to the running ones; weights of this version serve them."""

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Bring the cache into the form that the entering jobs need."""

    @abstractmethod
    def enter(self, jobs: Sequence[Job], version: int) -> None:
        """Give each job a row and prefill its prompt, without the last token, which is the input of its first step."""

    @abstractmethod
    def withdraw(self, jobs: Sequence[Job]) -> None:
        """Undo what :meth:`enter` has done before it failed."""

    @abstractmethod
    def step(self, work: HostWork) -> list[End]:
        """Sample one token for every row; return the rows that are known to end. The caller removes them."""

    def settle(self) -> list[End]:
        """Wait for all tokens sampled so far; return the rows that end with them. The caller removes them."""
        return []

    @abstractmethod
    def sampled(self, rows: Sequence[int]) -> list[Sampled]:
        """Return the tokens sampled for each row."""

    def experts(self, row: int) -> ExpertIds:
        """Return the experts of a row's tokens, see :attr:`hone.generation.protocol.Completion.expert_ids`; empty if they are not kept."""
        return ()

    @abstractmethod
    def keep_for_session(self, row: int, tokens: list[int], version: int) -> None:
        """Keep a row that ends after ``tokens`` for the next turn of its session; the last token is not in the cache yet."""

    @abstractmethod
    def remove(self, rows: set[int]) -> None:
        """Remove rows; the last rows move into their places."""

    def begin_version(self) -> None:
        """Drop the kept turns of all sessions: other weights computed them."""
        self.sessions.clear()

    def release(self) -> None:
        """Drop what depends on the addresses of the weights."""

    @abstractmethod
    def clear(self) -> None:
        """Drop all rows."""

    @abstractmethod
    def free(self) -> None:
        """Free the memory of all caches; no row may be running."""


def not_finite() -> Exception:
    """Return the error of a row whose logits are not finite."""
    return FloatingPointError("the logits are not finite, so no token can be sampled")
