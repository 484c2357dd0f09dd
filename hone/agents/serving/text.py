"""Calls to ``/v1/completions``, ``/tokenize``, ``/detokenize`` and ``/tokenizer_info``: text or token ids, without a chat."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import BaseModel, ConfigDict

from hone.agents.serving import replies
from hone.agents.serving.chat import chat_prompt, ending_of
from hone.agents.serving.errors import ApiError, bad_request
from hone.agents.serving.forcing import constraint_of
from hone.agents.serving.service import Sampled, Service
from hone.agents.serving.session import Prompt, Session
from hone.agents.serving.wire import Objects, TextBody
from hone.data.chat import template_of
from hone.data.types import StopReason
from hone.generation.protocol import Alternatives, Completion, GenerationRequest


class TokenizeBody(BaseModel):
    """A prompt, or messages."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: Objects = []
    tools: Objects = []
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    tokens: list[int]


def tokenize(service: Service, body: TokenizeBody) -> dict[str, Any]:
    if body.model is not None:
        service.check_model(body.model)
    ids = _ids(service, body)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids}
    names = service.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
    return {**answer, "token_strs": names}


def detokenize(service: Service, body: DetokenizeBody) -> dict[str, Any]:
    if body.model is not None:
        service.check_model(body.model)
    limit = service.vocabulary or len(service.tokenizer)
    wrong = next((token for token in body.tokens if not 0 <= token < limit), None)
    if wrong is not None:
        raise bad_request(f"token {wrong} is outside the vocabulary of {limit} tokens", "tokens")
    return {"prompt": service.decode(body.tokens, special_tokens=True)}


def tokenizer_info(service: Service) -> dict[str, Any]:
    """Return what a client needs that writes chats as text itself, with the names of a Hugging Face ``tokenizer_config.json``."""
    tokenizer = service.tokenizer
    marks = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "model_max_length": service.max_model_len,
        **marks,
        "chat_template": template_of(tokenizer) if tokenizer.chat_template else None,
    }


