"""Tool-call parsers: what is a call, what only looks like one, and what a malformed one is told."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support.conversations import LOOKALIKES, TOOLS, calls, written
from support.examples import examples
from support.templates import SHAPES, tokenizer

from hone.agents.messages import AssistantTurn, ToolCall, tool_message
from hone.agents.parsers import TOOL_PARSERS
from hone.agents.rendering import renderer_for
from hone.agents.rendering.template import ASKED, call, calling

QUICK = examples(30, suppress_health_check=[HealthCheck.too_slow])
MARKED = [name for name in sorted(SHAPES) if name not in ("llama3_1", "llama3_2_pythonic", "gemma3")]
"""Templates whose calls stand between tokens of their own."""

HARMONY = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>', "not valid JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'has no "name"'),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', 'has no "arguments"'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', "not an object but a string"),
        ("hermes", "<tool_call>[1, 2]</tool_call>", "not a JSON object but a list"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}', "not closed by </tool_call>"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
        ("qwen3_coder", "<tool_call>add(1)</tool_call>", "no <function=...> block"),
        ("qwen3_coder", "<tool_call><function=add>a=1</function></tool_call>", "a=1"),
        (
            "qwen3_coder",
            "<tool_call><function=add><parameter=b>\none\n</parameter></function></tool_call>",
            "'b' should be integer, and is 'one'",
        ),
        ("qwen3_coder", "<tool_call><function=add>", "not closed by </tool_call>"),
        ("llama3_json", '<|python_tag|>{"name": "add"}', 'has no "parameters"'),
        ("llama3_json", '<|python_tag|>add.call(a=1)', "not valid JSON"),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}', "not valid JSON"),
        ("pythonic", "[add(a=1, b=)]", "not valid Python"),
        ("pythonic", "[add(a=__import__('os').getcwd())]", "'a' is not a literal: __import__('os').getcwd()"),
        ("pythonic", "[add(1, 2, 3, 4)]", "Arguments need names"),
        ("pythonic", "[add(a=1), 7]", "not a function call"),
        ("pythonic", "[add(**{'a': 1})]", "once, by name"),
        ("pythonic", "[add(a=1e999)]", "not a literal"),
        ("gemma", '<|tool_call>call:add{a:}<tool_call|>', "a value is expected at character"),
        ("gemma", '<|tool_call>call:add{a:1 b:2}<tool_call|>', "',' or '}' is expected"),
        ("gemma", '<|tool_call>call:add{a:<|"|>x}<tool_call|>', "is not closed"),
        ("gemma", "<|tool_call>add{}<tool_call|>", "does not begin with call:NAME{"),
        ("gemma", "<|tool_call>call:add{a:" + "[" * 5000 + "<tool_call|>", "nested more than 64 deep"),
        ("gemma", "<|tool_call>call:add{a:1}", "not closed by <tool_call|>"),
        ("harmony", HARMONY + '{"a": 1<|call|>', "arguments of the call are not valid JSON"),
        ("harmony", HARMONY + '{"a": 1}<|return|>', "not ended by <|call|>"),
        ("harmony", HARMONY + '{"a": 1}', "not ended by <|call|>"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>[]<｜tool▁call▁end｜>", "not a JSON object but a list"),
        ("deepseek", "<｜tool▁calls▁begin｜>add(1)<｜tool▁calls▁end｜>", "has no <｜tool▁call▁begin｜>"),
        ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a"', "not closed by"),
        (
            "kimi",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:3<|tool_call_argument_begin|>{<|tool_call_end|>",
            "not valid JSON",
        ),
    ],
)  # fmt: skip
def test_malformed_calls_say_what_is_wrong(name: str, text: str, error: str) -> None:
    """A malformed call is kept, and its error can be given back to the model."""
    turn = TOOL_PARSERS.get(name)().parse(text, TOOLS)
    wrong = turn.calls[-1]
    assert wrong.arguments is None and wrong.error is not None and error in wrong.error
    assert wrong.raw and (wrong.raw in text or name in ("hermes", "gemma"))
    message = tool_message(wrong, wrong.error)
    assert message["content"] == wrong.error and message["tool_call_id"] == wrong.id and message["name"]
    assert turn.message()["tool_calls"][-1]["function"]["arguments"] == wrong.raw


@pytest.mark.parametrize(
    ("name", "text", "content", "made"),
    [
        ("hermes", 'Both.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>\n{"name": "g", "arguments": {"x": 1}}\n'
         "</tool_call> Done.", "Both.\n\n Done.", [("f", {}), ("g", {"x": 1})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>', "", [("f", {"x": "</tool_call>"})]),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1.5\n</parameter>\n<parameter=exact>\ntrue\n</parameter>\n</function>\n"
         "</tool_call>", "", [("add", {"a": 1.5, "exact": True})]),
        ("qwen3_coder", "<tool_call><function=search><parameter=query>\n12\n\n</parameter></function></tool_call>", "",
         [("search", {"query": "12\n"})]),
        ("qwen3_coder", "<tool_call><function=other><parameter=x>12</parameter><parameter=y>a</parameter></function></tool_call>", "",
         [("other", {"x": 12, "y": "a"})]),
        ("llama3_json", ' {"name": "f", "parameters": {"x": 1}}; {"name": "g", "arguments": {}}', "", [("f", {"x": 1}), ("g", {})]),
        ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ("pythonic", "[f(x=1, y=[True, None]), a.g(z={'k': -2.5})]", "", [("f", {"x": 1, "y": [True, None]}), ("a.g", {"z": {"k": -2.5}})]),
        ("pythonic", "[add(1, 2)]", "", [("add", {"a": 1, "b": 2})]),
        ("pythonic", "[1, 2, 3] is a list", "[1, 2, 3] is a list", []),
        ("gemma", 'Hm.<|tool_call>call:f{a:-1.5e3,b:[true,null],c:{<|"|>k<|"|>:<|"|>{}, ]<|"|>}}<tool_call|><|tool_response>', "Hm.",
         [("f", {"a": -1500.0, "b": [True, None], "c": {"k": "{}, ]"}})]),
        ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I will look.<|end|>"
         '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>', "I will look.", [("f", {"x": 1})]),
        ("harmony", "<|channel|>final<|message|>Say to=functions.f and wait.<|return|>", "Say to=functions.f and wait.", []),
        ("deepseek", "Look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"x\": 1}\n```<｜tool▁call▁end｜>\n"
         "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "Look.", [("f", {"x": 1}), ("g", {})]),
    ],
)  # fmt: skip
def test_what_is_read(name: str, text: str, content: str, made: list[tuple[str, dict]]) -> None:
    turn = TOOL_PARSERS.get(name)().parse(text, TOOLS)
    assert (turn.content, [(c.name, c.arguments) for c in turn.calls]) == (content, made)
    assert all(c.error is None for c in turn.calls)


@pytest.mark.parametrize("name", MARKED)
def test_ordinary_tokens_that_spell_marks_are_text(name: str) -> None:
    """The very text of a call, written letter by letter, is no call; written with the format's tokens it is."""
    renderer = renderer_for(tokenizer(name))
    turn = written(renderer, [ASKED], calling(call()))
    assert len(renderer.parse(turn).calls) == 1
    text = str(renderer.tokenizer.decode(turn[:-1]))
    spelled = [token for letter in text for token in renderer.tokenizer(letter, add_special_tokens=False)["input_ids"]]
    assert renderer.tokenizer.decode(spelled) == text
    parsed = renderer.parse(spelled)
    assert parsed.calls == () and parsed.content.replace(" ", "") == text.strip().replace(" ", "")


