"""The engine protocol: token ids in, token ids out, with the log-prob of every sampled token."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from torch import Tensor

from hone.data.images import ImageData
from hone.data.types import ExpertIds, StopReason
from hone.errors import GenerationError


def incomplete_weights(what: str) -> GenerationError:
    """Return the error of a request while new weights, such as those of ``version 3``, have arrived only in part."""
    return GenerationError(
        f"weights {what} have arrived only in part",
        why="the engine would sample from a mixture of two policies",
        fix="send all weights of a version again; if the engine refused some, the previous error says why",
    )


def require_weights(expected: Collection[str], missing: Collection[str], whole: str = "policy") -> None:
    """Raise GenerationError if some of the expected weights are missing."""
    if missing:
        raise GenerationError(
            f"{len(missing)} of {len(expected)} weights have not arrived, such as '{min(missing)}'",
            why="the engine would sample from a mixture of two policies",
            fix=f"send every parameter of the {whole}",
        )


class ConstraintKind(StrEnum):
    """Kind of a :class:`Constraint`; the comments name its text."""

    JSON_SCHEMA = "json_schema"  # a JSON schema
    JSON_OBJECT = "json_object"  # nothing: any JSON object
    REGEX = "regex"  # a regular expression, matched against the whole response
    CHOICE = "choice"  # a JSON list of strings, one of which is the response
    GRAMMAR = "grammar"  # a grammar in llguidance's dialect of Lark


@dataclass(frozen=True)
class Constraint:
    """Constraint on the text of a response: every sampled token must leave a way to complete it.

    A response may end (by a stop token) only where its text satisfies the constraint. It ends without one if there are no stop
    tokens or they are ignored, once nothing can follow.
    """

    kind: ConstraintKind  # see :class:`ConstraintKind`
    text: str = ""  # schema, expression, choices or grammar


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters.

    The raw policy is ``softmax(logits / temperature)``. The distribution sampled from is the raw policy after logit bias,
    penalties (repetition, then frequency and presence), constraint, top-k, top-p and min-p. Temperature 0 takes the likeliest
    token; log-probs are then those of temperature 1.

    Attributes:
        max_tokens: maximum of sampled tokens.
        temperature: 0 is greedy.
        top_k: sample among the top_k likeliest; -1 means all.
        top_p: sample among the likeliest tokens with this total probability.
        min_p: drop tokens less likely than min_p x the likeliest.
        repetition_penalty: positive scores of tokens seen in prompt or response are divided by it, negative ones multiplied.
        stop_token_ids: tokens that end the response (kept in it), usually the end-of-sequence tokens.
        stop: strings that end the response (kept in it).
        ignore_eos: do not stop at stop_token_ids.
        presence_penalty: subtracted from the logits of tokens that occur in the response.
        frequency_penalty: subtracted from a token's logit once for each of its occurrences in the response.
        logit_bias: pairs of a token and what is added to its logit.
        constraint: on the text of the response; None leaves it free.
        top_log_probs: number of likeliest tokens to report at every position, with their log-probs under the raw policy.
        report_support: report the support of every sampled token: the tokens that top-k, top-p and min-p left. Without penalties
            and logit bias, the distribution sampled from is the raw policy renormalised over it.
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    constraint: Constraint | None = None
    top_log_probs: int = 0
    report_support: bool = False

    @property
    def wants_support(self) -> bool:
        """True if the support of every token is reported: asked for, and smaller than the vocabulary."""
        return self.report_support and self.truncates and self.temperature > 0

    @property
    def truncates(self) -> bool:
        """True if top-k, top-p or min-p excludes tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


Alternatives = list[tuple[int, float]]
"""Likeliest tokens at a position, the likeliest first, with their log-probs under the raw policy."""
Progress = Callable[[list[int], list[float], list[Alternatives]], None]
"""Callback with the tokens sampled so far for a request, their log-probs, and the alternatives if it asks for them."""


