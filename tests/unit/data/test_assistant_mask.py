"""The loss mask of conversations: exactly what the assistant writes, end-of-turn token included, for any template."""

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support import chat_templates as chats
from support.chat_templates import assistant, user
from support.examples import examples
from support.messages import raises
from support.shapes import learned

from hone.data.assistant_mask import end_of_turn, render_conversations, rewritten
from hone.data.chat import render_prompt, render_prompts
from hone.errors import DataError

FAMILIES = {
    "chatml": (chats.CHATML_SYSTEM, "{}<|im_end|>"),
    "llama3": (chats.LLAMA3, "{}<|eot|>"),
    "gemma": (chats.GEMMA, "{}<|/turn|>"),
    "mistral": (chats.MISTRAL, " {}<|eot|>"),
    "plain": (chats.PLAIN, "{}\n"),  # no end-of-turn token: the line break is what ends the turn
    "marked": (chats.MARKED, "{}<|im_end|>"),
    "marked whole": (chats.MARKED_WHOLE, "{}<|im_end|>"),
}
ANSWER = st.text("ab 7?é\n", min_size=1, max_size=8).map(str.strip).filter(bool)
DIALOGUE = st.lists(st.tuples(st.text("ab 7<|>\n", max_size=8), ANSWER), min_size=1, max_size=3)


@pytest.mark.parametrize("family", FAMILIES)
@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(dialogue=DIALOGUE)
def test_every_turn_is_marked_exactly(with_template, family, dialogue):
    template, turn = FAMILIES[family]
    tokenizer = with_template(template)
    messages = [message for ask, answer in dialogue for message in (user(ask), assistant(answer))]
    ((ids, mask),) = render_conversations(tokenizer, [messages])
    assert learned(tokenizer, ids, mask) == [turn.format(answer) for _, answer in dialogue]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False)
    for i, message in enumerate(messages):  # the tokens before a turn are those of its generation prompt
        if message["role"] == "assistant" and "generation" not in template:
            prompt = render_prompt(tokenizer, messages[:i])
            assert ids[: len(prompt)] == prompt and mask[len(prompt)] == 1 and mask[len(prompt) - 1] == 0


def test_texts_become_parts_for_a_template_that_shows_nothing_else(with_template):
    tokenizer = with_template(chats.PARTS_ONLY)
    messages = [user("7?"), assistant("a b"), user("é"), assistant("7")]
    parts = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in messages]
    ((ids, mask),) = render_conversations(tokenizer, [messages])
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(parts, tokenize=False)
    assert learned(tokenizer, ids, mask) == [" a b<|eot|>", " 7<|eot|>"]
    assert render_prompt(tokenizer, messages[:1]) == ids[: mask.index(1)] == render_prompt(tokenizer, parts[:1])


def test_a_system_message_and_two_turns_in_a_row(with_template):
    tokenizer = with_template(chats.LLAMA3)
    messages = [{"role": "system", "content": "s"}, user("a"), assistant("b"), assistant("c"), user("d")]
    ((ids, mask),) = render_conversations(tokenizer, [messages])
    assert learned(tokenizer, ids, mask) == ["b<|eot|>", "c<|eot|>"]


@pytest.mark.parametrize("template", [chats.CHATML_SYSTEM, chats.MARKED], ids=["prefixes", "marked"])
def test_answers_that_begin_with_a_line_break_keep_the_tokens_of_the_prompt(with_template, template):
    tokenizer = with_template(template)
    messages = [user("a"), assistant("\n\nb"), user("c"), assistant("\nd")]
    whole = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
    prompt = render_prompt(tokenizer, messages[:1])
    assert whole[: len(prompt)] != prompt, "the tokenizer must merge the line breaks, or this tests nothing"
    ((ids, mask),) = render_conversations(tokenizer, [messages])
    assert ids[: len(prompt)] == prompt
    assert tokenizer.decode(ids) == tokenizer.decode(whole)
    assert learned(tokenizer, ids, mask) == ["\n\nb<|im_end|>", "\nd<|im_end|>"]


