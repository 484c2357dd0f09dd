"""Datasets of preferences in every form, and what is wrong with them."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support.chat_templates import LLAMA3, MARKED, PLAIN, THINK, assistant, user
from support.examples import examples
from support.messages import raises

from hone.data.assistant_mask import render_conversations
from hone.data.chat import render_prompt
from hone.data.preferences import PreferenceColumns, PreferenceDataset, preference_batch
from hone.errors import ConfigError, DataError

ASK = [user("How many?")]
PAIR = {"prompt": ASK, "chosen": [assistant("19")], "rejected": [assistant("7+12")]}
WITH_TOOLS = (
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t.name }} {% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def dataset(tokenizer, write_rows):
    def make(rows, limit=200, policy="error", name="train.jsonl", columns=None, **more):
        return PreferenceDataset(
            write_rows(rows, name), tokenizer, columns, max_length=limit, truncation=policy, **more
        )

    return make


def texts(tokenizer, row):
    """(label, prompt, response) of each side, special tokens shown."""
    return [(label, tokenizer.decode(r.prompt_ids), tokenizer.decode(r.response_ids)) for label, r in row.responses]


def test_a_pair_of_messages(dataset, tokenizer):
    data = dataset([PAIR])
    (good, chosen), (bad, rejected) = data[0].responses
    assert data.paired and good and not bad and len(data) == 1
    assert chosen.prompt_ids == rejected.prompt_ids == render_prompt(tokenizer, ASK)
    assert tokenizer.decode(chosen.response_ids) == "19<|im_end|>"
    assert tokenizer.decode(rejected.response_ids) == "7+12<|im_end|>"
    assert chosen.response_mask == [1] * len(chosen.response_ids)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "How many?", "chosen": [assistant("19")], "rejected": [assistant("7+12")]},
        {"prompt": ASK, "chosen": "19", "rejected": "7+12"},
        {"chosen": [*ASK, assistant("19")], "rejected": [*ASK, assistant("7+12")]},
        {"prompt": "unlike it", "chosen": [*ASK, assistant("19")], "rejected": [*ASK, assistant("7+12")]},
    ],
    ids=["string prompt", "string answers", "conversations", "conversations win over the prompt"],
)
def test_other_forms_give_the_same(dataset, tokenizer, row):
    assert texts(tokenizer, dataset([row])[0]) == texts(tokenizer, dataset([PAIR])[0])


@pytest.mark.parametrize("name", ["train.parquet", "train.json", "train.jsonl"])
def test_every_file_format(dataset, tokenizer, name):
    assert texts(tokenizer, dataset([PAIR, PAIR], name=name)[1]) == texts(tokenizer, dataset([PAIR])[0])


@given(st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=12), st.booleans())
@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_token_ids_keep_the_mask_of_the_mask_column(dataset, tokens, labelled):
    ids, mask = [token for token, _ in tokens], [1, *(int(sampled) for _, sampled in tokens[1:])]
    pair = {"chosen": ids, "chosen_mask": mask, "rejected": [100], "rejected_mask": None}
    row = {"prompt": [5, 6], **({"completion": ids, "completion_mask": mask, "label": True} if labelled else pair)}
    (_, first), *others = dataset([row])[0].responses
    assert (first.response_ids, first.response_mask) == (ids, mask)
    assert all(other.response_mask == [1] for _, other in others)


@pytest.mark.parametrize(
    ("row", "mentions"),
    [
        ({"chosen": [1, 2], "chosen_mask": [1]}, (1, "2 tokens")),
        ({"chosen": [1, 2], "chosen_mask": [1, 2]}, (2,)),
        ({"chosen": [1, 2], "chosen_mask": [0, 1]}, (0,)),
        ({"prompt": ASK, "chosen": "a", "rejected": "b", "chosen_mask": [1]}, ("token ids",)),
    ],
)
def test_masks_that_do_not_fit(dataset, row, mentions):
    with raises(DataError, "chosen or desirable", "hone data pairs --as tokens", *mentions):
        dataset([{"prompt": [5], "rejected": [3], **row}])


def test_plain_text_ends_with_the_end_of_sequence(dataset, tokenizer):
    data = dataset([{"prompt": "7+12=", "chosen": "19", "rejected": "7"}])
    assert texts(tokenizer, data[0]) == [(True, "7+12=", "19<|im_end|>"), (False, "7+12=", "7<|im_end|>")]


def test_token_ids_are_left_alone(dataset):
    data = dataset([{"prompt": [5, 6], "chosen": [7, 8, 9], "rejected": [3]}])
    assert [(r.prompt_ids, r.response_ids) for _, r in data[0].responses] == [([5, 6], [7, 8, 9]), ([5, 6], [3])]


def test_responses_of_several_turns_leave_out_what_the_model_did_not_write(dataset, tokenizer):
    turns = [assistant("7"), user("and?"), assistant("19")]
    data = dataset([{"prompt": [user("a"), assistant("b"), user("c")], "chosen": turns, "rejected": "no"}])
    (_, chosen), _ = data[0].responses
    assert tokenizer.decode(chosen.prompt_ids) == render_text(tokenizer, [user("a"), assistant("b"), user("c")])
    written = [i for i, m in zip(chosen.response_ids, chosen.response_mask, strict=True) if m]
    assert tokenizer.decode(written) == "7<|im_end|>19<|im_end|>"
    assert 0 in chosen.response_mask and chosen.response_mask[0] == chosen.response_mask[-1] == 1


def render_text(tokenizer, messages):
    return tokenizer.decode(render_prompt(tokenizer, messages))


def test_the_prompt_is_what_conversations_share_up_to_an_assistant_turn(dataset, tokenizer):
    start = [user("a"), assistant("b")]
    row = {"chosen": [*start, user("x"), assistant("1")], "rejected": [*start, user("y"), assistant("1")]}
    with raises(DataError, "chosen", "rejected", "row 0"):
        dataset([{"chosen": [user("x"), assistant("1")], "rejected": [user("y"), assistant("1")]}])
    # they differ from a user message on: both sides continue with the assistant after the first message only
    (_, chosen), (_, rejected) = dataset([row])[0].responses
    assert (
        tokenizer.decode(chosen.prompt_ids)
        == tokenizer.decode(rejected.prompt_ids)
        == render_text(tokenizer, [user("a")])
    )


@pytest.mark.parametrize("template", [LLAMA3, MARKED, PLAIN, THINK], ids=["llama3", "marked", "plain", "think"])
def test_templates(with_template, write_rows, template):
    tokenizer = with_template(template)
    data = PreferenceDataset(
        write_rows([{**PAIR, "prompt": [user("a"), assistant("b"), user("c")]}]),
        tokenizer,
        max_length=300,
        truncation="error",
    )
    (_, chosen), (_, rejected) = data[0].responses
    ((ids, mask),) = render_conversations(tokenizer, [[user("a"), assistant("b"), user("c"), assistant("19")]])
    assert chosen.prompt_ids == rejected.prompt_ids
    whole = chosen.prompt_ids + chosen.response_ids
    assert whole == ids[: len(whole)] and chosen.response_mask == mask[len(chosen.prompt_ids) : len(whole)]
    assert not any(mask[len(whole) :])


@pytest.mark.parametrize("template", [LLAMA3, MARKED, PLAIN])
def test_earlier_turns_are_in_the_prompt_also_where_turns_adjoin(with_template, write_rows, template):
    tokenizer = with_template(template)
    asked = [*ASK, assistant("One moment."), assistant("I count.")]
    row = {"prompt": asked, "chosen": [assistant("19"), assistant("yes")], "rejected": [assistant("7+12")]}
    data = PreferenceDataset(write_rows([row]), tokenizer, None, max_length=200, truncation="error")
    (_, chosen), (_, rejected) = data[0].responses
    assert chosen.prompt_ids == rejected.prompt_ids
    assert "I count." in tokenizer.decode(chosen.prompt_ids) and "19" not in tokenizer.decode(chosen.prompt_ids)
    written = [tokenizer.decode(side.response_ids) for side in (chosen, rejected)]
    assert "19" in written[0] and "yes" in written[0] and "7+12" in written[1] and "I count." not in written[0]


OPENED = (  # in the manner of Nemotron: the generation prompt opens a thought, an answer without one has an empty thought
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}</think>{% else %}<think></think>{% endif %}{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_sides_with_different_prompts_are_refused(with_template, write_rows):
    tokenizer = with_template(OPENED)
    thought = assistant("19") | {"reasoning_content": "hm"}
    for chosen, refused in ((thought, True), (assistant("19"), False)):
        rows = write_rows([{**PAIR, "chosen": [chosen]}])
        if refused:
            with raises(DataError, "train.jsonl, row 0", "reasoning"):
                PreferenceDataset(rows, tokenizer, None, max_length=200, truncation="error")
        else:
            assert len(PreferenceDataset(rows, tokenizer, None, max_length=200, truncation="error")) == 1


def test_a_response_that_begins_with_a_turn_left_out_is_refused(dataset):
    with raises(DataError, "train.jsonl, row 0", "weight"):
        dataset([{**PAIR, "chosen": [assistant("19") | {"weight": 0}, assistant("yes")]}])


def test_tools_reach_the_template_row_by_row(tokenizer, write_rows):
    tokenizer.chat_template = WITH_TOOLS
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
    row = {"prompt": ASK, "chosen": [call, {"role": "tool", "content": "19"}, assistant("19")], "rejected": "no"}
    files = write_rows([{**row, "tools": [{"name": "add"}]}, row, {**row, "tools": json.dumps([{"name": "sub"}])}])
    data = PreferenceDataset(files, tokenizer, max_length=400, truncation="error")
    prompts = [tokenizer.decode(data[i].responses[0][1].prompt_ids) for i in range(3)]
    assert "tools\nadd" in prompts[0] and "tools" not in prompts[1] and "tools\nsub" in prompts[2]
    (_, chosen), _ = data[0].responses
    written = [i for i, m in zip(chosen.response_ids, chosen.response_mask, strict=True) if m]
    assert tokenizer.decode(written) == "<call>add</call><|im_end|>19<|im_end|>"


def test_labelled_responses(dataset, tokenizer):
    rows = [
        {"prompt": ASK, "completion": [assistant("19")], "label": True},
        {"prompt": "How many?", "completion": [assistant("7")], "label": 0},
        {"completion": [*ASK, assistant("19")], "label": 1},
    ]
    data = dataset(rows)
    assert not data.paired and data.labels() == (2, 1)
    assert (
        texts(tokenizer, data[0])[0][1:]
        == texts(tokenizer, data[2])[0][1:]
        == texts(tokenizer, dataset([PAIR])[0])[0][1:]
    )
    assert texts(tokenizer, data[1])[0][::2] == (False, "7<|im_end|>")


def test_batch_columns(dataset):
    data = dataset([PAIR, {**PAIR, "chosen": "x"}], columns=None)
    batch = preference_batch([data[1], data[0]])
    assert batch.tensor("label").tolist() == [True, False, True, False]
    assert batch.tensor("unit").tolist() == [0, 0, 1, 1]
    assert "ref_log_probs" not in batch and batch.tensor("margin").tolist() == [0.0] * 4
    for _, response in (*data[0].responses, *data[1].responses):
        response.ref_log_probs = [-0.5] * len(response.response_ids)
    lengths = preference_batch([data[0]]).ragged("ref_log_probs").lengths
    assert lengths.tolist() == batch.ragged("response_ids").lengths[2:].tolist()


def test_margin_column(dataset):
    columns = PreferenceColumns(margin="gap")
    assert dataset([{**PAIR, "gap": 2}], columns=columns)[0].margin == 2.0
    for bad in (None, "2", float("nan"), True):
        with raises(DataError, "'gap'", "loss.margin_key=null"):
            dataset([{**PAIR, "gap": bad}], columns=columns)


def test_length_policies(dataset):
    long = {**PAIR, "rejected": "7+12=" * 30}
    size = max(len(r.prompt_ids) + len(r.response_ids) for _, r in dataset([PAIR], limit=500)[0].responses)
    with raises(DataError, "1 of 2", f"data.max_length={size}"):
        dataset([PAIR, long], limit=size)
    dropped = dataset([PAIR, long], limit=size, policy="drop")
    assert len(dropped) == 1 and dropped.dropped == 1
    cut = dataset([PAIR, long], limit=size, policy="truncate")
    assert len(cut) == 2 and [len(r.prompt_ids) + len(r.response_ids) for _, r in cut[1].responses][1] == size
    prompt = len(cut[0].responses[0][1].prompt_ids)
    with raises(DataError, "0 of 2", "2 are too long", f"data.max_length={2 * prompt}"):
        dataset([PAIR, long], limit=prompt, policy="truncate")
    with raises(ConfigError, "'cut'", where="data.truncation"):
        dataset([PAIR], policy="cut")


def test_equal_sides_are_left_out(dataset):
    data = dataset([PAIR, {**PAIR, "rejected": "19"}])
    assert len(data) == 1 and data.equal == 1
    with raises(DataError, "0 of 1", "1 have"):
        dataset([{**PAIR, "rejected": "19"}])


@pytest.mark.parametrize(
    ("row", "mentions"),
    [
        ({"prompt": ASK, "chosen": "19"}, ("'completion'", "data.chosen_key", "data.label_key")),
        ({"chosen": "19", "rejected": "7"}, ("data.prompt_key",)),
        ({**PAIR, "chosen": [user("x")]}, ("'user'",)),
        ({**PAIR, "chosen": 7}, ("int",)),
        ({"prompt": "text", "chosen": [1, 2], "rejected": [3]}, ("token ids", "text")),
        ({"prompt": ASK, "completion": "19", "label": "good"}, ("'label'", "'good'")),
        ({"completion": [*ASK], "label": True}, ("completion", "assistant")),
        ({**PAIR, "tools": "{"}, ("tools", "JSON")),
        ({**PAIR, "tools": [1]}, ("tools",)),
        ({"prompt": [5], "chosen": [], "rejected": [3]}, ("type list",)),
    ],
)
def test_mistakes_name_the_row(dataset, row, mentions):
    with raises(DataError, "train.jsonl, row 0", "Fix:", *mentions):
        dataset([row])


def test_pairs_and_labels_do_not_mix(dataset):
    with raises(DataError, "row 1", "label", "pair"):
        dataset([PAIR, {"prompt": ASK, "completion": "19", "label": True}])


def test_arrays_as_pandas_writes_them(tokenizer, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": np.array([5, 6]).tolist(), "chosen": [7], "rejected": [8]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    data = PreferenceDataset(tmp_path / "x.parquet", tokenizer, max_length=9, truncation="error")
    assert data[0].responses[1][1].response_ids == [8]
