"""Which tokens end a response, from the files of a tokenizer and a model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import GenerationConfig

from hone.data.tokenizer import stop_tokens


@pytest.mark.parametrize(
    ("end", "named", "expected"),
    [(7, [9, 7, 11], (7, 9, 11)), (7, 9, (7, 9)), (7, None, (7,)), (None, [3], (3,)), (None, None, ())],
)
def test_every_end_that_tokenizer_or_model_names_ends_a_response(tmp_path, end, named, expected):
    GenerationConfig(eos_token_id=named).save_pretrained(tmp_path)
    tokenizer = SimpleNamespace(eos_token_id=end)
    assert stop_tokens(tokenizer, str(tmp_path)) == expected  # type: ignore[arg-type]


def test_a_model_without_generation_config_leaves_the_tokenizers_end(tmp_path):
    tokenizer = SimpleNamespace(eos_token_id=7)
    assert stop_tokens(tokenizer, str(tmp_path)) == stop_tokens(tokenizer, None) == (7,)  # type: ignore[arg-type]
