"""Prompt of a chat: its messages checked, and rendered as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hone.agents.rendering import Ending, Renderer
from hone.agents.serving.conversation import check_template_arguments, check_tools, checked_messages, texts
from hone.agents.serving.errors import bad_request
from hone.agents.serving.service import Service
from hone.agents.serving.session import Prompt, Session
from hone.agents.serving.wire import ChatBody
from hone.data.chat import template_of
from hone.errors import DataError

_EFFORT = "reasoning_effort"


def chat_prompt(
    service: Service,
    session: Session,
    messages: Sequence[dict[str, Any]],
    tools: list[dict[str, Any]],
    template_kwargs: dict[str, Any],
    ending: Ending,
) -> tuple[Renderer, Prompt]:
    """Return the renderer and the prompt of a chat."""
    check_template_arguments(template_kwargs)
    check_tools(tools)
    checked = checked_messages(messages)
    service.prompt_size.check(texts([checked, tools, template_kwargs]), "messages")
    renderer = service.renderer_for(template_kwargs)
    try:
        return renderer, session.prompt(renderer, checked, tools or None, ending)
    except DataError as error:
        named = service.named(error)
        raise bad_request(f"{named.what}; {named.fix}", "messages") from error


def template_kwargs(service: Service, body: ChatBody) -> dict[str, Any]:
    """Return the arguments of the chat template that a request names.

    Raises:
        ApiError: it has a reasoning effort, and the template does not use it.
    """
    if body.reasoning_effort is None:
        return body.chat_template_kwargs
    if _EFFORT not in template_of(service.tokenizer):
        raise bad_request(
            f"the chat template of model '{service.model}' does not use {_EFFORT}; remove the field", _EFFORT
        )
    return {_EFFORT: body.reasoning_effort, **body.chat_template_kwargs}


def ending_of(
    messages: Sequence[dict[str, Any]], *, continue_final_message: bool, add_generation_prompt: bool | None
) -> Ending:
    """Return the end of the prompt that a request wants."""
    if not continue_final_message:
        return Ending.CLOSED if add_generation_prompt is False else Ending.REPLY
    if add_generation_prompt:
        raise bad_request(
            "continue_final_message continues the last turn and add_generation_prompt begins a new one; set one of them",
            "continue_final_message",
        )
    if messages[-1].get("role") != "assistant" or messages[-1].get("tool_calls"):
        raise bad_request(
            "continue_final_message needs an assistant message without tool calls as the last one", "messages"
        )
    return Ending.OPEN
