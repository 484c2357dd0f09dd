"""Chats with tools on a chat template that ignores tools."""

from __future__ import annotations

import copy
import json
from typing import Any

import openai
import pytest
from support.scripted import ScriptedEngine, served
from support.templates import tokenizer

from hone.agents.rendering import TEXT_TOOLS, renderer_for

TOKENIZER = copy.deepcopy(tokenizer("qwen2_5"))
TOKENIZER.chat_template = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RENDERER = renderer_for(TOKENIZER, TEXT_TOOLS)
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
QUESTION = {"role": "user", "content": "How is the weather in Rome?"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def ids(text: str) -> list[int]:
    return TOKENIZER(f"{text}<|im_end|>", add_special_tokens=False)["input_ids"]


def weather(request: Any) -> list[int]:
    return ids("Sunny.") if "<tool_response>" in TOKENIZER.decode(request.prompt_ids) else ids(CALL)


def test_the_tools_are_text_and_calls_are_calls() -> None:
    engine = ScriptedEngine(weather)
    with served(engine, TOKENIZER) as (url, endpoint):
        client = openai.OpenAI(base_url=f"{url}/sessions/a/v1", api_key="none", max_retries=0)
        messages: list[Any] = [QUESTION]
        raw = client.chat.completions.with_raw_response.create(model="tiny", messages=messages, tools=[WEATHER])
        assert "text_tools" in raw.headers["x-hone-note"]
        message = raw.parse().choices[0].message
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Rome"})
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        second = client.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER])
        assert second.choices[0].message.content == "Sunny."
        (ledger,) = endpoint.sessions.find("a").ledgers()
    assert engine.asked[0].prompt_ids == RENDERER.prompt([QUESTION], [WEATHER])
    assert len(ledger.ids) == len(engine.asked[1].prompt_ids) + len(ids("Sunny.")), "one conversation"


def test_a_chat_without_tools_has_no_note_and_the_templates_tokens() -> None:
    engine = ScriptedEngine(lambda request: ids("Yes."))
    with served(engine, TOKENIZER) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        raw = client.chat.completions.with_raw_response.create(model="tiny", messages=[QUESTION])
        none = client.chat.completions.create(model="tiny", messages=[QUESTION], tools=[WEATHER], tool_choice="none")
    assert "x-hone-note" not in raw.headers
    text = TOKENIZER.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True)
    assert TOKENIZER.decode(engine.asked[0].prompt_ids) == text
    assert none.choices[0].message.content == "Yes."


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"renderer": "generic"}, "--renderer"),
        ({"standalone": False}, "actor_rollout_ref.rollout.multi_turn.renderer"),
    ],
)
def test_a_renderer_of_ones_choice_stays_and_the_refusal_names_its_option(options: dict[str, Any], option: str) -> None:
    with (
        served(ScriptedEngine(weather), TOKENIZER, **options) as (url, _),
        pytest.raises(openai.BadRequestError) as caught,
    ):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        client.chat.completions.create(model="tiny", messages=[QUESTION], tools=[WEATHER])
    assert f"{option}=text_tools" in str(caught.value) or f"{option} text_tools" in str(caught.value)