@pytest.mark.parametrize("name", sorted(SHAPES))
@QUICK
@given(data=st.data())
def test_any_tokens_can_be_read(name: str, data: st.DataObject) -> None:
    """Whatever is sampled gives a turn in which every call is either whole or has an error, and ids are unique."""
    made = tokenizer(name)
    pieces = data.draw(
        st.lists(
            st.one_of(st.integers(0, len(made) - 1), st.sampled_from(sorted(made.added_tokens_decoder))), max_size=30
        )
    )
    turn = renderer_for(made).parser.parse(
        pieces, TOOLS, calls_before=data.draw(st.integers(0, 3)), thinking=data.draw(st.booleans())
    )
    _sound(turn)


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
@QUICK
@given(data=st.data())
def test_any_text_can_be_read(name: str, data: st.DataObject) -> None:
    parser = TOOL_PARSERS.get(name)()
    wild = st.sampled_from(
        [
            *parser.marks,
            *parser.thoughts,
            *LOOKALIKES,
            "{",
            "}",
            "[",
            "]",
            ":",
            ",",
            "call:f{",
            "<function=",
            ">",
            "f(x=1)",
            "[f(",
        ]
    )
    text = "".join(data.draw(st.lists(st.one_of(wild, st.text(max_size=5), calls().map(json.dumps)), max_size=12)))
    _sound(parser.parse(text, TOOLS))


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "deepseek"])
def test_thoughts(name: str) -> None:
    """Calls within thoughts are thoughts; thoughts that are never closed hide all that follows."""
    parser = TOOL_PARSERS.get(name)()
    inside = "".join(parser.marks)
    assert parser.parse(f"<think>\nMaybe {inside}\n</think>\n\nNo.") == AssistantTurn("No.", f"Maybe {inside}")
    assert parser.parse(f"Maybe {inside}</think>No.") == AssistantTurn("No.", f"Maybe {inside}"), "opened by the prompt"
    assert parser.parse(f"<think>Maybe {inside}") == AssistantTurn("", f"Maybe {inside}")
    assert parser.parse("Maybe so", thinking=True) == AssistantTurn("", "Maybe so")
    assert parser.parse("<think>\n\n</think>\n\nYes.") == AssistantTurn("Yes.")


