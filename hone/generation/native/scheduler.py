"""Admission of requests to the batch."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from hone.generation.grammars import RowGrammar
from hone.generation.protocol import Alternatives, Completion, GenerationRequest


class Sampled(NamedTuple):
    """Sampled tokens of a row, with their log-probs under the raw policy and under the distribution sampled from."""

    tokens: list[int]
    log_probs: list[float]
    sampling_log_probs: list[float]


@dataclass(eq=False)
class Job:
    """A request in the queue or in the batch."""

    request: GenerationRequest
    answer: asyncio.Queue[Completion | BaseException]
    prompt: bytes  # the prompt as bytes; jobs with equal bytes can share it in the cache
    arrived: int = 0  # version of the weights when it was requested
    version: int = 0  # of the weights when it entered
    # version and number of tokens at each change of the weights since
    earlier: list[tuple[int, int]] = field(default_factory=list)
    started: float = 0.0  # when it entered (``time.perf_counter``)
    first_token: float = 0.0  # when its first token was sampled
    # number of decode steps so far, less the tokens sampled for it; a step without drafts changes neither
    entered: int = 0
    in_row: bool = False  # whether its prompt is cached in its row; this is the same for all running jobs
    slot: int = -1  # of its shared prefix otherwise
    aborted: bool = False  # whether to end it with the tokens sampled so far
    grammar: RowGrammar | None = None  # follows the response of a request with a constraint
    mask: Tensor | None = None  # bits of the tokens that its constraint allows next
    tail: list[int] = field(default_factory=list)  # its last sampled tokens, if it has stop strings
    # of every sampled token, if the request asks for them
    alternatives: list[Alternatives] = field(default_factory=list)
    # number of tokens in the support of every sampled token, if the request asks for it
    support_sizes: list[int] = field(default_factory=list)
    support_ids: list[int] = field(default_factory=list)  # the tokens of all supports
    pages: list[int] = field(default_factory=list)  # of its row in a paged cache
    # its tokens in a paged cache, which it keeps when it loses its row
    sampled: Sampled = field(default_factory=lambda: Sampled([], [], []))

    @classmethod
    def from_request(
        cls,
        request: GenerationRequest,
        answer: asyncio.Queue[Completion | BaseException],
        grammar: RowGrammar | None = None,
        version: int = 0,
    ) -> Job:
        """Return a job that has not started, requested under weights of this version."""
        return cls(request, answer, array("q", request.prompt_ids).tobytes(), arrived=version, grammar=grammar)

    def token_versions(self, count: int, version: int) -> list[int]:
        """Return the version of each of ``count`` tokens, the last by ``version``; empty without a change since the request."""
        if not self.earlier and self.arrived == version:
            return []
        versions: list[int] = []
        for before, tokens in self.earlier:
            versions += [before] * (tokens - len(versions))
        return versions + [version] * (count - len(versions))

    @property
    def ids(self) -> list[int]:
        """Prompt and kept tokens: what its row begins with in a paged cache."""
        return [*self.request.prompt_ids, *self.sampled.tokens]

    @property
    def shared(self) -> int:
        """Cached tokens of its slot: the prompt without its last token, which is the input of the first step."""
        return 0 if self.in_row else len(self.request.prompt_ids) - 1

    @property
    def prompt_in_row(self) -> int:
        """Cached tokens of its row before the first step."""
        return len(self.request.prompt_ids) - 1 - self.shared

    @property
    def max_row_tokens(self) -> int:
        """Maximum of cached tokens in its row: the prompt's part, and all sampled tokens but the last."""
        return self.prompt_in_row + self.request.sampling.max_tokens


class Admission(Protocol):
    """Decides which waiting jobs fit next to the running ones; it sees them in the order of the queue."""

    def admit(self, job: Job) -> bool:
        """Return whether the job fits next to the running ones and those admitted before, and count it if so."""
        ...


class RectangleAdmission:
    """Admission to a cache of two rectangles: ``A`` rows of the longest running request, ``P`` shared prefixes of the longest one.

    While no two requests have the same prompt there is only one rectangle, of rows that begin with their prompts, because
    attention over one tensor is cheaper than over two.

        waiting: jobs in the queue.
        limit: capacity of the cache in tokens.
        share_prompts: whether rows can share a prefix; otherwise every row contains its prompt.
    """

    def __init__(
        self, running: Sequence[Job], waiting: Sequence[Job], version: int, *, limit: int, share_prompts: bool
    ) -> None:
        self._version, self._limit = version, limit
        self._prompts = {(job.prompt, job.version) for job in running}
        self._in_rows = not share_prompts or (all(job.in_row for job in running) and self._all_differ(waiting))
        self._rows, self._row_tokens, self._prefix_tokens = len(running), 0, 0
        for job in running:
            self._row_tokens, self._prefix_tokens = self._largest(job)

    def admit(self, job: Job) -> bool:
        """Return whether the job fits, and note where its prompt is to be stored."""
        rows, (row_tokens, prefix_tokens) = self._rows + 1, self._largest(job)
        slots = len(self._prompts) + ((job.prompt, self._version) not in self._prompts)
        if rows * row_tokens + slots * prefix_tokens > self._limit:
            return False
        self._rows, self._row_tokens, self._prefix_tokens = rows, row_tokens, prefix_tokens
        self._prompts.add((job.prompt, self._version))
        job.in_row = self._in_rows
        return True

    def _all_differ(self, waiting: Sequence[Job]) -> bool:
        """Return whether all waiting prompts differ from each other and from those in the cache."""
        prompts = {(job.prompt, self._version) for job in waiting}
        return len(prompts) == len(waiting) and not prompts & self._prompts

    def _largest(self, job: Job) -> tuple[int, int]:
        """Return the tokens per row and per shared prefix that suffice for this job too."""
        prompt, response = len(job.request.prompt_ids) - 1, job.request.sampling.max_tokens
        if self._in_rows:
            return max(self._row_tokens, prompt + response), 0
        return max(self._row_tokens, response), max(self._prefix_tokens, prompt)


class Scheduler:
    """First come, first served, as many requests at once as rows and cache allow."""

    def __init__(self, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[Job] = deque()

    def admit(self, running: int, version: int, admission_of: Callable[[Sequence[Job], int], Admission]) -> list[Job]:
        """Remove from the queue and return the jobs that fit next to the running ones; ``admission_of`` is the cache's."""
        if not self.waiting or running >= self.max_num_seqs:
            return []
        admission = admission_of(self.waiting, version)
        entering: list[Job] = []
        while self.waiting and running + len(entering) < self.max_num_seqs and admission.admit(self.waiting[0]):
            job = self.waiting.popleft()
            if job.sampled.tokens and job.version != version:
                job.earlier.append((job.version, len(job.sampled.tokens)))
            job.version = version
            entering.append(job)
        return entering

    def put_back(self, jobs: Sequence[Job]) -> None:
        """Put jobs that lost their row at the front of the queue, in their order."""
        self.waiting.extendleft(reversed(jobs))

    def remove(self, wanted: Callable[[Job], bool]) -> list[Job]:
        removed = [job for job in self.waiting if wanted(job)]
        if removed:
            self.waiting = deque(job for job in self.waiting if not wanted(job))
        return removed
