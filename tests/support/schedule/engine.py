"""Simulated engine: replicas that sample one token for each of their requests per decode step.

A decode step of r running requests takes ``step + per_request x r`` seconds. A new request joins at the next step boundary, after the
prefill of its prompt, which delays all requests of its replica. Every request samples exactly ``max_tokens`` tokens. The id of a token
is the version of the weights that sampled it, so a trajectory shows the truth.

Between two changes all requests of a replica advance equally, so the simulation jumps from change to change.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from hone.data.types import StopReason
from hone.generation.protocol import Completion, EngineDescription, GenerationRequest

ROUNDING = 1e-9


@dataclass(frozen=True)
class Speed:
    """Speed of a replica.

    Attributes:
        step: seconds of a decode step without requests.
        per_request: seconds that each running request adds to a decode step.
        prefill: seconds per prompt token.
        max_running: requests that a replica decodes at once; the others wait.
    """

    step: float
    per_request: float = 0.0
    prefill: float = 0.0
    max_running: int = 1024

    def scaled(self, slower: float) -> Speed:
        """Return the speed of an engine that takes ``slower`` times as long for everything."""
        costs = {"step": self.step, "per_request": self.per_request, "prefill": self.prefill}
        return replace(self, **{name: cost * slower for name, cost in costs.items()})

    def seconds(self, running: int) -> float:
        """Return the seconds of a decode step."""
        return self.step + self.per_request * running


@dataclass(eq=False)
class Job:
    """Request in the engine, with the tokens sampled for it."""

    request: GenerationRequest
    answer: asyncio.Future[Completion]
    tokens: list[int] = field(default_factory=list)
    stopping: bool = False

    @property
    def most_tokens(self) -> int:
        """Prompt and response tokens."""
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens

    @property
    def missing(self) -> int:
        """Tokens that are not sampled yet."""
        return self.request.sampling.max_tokens - len(self.tokens)


class Replica:
    """Replica of the engine, which moves from step boundary to step boundary.

    Attributes:
        alive: False while it is lost.
        busy: seconds with at least one running request.
    """

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine, self.alive, self.busy = engine, True, 0.0
        self.load = 0
        """Most tokens that its requests can have."""
        self._running: list[Job] = []
        self._joining: list[Job] = []
        self._begun = self._since = 0.0  # begin of the prefill, and of the decode steps until the next boundary
        self._timer: asyncio.TimerHandle | None = None
        self._changed = False

    @property
    def jobs(self) -> list[Job]:
        """Requests of the replica."""
        return [*self._running, *self._joining]

    @property
    def has_space(self) -> bool:
        """True if it can take one more request."""
        return self.alive and len(self._running) + len(self._joining) < self.engine.speed.max_running

    @property
    def decoding(self) -> bool:
        """True within a decode step."""
        return self._changed or self._timer is not None

    def add(self, job: Job) -> None:
        """Let a request join at the next step boundary."""
        self._joining.append(job)
        self.load += job.most_tokens
        self.change()

    def change(self) -> None:
        """Plan the next boundary again, once for all changes of this moment."""
        if not self._changed:
            self._changed = True
            asyncio.get_running_loop().call_soon(self._change)

    def lose(self) -> list[Job]:
        """End the replica and return its requests."""
        if self._timer is not None:
            self._timer.cancel()
            self.busy += asyncio.get_running_loop().time() - self._begun
        jobs, self._running, self._joining, self._timer = self.jobs, [], [], None
        self.alive, self.load = False, 0
        return jobs

    def _change(self) -> None:
        self._changed = False
        if self._timer is None:
            self._continue()
        elif self._joining or self.engine.paused or any(job.stopping for job in self._running):
            self._plan(soon=True)

    def _plan(self, *, soon: bool = False) -> None:
        """Set the timer to the next boundary: the end of a request, or of this decode step."""
        step, loop = self.engine.speed.seconds(len(self._running)), asyncio.get_running_loop()
        steps = min(job.missing for job in self._running)
        if soon:
            steps = min(steps, max(1, math.ceil((loop.time() - self._since) / step - ROUNDING)))
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(self._since + steps * step, self._boundary, steps)

    def _boundary(self, steps: int) -> None:
        self.busy += asyncio.get_running_loop().time() - self._begun
        self._timer = None
        for job in self._running:
            job.tokens += [self.engine.version] * steps
        self._continue()

    def _continue(self) -> None:
        """At a boundary: answer ended requests, admit new ones, and begin the next decode step."""
        ended = [job for job in self.jobs if job.stopping or not job.missing]
        if ended:
            self._running = [job for job in self._running if not job.stopping and job.missing]
            self._joining = [job for job in self._joining if not job.stopping]
            for job in ended:
                self.load -= job.most_tokens
                self.engine.answer(job)
            self.engine.dispatch()
        if self.engine.paused:
            self.engine.stopped.set()
            return
        joined, self._joining = self._joining, []
        self._running += joined
        if self._running:
            self._begun = asyncio.get_running_loop().time()
            self._since = self._begun + self.engine.speed.prefill * sum(
                self.engine.uncached(job.request) for job in joined
            )
            self._plan()


class SimulatedEngine:
    """Engine of several replicas with one queue, as :class:`~hone.generation.protocol.Engine`.

    Args:
        speed: speed of each replica.
        replicas: number of replicas.

    Attributes:
        version: version of the weights.
        paused: True between :meth:`pause` and :meth:`resume`.
        stopped: set when a replica has stopped at a step boundary.
    """

    def __init__(self, speed: Speed, replicas: int = 1) -> None:
        self.speed, self.version, self.paused = speed, 0, False
        self.replicas = [Replica(self) for _ in range(replicas)]
        self.stopped = asyncio.Event()
        self._queue: deque[Job] = deque()
        self._jobs: dict[str, Job] = {}
        self._kept: dict[str, int] = {}  # tokens in the session KV cache of each episode

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        """Serve the requests, yielding each completion as it finishes."""
        answers: list[asyncio.Future[Completion]] = []
        for request in requests:
            job = Job(request, asyncio.get_running_loop().create_future())
            self._jobs[request.request_id] = job
            self._queue.append(job)
            answers.append(job.answer)
        self.dispatch()
        for answer in asyncio.as_completed(answers):
            yield await answer

    @property
    def busy(self) -> float:
        """Seconds with requests up to the last step boundary, summed over replicas."""
        return sum(replica.busy for replica in self.replicas)

    def dispatch(self) -> None:
        """Send waiting requests to the replica with the fewest outstanding tokens."""
        while self._queue and not self.paused:
            free = [replica for replica in self.replicas if replica.has_space]
            if not free:
                break
            min(free, key=lambda replica: replica.load).add(self._queue.popleft())

    def answer(self, job: Job) -> None:
        """Complete a request with the tokens sampled so far."""
        del self._jobs[job.request.request_id]
        request, tokens = job.request, job.tokens
        if request.session is not None:
            self._kept[request.session] = len(request.prompt_ids) + len(tokens)
        zeros = [0.0] * len(tokens)
        versions = (tokens[0], tokens[-1]) if tokens else (self.version, self.version)
        reason = StopReason.ABORTED if job.missing else StopReason.STOP
        if not job.answer.done():
            job.answer.set_result(Completion(request.request_id, tokens, zeros, zeros, reason, versions))

    def uncached(self, request: GenerationRequest) -> int:
        """Return the prompt tokens that are not in the session KV cache."""
        kept = self._kept.get(request.session, 0) if request.session is not None else 0
        return max(0, len(request.prompt_ids) - kept)

    def lose(self, index: int) -> None:
        """Lose a replica; its requests begin again in others, before those that wait."""
        jobs = self.replicas[index].lose()
        for job in jobs:
            job.tokens.clear()
        for job in [job for job in jobs if job.stopping]:
            self.answer(job)
        self._queue.extendleft(reversed([job for job in jobs if not job.stopping]))
        self.stopped.set()
        self.dispatch()

    def restore(self, index: int) -> None:
        """Start a lost replica with the current weights."""
        self.replicas[index].alive = True
        self.dispatch()

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests at their next token; those that wait end at once."""
        names = list(self._jobs) if request_ids is None else [name for name in request_ids if name in self._jobs]
        wanted = {name: self._jobs[name] for name in names}
        for job in wanted.values():
            job.stopping = True
        for job in [job for job in self._queue if job.stopping]:
            self._queue.remove(job)
            self.answer(job)
        for replica in self.replicas:
            if any(job.stopping for job in replica.jobs):
                replica.change()

    async def pause(self) -> None:
        """Stop decoding after the current token."""
        self.paused = True
        for replica in self.replicas:
            replica.change()
        while any(replica.decoding for replica in self.replicas):
            self.stopped.clear()
            await self.stopped.wait()

    async def resume(self) -> None:
        """Resume decoding."""
        self.paused = False
        for replica in self.replicas:
            replica.change()
        self.dispatch()

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, *, last: bool = True) -> None:
        """Use new weights, for which no KV cache is valid."""
        self.version = version
        self._kept.clear()

    async def end_sessions(self, sessions: Sequence[str]) -> None:
        """Drop the session KV caches of these episodes."""
        for session in sessions:
            self._kept.pop(session, None)

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Do nothing: there is no memory to free."""

    async def wake(self, *, cache: bool = True) -> None:
        """Do nothing, as :meth:`sleep`."""

    def describe(self) -> EngineDescription:
        """Return the name of the engine."""
        return EngineDescription("simulated", False, "float32", "cpu")

    def close(self) -> None:
        """Do nothing: there is no process."""
