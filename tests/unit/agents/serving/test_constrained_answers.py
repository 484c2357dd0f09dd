"""Response formats, forced calls, penalties and alternatives of a random model, through the HTTP server and the official client."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import jsonschema
import openai
import pytest
from support.families import make_engine, model_of, tiny_config
from support.patience import SOON
from support.scripted import ScriptedEngine, served
from support.templates import tokenizer

from hone.extras import install_command
from hone.generation.protocol import ConstraintKind

pytestmark = pytest.mark.application("hone/agents/serving", "hone/generation")

CONTEXT = 3072
QUESTION: Any = {"role": "user", "content": "Hi"}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 0, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
        "at": {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 90}, "maxItems": 2},
    },
    "required": ["city", "days"],
}
PLACE = {
    "type": "object",
    "properties": {"inside": {"type": "boolean"}, "floor": {"anyOf": [{"type": "null"}, {"type": "integer"}]}},
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in {"weather": WEATHER, "place-1": PLACE}.items()
] + [{"type": "function", "function": {"name": "stop", "description": "no parameters"}}]
SCHEMAS = {"weather": WEATHER, "place-1": PLACE, "stop": {"type": "object", "maxProperties": 0}}


def random_model(family: str) -> tuple[Any, Any]:
    """A model with random weights, and its tokenizer."""
    words = tokenizer(family)
    config = tiny_config("qwen3")
    config.vocab_size, config.max_position_embeddings = len(words) + 5, CONTEXT
    return model_of(config), words


def serving(family: str) -> Any:
    model, words = random_model(family)
    limits = {"max_num_seqs": 64, "max_model_len": CONTEXT}
    engine = make_engine(model, tokenizer=words, **limits)
    return served(engine, words, max_model_len=CONTEXT, vocabulary=len(words) + 5)


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=SOON)


@pytest.fixture(scope="module")
def asking() -> Iterator[openai.OpenAI]:
    with serving("qwen2_5") as (url, _):
        yield client(url)


def ask(asking: openai.OpenAI, **fields: Any) -> Any:
    extra = {name: fields.pop(name) for name in list(fields) if name.startswith(("guided", "structured", "stop_token"))}
    body = {"model": "tiny", "messages": [QUESTION], "max_tokens": 400, "temperature": 0.8, **fields}
    return asking.chat.completions.create(**body, extra_body=extra)


def check_calls(choice: Any) -> list[str]:
    """Check that a choice is calls and nothing else, whose arguments follow the schemas; return the names."""
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content and choice.message.tool_calls
    for call in choice.message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [call.function.name for call in choice.message.tool_calls]


@pytest.mark.parametrize("parallel", [False, True])
def test_100_of_100_required_calls_are_valid(asking: openai.OpenAI, parallel: bool) -> None:
    answer = ask(
        asking, n=100, seed=1, tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel, max_tokens=1200
    )
    names = [check_calls(choice) for choice in answer.choices]
    assert len(names) == 100 and {name for several in names for name in several} == set(SCHEMAS)
    assert max(map(len, names)) == 1 or parallel


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("family", ["qwen2_5", "llama3_1"])
def test_a_named_tool_is_called_once(asking: openai.OpenAI, name: str, family: str) -> None:
    choice = {"type": "function", "function": {"name": name}}
    if family == "qwen2_5":
        answer = ask(asking, n=8, tools=TOOLS, tool_choice=choice)
    else:
        with serving(family) as (url, _):
            answer = ask(client(url), n=8, tools=TOOLS, tool_choice=choice)
    assert [check_calls(one) for one in answer.choices] == [[name]] * 8


def test_required_calls_are_valid_in_bare_json() -> None:
    with serving("llama3_1") as (url, _):
        answer = ask(client(url), n=20, tools=TOOLS, tool_choice="required", max_tokens=1200)
    assert len({name for choice in answer.choices for name in check_calls(choice)}) > 1


def test_required_calls_stream(asking: openai.OpenAI) -> None:
    deltas = [
        chunk.choices[0] for chunk in ask(asking, tools=TOOLS, tool_choice="required", stream=True) if chunk.choices
    ]
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for call in [call for choice in deltas for call in choice.delta.tool_calls or ()]:
        if call.function.name:
            names[call.index] = call.function.name
        arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    assert deltas[-1].finish_reason == "tool_calls" and names
    for index, name in names.items():
        jsonschema.validate(json.loads(arguments[index]), SCHEMAS[name])


FORMATS: dict[str, dict[str, Any]] = {
    "json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": PLACE, "strict": True}}
    },
    "guided_json": {"guided_json": PLACE},
    "guided_json as text": {"guided_json": json.dumps(PLACE)},
    "structured_outputs.json": {"structured_outputs": {"json": PLACE}},
    "guided_regex": {"guided_regex": "[a-c]{2,4}"},
    "structured_outputs.regex": {"structured_outputs": {"regex": "[a-c]{2,4}"}},
    "guided_choice": {"guided_choice": ["yes", "no"]},
    "structured_outputs.choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "guided_grammar": {"guided_grammar": 'root ::= "a" b\nb ::= [0-9] | "b"\n'},
    "structured_outputs.grammar": {"structured_outputs": {"grammar": 'start: "a" (/[0-9]/ | "b")'}},
}


def follows(name: str, text: str) -> bool:
    if "regex" in name:
        return re.fullmatch("[a-c]{2,4}", text) is not None
    if "choice" in name:
        return text in ("yes", "no")
    if "grammar" in name:
        return re.fullmatch("a[0-9b]", text) is not None
    jsonschema.validate(json.loads(text), PLACE)
    return True


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_follows_its_format(asking: openai.OpenAI, name: str) -> None:
    answer = ask(asking, n=6, **FORMATS[name])
    assert all(choice.finish_reason == "stop" for choice in answer.choices)
    assert all(follows(name, choice.message.content) for choice in answer.choices)
    streamed = ask(asking, stream=True, **FORMATS[name])
    assert follows(name, "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices))


def test_an_answer_of_the_completions_endpoint_follows_its_format(asking: openai.OpenAI) -> None:
    answer = asking.completions.create(
        model="tiny", prompt=["a", "b"], n=3, max_tokens=60, extra_body={"guided_regex": "[a-c]{2,4}"}
    )
    assert len(answer.choices) == 6
    assert all(re.fullmatch("[a-c]{2,4}", choice.text) for choice in answer.choices)


def test_any_json_object_begins_as_one(asking: openai.OpenAI) -> None:
    answer = ask(asking, n=8, response_format={"type": "json_object"})
    for choice in answer.choices:
        assert choice.message.content.startswith("{")
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


def test_with_tools_an_answer_is_calls_or_follows_its_format(asking: openai.OpenAI) -> None:
    answer = ask(asking, n=40, tools=TOOLS, temperature=1.5, max_tokens=1200, **FORMATS["json_schema"])
    kinds = Counter(choice.finish_reason for choice in answer.choices)
    for choice in answer.choices:
        check_calls(choice) if choice.finish_reason == "tool_calls" else follows("json", choice.message.content)
    assert set(kinds) == {"tool_calls", "stop"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "(a"},
        {"guided_json": "{"},
        {"guided_json": {"type": "array", "uniqueItems": True}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "http://a/b"}}}},
        {"guided_grammar": "root ::= missing"},
        {"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"},
        {"tools": TOOLS, "guided_grammar": 'start: "a"'},
    ],
)
def test_a_constraint_that_cannot_be_served_has_status_400(
    asking: openai.OpenAI, fields: dict[str, Any], stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError):
        ask(asking, stream=stream, **fields)


def test_reasoning_that_the_prompt_opens_comes_before_the_format() -> None:
    words = deepcopy(tokenizer("qwen3"))
    words.chat_template += "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
    engine = ScriptedEngine(lambda request: words('Hm.\n</think>\n\n{"inside": true}<|im_end|>')["input_ids"])
    with served(engine, words) as (url, _):
        fields = {"response_format": FORMATS["json_schema"]["response_format"]}
        message = ask(client(url), **fields).choices[0].message
        assert json.loads(message.content) == {"inside": True} and message.reasoning_content == "Hm."
        call = {"tools": TOOLS, "tool_choice": "required"}
        ask(client(url), **call)
    asked = [request.sampling.constraint for request in engine.asked]
    assert [one.kind for one in asked if one] == [ConstraintKind.GRAMMAR] * 2
    plain = words('Hm.\n</think>\n\n{"inside": true}', add_special_tokens=False)["input_ids"]
    assert accepts(words, asked[0], plain) and not accepts(
        words, asked[0], plain[plain.index(words.vocab["</think>"]) + 1 :]
    )
    called = words('A\n</think>\n\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>')["input_ids"]
    assert accepts(words, asked[1], called)


def accepts(words: Any, constraint: Any, ids: list[int]) -> bool:
    """Return whether tokens are a complete answer."""
    import asyncio

    from hone.generation.grammars import Grammars
    from hone.generation.protocol import SamplingParams

    async def start() -> Any:
        return await Grammars(words, len(words)).start(SamplingParams(constraint=constraint))

    matcher = asyncio.run(start()).matcher
    return matcher.consume_tokens(ids) and matcher.is_accepting()


@pytest.mark.parametrize("stream", [False, True])
def test_top_log_probs_are_reported_for_every_token(asking: openai.OpenAI, stream: bool) -> None:
    answer = ask(asking, logprobs=True, top_logprobs=5, max_tokens=20, seed=3, stream=stream)
    choices = [chunk.choices[0] for chunk in answer if chunk.choices] if stream else answer.choices
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or ()]
    assert 0 < len(entries) <= 20
    for entry in entries:
        reported = [one.logprob for one in entry.top_logprobs]
        assert len(reported) == 5 and reported == sorted(reported, reverse=True)
        assert entry.logprob <= reported[0] + 1e-6 and sum(map(math.exp, reported)) <= 1 + 1e-6
        same = [one.logprob for one in entry.top_logprobs if one.token == entry.token]
        assert not same or entry.logprob in [pytest.approx(one) for one in same] or entry.logprob < reported[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_completions_report_alternatives(asking: openai.OpenAI, stream: bool) -> None:
    answer = asking.completions.create(model="tiny", prompt="a", logprobs=3, max_tokens=12, seed=3, stream=stream)
    choices = [chunk.choices[0] for chunk in answer if chunk.choices] if stream else answer.choices
    reported = [choice.logprobs for choice in choices if choice.logprobs and choice.logprobs.tokens]
    assert 0 < sum(len(part.tokens) for part in reported) <= 12
    for part in reported:
        for token, log_prob, others in zip(part.tokens, part.token_logprobs, part.top_logprobs, strict=True):
            assert others[token] == log_prob and 1 <= len(others) <= 4
            assert list(others.values()) == sorted(others.values(), reverse=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "[not compiled before]"},
        {"tools": [{"type": "function", "function": {"name": "new"}}], "tool_choice": "required"},
    ],
)
def test_a_missing_library_is_named(
    asking: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], stream: bool
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(openai.APIStatusError) as error:
        ask(asking, stream=stream, **fields)
    assert error.value.status_code == 501 and install_command("constraints") in error.value.message


def test_fields_of_sampling_reach_the_engine() -> None:
    words = tokenizer("qwen2_5")
    engine = ScriptedEngine(lambda request: words("Yes.<|im_end|>")["input_ids"])
    with served(engine, words) as (url, _):
        penalties = {"presence_penalty": 1.5, "frequency_penalty": -0.5, "logit_bias": {"3": -100, "7": 2.5}}
        ask(client(url), stop_token_ids=[9, 11], **penalties)
    sampling = engine.asked[0].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -0.5)
    assert sampling.logit_bias == ((3, -100.0), (7, 2.5))
    assert {9, 11} < set(sampling.stop_token_ids) and words.eos_token_id in sampling.stop_token_ids


def test_a_reasoning_effort_is_an_argument_of_the_template() -> None:
    words = deepcopy(tokenizer("qwen2_5"))
    words.chat_template = "{{ 'Reasoning: ' + reasoning_effort|default('medium') }}" + words.chat_template
    engine = ScriptedEngine(lambda request: words("Yes.")["input_ids"])
    with served(engine, words) as (url, _):
        for effort in ("low", "high"):
            ask(client(url), reasoning_effort=effort)
    assert [
        re.search("Reasoning: (low|high)", words.decode(request.prompt_ids))[1]  # type: ignore[index]
        for request in engine.asked
    ] == ["low", "high"]


def test_concurrent_constraints_do_not_mix(asking: openai.OpenAI) -> None:
    texts = [f"[{first}-{first}]{{3}}" for first in "abcdefgh"]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda regex: ask(asking, guided_regex=regex, n=3), texts))
    for letter, answer in zip("abcdefgh", answers, strict=True):
        assert [choice.message.content for choice in answer.choices] == [letter * 3] * 3