def test_a_template_that_varies_only_the_wrapping_of_earlier_turns_counts_the_final_rendering(with_template):
    tokenizer = with_template(chats.THINK)
    messages = [user("a"), assistant("b"), user("c"), assistant("<think>\nhm\n</think>\n\nd")]
    ((ids, mask),) = render_conversations(tokenizer, [messages])
    assert learned(tokenizer, ids, mask) == ["b<|im_end|>", "<think>\nhm\n</think>\n\nd<|im_end|>"]


def test_earlier_thoughts_that_the_template_drops_are_counted(with_template, caplog):
    tokenizer = with_template(chats.THINK + "{# a template that no other test has #}")
    messages = [user("a"), assistant("<think>\nhm\n</think>\n\nb"), user("c"), assistant("d")]
    ((ids, mask),) = render_conversations(tokenizer, [messages])
    assert learned(tokenizer, ids, mask) == ["b<|im_end|>", "<think>\n\n</think>\n\nd<|im_end|>"]
    assert [record.args for record in caplog.records] == [(1, 1)]
    render_conversations(tokenizer, [messages])
    assert len(caplog.records) == 1  # it is said once


def test_a_last_turn_without_its_thoughts_is_refused(with_template):
    tokenizer = with_template(chats.LLAMA3)
    messages = [user("a"), assistant("d") | {"reasoning_content": "hm"}]
    with raises(DataError, "file, row 4", 1, "'hm'", "model.custom_chat_template=PATH", code="E-left-out"):
        render_conversations(tokenizer, [messages], names=["file, row 4"])


def test_a_template_that_rewrites_what_came_before_is_named(with_template):
    tokenizer = with_template(chats.NUMBERED)
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    ((ids, mask),) = render_conversations(tokenizer, [messages])
    assert learned(tokenizer, ids, mask) == ["4 assistant b<|im_end|>", "4 assistant d<|im_end|>"]
    number, at, alone, whole = rewritten(tokenizer, messages)
    assert (number, at, alone[0], whole[0]) == (1, 0, "1", "4")
    assert rewritten(with_template(chats.THINK), messages) is None


MARKED_HEADER = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n{{ m.content }}"
    "{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_MORE = chats.MARKED.replace("{% endgeneration %}<|im_end|>\n", "<|im_end|>\n{% endgeneration %}")


@pytest.mark.parametrize("template", [chats.MARKED, MARKED_HEADER, MARKED_MORE], ids=["usual", "header", "line break"])
def test_marks_are_cut_to_what_the_model_writes(with_template, template):
    tokenizer = with_template(template)
    ((ids, mask),) = render_conversations(tokenizer, [[user("q"), assistant("a"), user("q"), assistant("b")]])
    assert learned(tokenizer, ids, mask) == ["a<|im_end|>", "b<|im_end|>"]
    assert end_of_turn(tokenizer) == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_rows_of_many_conversations_do_not_mix(with_template):
    tokenizer = with_template(chats.GEMMA)
    many = [[user(str(i)), assistant("x" * i), user("y"), assistant(str(i))][: 2 + 2 * (i % 2)] for i in range(1, 9)]
    at_once = render_conversations(tokenizer, many)
    assert at_once == [render_conversations(tokenizer, [one])[0] for one in many]


def test_template_arguments_reach_the_template(with_template):
    tokenizer = with_template("{{ tone }}" + chats.CHATML_SYSTEM)
    ((ids, _),) = render_conversations(tokenizer, [[user("a"), assistant("b")]], {"tone": "warm"})
    assert tokenizer.decode(ids).startswith("warm<|im_start|>")
    assert tokenizer.decode(render_prompt(tokenizer, [user("a")], {"tone": "warm"})).startswith("warm")


def test_wrong_conversations_and_templates_are_refused(with_template):
    with raises(DataError, "'assistant'", 1):
        render_conversations(with_template(chats.CHATML_SYSTEM), [[user("a")]])
    with raises(DataError, "roles must alternate", "model.custom_chat_template"):
        render_conversations(with_template(chats.GEMMA), [[user("a"), user("b"), assistant("c")]])
    with raises(DataError, "model.custom_chat_template=PATH"):
        render_conversations(with_template(None), [[user("a"), assistant("b")]])
    with raises(DataError, "model.custom_chat_template=PATH"):
        render_prompt(with_template(None), [user("a")])
    assert render_prompts(with_template(None), []) == []


