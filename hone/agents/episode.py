"""One episode as an agent loop sees it: a conversation to be continued, with its tokens, its limits and its rewards."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from hone.agents.budget import Budget, BudgetSpent, Limits
from hone.agents.client import EngineClient
from hone.agents.ledger import TokenLedger
from hone.data.episode_log import EpisodeEnd, EpisodeLog
from hone.data.seeding import derive_seed
from hone.data.types import Sample, StopReason, Trajectory
from hone.generation.protocol import Completion, GenerationRequest, SamplingParams

T = TypeVar("T")


class Episode:
    """One episode, driven by an :class:`~hone.agents.base.AgentLoop`.

    Args:
        sample: the dataset row.
        index: number of the episode within its prompt group.
        client: asks the engine.
        sampling: how each turn is drawn; its ``max_tokens`` bounds a turn, ``limits.tokens`` the episode.
        limits: of the episode.
        seed: of the episode; every turn has a random stream of its own, derived from it.
        keeps_session: whether the engine should keep what it computes for the episode's next turn.
        attempt: 0, or how often the episode was played before and broke.

    Attributes:
        name: of the episode, the session of its requests.
        ledger: tokens of the present part.
        parts: all parts; more than one where the history was rewritten.
        sampling: how each turn is drawn.
        session: name under which the engine keeps what it has computed, or None.
        log: what happens besides tokens; loops fill in messages, calls and rewards.
        answer: text to be scored; None means everything that the policy wrote.
    """

    def __init__(
        self,
        sample: Sample,
        index: int,
        client: EngineClient,
        sampling: SamplingParams,
        limits: Limits,
        *,
        seed: int,
        keeps_session: bool = True,
        attempt: int = 0,
    ) -> None:
        self.sample, self.index, self.seed, self.attempt = sample, index, seed, attempt
        self.name = f"{sample.uid}#{index}" + (f"~{attempt}" if attempt else "")
        self.started = time.perf_counter()
        self.budget = Budget(limits, self.started)
        self.ledger = TokenLedger(sample.prompt_ids)
        self.log = EpisodeLog(retries=attempt)
        self.sampling, self.client = sampling, client
        self.session = self.name if keeps_session else None
        self.parts: list[TokenLedger] = [self.ledger]
        self.answer: str | None = None
        self._finished: list[Callable[[], Awaitable[None]]] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation: the prompt's messages and those since."""
        return [*(self.sample.messages or []), *self.log.messages]

    @property
    def tokens_left(self) -> int:
        """Tokens that may still come behind the prompt, sampled or not."""
        return self.budget.limits.tokens - sum(len(part.response_ids) for part in self.parts)

    # turns -----------------------------------------------------------------------------------------------------------

    async def generate(self, *, max_tokens: int | None = None, **changes: Any) -> Completion:
        """Let the policy take a turn behind everything so far; its tokens are in the ledger afterwards.

        Args:
            max_tokens: most tokens of this turn; None means what the sampling parameters and the budget allow.
            changes: other sampling parameters for this turn (``stop``, for example).

        Raises:
            BudgetSpent: a limit is reached, before or by this turn. The runner ends the episode then.
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
        request = GenerationRequest(self.name, prompt, sampling, turn_seed, session=self.session)
        started = time.perf_counter()
        completion = await self.client.complete(request)
        self.log.generate_seconds += time.perf_counter() - started
        self.ledger.add_sampled(prompt, completion)
        self.log.assistant_turns += 1
        self.log.turn_rewards.append(0.0)
        if completion.stop_reason is StopReason.ABORTED:
            raise BudgetSpent(EpisodeEnd.ABORTED)
        return completion

    def append(self, ids: Sequence[int]) -> None:
        """Add tokens that the policy did not write.

        Raises:
            BudgetSpent: they do not fit; nothing is added then, for what cannot be answered teaches nothing.
        """
        if len(ids) >= self.tokens_left:
            raise BudgetSpent(EpisodeEnd.TOKENS)
        self.ledger.add_given(ids)

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """The history was rewritten: begin a part with tokens of its own. Each part becomes a trajectory."""
        self.ledger = TokenLedger(prompt_ids)
        self.parts.append(self.ledger)

    def adopt(self, conversations: Sequence[TokenLedger]) -> None:
        """Take conversations that were played elsewhere as the parts of this episode, in place of what it has."""
        self.parts = list(conversations)
        self.ledger = self.parts[-1]
        self.log.assistant_turns = sum(len(part.turns) for part in self.parts)
        self.log.turn_rewards = [0.0] * self.log.assistant_turns

    def count_user_turn(self) -> None:
        """A simulated user, or the environment, takes a turn.

        Raises:
            BudgetSpent: it may not.
        """
        self.budget.check_user_turn(self.log.user_turns)
        self.log.user_turns += 1

    async def outside(self, waiting: Awaitable[T], timeout: float | None = None) -> T:
        """Await something that is not the engine, and count the time.

        Args:
            waiting: a tool, an environment, a user.
            timeout: in seconds; None is no limit but that of the episode.

        Raises:
            BudgetSpent: the episode's time is over.
            TimeoutError: it took longer than ``timeout``.
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
        """Give the last assistant turn a reward."""
        if self.log.turn_rewards:
            self.log.turn_rewards[-1] += reward

    def on_finish(self, call: Callable[[], Awaitable[None]]) -> None:
        """Have ``call`` awaited when the episode is over, however it ends; the last one added comes first."""
        self._finished.append(call)

    async def finish(self) -> None:
        """Call what was added with :meth:`on_finish`; all of it, then raise the first error."""
        failures: list[Exception] = []
        while self._finished:
            try:
                await self._finished.pop()()
            except Exception as error:  # noqa: BLE001 - the rest must be called too; it is raised below
                failures.append(error)
        if failures:
            raise failures[0]

    def trajectories(self, decode: Callable[[list[int]], str]) -> list[Trajectory]:
        """What the episode leaves: a trajectory for each part in which the policy wrote something.

        Args:
            decode: token ids to text, without special tokens.
        """
        text = "\n".join(
            decode(part.response_ids[turn.start : turn.stop]) for part in self.parts for turn in part.turns
        )
        text = text if self.answer is None else self.answer
        parts = [part for part in self.parts if part.trained_length]
        return [self._trajectory(part, number, text) for number, part in enumerate(parts)]

    def _trajectory(self, part: TokenLedger, number: int, text: str) -> Trajectory:
        length = part.trained_length
        return Trajectory(
            uid=self.sample.uid,
            index=self.index,
            prompt_ids=part.prompt_ids,
            response_ids=part.response_ids[:length],
            response_mask=part.mask[:length],
            rollout_log_probs=part.log_probs[:length],
            sampling_log_probs=part.sampling_log_probs[:length],
            text=text,
            stop_reason=part.turns[-1].stop_reason,
            sample=self.sample,
            weight_versions=part.versions or (0, 0),
            seconds=time.perf_counter() - self.started,
            episode=None if self.log.is_plain else self.log,
            part=number,
        )
