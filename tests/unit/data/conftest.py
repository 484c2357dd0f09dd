"""A small byte-level tokenizer, and chat templates in the manner of well-known families."""

import json
from pathlib import Path

import pytest

CHATML_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}<|bos|>{% endif %}"
    "<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
GEMMA = (
    "<|bos|>{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|turn|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|/turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>model\n{% endif %}"
)
MISTRAL = (
    "<|bos|>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<|eot|>{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
THINK = (  # in the manner of Qwen3: an empty thinking block in the last turn only, thoughts of earlier turns removed
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set text = m.content.split('</think>')[-1].lstrip('\n') %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n"
    "{{ m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content else '' }}"
    "\n</think>\n\n{{ text }}{% else %}{{ text }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_WHOLE = MARKED.replace("{% endgeneration %}<|im_end|>\n", "<|im_end|>{% endgeneration %}\n")
NUMBERED = "{% for m in messages %}{{ messages | length }} {{ m.role }} {{ m.content }}<|im_end|>\n{% endfor %}"


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory) -> Path:
    from hone.data.train_tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    texts = ["How many apples does Anna have? ", "7+12=19\n#### 19", "\n\n\n\n", "hello there, world", "  a  b"] * 5
    rows = [{"messages": [user(text), assistant(text)]} for text in texts]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train_tokenizer([folder / "texts.jsonl"], folder / "made", vocab_size=330)
    return folder / "made"


@pytest.fixture
def tokenizer(tokenizer_directory):
    from hone.data.tokenizer import load_tokenizer

    return load_tokenizer(tokenizer_directory)


@pytest.fixture
def with_template(tokenizer):
    """A function from a template to the tokenizer that uses it, with the special tokens it writes."""
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|bos|>", "<|head|>", "<|/head|>", "<|eot|>", "<|turn|>", "<|/turn|>"]}
    )

    def use(template):
        tokenizer.chat_template = template
        return tokenizer

    return use


@pytest.fixture
def write_rows(tmp_path):
    """A function that writes rows as jsonl, or parquet, and returns the path."""

    def write(rows, name="train.jsonl"):
        path = tmp_path / name
        if path.suffix == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.Table.from_pylist(rows), path)
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows))
        else:
            path.write_text("\n".join(map(json.dumps, rows)))
        return path

    return write
