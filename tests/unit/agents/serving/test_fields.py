"""Fields of requests that extend OpenAI's: unfinished messages, echo, special tokens."""

from __future__ import annotations

import copy
from typing import Any

import openai
import pytest
from support.patience import SOON
from support.scripted import ScriptedEngine, served
from support.templates import tokenizer

from hone.agents.rendering import Ending, renderer_for
from hone.agents.serving.chat import ReplyText
from hone.agents.serving.replies import text_log_probs
from hone.agents.serving.session import Prompt
from hone.agents.serving.wire import ChatBody, parse

TOKENIZER = tokenizer("qwen2_5")
RENDERER = renderer_for(TOKENIZER)
QUESTION = {"role": "user", "content": "How is the weather in Rome?"}
START = {"role": "assistant", "content": "It is "}
CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}
SHAPES = ("qwen2_5", "llama3_1", "gemma3", "deepseek_v3_1", "kimi_k2")


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=SOON)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_open_ending_is_that_of_transformers(shape: str) -> None:
    renderer = renderer_for(tokenizer(shape))
    messages = [QUESTION, {"role": "assistant", "content": "It is"}]
    expected = renderer.tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert renderer.tokenizer.decode(renderer.prompt(messages, ending=Ending.OPEN)) == expected
    spaced = renderer.tokenizer.decode(renderer.prompt([QUESTION, START], ending=Ending.OPEN))
    assert spaced == expected + " ", "the last space of a prefix stays"


@pytest.mark.parametrize("shape", SHAPES)
def test_an_open_bridge_equals_the_whole_rendering(shape: str) -> None:
    renderer = renderer_for(tokenizer(shape))
    turn = [*renderer.tokenizer("Sunny.", add_special_tokens=False)["input_ids"], renderer.closer_ids[0]]
    before = [QUESTION, {"role": "assistant", "content": "Sunny."}]
    bridge = renderer.bridge(turn, [QUESTION, START], ending=Ending.OPEN)
    closed = renderer.prompt(before, ending=Ending.CLOSED)
    played = closed[: len(closed) - closed[::-1].index(turn[-1])] + bridge
    assert played == renderer.prompt([*before, QUESTION, START], ending=Ending.OPEN)


def test_a_prefix_is_given_and_its_continuation_sampled() -> None:
    engine = ScriptedEngine(lambda request: ids(" sunny there.<|im_end|>"))
    with served(engine, TOKENIZER) as (url, endpoint):
        asking = openai.OpenAI(base_url=f"{url}/sessions/a/v1", api_key="none", max_retries=0, timeout=SOON)
        messages: list[Any] = [QUESTION, {"role": "assistant", "content": "It is"}]
        reply = asking.chat.completions.create(model="tiny", messages=messages, extra_body=CONTINUE)
        assert reply.choices[0].message.content == " sunny there."
        pieces = asking.chat.completions.create(model="tiny", messages=messages, extra_body=CONTINUE, stream=True)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == " sunny there."
        whole: list[Any] = [QUESTION, {"role": "assistant", "content": "It is sunny there."}, QUESTION]
        asking.chat.completions.create(model="tiny", messages=whole)
        session = endpoint.sessions.find("a")
    prompt = RENDERER.prompt([QUESTION]) + ids("It is")
    assert engine.asked[0].prompt_ids == prompt
    turn = ids(" sunny there.<|im_end|>")
    assert engine.asked[2].prompt_ids[: len(prompt) + len(turn)] == prompt + turn, "one conversation with the next call"
    assert session.counts == {"calls": 3, "opened": 2}
    ledgers = session.ledgers()
    assert all(ledger.prompt_ids == prompt and ledger.mask[: len(turn)] == [1] * len(turn) for ledger in ledgers)


def test_a_truncated_reply_is_continued_by_its_tokens() -> None:
    odd = [token for letter in "sunny" for token in ids(letter)]
    replies = iter([odd, ids(", and warm.<|im_end|>")])
    engine = ScriptedEngine(lambda request: next(replies))
    with served(engine, TOKENIZER) as (url, endpoint):
        asking = openai.OpenAI(base_url=f"{url}/sessions/a/v1", api_key="none", max_retries=0, timeout=SOON)
        first = asking.chat.completions.create(model="tiny", messages=[QUESTION]).choices[0].message
        assert first.content == "sunny"
        messages: list[Any] = [QUESTION, {"role": "assistant", "content": "sunny"}]
        asking.chat.completions.create(model="tiny", messages=messages, extra_body=CONTINUE)
        (ledger,) = endpoint.sessions.find("a").ledgers()
    assert engine.asked[1].prompt_ids == engine.asked[0].prompt_ids + odd
    assert ledger.response_ids == odd + ids(", and warm.<|im_end|>") and set(ledger.mask) == {1}


