"""What every engine speaks: token ids in, token ids out, with the log-prob of every sampled token."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from hone.data.types import StopReason


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn.

    The raw policy is ``softmax(logits / temperature)``. The distribution sampled from is the raw policy after repetition
    penalty, top-k, top-p and min-p. Temperature 0 takes the likeliest token; log-probs are then those of temperature 1.

    Attributes:
        max_tokens: most tokens sampled.
        temperature: 0 is greedy.
        top_k: sample among the top_k likeliest; -1 means all.
        top_p: sample among the likeliest tokens that hold this much probability.
        min_p: drop tokens less likely than min_p x the likeliest.
        repetition_penalty: positive scores of tokens seen in prompt or response are divided by it, negative ones multiplied.
        stop_token_ids: tokens that end the response (kept in it), usually the end-of-sequence tokens.
        stop: strings that end the response (kept in it).
        ignore_eos: do not stop at stop_token_ids.
    """

    max_tokens: int = 512
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


Progress = Callable[[list[int], list[float]], None]
"""Told of the tokens of a request so far and of their log-probs, while it goes on."""


@dataclass(frozen=True)
class GenerationRequest:
    """One response asked for.

    Attributes:
        request_id: names it in the completion.
        prompt_ids: token ids. Requests with equal prompts that wait together share one prefill.
        sampling: how to draw.
        seed: the request's own random stream; its tokens depend on it, not on what else is in the batch.
        session: name of the episode that the request belongs to; what an engine still holds of the episode's earlier turns
            is not computed again. None for a request that stands alone.
        progress: called now and then until the request is complete, on the engine's event loop; engines that cannot tell leave
            it alone.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int = 0
    session: str | None = None
    progress: Progress | None = field(default=None, compare=False, repr=False)


@dataclass
class Completion:
    """One response.

    Attributes:
        request_id: of the request.
        token_ids: sampled tokens, the stopping token included.
        log_probs: of every token under the raw temperature-scaled policy.
        sampling_log_probs: of every token under the distribution really sampled from.
        stop_reason: why it ended.
        weight_versions: first and last version of the weights that produced it.
        seconds: wall time from admission to the last token.
        first_token_seconds: the same to the first token; None where the engine does not say.
    """

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    sampling_log_probs: list[float]
    stop_reason: StopReason
    weight_versions: tuple[int, int] = (0, 0)
    seconds: float = 0.0
    first_token_seconds: float | None = None


@dataclass
class EngineDescription:
    """What an engine is, for logs and checks.

    Attributes:
        name: as in ``rollout.name``.
        shares_weights: whether it reads the very parameters that the trainer updates.
        dtype: compute dtype.
        device: where it runs.
        stats: counters since start. Where an engine counts them, they are called ``prefill_tokens`` (computed of prompts),
            ``cached_tokens`` (of prompts, found in the cache), ``decode_tokens`` and ``preemptions``.
    """

    name: str
    shares_weights: bool
    dtype: str
    device: str
    stats: dict[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """A generation engine. Completions stream in the order in which they finish."""

    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        """Serve the requests, yielding each completion as it finishes.

        Raises:
            GenerationError: a request can never be served (its prompt and max_tokens exceed the cache or the model), or new
                weights have arrived only in part.
        """
        ...

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, *, last: bool = True) -> None:
        """Take new weights; an engine that shares the trainer's parameters only notes the version.

        They may come in several calls, all but the last with ``last=False``. From the first call until the last one
        returns, and after one that failed, nothing is generated.

        Raises:
            GenerationError: weights that the engine's model does not have, or with the last call: some that are missing.
        """
        ...

    async def pause(self) -> None:
        """Stop decoding after the current token; requests stay."""
        ...

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        ...

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End the given requests (all when None) with what they have, as ``StopReason.ABORTED``."""
        ...

    async def sleep(self) -> None:
        """Give cache memory back."""
        ...

    async def wake(self) -> None:
        """Take it again."""
        ...

    async def end_sessions(self, sessions: Sequence[str]) -> None:
        """These episodes are over: forget what was kept for their next turns."""
        ...

    def describe(self) -> EngineDescription:
        """Say what it is."""
        ...

    def close(self) -> None:
        """End the processes that the engine has started."""
        ...
