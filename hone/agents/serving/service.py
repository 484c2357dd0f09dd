"""Completions for a checked request: limits, sampling parameters, seeds and streaming."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.agents.messages import Message
from hone.agents.rendering import TEXT_TOOLS, Renderer, renderer_for
from hone.agents.rendering.template import Template, shows_tools
from hone.agents.serving.errors import ApiError, bad_request, named_by_options, too_long
from hone.agents.serving.gateway import Gateway
from hone.agents.serving.session import Prompt, Session
from hone.agents.serving.wire import ChatBody, TextBody
from hone.data.tokenizer import decoded
from hone.errors import HoneError, RequestError
from hone.generation.grammars import check_compiles
from hone.generation.limits import RequestLimits
from hone.generation.protocol import Alternatives, Completion, Constraint, GenerationRequest, SamplingParams
from hone.insight.audit import AuditLog

_USUAL_CHARACTERS = 8
"""Characters per token below which a text is tokenized at once; text of people has about 4."""
_PIECE = 2**16
"""Characters of a piece of a longer text."""


class PromptSize:
    """Refuses text that cannot fit in the context, without tokenizing all of it.

    A token stands for at most as many characters as its name in the vocabulary. So a text of more characters than ``max_tokens``
    such tokens cannot fit. Most tokens are shorter than the longest one: a text that passes and is unusually long is tokenized piece
    by piece, and refused at twice the context length, which is more than the cuts can add.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens

    @cached_property
    def max_characters(self) -> int:
        return self._max_tokens * max(map(len, self._tokenizer.get_vocab()))

    def check(self, texts: Iterable[str], param: str) -> None:
        """Check that texts of the field ``param`` fit in one prompt together."""
        texts = list(texts)
        characters = sum(map(len, texts))
        if characters > self.max_characters:
            raise too_long(f"{characters} characters", self._max_tokens, param)
        if characters > _USUAL_CHARACTERS * self._max_tokens:
            self._count(texts, param)

    def _count(self, texts: list[str], param: str) -> None:
        tokens = 0
        for text in texts:
            for start in range(0, len(text), _PIECE):
                encoded: Any = self._tokenizer(text[start : start + _PIECE], add_special_tokens=False)
                tokens += len(encoded["input_ids"])
                if tokens > 2 * self._max_tokens:
                    raise too_long(f"more than {tokens // 2} tokens", self._max_tokens, param)


MAX_RENDERERS = 32
"""Maximum of kept renderers, one for each combination of template arguments."""

TOOLS_AS_TEXT = "the chat template ignores tools, so tools, calls and results are text (--renderer text_tools)"
"""Note of a server whose model's template has no tools."""


@dataclass(frozen=True)
class Sampled:
    """Sampled tokens of one reply, complete or partial."""

    choice: int  # index of the reply
    ids: list[int]  # all tokens so far
    log_probs: list[float]  # log-probs of these tokens
    alternatives: list[Alternatives]  # likeliest tokens at each of their positions, if the request asks for them
    completion: Completion | None = None  # the completion, once the reply is complete


