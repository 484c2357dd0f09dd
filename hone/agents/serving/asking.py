"""From a checked request to completions: limits, sampling, random streams, and pieces as they are sampled."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from hone.agents.rendering import Renderer, renderer_for
from hone.agents.serving.errors import ApiError, bad_request, too_long
from hone.agents.serving.gateway import Gateway
from hone.agents.serving.session import Prompt, Session
from hone.agents.serving.wire import ChatBody, TextBody
from hone.generation.protocol import Completion, GenerationRequest, SamplingParams


@dataclass(frozen=True)
class Sampled:
    """Tokens of one reply so far, or all of them.

    Attributes:
        choice: number of the reply.
        ids: all tokens so far.
        log_probs: of these tokens.
        completion: set when the reply is whole.
    """

    choice: int
    ids: list[int]
    log_probs: list[float]
    completion: Completion | None = None


@dataclass
class Service:
    """What an endpoint offers.

    Attributes:
        model: name under which clients ask for it.
        tokenizer: of the model.
        gateway: to the engine.
        max_model_len: most tokens of a prompt with its reply.
        stop_token_ids: that end a reply.
        renderer: name of the rule by which messages become tokens; ``auto`` finds it.
        parser: name of the rule by which tool calls are read.
        template_kwargs: extra arguments of the chat template; those of a request win.
    """

    model: str
    tokenizer: PreTrainedTokenizerBase
    gateway: Gateway
    max_model_len: int
    stop_token_ids: tuple[int, ...] = ()
    renderer: str = "auto"
    parser: str = "auto"
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    _renderers: dict[str, Renderer] = field(default_factory=dict)

    def renderer_for(self, template_kwargs: dict[str, Any]) -> Renderer:
        """The renderer for these arguments of the chat template."""
        template_kwargs = {**self.template_kwargs, **template_kwargs}
        name = repr(sorted(template_kwargs.items()))
        if name not in self._renderers:
            self._renderers[name] = renderer_for(
                self.tokenizer, self.renderer, parser=self.parser, template_kwargs=template_kwargs
            )
        return self._renderers[name]

    def check_model(self, name: str) -> None:
        """Refuse another model than the one there is.

        Raises:
            ApiError: it is another.
        """
        if name != self.model:
            raise ApiError(
                404, f"there is no model '{name}' here; there is '{self.model}'", code="model_not_found", param="model"
            )

    def decode(self, ids: list[int]) -> str:
        """Text of tokens, special ones skipped."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def requests(
        self,
        body: ChatBody | TextBody,
        prompt: Prompt,
        session: Session | None,
        name: str,
        stop_token_ids: tuple[int, ...],
    ) -> list[GenerationRequest]:
        """One request for each reply asked for.

        Raises:
            ApiError: the prompt leaves no room, or holds no tokens or unknown ones.
        """
        length = len(prompt.ids)
        if not prompt.ids or min(prompt.ids) < 0:
            raise bad_request(f"the prompt has {length} tokens, of which all must be ids of 0 and above", "prompt")
        room = self.max_model_len - length
        if room < 1 or (body.longest or 0) > room:
            asked = f" and {body.longest} tokens are asked for" if room >= 1 else ""
            error = too_long(length, self.max_model_len)
            raise ApiError(400, error.message + asked, code=error.code, param=error.param)
        allowed = session.allow(prompt) if session and session.allow else room
        longest = min(room, allowed, body.longest or room)
        own = session.sampling if session else None
        sampling = own or SamplingParams(
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            ignore_eos=body.ignore_eos,
        )
        ends = (*self.stop_token_ids, *stop_token_ids, *sampling.stop_token_ids)
        sampling = replace(
            sampling,
            max_tokens=longest,
            stop=(*sampling.stop, *body.stop),
            stop_token_ids=tuple(dict.fromkeys(ends)),
        )
        return [
            GenerationRequest(f"{name}#{number}", prompt.ids, sampling, seed, session=session.name if session else None)
            for number, seed in enumerate(_seeds(body, prompt, session))
        ]

    async def completions(self, requests: list[GenerationRequest]) -> list[Completion]:
        """All replies, in order."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.gateway.complete(request)) for request in requests]
        return [task.result() for task in tasks]

    async def stream(self, requests: list[GenerationRequest]) -> AsyncIterator[Sampled]:
        """All replies as they grow, mixed. Engines that give no pieces give each reply whole."""
        events: asyncio.Queue[Sampled | BaseException] = asyncio.Queue()

        async def follow(choice: int, request: GenerationRequest) -> None:
            def progress(ids: list[int], log_probs: list[float]) -> None:
                events.put_nowait(Sampled(choice, ids, log_probs))

            try:
                done = await self.gateway.complete(replace(request, progress=progress))
            except (ApiError, asyncio.CancelledError) as error:
                events.put_nowait(error)
                raise
            events.put_nowait(Sampled(choice, done.token_ids, done.log_probs, done))

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


def _seeds(body: ChatBody | TextBody, prompt: Prompt, session: Session | None) -> list[int]:
    if body.seed is not None and (session is None or session.sampling is None):
        return [body.seed + number for number in range(body.n)]
    if session is not None:
        return session.seeds(prompt.ids, body.n)
    return [secrets.randbits(63) for _ in range(body.n)]
