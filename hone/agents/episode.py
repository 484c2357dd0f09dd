"""One episode as an agent loop sees it: its conversation, limits and rewards, the ledger of exactly its tokens, and the client by which all episodes share an engine."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from hone.agents.messages import Message
from hone.data.episode_log import EpisodeEnd, EpisodeLog
from hone.data.image_processor import ImageProcessor
from hone.data.images import IMAGE_PARTS, ImageData, read_image
from hone.data.row_images import PLACE, part_image
from hone.data.seeding import derive_seed
from hone.data.types import ExpertIds, Sample, StopReason, Trajectory
from hone.errors import DataError, GenerationError, InvariantError
from hone.generation.protocol import Completion, Engine, GenerationRequest, SamplingParams
from hone.text import valid_text


@dataclass(frozen=True)
class SampledTurn:
    """Position of one policy turn in the response."""

    start: int  # index of its first token, counted from the end of the prompt
    stop: int  # index after its last token
    stop_reason: StopReason  # reason for its end


class TokenLedger:
    """Token ids of one conversation: the prompt, then sampled and given tokens in order.

    The ledger only grows at its end, so the tokens after turn k are an exact prefix of those after turn k + 1.

    >>> from hone.data.types import StopReason
    >>> ledger = TokenLedger([1, 2])
    >>> ledger.add_sampled(ledger.ids, Completion("a", [3, 4], [-0.5, -0.25], [-0.5, -0.25], StopReason.STOP))
    >>> ledger.add_given([5])
    >>> ledger.ids, ledger.mask, ledger.log_probs
    ([1, 2, 3, 4, 5], [1, 1, 0], [-0.5, -0.25, 0.0])
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise ValueError("a conversation begins with at least one token")
        self.prompt_ids = list(prompt_ids)
        self.response_ids: list[int] = []  # all tokens after the prompt, length T
        self.mask: list[int] = []  # 1 on sampled tokens, length T
        self.log_probs: list[float] = []  # of sampled tokens under the policy, 0 elsewhere, length T
        # of sampled tokens under the sampling distribution (temperature, top-k, top-p), 0 elsewhere, length T
        self.sampling_log_probs: list[float] = []
        # number of tokens in the support of each sampled token, 0 elsewhere and where it is the whole vocabulary,
        # length T
        self.support_sizes: list[int] = []
        self.support_ids: list[int] = []  # the tokens of all supports
        # the experts of the first tokens, prompt included, as the newest turn reported them; see
        # :attr:`hone.generation.protocol.Completion.expert_ids`
        self.expert_ids: ExpertIds = ()
        self._expert_tokens = 0
        self.turns: list[SampledTurn] = []  # the sampled turns
        self.token_versions: list[int] = []  # weight version that sampled each token, -1 elsewhere, length T

    @property
    def ids(self) -> list[int]:
        """All tokens: the prompt of the next turn."""
        return self.prompt_ids + self.response_ids

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    def add_sampled(self, prompt: Sequence[int], completion: Completion) -> None:
        """Add the policy's completion of ``prompt``, which must equal the ledger's tokens.

        Raises:
            InvariantError: the prompt differs, or tokens and log-probs differ in number.
        """
        count = len(completion.token_ids)
        if len(prompt) != len(self) or list(prompt) != self.ids:
            raise InvariantError(
                f"turn {len(self.turns)} was sampled after {len(prompt)} tokens; the episode has {len(self)}, and the two are "
                "not the same",
                code="D-prefix",
                why="log-probs would be of a different conversation",
                fix="generate turns with Episode.generate, which uses the episode's tokens",
            )
        if len(completion.log_probs) != count or len(completion.sampling_log_probs) != count:
            raise InvariantError(
                f"the engine gave {len(completion.log_probs)} log-probs for {count} tokens",
                code="D-prefix",
                why="every sampled token is trained on with its own log-prob",
                fix="check the engine",
            )
        start = len(self.response_ids)
        self.response_ids += completion.token_ids
        self.mask += [1] * count
        self.log_probs += completion.log_probs
        self.sampling_log_probs += completion.sampling_log_probs
        self.support_sizes += completion.support_sizes or [0] * count
        self.support_ids += completion.support_ids
        if len(completion.expert_ids):
            self.expert_ids, self._expert_tokens = completion.expert_ids, len(prompt) + count - 1
        self.turns.append(SampledTurn(start, start + count, completion.stop_reason))
        self.token_versions += completion.token_versions or _versions(completion)

    def add_given(self, ids: Sequence[int]) -> None:
        """Add tokens that the policy did not sample: tool results, user turns, template tokens."""
        self.response_ids += ids
        self.mask += [0] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self.sampling_log_probs += [0.0] * len(ids)
        self.support_sizes += [0] * len(ids)
        self.token_versions += [-1] * len(ids)

    @property
    def versions(self) -> tuple[int, int] | None:
        """Lowest and highest weight version that sampled; None before the first sampled token."""
        sampled = [version for version in self.token_versions if version >= 0]
        return (min(sampled), max(sampled)) if sampled else None

    def experts_of(self, tokens: int) -> ExpertIds:
        """Return the experts of the first ``tokens`` tokens, -1 where no engine reported them; empty if none did."""
        if not self._expert_tokens:
            return ()
        reported = np.asarray(self.expert_ids, dtype=np.int16).reshape(self._expert_tokens, -1)[:tokens]
        unknown = np.full((tokens - len(reported), reported.shape[1]), -1, dtype=np.int16)
        return np.concatenate([reported, unknown]).ravel()

    @property
    def sampled(self) -> int:
        return sum(self.mask)

    @property
    def trained_length(self) -> int:
        """Length of the response up to its last sampled token; later tokens have no loss."""
        return max((turn.stop for turn in self.turns if turn.stop > turn.start), default=0)


