"""Whatever a conversation and a template look like: all of it is shown and the right turns are learned, or it is refused."""

import copy
import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support.examples import examples
from support.shapes import SHAPES, TOOLS, call, lacks, learned, part, result, said, texts, user

from hone.data.assistant_mask import render_conversations
from hone.data.chat import render_prompt
from hone.data.chat_formats import CHAT_FORMATS
from hone.errors import DataError

TEMPLATES = {path.stem: path for path in (Path(__file__).parents[2] / "support/templates").glob("*.jinja")}
FOREIGN = {
    f"theirs/{path.stem}": path for path in sorted(Path(os.environ.get("HONE_TEMPLATES", "/nowhere")).glob("*.jinja"))
}
"""Templates of other projects, read as input: HONE_TEMPLATES names their folder."""
TOKENS = re.compile(
    r"<\|[A-Za-z_/.]{1,40}\|>|</?s>|<｜[^｜]{1,40}｜>|<(?:start|end)_of_turn>|<end_of_utterance>|<\|?turn\|?>|\[/?[A-Z_]{3,20}\]|\[\|[a-z]+\|\]"
)
HEADER = re.compile(
    r"\s*(<\|start\|>|<\|turn>|<start_of_turn>|<\|START_OF_TURN_TOKEN\|>|<[|｜]?(im_start|start_header_id|Assistant)[|｜]?>|assistant\b|model\n)"
)
"""How headers of turns begin, which the model is given."""
HEADERLESS = {"theirs/diffusion_gemma", "theirs/template_chatml"}
"""Generation prompts that leave out the header, after a result or an answer, that the whole conversation shows: the model writes it."""


def template_of(name):
    if name in CHAT_FORMATS:
        return CHAT_FORMATS[name].template
    return (FOREIGN | TEMPLATES)[name].read_text()


@pytest.fixture
def rendering(tokenizer):
    def use(name):
        template = template_of(name)
        tokenizer.add_special_tokens({"additional_special_tokens": sorted({*TOKENS.findall(template), "<|begin|>"})})
        tokenizer.bos_token = "<|begin|>"
        tokenizer.chat_template = template
        return tokenizer

    return use


def turns_that_count(messages):
    turns = [message for message in messages if message["role"] == "assistant"]
    return [turn for turn in turns if turn.get("weight") != 0]


@pytest.mark.parametrize("name", [*CHAT_FORMATS, *TEMPLATES, *FOREIGN])
def test_every_shape_is_shown_whole_or_refused_for_what_is_missing(rendering, name):
    tokenizer = rendering(name)
    outcomes = {}
    for shape, (messages, tools) in SHAPES.items():
        shown = texts(tokenizer, messages, tools)
        try:
            ((ids, mask),) = render_conversations(
                tokenizer, [copy.deepcopy(messages)], {"tools": tools} if tools else None
            )
        except DataError as error:
            order = "within message" in error.what
            assert not shown or order or all(lacks(text, messages, tools) for text in shown), f"{shape}: {error}"
            outcomes[shape] = "refused"
            continue
        outcomes[shape] = "shown"
        text = tokenizer.decode(ids)
        assert text in shown and not lacks(text, messages, tools), shape
        runs, turns = learned(tokenizer, ids, mask), turns_that_count(messages)
        if shape == "two answers in a row" and len(runs) == 1:  # nothing is between them, not even a header
            runs *= 2
        if shape == "no answer" and len(runs) == 1:  # a template without an end of turn: there is nothing to learn
            turns = turns[1:]
        assert len(runs) == len(turns), (shape, runs)
        for run, turn in zip(runs, turns, strict=True):
            content = turn["content"] if isinstance(turn["content"], str) else turn["content"][0]["text"]
            answer = content.split("</think>")[-1].strip()
            apart = not turn.get("tool_calls") and not (shape == "two answers in a row" and runs[0] == runs[-1])
            assert answer in run and (not apart or re.search(rf"{re.escape(answer)}\s*({TOKENS.pattern}|$)", run)), (
                shape,
                run,
            )
            thought = turn.get("reasoning_content")
            assert not turn.get("tool_calls") or "get_weather" in (run.split(thought)[-1] if thought else run), (
                shape,
                run,
            )
            assert not any(word in run for word in ("Where is", "And ", "How is", "clear sky", "Be brief")), (
                shape,
                run,
            )
            assert name in HEADERLESS or not HEADER.match(run), (shape, run)
    assert "shown" in outcomes.values() or name == "theirs/template_kimi_audio"  # which shows audio alone


def test_parts_are_the_same_text_in_every_role(rendering):
    for name in (*CHAT_FORMATS, *TEMPLATES):
        tokenizer = rendering(name)
        plain = [
            user("Rome?"),
            said("", tool_calls=[call(0, city="Rome")]),
            result(0, "clear"),
            said("Sun."),
            user("Oslo?"),
        ]
        parts = [{**m, "content": part(m["content"])} if m["content"] else m for m in plain]
        two = [
            {**m, "content": [*part(m["content"][:2]), *part(m["content"][2:])]} if m["content"] else m for m in plain
        ]
        for count in (1, 5):
            try:
                expected = render_prompt(tokenizer, plain[-count:] if count == 1 else plain, {"tools": TOOLS})
            except DataError:
                continue
            for form in (parts, two):
                assert render_prompt(tokenizer, form[-count:] if count == 1 else form, {"tools": TOOLS}) == expected, (
                    name
                )


WORDS = st.text("ab7é <|>{}\"'\n", min_size=1, max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 99999) | WORDS,
    lambda v: st.lists(v, max_size=2) | st.dictionaries(WORDS, v, max_size=2),
)


@pytest.mark.parametrize(
    "name", ["qwen2_5", "llama3_1", "gemma4", "qwen3_coder", "deepseek_v3_1", "kimi_k2", "chatml_tools"]
)
@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_conversations_of_any_content_are_shown_whole_or_refused(rendering, name, data):
    tokenizer = rendering(name)
    messages = [user(data.draw(WORDS))]
    for number in range(data.draw(st.integers(0, 2))):
        arguments = data.draw(st.dictionaries(st.text("abc", min_size=1, max_size=3), VALUES, max_size=3))
        messages += [said("", tool_calls=[call(number, **arguments)]), result(number, data.draw(WORDS))]
    messages.append(said(data.draw(WORDS)))
    try:
        ((ids, mask),) = render_conversations(tokenizer, [messages], {"tools": TOOLS})
    except DataError:
        return
    runs = learned(tokenizer, ids, mask)
    assert len(runs) == sum(message["role"] == "assistant" for message in messages)
    text = tokenizer.decode(ids)
    assert all(message["content"].strip() in text for message in messages if message["role"] == "user")
    assert messages[-1]["content"].strip() in runs[-1]