def test_a_prompt_that_opens_thoughts() -> None:
    renderer = renderer_for(tokenizer("deepseek_v3_1"), template_kwargs={"thinking": True})
    asked = renderer.prompt([ASKED])
    cut = renderer.tokenizer("Let me think of", add_special_tokens=False)["input_ids"]
    assert renderer.parse(cut, prompt_ids=asked) == AssistantTurn("", "Let me think of")
    turn = written(renderer_for(tokenizer("deepseek_v3_1")), [ASKED], calling(call()))
    behind = (
        asked + turn + renderer.bridge(turn, [{"role": "tool", "name": "f", "tool_call_id": "0", "content": "sunny"}])
    )
    assert renderer.parse(cut, prompt_ids=behind) == AssistantTurn("Let me think of"), (
        "no thoughts are opened behind results"
    )


def test_ids_of_calls() -> None:
    """Ids go on from the calls before; Kimi K2 writes its own."""
    one = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    ids = [c.id for c in TOOL_PARSERS.get("hermes")().parse(one + one, calls_before=3).calls]
    assert ids == ["call_3", "call_4"]
    kimi = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert TOOL_PARSERS.get("kimi")().parse(kimi).calls[0] == ToolCall(
        "functions.f:7", "f", {}, kimi.removeprefix("<|tool_calls_section_begin|>")
    )


def test_messages() -> None:
    turn = AssistantTurn("Hi.", "Hm.", (ToolCall("call_0", "f", {"x": "é"}, "raw"),))
    assert turn.message() == {
        "role": "assistant",
        "content": "Hi.",
        "reasoning_content": "Hm.",
        "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}],
    }
    assert AssistantTurn("Hi.").message() == {"role": "assistant", "content": "Hi."}


def _sound(turn: AssistantTurn) -> None:
    for made in turn.calls:
        assert (made.arguments is None) != (made.error is None) and made.id
        json.dumps(made.arguments, allow_nan=False)
    assert not any(0xD800 <= ord(letter) <= 0xDFFF for text in (turn.content, turn.reasoning or "") for letter in text)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("", ""),
        ("<|channel|>analysis", ""),
        ("<|channel|>analysis<|message|>Hm", "<|channel|>analysis<|message|>Hm"),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>fin", "<|channel|>analysis<|message|>Hm.<|end|>"),
        ("<|channel|>final<|message|>Hi.<|return|>", "<|channel|>final<|message|>Hi.<|return|>"),
        (HARMONY + "{}<|call|><|start|>", HARMONY + "{}<|call|>"),
    ],
)  # fmt: skip
def test_a_header_of_harmony_without_a_body_is_not_settled(text: str, kept: str) -> None:
    """Until the body begins nobody knows whether a message is a thought, an answer or a call."""
    parser, words = renderer_for(tokenizer("harmony")).parser, tokenizer("harmony")
    ids = words.encode(text, add_special_tokens=False)
    assert words.decode(parser.settled(ids)) == kept
