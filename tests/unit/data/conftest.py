"""A small byte-level tokenizer, and files of rows."""

import json
from pathlib import Path

import pytest
from support.chat_templates import assistant, user


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory) -> Path:
    from hone.apps.lab.data.inspection import train_tokenizer

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