@dataclass
class Service:
    """Model, tokenizer and engine of an endpoint."""

    model: str  # name of the model in requests
    tokenizer: PreTrainedTokenizerBase
    gateway: Gateway
    max_model_len: int  # maximum tokens of a prompt plus its reply
    vocabulary: int | None = None  # number of tokens of the model; None leaves the check of token ids to the engine
    stop_token_ids: tuple[int, ...] = ()  # tokens that end a reply
    renderer: str = "auto"  # name of the renderer; ``auto`` chooses it by the tokenizer
    parser: str = "auto"  # name of the tool-call parser
    # extra arguments of the chat template; a request's arguments override them
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    # returns the log-probs of a prompt's tokens after the first, each followed by the given number of likeliest tokens;
    # called on the engine's loop. None where the engine is another process.
    prompt_log_probs: Callable[[Sequence[int], int], list[Alternatives]] | None = None
    # True for `hone serve`: errors name its options, and a template that ignores tools gets them as text. False for the
    # endpoint of a training run: errors name its keys, and such a template is refused.
    standalone: bool = True
    release: int | None = None  # number of the release that answers; None for a model of no shelf
    audit: AuditLog | None = None  # log of the tool calls in replies, or None
    _renderers: dict[str, Renderer] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _constraints: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "hone-constraints"))

    def __post_init__(self) -> None:
        self.prompt_size = PromptSize(self.tokenizer, self.max_model_len)
        self.limits = RequestLimits(self.max_model_len, vocabulary=self.vocabulary)

    def renderer_for(self, template_kwargs: dict[str, Any]) -> Renderer:
        """Return the renderer for these arguments of the chat template; the ``MAX_RENDERERS`` latest are kept."""
        template_kwargs = {**self.template_kwargs, **template_kwargs}
        name = repr(sorted(template_kwargs.items()))
        with self._lock:
            renderer = self._renderers.pop(name, None)
        if renderer is None:
            used = TEXT_TOOLS if self.tools_as_text else self.renderer
            renderer = renderer_for(self.tokenizer, used, parser=self.parser, template_kwargs=template_kwargs)
            renderer.template.strict = self.standalone
        with self._lock:
            self._renderers[name] = renderer
            if len(self._renderers) > MAX_RENDERERS:
                del self._renderers[next(iter(self._renderers))]
        return renderer

    @cached_property
    def tools_as_text(self) -> bool:
        """True if tools are written into message contents, because the chosen renderer's template ignores them."""
        if not self.standalone or self.renderer != "auto" or not self.tokenizer.chat_template:
            return False
        return not shows_tools(Template(self.tokenizer, self.template_kwargs))

    def named(self, error: HoneError) -> HoneError:
        """Return an error that names the options of the command which the user called."""
        return named_by_options(error) if self.standalone else error

    def check_model(self, name: str) -> None:
        if name != self.model:
            raise ApiError(
                404,
                f"model '{name}' does not exist; this server has '{self.model}'",
                code="model_not_found",
                param="model",
            )

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        return decoded(self.tokenizer, ids, skip_special_tokens=not special_tokens)

    async def prompt_scores(self, ids: Sequence[int], top: int) -> list[Alternatives]:
        """Return the log-probs of a prompt's tokens after the first, each followed by the ``top`` likeliest tokens there."""
        compute = self.prompt_log_probs
        assert compute is not None

        async def score() -> list[Alternatives]:
            return compute(ids, top) if len(ids) > 1 else []

        return await self.gateway.on_engine(score())

    def requests(
        self,
        body: ChatBody | TextBody,
        prompt: Prompt,
        session: Session | None,
        name: str,
        stop_token_ids: tuple[int, ...],
        constraint: Constraint | None = None,
    ) -> list[GenerationRequest]:
        """Return one engine request for each requested reply; a session's sampling parameters replace the body's.

        Raises:
            ApiError: the prompt leaves no space for a reply, or the request is one that no engine can serve.
        """
        length = len(prompt.ids)
        space = self.max_model_len - length
        if space < 1:
            raise too_long(f"{length} tokens", self.max_model_len)
        if (body.max_new_tokens or 0) > space:
            raise ApiError(
                400,
                f"max_tokens={body.max_new_tokens} exceeds the context: {length} prompt tokens and the answer must fit in "
                f"{self.max_model_len}; use max_tokens <= {space}",
                code="context_length_exceeded",
                param="messages",
            )
        allowed = session.allow(prompt) if session and session.allow else space
        max_tokens = min(space, allowed, body.max_new_tokens or space)
        session_sampling = session.sampling if session else None
        sampling = session_sampling or SamplingParams(
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            ignore_eos=body.ignore_eos,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=tuple(body.logit_bias.items()),
        )
        ends = (*self.stop_token_ids, *stop_token_ids, *body.stop_token_ids, *sampling.stop_token_ids)
        sampling = replace(
            sampling,
            max_tokens=max_tokens,
            stop=(*sampling.stop, *body.stop),
            stop_token_ids=tuple(dict.fromkeys(ends)),
            constraint=constraint or sampling.constraint,
            top_log_probs=body.top_log_probs,
        )
        try:
            self.limits.check(GenerationRequest(name, prompt.ids, sampling))
        except RequestError as error:
            raise bad_request(f"{error.what}; {error.fix}", error.field) from error
        return [
            GenerationRequest(f"{name}#{number}", prompt.ids, sampling, seed, session=session.name if session else None)
            for number, seed in enumerate(_seeds(body, prompt, session))
        ]

    async def check_constraints(self, requests: Sequence[GenerationRequest]) -> None:
        """Check that the constraints of requests compile, in a thread of their own."""
        loop = asyncio.get_running_loop()
        for constraint in {request.sampling.constraint for request in requests}:
            if constraint is not None:
                try:
                    await loop.run_in_executor(self._constraints, check_compiles, constraint)
                except RequestError as error:
                    raise bad_request(f"{error.what}; {error.fix}", error.field) from error

    async def completions(self, requests: list[GenerationRequest]) -> list[Completion]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.gateway.complete(request)) for request in requests]
        return [task.result() for task in tasks]

    async def stream(self, requests: list[GenerationRequest]) -> AsyncIterator[Sampled]:
        """Yield all replies as they grow, interleaved. Engines without streaming yield each complete reply."""
        events: asyncio.Queue[Sampled | BaseException] = asyncio.Queue()

        async def follow(choice: int, request: GenerationRequest) -> None:
            def progress(ids: list[int], log_probs: list[float], alternatives: list[Alternatives]) -> None:
                events.put_nowait(Sampled(choice, ids, log_probs, alternatives))

            try:
                done = await self.gateway.complete(replace(request, progress=progress))
            except BaseException as error:  # the reader of the events must receive it
                events.put_nowait(error)
                raise
            events.put_nowait(Sampled(choice, done.token_ids, done.log_probs, done.alternatives, done))

        tasks = [asyncio.ensure_future(follow(choice, request)) for choice, request in enumerate(requests)]
        try:
            left = len(tasks)
            while left:
                event = await events.get()
                if isinstance(event, BaseException):
                    raise event
                left -= event.completion is not None
                yield event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def audit_calls(self, message: Message, session: Session, reply: str) -> None:
        """Write the tool calls of a reply to the audit log, if there is one."""
        for call in message.get("tool_calls") or () if self.audit is not None else ():
            function = call["function"]
            about = {"session": session.name, "reply": reply, "model": self.model, "release": self.release}
            assert self.audit is not None
            self.audit.served(function["name"], function["arguments"], **about)


def _seeds(body: ChatBody | TextBody, prompt: Prompt, session: Session | None) -> list[int]:
    if body.seed is not None and (session is None or session.sampling is None):
        return [body.seed + number for number in range(body.n)]
    if session is not None:
        return session.seeds(prompt.ids, body.n)
    return [secrets.randbits(63) for _ in range(body.n)]
