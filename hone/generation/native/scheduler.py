"""Admission of requests to the batch."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hone.generation.grammars import RowGrammar
from hone.generation.protocol import Alternatives, Completion, GenerationRequest


@dataclass(eq=False)
class Job:
    """A request in the queue or in the batch.

    Attributes:
        request: what to generate.
        answer: queue for its completion.
        prompt: the prompt as bytes; jobs with equal bytes can share it in the cache.
        arrived: version of the weights when it was requested.
        version: of the weights when it entered.
        earlier: version and number of tokens at each change of the weights since.
        started: when it entered (``time.perf_counter``).
        first_token: when its first token was sampled.
        entered: number of decode steps before it entered.
        in_row: whether its prompt is cached in its row; this is the same for all running jobs.
        slot: of its shared prefix otherwise.
        aborted: whether to end it with the tokens sampled so far.
        grammar: follows the response of a request with a constraint.
        mask: bits of the tokens that its constraint allows next.
        tail: its last sampled tokens, if it has stop strings.
        alternatives: of every sampled token, if the request asks for them.
    """

    request: GenerationRequest
    answer: asyncio.Queue[Completion | BaseException]
    prompt: bytes
    arrived: int = 0
    version: int = 0
    earlier: list[tuple[int, int]] = field(default_factory=list)
    started: float = 0.0
    first_token: float = 0.0
    entered: int = 0
    in_row: bool = False
    slot: int = -1
    aborted: bool = False
    grammar: RowGrammar | None = None
    mask: Tensor | None = None
    tail: list[int] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)

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


class Scheduler:
    """First come, first served, as many requests at once as rows and cache allow.

    The cache is two rectangles: ``A`` rows of the longest running request, and ``P`` shared prefixes of the longest one.
    While no two requests have the same prompt there is only one rectangle, of rows that begin with their prompts, because
    attention over one tensor is cheaper than over two.

    Args:
        max_num_seqs: maximum of requests at once.
        max_cache_tokens: capacity of the cache.
        share_prompts: whether rows can share a prefix; otherwise every row contains its prompt.
    """

    def __init__(self, *, max_num_seqs: int, max_cache_tokens: int, share_prompts: bool = True) -> None:
        self._share_prompts = share_prompts
        self.max_num_seqs, self.max_cache_tokens = max_num_seqs, max_cache_tokens
        self.waiting: deque[Job] = deque()

    def admit(self, running: Sequence[Job], version: int) -> list[Job]:
        """Remove from the queue and return the jobs that fit next to ``running``; weights of this version serve them."""
        if not self.waiting or len(running) >= self.max_num_seqs:
            return []
        prompts = {(job.prompt, job.version) for job in running}
        in_rows = not self._share_prompts or (all(job.in_row for job in running) and self._all_differ(prompts, version))
        rows, row_tokens, prefix_tokens = len(running), 0, 0
        for job in running:
            row_tokens, prefix_tokens = _largest(row_tokens, prefix_tokens, job, in_rows=in_rows)
        entering: list[Job] = []
        while self.waiting and rows < self.max_num_seqs:
            job = self.waiting[0]
            rows += 1
            row_tokens, prefix_tokens = _largest(row_tokens, prefix_tokens, job, in_rows=in_rows)
            slots = len(prompts) + ((job.prompt, version) not in prompts)
            if rows * row_tokens + slots * prefix_tokens > self.max_cache_tokens:
                break
            job.version, job.in_row = version, in_rows
            prompts.add((job.prompt, version))
            entering.append(self.waiting.popleft())
        return entering

    def _all_differ(self, prompts: set[tuple[bytes, int]], version: int) -> bool:
        """Return whether all waiting prompts differ from each other and from those in the cache."""
        waiting = {(job.prompt, version) for job in self.waiting}
        return len(waiting) == len(self.waiting) and not waiting & prompts

    def remove(self, wanted: Callable[[Job], bool]) -> list[Job]:
        """Remove the jobs that ``wanted`` selects from the queue and return them."""
        removed = [job for job in self.waiting if wanted(job)]
        if removed:
            self.waiting = deque(job for job in self.waiting if not wanted(job))
        return removed


def _largest(row_tokens: int, prefix_tokens: int, job: Job, *, in_rows: bool) -> tuple[int, int]:
    """Return the tokens per row and per shared prefix that suffice for this job too."""
    prompt, response = len(job.request.prompt_ids) - 1, job.request.sampling.max_tokens
    return (
        (max(row_tokens, prompt + response), 0) if in_rows else (max(row_tokens, response), max(prefix_tokens, prompt))
    )
