"""Calls to ``/v1/completions``: continue text or token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

from hone.agents.serving import replies
from hone.agents.serving.errors import ApiError, bad_request
from hone.agents.serving.forcing import constraint_of
from hone.agents.serving.service import Sampled, Service
from hone.agents.serving.session import Prompt, Session
from hone.agents.serving.wire import TextBody
from hone.generation.protocol import Completion, GenerationRequest

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
