"""Loading tokenizers, and training small ones."""

import json

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support.examples import examples
from support.messages import raises

from hone.apps.lab.data.inspection import train_tokenizer
from hone.data.chat import encode_texts, render_texts, token_counts
from hone.data.chat_formats import CHAT_FORMATS
from hone.data.tokenizer import load_tokenizer
from hone.errors import DataError, ModelError


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=30))
def test_any_text_survives_and_digits_are_single_tokens(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    for token in tokenizer.convert_ids_to_tokens(ids):
        assert len(token) == 1 or not any(character in "0123456789" for character in token)


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(max_size=40), max_size=4), st.sampled_from([None, 3]))
def test_counts_are_those_of_the_tokens(tokenizer, texts, truncated):
    if truncated:
        tokenizer.backend_tokenizer.enable_truncation(truncated)  # as a tokenizer.json may say
    assert token_counts(tokenizer, texts) == [len(ids) for ids in encode_texts(tokenizer, texts)]


def test_special_tokens_and_template(tokenizer, tokenizer_directory):
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|pad|>")
    assert tokenizer.encode("<|im_start|>a<|im_end|>")[::2] == tokenizer.convert_tokens_to_ids(
        ["<|im_start|>", "<|im_end|>"]
    )
    assert len(tokenizer) <= 330 and len(set(tokenizer.get_vocab().values())) == len(tokenizer)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer_directory / "tokenizer.json").is_file()


def test_words_of_the_corpus_become_tokens(tokenizer):
    assert len(tokenizer.encode(" apples")) == 1 and len(tokenizer.encode("user")) == 1


def test_training_is_deterministic(write_rows, tmp_path):
    texts = [f"word{i % 7} other{i % 3} {i}" for i in range(200)]
    path = write_rows([{"prompt": text} for text in texts])
    for name in ("a", "b"):
        train_tokenizer([path], tmp_path / name, vocab_size=300)
    assert (tmp_path / "a/tokenizer.json").read_text() == (tmp_path / "b/tokenizer.json").read_text()


def test_all_kinds_of_text_columns(write_rows, tmp_path):
    (tmp_path / "plain.txt").write_text("plainword " * 9)
    message = [{"role": "user", "content": "messageword " * 9}]
    files = [
        tmp_path / "plain.txt",
        write_rows([{"messages": message, "prompt": "unseen"}], "a.parquet"),
        write_rows([{"prompt": message}], "b.json"),
        write_rows([{"text": "textword " * 9}], "c.jsonl"),
    ]
    vocabulary = train_tokenizer(files, tmp_path / "made", vocab_size=300).get_vocab()
    assert {"plainword", "messageword", "textword"} <= {token.strip("Ġ") for token in vocabulary}
    assert not any("unseen" in token for token in vocabulary)


def test_wrong_training_arguments_are_refused(write_rows, tmp_path):
    good = write_rows([{"prompt": "a"}])
    for arguments, error, mentions in (
        (([good], {"vocab_size": 259}), DataError, ("--vocab-size 259", 256, 4, 260)),
        (([good], {"template": "chatlm"}), ModelError, ("Did you mean chatml",)),
        (([tmp_path / "no.jsonl"], {}), DataError, ("no.jsonl",)),
        (([tmp_path / "no.txt"], {}), DataError, ("no.txt", "UTF-8")),
        (([write_rows([{"other": "a"}], "o.jsonl")], {}), DataError, ("row 0", "'messages'", "'prompt'", "'text'")),
    ):
        files, options = arguments
        with raises(error, *mentions):
            train_tokenizer(files, tmp_path / "made", **options)
    with raises(DataError, "--out", where=str(good / "below")):
        train_tokenizer([good], good / "below")


def test_custom_templates_by_text_and_by_file(tokenizer_directory, tmp_path, write_rows):
    template = "{% for m in messages %}{{ m.content }}!{% endfor %}"
    (tmp_path / "t.jinja").write_text(template)
    for given_as in (template, str(tmp_path / "t.jinja")):
        assert load_tokenizer(tokenizer_directory, custom_chat_template=given_as).chat_template == template
    made = train_tokenizer([write_rows([{"prompt": "a"}])], tmp_path / "made", template=str(tmp_path / "t.jinja"))
    assert made.chat_template == load_tokenizer(tmp_path / "made").chat_template == template
    with raises(ModelError, "nowhere.jinja"):
        load_tokenizer(tokenizer_directory, custom_chat_template="nowhere.jinja")


def test_custom_templates_by_name_need_the_tokens_of_the_name(tokenizer_directory):
    named = load_tokenizer(tokenizer_directory, custom_chat_template="chatml_tools")
    assert named.chat_template == CHAT_FORMATS["chatml_tools"].template
    with raises(ModelError, "<|start|>", "<|return|>"):
        load_tokenizer(tokenizer_directory, custom_chat_template="harmony")


def test_wrong_directories_are_refused(tmp_path):
    with raises(ModelError, str(tmp_path / "no")):
        load_tokenizer(tmp_path / "no")
    with raises(ModelError, "actor_rollout_ref.model.path=DIR"):
        load_tokenizer(None)
    (tmp_path / "config.json").write_text("{}")
    with raises(ModelError, "config.json", "model.tokenizer_path=DIR"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with raises(ModelError, where=str(tmp_path)):
        load_tokenizer(tmp_path)


TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
CALL = {"id": "call_0", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "6*7"}'}}
ASKED = [
    {"role": "user", "content": "What is 6*7?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "calculator", "tool_call_id": "call_0", "content": "42"},
    {"role": "assistant", "content": "#### 42"},
]


@pytest.mark.parametrize("name", sorted(CHAT_FORMATS))
def test_a_format_brings_its_tokens_and_learns_the_words_of_its_template(write_rows, tmp_path, name):
    form = CHAT_FORMATS[name]
    chat = ASKED if name != "chatml" else [ASKED[0], ASKED[3]]
    path = write_rows([{"messages": chat, "tools": json.dumps([TOOL])}] * 8)
    train_tokenizer([path], tmp_path / "made", vocab_size=700, template=name)
    made = load_tokenizer(tmp_path / "made")
    assert (made.eos_token, made.pad_token, made.bos_token) == (form.end, form.pad, form.bos)
    ids = [made.encode(token, add_special_tokens=False) for token in (*form.all_special, *form.marks)]
    assert all(len(token_ids) == 1 for token_ids in ids) and len({token_ids[0] for token_ids in ids}) == len(ids)
    (rendered,) = render_texts(made, [chat], False, {"tools": [TOOL]} if name != "chatml" else None)
    tokens = made.encode(rendered, add_special_tokens=False)
    assert made.decode(tokens) == rendered
    if form.wordy:
        assert len(tokens) < len(rendered) / 4, "the words of the template are tokens, not letters"
        assert len(made.encode("calculator")) == 1
