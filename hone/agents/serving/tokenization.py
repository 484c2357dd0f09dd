"""``/tokenize`` and ``/detokenize``: the tokens of a prompt as this server makes them, and the text of tokens."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from hone.agents.serving.chat_prompt import chat_prompt, ending_of
from hone.agents.serving.errors import bad_request
from hone.agents.serving.service import Service
from hone.agents.serving.session import Session
from hone.agents.serving.wire import Objects


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