def _versions(completion: Completion) -> list[int]:
    """Return the version of each token; where the engine changed it in mid-response, the oldest that is possible."""
    first, last = completion.weight_versions
    return [first] * (len(completion.token_ids) - 1) + [last] if completion.token_ids else []


class BudgetSpent(Exception):  # noqa: N818 - a signal that ends an episode, not an error
    """Signal that the episode has reached a limit."""

    def __init__(self, end: EpisodeEnd) -> None:
        super().__init__(end.value)
        self.end = end  # the limit that was reached


@dataclass(frozen=True)
class Limits:
    """Limits of one episode; None means unlimited."""

    tokens: int  # all tokens after the prompt, sampled or not
    assistant_turns: int | None = None  # turns of the policy
    user_turns: int | None = None  # turns of a simulated user or an environment
    tool_calls: int | None = None  # executed tool calls
    seconds: float | None = None  # wall time
    context: int | None = None  # tokens that the engine can hold, prompt included


class Budget:
    """Consumption of one episode measured against its limits."""

    def __init__(self, limits: Limits, started: float) -> None:
        self.limits, self._started = limits, started

    def check_time(self) -> None:
        """Raise :class:`BudgetSpent` when the time is over."""
        if self.limits.seconds is not None and self.seconds_left <= 0:
            raise BudgetSpent(EpisodeEnd.TIME)

    @property
    def seconds_left(self) -> float:
        """Remaining wall time in seconds; infinite without a limit."""
        if self.limits.seconds is None:
            return float("inf")
        return self.limits.seconds - (time.perf_counter() - self._started)

    def check_turn(self, assistant_turns: int, tokens_left: int) -> None:
        """Raise :class:`BudgetSpent` when the policy has no turn left, or no token of the episode's limit."""
        self.check_time()
        if self.limits.assistant_turns is not None and assistant_turns >= self.limits.assistant_turns:
            raise BudgetSpent(EpisodeEnd.ASSISTANT_TURNS)
        if tokens_left <= 0:
            raise BudgetSpent(EpisodeEnd.TOKENS)

    def check_user_turn(self, user_turns: int) -> None:
        """Raise :class:`BudgetSpent` when the user, or the environment, has no turn left."""
        if self.limits.user_turns is not None and user_turns >= self.limits.user_turns:
            raise BudgetSpent(EpisodeEnd.USER_TURNS)