def test_without_a_generation_prompt_the_conversation_is_closed() -> None:
    engine = ScriptedEngine(lambda request: ids("Yes.<|im_end|>"))
    with served(engine, TOKENIZER) as (url, _):
        client(url).chat.completions.create(
            model="tiny", messages=[QUESTION], extra_body={"add_generation_prompt": False}
        )
    assert engine.asked[0].prompt_ids == RENDERER.prompt([QUESTION], ending=Ending.CLOSED)


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([QUESTION, START], {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ([QUESTION], CONTINUE, "messages"),
    ],
)
def test_nothing_to_continue_is_refused(messages: list[Any], fields: dict[str, Any], param: str) -> None:
    with (
        served(ScriptedEngine(lambda request: []), TOKENIZER) as (url, _),
        pytest.raises(openai.BadRequestError) as caught,
    ):
        client(url).chat.completions.create(model="tiny", messages=messages, extra_body=fields)
    assert caught.value.param == param


def test_special_tokens_are_shown_when_wanted() -> None:
    engine = ScriptedEngine(lambda request: ids("Yes<|im_start|> no.<|im_end|>"))
    with served(engine, TOKENIZER, stop_token_ids=(TOKENIZER.eos_token_id,)) as (url, _):
        shown = {"skip_special_tokens": False}
        chat = client(url).chat.completions.create(model="tiny", messages=[QUESTION], extra_body=shown)
        text = client(url).completions.create(model="tiny", prompt="Well", extra_body=shown)
        plain = client(url).completions.create(model="tiny", prompt="Well")
    assert chat.choices[0].message.content == text.choices[0].text == "Yes<|im_start|> no."
    assert plain.choices[0].text == "Yes no."


@pytest.mark.parametrize("before", [1, 3, 20])
def test_the_first_space_of_a_reply_stays(before: int) -> None:
    """As with SentencePiece, whose decoder drops a text's first space."""

    class Pieces:
        def decode(self, ids: list[int], special_tokens: bool = False) -> str:
            return "".join(f" w{token}" for token in ids).removeprefix(" ")

    stand_in: Any = Pieces()
    prompt = Prompt(None, [], list(range(before)), [], [])
    assert ReplyText(stand_in, RENDERER, prompt, special_tokens=True).plain([50, 51]) == " w50 w51"


@pytest.mark.parametrize("prompt", ["Once upon", ids("Once upon")])
def test_echo_begins_with_the_prompt_once(prompt: Any) -> None:
    engine = ScriptedEngine(lambda request: ids(" a time there was.<|im_end|>"))
    with served(engine, TOKENIZER) as (url, _):
        arguments: Any = {"model": "tiny", "prompt": prompt, "echo": True, "n": 2}
        whole = client(url).completions.create(**arguments)
        pieces = [piece.choices[0] for piece in client(url).completions.create(stream=True, **arguments)]
        with pytest.raises(openai.BadRequestError) as caught:
            client(url).completions.create(logprobs=1, **arguments)
    said = "Once upon a time there was."
    assert [choice.text for choice in whole.choices] == [said, said]
    assert "".join(piece.text for piece in pieces if piece.index == 1) == said
    assert caught.value.param == "echo"


