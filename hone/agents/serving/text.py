"""Calls to ``/v1/completions``, ``/tokenize`` and ``/detokenize``: text or token ids, without a chat."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel, ConfigDict

from hone.agents.serving import replies
from hone.agents.serving.chat import chat_prompt, ending_of
from hone.agents.serving.errors import ApiError, bad_request
from hone.agents.serving.forcing import constraint_of
from hone.agents.serving.service import Sampled, Service
from hone.agents.serving.session import Prompt, Session
from hone.agents.serving.wire import Objects, TextBody
from hone.generation.protocol import Completion, GenerationRequest


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


@dataclass
class _Reply:
    """State of a reply; ``echo`` is the text before it, until it is sent."""

    prompt: Prompt
    stream: replies.TextStream
    echo: str = ""
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
        if body.echo and body.logprobs is not None:
            raise bad_request(
                "echo with logprobs is not supported; prompt_logprobs gives the log-probs of the prompt's tokens",
                "echo",
            )
        if body.prompt_logprobs is not None and (service.prompt_log_probs is None or body.stream):
            obstacle = "stream=true" if body.stream else "an engine in another process"
            raise bad_request(
                f"prompt_logprobs does not work with {obstacle}; it needs a complete answer of `hone serve` without --engine and "
                "--replicas",
                "prompt_logprobs",
            )
        self.prompts = [self.session.text_prompt(self._ids(prompt)) for prompt in body.prompts]
        self.requests: list[GenerationRequest] = []
        self._replies: list[_Reply] = []
        constraint = constraint_of(body)
        for place, prompt in enumerate(self.prompts):
            requests = service.requests(body, prompt, session, f"{number}.{place}", (), constraint)
            self.requests += requests
            echo = self._text(body.prompts[place]) if body.echo else ""
            self._replies += [_Reply(prompt, replies.TextStream(body.stop), echo) for _ in requests]

    async def whole(self) -> dict[str, Any]:
        completions = await self.service.completions(self.requests)
        choices = []
        for index, completion in enumerate(completions):
            text = self._record(index, completion)
            sampled = Sampled(index, completion.token_ids, completion.log_probs, completion.alternatives)
            choices.append(self._choice(sampled, text, slice(None), replies.finish_reason(completion)))
        if self.body.prompt_logprobs is not None:
            for prompt, choice in zip(self.requests, choices, strict=True):
                scores = await self.service.prompt_scores(prompt.prompt_ids, self.body.prompt_logprobs)
                choice["prompt_logprobs"] = replies.prompt_log_probs(self.service.tokenizer, scores)
        return self.heading.whole(choices, self._usage(completions))

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        completions: list[Completion] = []
        async for sampled in self.service.stream(self.requests):
            yield self.heading.chunk([self._chunk(sampled)])
            if sampled.completion is not None:
                completions.append(sampled.completion)
        if self.body.stream_options.include_usage:
            yield self.heading.chunk([], self._usage(completions))

    def failure(self, error: ApiError) -> dict[str, Any]:
        return error.body()

    def _chunk(self, sampled: Sampled) -> dict[str, Any]:
        reply, index = self._replies[sampled.choice], sampled.choice
        fresh, reply.seen = slice(reply.seen, None), len(sampled.ids)
        if sampled.completion is None:
            return self._choice(sampled, reply.stream.grow(self._decode(sampled.ids)), fresh, None)
        text = reply.stream.end(self._record(index, sampled.completion))
        return self._choice(sampled, text, fresh, replies.finish_reason(sampled.completion))

    def _record(self, index: int, completion: Completion) -> str:
        text = replies.cut(self._decode(completion.token_ids), self.body.stop)
        self.session.record(self._replies[index].prompt, completion, {"role": "assistant", "content": text})
        return text

    def _choice(self, sampled: Sampled, text: str, fresh: slice, reason: str | None) -> dict[str, Any]:
        """Return a reply or a part of it, with the fresh ones of its tokens."""
        index, ids = sampled.choice, sampled.ids[fresh]
        echo, self._replies[index].echo = self._replies[index].echo, ""
        choice: dict[str, Any] = {"index": index, "text": echo + text, "finish_reason": reason, "logprobs": None}
        if self.body.logprobs is not None:
            reply = self._replies[index]
            log_prob_entry = replies.text_log_probs(
                self.service.tokenizer,
                ids,
                sampled.log_probs[fresh],
                sampled.alternatives[fresh],
                offset=reply.characters,
            )
            reply.characters += sum(map(len, log_prob_entry["tokens"]))
            choice["logprobs"] = log_prob_entry
        if self.body.return_token_ids:
            choice |= {"token_ids": ids, "prompt_token_ids": self._replies[index].prompt.ids}
        return choice

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
