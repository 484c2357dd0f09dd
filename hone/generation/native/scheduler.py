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
        slot: where its prompt is in the cache.
        aborted: to be ended with what it has.
    """

    request: GenerationRequest
    answer: asyncio.Queue[Completion | BaseException]
    prompt: bytes
    version: int = 0
    started: float = 0.0
    first_token: float = 0.0
    entered: int = 0
    slot: int = -1
    aborted: bool = False

    @classmethod
    def of(cls, request: GenerationRequest, answer: asyncio.Queue[Completion | BaseException]) -> Job:
        """A job that has not begun."""
        return cls(request, answer, array("q", request.prompt_ids).tobytes())

    @property
    def own(self) -> int:
        """Most cache tokens of its own: the prompt's last token, and all drawn but the last."""
        return self.request.sampling.max_tokens

    @property
    def shared(self) -> int:
        """Cache tokens of its prompt."""
        return len(self.request.prompt_ids) - 1


class Scheduler:
    """First come, first served, as many at once as rows and cache allow.

    The cache is two rectangles: ``A`` running requests cost ``A`` times what the largest of them has of its own, and ``P``
    different prompts ``P`` times the longest of them.

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
        entering: list[Job] = []
        prompts = {(job.prompt, job.version) for job in running}
        own, shared = (max((getattr(job, part) for job in running), default=0) for part in ("own", "shared"))
        while self.waiting and len(running) + len(entering) < self.max_num_seqs:
            job = self.waiting[0]
            slots = len(prompts) + ((job.prompt, version) not in prompts)
            own, shared = max(own, job.own), max(shared, job.shared)
            if (len(running) + len(entering) + 1) * own + slots * shared > self.max_cache_tokens:
                break
            prompts.add((job.prompt, version))
            entering.append(self.waiting.popleft())
        return entering

    def remove(self, wanted: Callable[[Job], bool]) -> list[Job]:
        """Take the wanted ones out of the queue."""
        removed = [job for job in self.waiting if wanted(job)]
        if removed:
            self.waiting = deque(job for job in self.waiting if not wanted(job))
        return removed