def scores(prompt: Any, top: int) -> list[list[tuple[int, float]]]:
    """Each token is likeliest where the next id is even, and second where it is odd."""
    return [
        [(token, -1.0 - token % 2), (token + 1, -1.5), (token, -1.0 - token % 2)][: 1 + top] for token in prompt[1:]
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_has_those_of_the_prompt_before_the_answers(stream: bool) -> None:
    prompt, answer = ids("Once upon a time"), ids(" there was a king.")
    with served(ScriptedEngine(lambda request: answer), TOKENIZER, prompt_log_probs=scores) as (url, _):
        arguments: Any = {"model": "tiny", "prompt": [prompt], "echo": True, "logprobs": 0, "seed": 1, "stream": stream}
        told = client(url).completions.create(**arguments)
        parts = [piece.choices[0].logprobs for piece in told] if stream else [told.choices[0].logprobs]
    tokens = [TOKENIZER.decode([token]) for token in prompt + answer]
    assert [token for part in parts for token in part.tokens] == tokens
    assert [place for part in parts for place in part.text_offset] == [
        len("".join(tokens[:n])) for n in range(len(tokens))
    ]
    said = [-(1 % 97 + place + 1) / 100 for place in range(len(answer))]
    expected = [None, *(-1.0 - token % 2 for token in prompt[1:]), *said]
    assert [value for part in parts for value in part.token_logprobs] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_are_sampled_for_a_text_that_is_only_scored(stream: bool) -> None:
    engine, texts = ScriptedEngine(lambda request: ids("Yes.")), ["Once upon a time", "It is"]
    with served(engine, TOKENIZER, prompt_log_probs=scores) as (url, endpoint):
        asking = openai.OpenAI(base_url=f"{url}/sessions/a/v1", api_key="none", max_retries=0, timeout=SOON)
        options: Any = {"stream_options": {"include_usage": True}} if stream else {}
        arguments: Any = {"model": "tiny", "prompt": texts, "max_tokens": 0, "echo": True, "logprobs": 2, "n": 2}
        told = asking.completions.create(**arguments, stream=stream, **options)
        pieces = list(told) if stream else [told]
        session = endpoint.sessions.find("a")
    choices = [choice for piece in pieces for choice in piece.choices]
    assert engine.asked == [] and session.ledgers() == []
    assert [(choice.text, choice.finish_reason) for choice in choices] == [
        (text, "length") for text in texts for _ in "ab"
    ]
    assert (pieces[-1].usage.completion_tokens, pieces[-1].usage.prompt_tokens) == (
        0,
        sum(len(ids(text)) for text in texts),
    )
    for choice, text in zip(choices[::2], texts, strict=True):
        values, tops = choice.logprobs.token_logprobs[1:], choice.logprobs.top_logprobs[1:]
        assert (choice.logprobs.token_logprobs[0], choice.logprobs.top_logprobs[0]) == (None, None)
        assert [value == max(top.values()) for value, top in zip(values, tops, strict=True)] == [
            token % 2 == 0 for token in ids(text)[1:]
        ]


def test_fields_that_are_null_are_missing_at_every_level() -> None:
    """As inspect-ai sends them."""
    schema = {"name": "city", "schema": {"type": "object"}, "description": None, "strict": None}
    body = {"model": "tiny", "messages": [QUESTION], "stream_options": {"include_usage": None}, "seed": None}
    nulls = parse(ChatBody, {**body, "response_format": {"type": "json_schema", "json_schema": schema}})
    assert nulls.response_format.json_schema is not None
    assert (nulls.response_format.json_schema.description, nulls.stream_options.include_usage) == ("", False)


def test_tokens_of_the_same_text_keep_their_own_log_probs() -> None:
    class Bytes:
        def decode(self, ids: list[int]) -> str:
            return "?" if ids[0] < 10 else str(ids[0])

    stand_in: Any = Bytes()
    entry = text_log_probs(stand_in, [3], [-2.0], [[(4, -0.5), (12, -1.5), (3, -2.0)]])
    assert entry["top_logprobs"] == [{"token_id:4": -0.5, "12": -1.5, "?": -2.0}]


def test_a_request_whose_texts_the_template_leaves_out_is_refused() -> None:
    """But an assistant's words are only said to be lost: agents send them again with every request."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = (
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{% if not m.tool_calls %}{{ m.content }}{% endif %}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    )
    engine = ScriptedEngine(lambda request: ids("Yes."))
    with served(engine, tokenizer) as (url, _):
        with pytest.raises(openai.BadRequestError, match="Be kind"):
            client(url).chat.completions.create(
                model="tiny", messages=[{"role": "system", "content": "Be kind."}, QUESTION]
            )
        function = {"name": "weather", "arguments": "{}"}
        called = {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        }
        result = {"role": "tool", "tool_call_id": "a", "content": "clear"}
        client(url).chat.completions.create(model="tiny", messages=[QUESTION, called, result])
        with pytest.raises(openai.BadRequestError, match="Be kind"):  # also behind an assistant's lost words
            later = [QUESTION, called, result, {"role": "system", "content": "Be kind."}, QUESTION]
            client(url).chat.completions.create(model="tiny", messages=later)
    assert "clear" in tokenizer.decode(engine.asked[0].prompt_ids)