def _ids(service: Service, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (not body.messages):
        raise bad_request("send either 'prompt' or 'messages'", "prompt")
    if body.prompt is not None:
        service.prompt_size.check([body.prompt], "prompt")
        add = body.add_special_tokens is not False
        return list(service.tokenizer.encode(body.prompt, add_special_tokens=add))
    if body.add_special_tokens:
        raise bad_request(
            "the chat template writes the special tokens of messages; omit the field", "add_special_tokens"
        )
    ending = ending_of(
        body.messages,
        continue_final_message=body.continue_final_message,
        add_generation_prompt=body.add_generation_prompt,
    )
    _, prompt = chat_prompt(service, Session("tokenize"), body.messages, body.tools, body.chat_template_kwargs, ending)
    return prompt.ids


MAX_REPLIES = 4096
"""Maximum of replies to one call, over all its prompts."""
_NOTHING = Completion("", [], [], [], StopReason.LENGTH, (0, 0), 0.0)
"""Reply to a request for no tokens."""


@dataclass
class _Reply:
    """State of a reply; ``echo`` is the text before it, until it is sent, and ``scores`` the log-probs of its prompt."""

    prompt: Prompt
    stream: replies.TextStream
    echo: str = ""
    scores: list[Alternatives] = field(default_factory=list)
    is_begun: bool = False
    seen: int = 0
    characters: int = 0


class TextCall:
    """Call to ``/v1/completions``; several prompts run concurrently, with ``n`` replies each."""

    def __init__(self, service: Service, session: Session | None, body: TextBody, number: str) -> None:
        service.check_model(body.model)
        self.service, self.body, self.streams = service, body, body.stream
        self.headers: dict[str, str] = {}
        self.session = session or Session(f"call-{number}")
        self.heading = replies.Heading.start(number, service.model, chat=False)
        if len(body.prompts) * body.n > MAX_REPLIES:
            raise bad_request(f"{len(body.prompts)} prompts with n={body.n} replies; at most {MAX_REPLIES}", "prompt")
        if body.prompt_logprobs is not None and body.stream:
            raise bad_request("prompt_logprobs needs a complete answer, not stream=true", "prompt_logprobs")
        self._echoes = body.echo and body.logprobs is not None
        tops = [body.prompt_logprobs, body.logprobs if self._echoes else None]
        self._top = max((top for top in tops if top is not None), default=None)  # likeliest tokens of a prompt's tokens
        if self._top is not None and service.prompt_log_probs is None:
            raise bad_request(
                "log-probs of a prompt do not work with an engine in another process; they need `hone serve` without --engine and "
                "--replicas",
                "echo" if self._echoes else "prompt_logprobs",
            )
        self.prompts = [self.session.text_prompt(self._ids(prompt)) for prompt in body.prompts]
        self.requests: list[GenerationRequest] = []
        self._replies: list[_Reply] = []
        constraint = constraint_of(body)
        for place, prompt in enumerate(self.prompts):
            requests = service.requests(body, prompt, session, f"{number}.{place}", (), constraint)
            self.requests += requests if body.max_tokens != 0 else []
            echo = self._text(body.prompts[place]) if body.echo else ""
            self._replies += [_Reply(prompt, replies.TextStream(body.stop), echo) for _ in requests]

    async def whole(self) -> dict[str, Any]:
        await self._score()
        completions = await self.service.completions(self.requests) or [_NOTHING] * len(self._replies)
        choices = []
        for index, completion in enumerate(completions):
            text = self._record(index, completion)
            sampled = Sampled(index, completion.token_ids, completion.log_probs, completion.alternatives)
            choices.append(self._choice(sampled, text, slice(None), replies.finish_reason(completion)))
        if self.body.prompt_logprobs is not None:
            for reply, choice in zip(self._replies, choices, strict=True):
                places = [place[: 1 + self.body.prompt_logprobs] for place in reply.scores]
                choice["prompt_logprobs"] = replies.prompt_log_probs(self.service.tokenizer, places)
        return self.heading.whole(choices, self._usage(completions))

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        completions: list[Completion] = []
        await self._score()
        async for sampled in self._stream():
            yield self.heading.chunk([self._chunk(sampled)])
            if sampled.completion is not None:
                completions.append(sampled.completion)
        if self.body.stream_options.include_usage:
            yield self.heading.chunk([], self._usage(completions))

    def failure(self, error: ApiError) -> dict[str, Any]:
        return error.body()

    async def _score(self) -> None:
        """Compute the log-probs of each prompt, if the request asks for them."""
        for place, prompt in enumerate(self.prompts if self._top is not None else ()):
            scores = await self.service.prompt_scores(prompt.ids, self._top or 0)
            for reply in self._replies[place * self.body.n : (place + 1) * self.body.n]:
                reply.scores = scores

    async def _stream(self) -> AsyncIterator[Sampled]:
        for choice in range(len(self._replies) if not self.requests else 0):
            yield Sampled(choice, [], [], [], _NOTHING)
        async for sampled in self.service.stream(self.requests):
            yield sampled

    def _chunk(self, sampled: Sampled) -> dict[str, Any]:
        reply, index = self._replies[sampled.choice], sampled.choice
        fresh, reply.seen = slice(reply.seen, None), len(sampled.ids)
        if sampled.completion is None:
            return self._choice(sampled, reply.stream.grow(self._decode(sampled.ids)), fresh, None)
        text = reply.stream.end(self._record(index, sampled.completion))
        return self._choice(sampled, text, fresh, replies.finish_reason(sampled.completion))

    def _record(self, index: int, completion: Completion) -> str:
        text = replies.cut(self._decode(completion.token_ids), self.body.stop)
        if self.requests:
            self.session.record(self._replies[index].prompt, completion, {"role": "assistant", "content": text})
        return text

    def _choice(self, sampled: Sampled, text: str, fresh: slice, reason: str | None) -> dict[str, Any]:
        """Return a reply or a part of it, with the fresh ones of its tokens."""
        index, ids = sampled.choice, sampled.ids[fresh]
        echo, self._replies[index].echo = self._replies[index].echo, ""
        choice: dict[str, Any] = {"index": index, "text": echo + text, "finish_reason": reason, "logprobs": None}
        if self.body.logprobs is not None:
            choice["logprobs"] = self._log_probs(self._replies[index], sampled, fresh)
        if self.body.return_token_ids:
            choice |= {"token_ids": ids, "prompt_token_ids": self._replies[index].prompt.ids}
        return choice

    def _log_probs(self, reply: _Reply, sampled: Sampled, fresh: slice) -> dict[str, Any]:
        """Return the log-probs of a reply's fresh tokens, after those of its prompt if that is echoed now."""
        words, echoed = self.service.tokenizer, dict[str, Any]()
        if self._echoes and not reply.is_begun:
            echoed = replies.echoed_log_probs(words, reply.prompt.ids, reply.scores, self.body.top_log_probs)
            reply.is_begun, reply.characters = True, sum(map(len, echoed["tokens"]))
        parts = sampled.ids[fresh], sampled.log_probs[fresh], sampled.alternatives[fresh]
        entry = replies.text_log_probs(words, *parts, offset=reply.characters)
        reply.characters += sum(map(len, entry["tokens"]))
        return {name: values and [*values, *(entry[name] or ())] for name, values in echoed.items()} or entry

    def _usage(self, completions: list[Completion]) -> dict[str, int]:
        return replies.usage([token for prompt in self.prompts for token in prompt.ids], completions)

    def _decode(self, ids: list[int]) -> str:
        """Decode a reply; the token that ends it is left out."""
        ended = bool(ids) and not self.body.ignore_eos and ids[-1] in self.service.stop_token_ids
        return self.service.decode(ids[:-1] if ended else ids, special_tokens=not self.body.skip_special_tokens)

    def _text(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return self.service.decode(prompt, special_tokens=not self.body.skip_special_tokens)

    def _ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        self.service.prompt_size.check([prompt], "prompt")
        return cast("list[int]", self.service.tokenizer.encode(prompt))