ODD = {
    "words of headers": ["user", "assistant", "assistant", "user"],
    "one letter": ["1", "1", "1", "1"],
    "no answer": ["q one", "", "q two", "a two"],
    "the same words": ["same words"] * 4,
    "a token in the text": ["say <|im_end|> now", "<|im_end|> is a token", "q two", "a two"],
    "line ends": ["q\r\none", "a\r\none", "q", "a"],
    "letters and marks": ["cafe\u0301", "cafe\u0301 caf\u00e9", "q", "a"],
    "a mark of thoughts": ["q", "a </think> b", "q", "c"],
}


@pytest.mark.parametrize("template", [chats.CHATML, chats.GATHERED, chats.MACRO, chats.INDEXED, chats.LAST_END])
@pytest.mark.parametrize("odd", ODD)
def test_odd_texts_in_templates_of_every_make(with_template, template, odd):
    tokenizer, texts = with_template(template), ODD[odd]
    messages = [chat(text) for chat, text in zip([user, assistant] * 2, texts, strict=True)]
    ((ids, mask),) = render_conversations(tokenizer, [messages])
    end = "<|eot|>" if template == chats.LAST_END else "<|im_end|>"
    assert learned(tokenizer, ids, mask) == [f"{texts[1]}<|im_end|>", f"{texts[3]}{end}"]


UNLIKE = chats.CHATML.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n</think>\n{% endif")
"""Its generation prompt has an empty thought that answers lack, in the manner of Gemma 4."""
SLOPPY = "{% for m in messages %}\n    {{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}\n  assistant:\n{% endif %}"
"""White space around headers is another one in the generation prompt, in the manner of Vicuna."""


@pytest.mark.parametrize("template", [chats.CHATML, chats.MACRO, chats.INDEXED, chats.LAST_END, UNLIKE, SLOPPY])
def test_the_header_of_a_first_answer_is_not_learned(with_template, template):
    tokenizer = with_template(template)
    ((ids, mask),) = render_conversations(tokenizer, [[assistant("hello"), user("q"), assistant("a")]])
    assert learned(tokenizer, ids, mask)[0].strip() == "hello<|im_end|>"
    assert learned(tokenizer, ids, mask)[1].strip() in ("a<|im_end|>", "a<|eot|>")


@pytest.mark.parametrize("template", [chats.CHATML, chats.GATHERED, chats.MACRO, chats.LAST_END])
def test_what_a_template_shows_after_the_last_turn_is_not_learned(with_template, template):
    tokenizer = with_template(template + "{% if not add_generation_prompt %}Be careful with answers.{% endif %}")
    ((ids, mask),) = render_conversations(tokenizer, [[user("q"), assistant("a b")]])
    assert tokenizer.decode(ids).endswith("Be careful with answers.")
    assert learned(tokenizer, ids, mask) == ["a b<|eot|>" if template == chats.LAST_END else "a b<|im_end|>"]


def test_a_message_that_shows_nothing_is_not_within_the_turn_before(with_template):
    tokenizer = with_template("{% for m in messages %}{% if not loop.first %}|{% endif %}{{ m.content }}{% endfor %}|")
    ((ids, mask),) = render_conversations(tokenizer, [[user("q"), assistant("A"), user(""), assistant("B")]])
    assert learned(tokenizer, ids, mask) == ["A|", "B"]


CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | default({}) | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("message", "missing"),
    [
        (assistant("b") | {"tool_calls": [{"function": {"name": "f", "parameters": {"city": "Rome"}}}]}, "city"),
        (assistant("f it is") | {"tool_calls": [{"function": {"name": "g", "arguments": {}}}]}, None),
        (assistant("f it is") | {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, None),
        (assistant([{"type": "image"}, {"type": "text", "text": "b"}]), "b"),
        (assistant("Well. <think>hm</think>b"), None),
    ],
)
def test_parts_that_hide_in_others_are_missed(with_template, message, missing):
    tokenizer = with_template(CALLS)
    if missing is None:
        ((ids, mask),) = render_conversations(tokenizer, [[user("q"), message]])
        (run,) = learned(tokenizer, ids, mask)
        assert run.startswith(message["content"]) and run.endswith("<|im_end|>")
    else:
        with raises(DataError, 1, f"'{missing}'", code="E-left-out"):
            render_conversations(tokenizer, [[user("q"), message]])
