"""Who may enter the batch, and when."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hone.errors import GenerationError
from hone.generation.protocol import Completion, GenerationRequest


@dataclass(eq=False)
class Job:
    """A request on its way.

    Attributes:
        request: what is asked.
        answer: where its completion goes.
        prompt: the prompt as bytes: jobs with equal ones share it in the cache.
        version: of the weights when it entered.
        started: when it entered (``time.perf_counter``).
        first_token: when its first token was drawn.
        entered: decode steps made before it entered.
        alone: whether its prompt stands in its row, as do those of all others that run.
        slot: where its prompt is in the cache otherwise.
        aborted: to be ended with what it has.
    """

    request: GenerationRequest
    answer: asyncio.Queue[Completion | BaseException]
    prompt: bytes
    version: int = 0
    started: float = 0.0
    first_token: float = 0.0
    entered: int = 0
    alone: bool = False
    slot: int = -1
    aborted: bool = False

    @classmethod
    def of(cls, request: GenerationRequest, answer: asyncio.Queue[Completion | BaseException]) -> Job:
        """A job that has not begun."""
        return cls(request, answer, array("q", request.prompt_ids).tobytes())

    @property
    def shared(self) -> int:
        """Cache tokens of its slot: the prompt but for its last token, which the first step feeds."""
        return 0 if self.alone else len(self.request.prompt_ids) - 1

    @property
    def begun(self) -> int:
        """Cache tokens of its row before the first step."""
        return len(self.request.prompt_ids) - 1 - self.shared

    @property
    def own(self) -> int:
        """Most cache tokens of its row: what it begins with, the prompt's last token, and all drawn but the last."""
        return self.begun + self.request.sampling.max_tokens


class Scheduler:
    """First come, first served, as many at once as rows and cache allow.

    The cache is two rectangles: ``A`` running requests cost ``A`` times what the largest of them has of its own, and ``P``
    different prompts ``P`` times the longest of them. While no two requests have the same prompt there is one rectangle only,
    of rows that begin with their prompts: attention over one piece is cheaper than over two.

    Args:
        max_num_seqs: most requests at once.
        max_cache_tokens: capacity of the cache.
        max_model_len: longest prompt with response.
    """

    def __init__(self, *, max_num_seqs: int, max_cache_tokens: int, max_model_len: int) -> None:
        self.max_num_seqs, self.max_cache_tokens, self.max_model_len = max_num_seqs, max_cache_tokens, max_model_len
        self.waiting: deque[Job] = deque()

    def check(self, request: GenerationRequest) -> None:
        """Refuse what can never be served.

        Raises:
            GenerationError: nothing to do, or more tokens than model or cache hold.
        """
        prompt, response = len(request.prompt_ids), request.sampling.max_tokens
        name, need = f"request '{request.request_id}'", prompt + response
        if prompt == 0 or response < 1:
            raise GenerationError(
                f"{name} has {prompt} prompt tokens and asks for {response}",
                why="generation continues a prompt by at least one token",
                fix="give at least one prompt token and max_tokens of at least 1",
            )
        if need > self.max_model_len:
            raise GenerationError(
                f"{name} needs {need} tokens ({prompt} prompt + {response} response), the engine serves at most "
                f"{self.max_model_len}",
                why="data.max_prompt_length + data.max_response_length bound a sequence",
                fix=f"data.max_response_length={max(1, self.max_model_len - prompt)} for this prompt, or larger limits",
            )
        if need > self.max_cache_tokens:
            raise GenerationError(
                f"{name} needs {need} cache tokens ({prompt} prompt + {response} response), the cache holds "
                f"{self.max_cache_tokens}",
                why="it would wait for ever",
                fix=f"actor_rollout_ref.rollout.max_cache_tokens={need}",
            )

    def admit(self, running: Sequence[Job], version: int) -> list[Job]:
        """Take from the queue those that fit beside ``running``; they will be served by weights of this version."""
        if not self.waiting or len(running) >= self.max_num_seqs:
            return []
        prompts = {(job.prompt, job.version) for job in running}
        alone = all(job.alone for job in running) and self._all_differ(prompts, version)
        rows, own, shared = len(running), 0, 0
        for job in running:
            own, shared = _largest(own, shared, job, alone=alone)
        entering: list[Job] = []
        while self.waiting and rows < self.max_num_seqs:
            job = self.waiting[0]
            rows, (own, shared) = rows + 1, _largest(own, shared, job, alone=alone)
            slots = len(prompts) + ((job.prompt, version) not in prompts)
            if rows * own + slots * shared > self.max_cache_tokens:
                break
            job.version, job.alone = version, alone
            prompts.add((job.prompt, version))
            entering.append(self.waiting.popleft())
        return entering

    def _all_differ(self, prompts: set[tuple[bytes, int]], version: int) -> bool:
        """Whether no two that wait have the same prompt, nor one the same as those in the cache."""
        waiting = {(job.prompt, version) for job in self.waiting}
        return len(waiting) == len(self.waiting) and not waiting & prompts

    def remove(self, wanted: Callable[[Job], bool]) -> list[Job]:
        """Take the wanted ones out of the queue."""
        removed = [job for job in self.waiting if wanted(job)]
        if removed:
            self.waiting = deque(job for job in self.waiting if not wanted(job))
        return removed


def _largest(own: int, shared: int, job: Job, *, alone: bool) -> tuple[int, int]:
    """The sides of the rectangles, with this job in them."""
    prompt, response = len(job.request.prompt_ids) - 1, job.request.sampling.max_tokens
    return (max(own, prompt + response), 0) if alone else (max(own, response), max(shared, prompt))