KEY = "key"
"""Key of an image in its place."""


class EpisodeImages:
    """Images of one episode, ``all`` in order: those of the prompt, then those of messages since.

    The conversation holds places without contents. A place of the prompt is ``{"type": "image"}``; one of a later message
    names its image by key, so that a conversation whose history was rewritten still has the right images.
    """

    def __init__(self, shown: Sequence[ImageData], processor: ImageProcessor | None) -> None:
        self.all, self.processor = tuple(shown), processor
        self._of_prompt = tuple(shown)

    def add(self, images: Sequence[ImageData]) -> None:
        self.all += tuple(images)

    def placed(self, messages: Sequence[Message], who: str) -> tuple[list[Message], list[ImageData]]:
        """Return the messages with places, and the images that their parts have.

        Raises:
            DataError: an image cannot be read, or a part has none.
        """
        images: list[ImageData] = []

        def place(part: Any) -> Any:
            if not _is_image(part):
                return part
            content = part_image(part)
            if content is None:
                raise DataError(f"{who} has a part of an image without its content", fix="give the part an image")
            images.append(read_image(content, who))
            return {**PLACE, KEY: _name(images[-1])}

        return [_with_parts(message, place) for message in messages], images

    def expand(self, ids: list[int], messages: Sequence[Message], more: Sequence[ImageData] = ()) -> list[int]:
        """Replace the placeholders in the rendering ``ids`` of messages by the tokens of their images.

        ``messages`` are all of the rendered ones that have places; ``more`` are images of them that are not added yet.
        """
        if self.processor is None:
            return ids
        return self.processor.expand(ids, list(self._images_in(messages, more)))

    def fold(self, ids: Sequence[int]) -> list[int]:
        """Return ids with one placeholder for each image, as they were before :meth:`expand`."""
        if self.processor is None or not self.all:
            return list(ids)
        return self.processor.fold(ids, self.all)

    def _images_in(self, messages: Sequence[Message], more: Sequence[ImageData]) -> Iterator[ImageData]:
        by_name = {_name(image): image for image in (*self.all, *more)}
        of_prompt = iter(self._of_prompt)
        for message in messages:
            content = message.get("content")
            for part in content if isinstance(content, list) else ():
                if _is_image(part):
                    yield by_name[part[KEY]] if KEY in part else next(of_prompt)


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in IMAGE_PARTS


def _name(image: ImageData) -> str:
    return f"{image.key:011x}"


def _with_parts(message: Message, place: Any) -> Message:
    content = message.get("content")
    return {**message, "content": [place(part) for part in content]} if isinstance(content, list) else message


