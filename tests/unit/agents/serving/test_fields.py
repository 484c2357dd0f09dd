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
from hone.agents.serving.session import Prompt

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