@dataclass(frozen=True)
class GenerationRequest:
    """Request for one response.

    Attributes:
        request_id: name in the completion.
        prompt_ids: token ids. Requests with equal prompts that wait together share one prefill.
        sampling: see :class:`SamplingParams`.
        seed: of the request's random stream; its tokens do not depend on the rest of the batch.
        session: name of the request's episode, whose earlier turns an engine may have in its session KV cache. None for a
            single request.
        progress: called now and then until the request is complete, on the engine's event loop; some engines ignore it.
        images: those of the prompt, whose tokens have ids below 0 (:mod:`hone.data.images`).
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int = 0
    session: str | None = None
    progress: Progress | None = field(default=None, compare=False, repr=False)
    images: tuple[ImageData, ...] = field(default=(), repr=False)


@dataclass
class Completion:
    """One response.

    Attributes:
        request_id: of the request.
        token_ids: sampled tokens, the stopping token included.
        log_probs: of every token under the raw temperature-scaled policy.
        sampling_log_probs: of every token under the distribution sampled from.
        stop_reason: why it ended.
        weight_versions: first and last version of the weights that sampled it.
        token_versions: version of every token, if the response was interrupted by new weights; else empty.
        seconds: wall time from admission to the last token.
        first_token_seconds: the same to the first token; None if the engine does not report it.
        queued_seconds: time in an engine's server before admission: the cache was full.
        support_sizes: number of tokens in the support of every token, if the request asks for it; else empty.
        support_ids: the tokens of all supports, in ascending order within each.
        alternatives: at every position, if the request asks for ``top_log_probs``; else empty.
        expert_ids: the experts that the routers chose for each token of the prompt and of the response, the last token excluded: by
            token, router and rank, end to end. Empty from an engine that does not report them.
        score: output of a scoring model after the prompt's last token; None from a model that generates.
    """

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    sampling_log_probs: list[float]
    stop_reason: StopReason
    weight_versions: tuple[int, int] = (0, 0)
    seconds: float = 0.0
    first_token_seconds: float | None = None
    alternatives: list[Alternatives] = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)
    queued_seconds: float = 0.0
    support_sizes: list[int] = field(default_factory=list)
    support_ids: list[int] = field(default_factory=list)
    expert_ids: ExpertIds = field(default=(), compare=False)
    score: float | None = None


@dataclass
class EngineDescription:
    """Properties of an engine, for logs and checks."""

    name: str  # as in ``rollout.name``
    shares_weights: bool  # whether it reads the parameters that the trainer updates
    dtype: str  # compute dtype
    device: str
    # counters since start. Common names are ``prefill_tokens`` (computed prompt tokens), ``cached_tokens`` (prompt
    # tokens read from the cache), ``decode_tokens`` and ``preemptions``.
    stats: dict[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """A generation engine. Completions stream in the order in which they finish.

    What an engine leaves out of pausing, sleeping, sessions and closing, it has no use for.
    """

    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        """Serve the requests, yielding each completion as it finishes.

        Raises:
            RequestError: a request exceeds the limits of the cache or the model, or cannot be served
                (:mod:`hone.generation.limits`); then no request of the call starts.
            GenerationError: new weights have arrived only in part, or a request failed in the engine. Requests of other
                calls continue.
        """
        ...

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, *, last: bool = True) -> None:
        """Load new weights; an engine that shares the trainer's parameters only notes the version.

        Weights may come in several calls, all but the last with ``last=False``. From the first call until the last one
        returns, and after a failed call, nothing is generated.

        Raises:
            GenerationError: the engine's model has no such weight, or after the last call weights are missing.
        """
        ...

    async def pause(self) -> None:
        """Stop decoding after the current token; requests keep their state."""

    async def resume(self) -> None:
        """Resume decoding after :meth:`pause`."""

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End the given requests (all when None) with the tokens sampled so far, as ``StopReason.ABORTED``."""
        ...

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Free the engine's memory until :meth:`wake`: the KV cache, and on a GPU the weights. Running requests end as aborted.

        Args:
            keep_weights: keep the weights in host memory. Otherwise they are dropped, and all weights must be loaded between
                ``wake(cache=False)`` and the next request. An engine that shares the trainer's parameters keeps them.
        """

    async def wake(self, *, cache: bool = True) -> None:
        """Take the memory of the weights back, and with ``cache`` that of the KV cache too, after which requests are served."""

    async def end_sessions(self, sessions: Sequence[str]) -> None:
        """Drop the session KV caches of these episodes."""

    def describe(self) -> EngineDescription:
        """Return the engine's properties and counters."""
        ...

    def close(self) -> None:
        """End the processes that the engine started."""