class EngineClient:
    """Client of an engine for any number of coroutines, each of which requests one completion at a time.

    Requests made within one turn of the event loop begin in that order within another turn. So the samples of a group share the
    prefill of their prompt, and a batch of episodes begins in the same order in every run. Each is a call of
    :meth:`Engine.generate` by itself: an error of one is not an error of the others.

    New weights may interrupt responses (:meth:`interrupt`). Each then ends at a token, and after :meth:`proceed` resumes as a request
    whose prompt contains what was sampled, so that the engine computes its KV cache again. The caller sees one completion. With
    :meth:`hold` they stay in the paused engine, which keeps their KV cache.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[Completion]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0
        self._under_way: set[str] = set()
        self._interrupted: set[str] = set()
        self._proceeding = asyncio.Event()
        self._proceeding.set()

    async def complete(self, request: GenerationRequest) -> Completion:
        """Return the completion of one request. Cancelling the caller aborts the request.

        Raises:
            RequestError: the request can never be served.
            GenerationError: the engine failed.
        """
        parts: list[Completion] = []
        while True:
            await self._proceeding.wait()
            part, interrupted = await self._part(continued(request, parts))
            parts.append(part)
            if not interrupted:
                return joined(parts)

    async def interrupt(self) -> None:
        """End all responses under way at their next token, and let no request begin, until :meth:`proceed`."""
        self._proceeding.clear()
        self._interrupted |= self._under_way
        await self.engine.abort(sorted(self._under_way))

    def hold(self) -> None:
        """Let no request begin until :meth:`proceed`; those under way stay in the engine."""
        self._proceeding.clear()

    def proceed(self) -> None:
        """Resume interrupted responses and admit new requests."""
        self._proceeding.set()

    async def _part(self, request: GenerationRequest) -> tuple[Completion, bool]:
        """Return a completion, and whether :meth:`interrupt` ended it."""
        self._number += 1
        request = dataclasses.replace(request, request_id=f"{request.request_id}/{self._number}")
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._send)
        self._waiting.append((request, future))
        self._under_way.add(request.request_id)
        try:
            completion = await future
            interrupted = request.request_id in self._interrupted
            return completion, interrupted and completion.stop_reason is StopReason.ABORTED
        except asyncio.CancelledError:
            await self.engine.abort([request.request_id])
            raise
        finally:
            self._under_way.discard(request.request_id)
            self._interrupted.discard(request.request_id)

    async def end_sessions(self, sessions: Sequence[str]) -> None:
        """Let the engine free the session KV caches of finished episodes."""
        await self.engine.end_sessions(sessions)

    def _send(self) -> None:
        pending, self._waiting = self._waiting, []
        for request, future in pending:
            if not future.done():
                task = asyncio.get_running_loop().create_task(self._serve(request, future))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _serve(self, request: GenerationRequest, future: asyncio.Future[Completion]) -> None:
        failure: BaseException = GenerationError(
            f"the engine ended without an answer to request '{request.request_id}'", fix="see its log"
        )
        try:
            await self._proceeding.wait()
            async for completion in self.engine.generate([request]):
                if not future.done():
                    future.set_result(completion)
        except Exception as error:  # noqa: BLE001 - the error is the caller's answer
            failure = error
        finally:
            if not future.done():
                future.set_exception(failure)


def continued(request: GenerationRequest, parts: Sequence[Completion]) -> GenerationRequest:
    """Return the request for the rest of a response, after the parts that are sampled already."""
    ids = [token for part in parts for token in part.token_ids]
    if not ids:
        return request
    sampling = dataclasses.replace(request.sampling, max_tokens=request.sampling.max_tokens - len(ids))
    seed = derive_seed(request.seed, "continued", len(ids))
    return dataclasses.replace(request, prompt_ids=request.prompt_ids + ids, sampling=sampling, seed=seed)


def versions_of(part: Completion) -> list[int]:
    """Return the version of each token of a part."""
    return part.token_versions or [part.weight_versions[0]] * len(part.token_ids)


def joined(parts: Sequence[Completion]) -> Completion:
    """Return one completion with the tokens of all parts, each with the version that sampled it."""
    if len(parts) == 1:
        return parts[0]
    first, last = parts[0], parts[-1]
    return dataclasses.replace(
        last,
        request_id=first.request_id,
        token_ids=[token for part in parts for token in part.token_ids],
        log_probs=[value for part in parts for value in part.log_probs],
        sampling_log_probs=[value for part in parts for value in part.sampling_log_probs],
        alternatives=[position for part in parts for position in part.alternatives],
        support_sizes=[size for part in parts for size in part.support_sizes],
        support_ids=[token for part in parts for token in part.support_ids],
        weight_versions=(first.weight_versions[0], last.weight_versions[1]),
        token_versions=[version for part in parts for version in versions_of(part)],
        expert_ids=last.expert_ids,
        seconds=sum(part.seconds for part in parts),
        first_token_seconds=first.first_token_seconds,
    )


class LimitedClient(EngineClient):
    """Client whose further requests wait, first come, first served, while as many as ``limit()`` are under way.

    A limit of None admits all.
    """

    def __init__(self, engine: Engine, limit: Callable[[], int | None]) -> None:
        super().__init__(engine)
        self.under_way = 0  # number of requests in the engine
        self._limit, self._queue = limit, deque[asyncio.Future[None]]()

    async def complete(self, request: GenerationRequest) -> Completion:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        self.admit()
        try:
            await place
            request = dataclasses.replace(
                request, request_id=f"limited/{request.request_id}"
            )  # not that of another client
            return await super().complete(request)
        finally:
            if not place.cancelled():  # else it had no place
                self.under_way -= 1
                self.admit()

    def admit(self) -> None:
        """Admit waiting requests as the limit allows; called after a change of the limit."""
        while self._queue and self._has_place():
            place = self._queue.popleft()
            if not place.cancelled():
                self.under_way += 1
                place.set_result(None)

    def _has_place(self) -> bool:
        limit = self._limit()
        return limit is None or self.under_way < limit


T = TypeVar("T")


class Episode:
    """Episode driven by an :class:`~hone.agents.base.AgentLoop`."""

    def __init__(
        self,
        sample: Sample,
        index: int,  # index of the episode within its prompt group
        client: EngineClient,
        # sampling parameters of each turn; their ``max_tokens`` bounds a turn, ``limits.tokens`` the episode
        sampling: SamplingParams,
        limits: Limits,
        *,
        seed: int,  # of the episode; the random stream of every turn is derived from it
        keeps_session: bool = True,  # True if the engine should keep a session KV cache for the episode's next turn
        attempt: int = 0,  # number of earlier attempts that failed
        image_processor: ImageProcessor | None = None,
    ) -> None:
        self.sample, self.index, self.seed, self.attempt = sample, index, seed, attempt
        self.name = f"{sample.uid}#{index}" + (f"~{attempt}" if attempt else "")
        self.started = time.perf_counter()
        self.budget = Budget(limits, self.started)
        self.ledger = TokenLedger(sample.prompt_ids)  # tokens of the current segment
        # record of everything except tokens; loops fill in messages, calls and rewards
        self.log = EpisodeLog(retries=attempt)
        self.shown = EpisodeImages(sample.images, image_processor)  # the images that the policy sees
        self.sampling, self.client = sampling, client
        self.session = self.name if keeps_session else None  # name of the session KV cache in the engine, or None
        self.segments: list[TokenLedger] = [self.ledger]
        self.answer: str | None = None  # text to be scored; None means all text that the policy wrote
        self._rewritten: list[dict[str, Any]] | None = None
        self._logged_before = 0
        self._relatives: list[Episode] = [self]
        self._children: list[Episode] = []
        self._finished: list[Callable[[], Awaitable[None]]] = []

    @property
    def images(self) -> tuple[ImageData, ...]:
        """Images of the prompt, and of tool results since."""
        return self.shown.all

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Messages of the current conversation, prompt included: what the policy sees."""
        begin = self.sample.messages or [] if self._rewritten is None else self._rewritten
        return [*begin, *self.log.messages[self._logged_before :]]

    @property
    def tokens_left(self) -> int:
        """Remaining tokens of the episode's limit, sampled or not."""
        segments = [segment for episode in self._relatives for segment in episode.segments]
        return self.budget.limits.tokens - sum(len(segment.response_ids) for segment in segments)

    # turns -----------------------------------------------------------------------------------------------------------

    async def generate(self, *, max_tokens: int | None = None, **changes: Any) -> Completion:
        """Generate a policy turn after all tokens of the segment, and add its tokens to the ledger.

        Args:
            max_tokens: upper bound on tokens of this turn; None means what sampling parameters and the budget allow.
            changes: sampling parameters changed for this turn, for example ``stop``.

        Raises:
            BudgetSpent: a limit is reached, before or by this turn. The player then ends the episode.
        """
        self.budget.check_turn(self.log.assistant_turns, self.tokens_left)
        prompt = self.ledger.ids
        left = min(self.tokens_left, max_tokens or self.sampling.max_tokens, self.sampling.max_tokens)
        if self.budget.limits.context is not None:
            left = min(left, self.budget.limits.context - len(prompt))
        if left < 1:
            raise BudgetSpent(EpisodeEnd.TOKENS)
        turn_seed = self.seed if self.log.assistant_turns == 0 else derive_seed(self.seed, self.log.assistant_turns)
        sampling = dataclasses.replace(self.sampling, max_tokens=left, **changes)
        request = GenerationRequest(self.name, prompt, sampling, turn_seed, session=self.session, images=self.images)
        started = time.perf_counter()
        completion = await self.client.complete(request)
        ended = time.perf_counter()
        self.log.generate_seconds += ended - started
        self.ledger.add_sampled(prompt, completion)
        self.log.assistant_turns += 1
        self.log.turn_times.append([started - self.started, ended - self.started])
        self.log.turn_rewards.append(0.0)
        if completion.stop_reason is StopReason.ABORTED:
            raise BudgetSpent(EpisodeEnd.ABORTED)
        return completion

    def append(self, ids: Sequence[int]) -> None:
        """Add tokens that the policy did not write.

        Raises:
            BudgetSpent: the tokens do not fit or leave no space for an answer; none are added.
        """
        if len(ids) >= self.tokens_left:
            raise BudgetSpent(EpisodeEnd.TOKENS)
        self.ledger.add_given(ids)

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Begin a new segment after the history was rewritten. Each segment becomes a trajectory."""
        self.ledger = TokenLedger(prompt_ids)
        self.segments.append(self.ledger)

    def rewrite(self, messages: Sequence[dict[str, Any]], prompt_ids: Sequence[int]) -> None:
        """Begin a new segment with another conversation in place of the one so far; the log keeps all of it."""
        self._rewritten, self._logged_before = list(messages), len(self.log.messages)
        self.begin(prompt_ids)

    def child(self, messages: list[dict[str, Any]], prompt_ids: Sequence[int]) -> Episode:
        """Return an episode of a sub-agent: a conversation of its own, within the limits of this one.

        It belongs to this episode after :meth:`absorb_children`.
        """
        number = len(self._children)
        turn = self.log.assistant_turns
        sample = dataclasses.replace(self.sample, messages=messages, prompt_ids=list(prompt_ids), images=())
        seed = derive_seed(self.seed, "child", turn, number)
        keeps = self.session is not None
        child = Episode(
            sample,
            self.index,
            self.client,
            self.sampling,
            self.budget.limits,
            seed=seed,
            keeps_session=keeps,
            image_processor=self.shown.processor,
        )
        child.name = f"{self.name}/{turn}.{number}"
        child.session = child.name if keeps else None
        child.started, child.budget, child._relatives = self.started, self.budget, self._relatives
        self._relatives.append(child)
        self._children.append(child)
        return child

    async def absorb_children(self) -> None:
        """Take the segments, turns and calls of sub-agents, whose sessions end; they precede the segment that called them."""
        sessions = [child.session for child in self._children if child.session is not None]
        for child in self._children:
            place = len(self.log.turn_rewards) - len(self.ledger.turns)
            for call in self.log.calls:
                call.turn += child.log.assistant_turns if call.turn >= place else 0
            for call in child.log.calls:
                call.turn += place
            self.segments[-1:-1] = child.segments
            self.log.turn_rewards[place:place] = child.log.turn_rewards
            self.log.turn_roles[place:place] = child.log.turn_roles
            self.log.turn_times[place:place] = child.log.turn_times
            self.log.assistant_turns += child.log.assistant_turns
            self.log.calls += child.log.calls
            self.shown.add(child.images)
            conversation = [*(child.sample.messages or []), *child.log.messages]
            self.log.conversations.append({"turn": place, "turns": child.log.assistant_turns, "messages": conversation})
            self.log.generate_seconds += child.log.generate_seconds
            self._relatives.remove(child)
        self._children = []
        if sessions:
            await self.client.end_sessions(sessions)

    def adopt(self, conversations: Sequence[TokenLedger]) -> None:
        """Replace the segments of this episode by conversations that were played elsewhere."""
        self.segments = list(conversations)
        self.ledger = self.segments[-1]
        self.log.assistant_turns = sum(len(segment.turns) for segment in self.segments)
        self.log.turn_rewards = [0.0] * self.log.assistant_turns
        self.log.turn_times = []

    def count_user_turn(self) -> None:
        self.budget.check_user_turn(self.log.user_turns)
        self.log.user_turns += 1

    async def outside(self, waiting: Awaitable[T], timeout: float | None = None) -> T:
        """Await a tool, an environment or a user, and count the time as tool time.

        Raises:
            BudgetSpent: the episode's time is over.
            TimeoutError: it took longer than ``timeout`` seconds; None leaves the episode's limit.
        """
        started, left = time.perf_counter(), self.budget.seconds_left
        limit = min(left, float("inf") if timeout is None else timeout)
        try:
            async with asyncio.timeout(None if limit == float("inf") else max(0.0, limit)):
                return await waiting
        except TimeoutError:
            self.budget.check_time()
            raise
        finally:
            self.log.tool_seconds += time.perf_counter() - started

    # rewards and endings ---------------------------------------------------------------------------------------------

    def reward_turn(self, reward: float) -> None:
        if self.log.turn_rewards:
            self.log.turn_rewards[-1] += reward

    def on_finish(self, call: Callable[[], Awaitable[None]]) -> None:
        """Register a cleanup call, awaited however the episode ends; the last one registered runs first."""
        self._finished.append(call)

    async def finish(self) -> None:
        """Run all calls registered with :meth:`on_finish`, then raise the first error."""
        failures: list[Exception] = []
        while self._finished:
            try:
                await self._finished.pop()()
            except Exception as error:  # noqa: BLE001 - the rest must be called too; it is raised below
                failures.append(error)
        if failures:
            raise failures[0]

    def trajectories(self, decode: Callable[[list[int]], str]) -> list[Trajectory]:
        """Return a trajectory for each segment with sampled tokens; ``decode`` leaves special tokens out."""
        text = "\n".join(
            decode(segment.response_ids[turn.start : turn.stop]) for segment in self.segments for turn in segment.turns
        )
        text = text if self.answer is None else valid_text(self.answer)
        segments = [segment for segment in self.segments if segment.trained_length]
        return [self._trajectory(segment, number, text) for number, segment in enumerate(segments)]

    def _trajectory(self, segment: TokenLedger, number: int, text: str) -> Trajectory:
        length = segment.trained_length
        return Trajectory(
            uid=self.sample.uid,
            index=self.index,
            prompt_ids=segment.prompt_ids,
            response_ids=segment.response_ids[:length],
            response_mask=segment.mask[:length],
            rollout_log_probs=segment.log_probs[:length],
            sampling_log_probs=segment.sampling_log_probs[:length],
            support_sizes=segment.support_sizes[:length],
            support_ids=segment.support_ids,
            expert_ids=segment.experts_of(len(segment.prompt_ids) + length),
            text=text,
            stop_reason=segment.turns[-1].stop_reason,
            sample=self.sample,
            token_versions=segment.token_versions[:length],
            seconds=time.perf_counter() - self.started,
            episode=None if self.log.is_plain else self.log,
            part=number,
            seed=self.seed,
            images=self.images,
        )
