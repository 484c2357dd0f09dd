"""Valid text: what UTF-8 can encode is unchanged, everything else is repaired or refused with its place."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from hone.errors import DataError
from hone.text import REPLACEMENT, check_valid, invalid_place, is_valid, valid_data, valid_text

ANY_TEXT = st.text(st.one_of(st.characters(), st.characters(categories=["Cs"])), max_size=8)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | ANY_TEXT
DATA = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4), max_leaves=12
)


def encodes(value: Any) -> bool:
    """Return, by encoding it, whether UTF-8 accepts all text of a value."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


@given(DATA)
@examples(100)
def test_validity_is_that_of_utf_8_and_repair_gives_it(value: Any) -> None:
    repaired = valid_data(value)
    assert is_valid(value) == encodes(value) == (invalid_place(value) is None)
    assert is_valid(repaired) and encodes(repaired)
    assert valid_data(repaired) == repaired
    if is_valid(value):
        assert repaired == value
        check_valid(value, "f.jsonl, row 0")
    else:
        with pytest.raises(DataError) as caught:
            check_valid(value, "f.jsonl, row 0")
        assert caught.value.where == "f.jsonl, row 0"


@given(ANY_TEXT)
@examples(100)
def test_each_lone_surrogate_becomes_one_replacement(text: str) -> None:
    expected = "".join(REPLACEMENT if 0xD800 <= ord(character) <= 0xDFFF else character for character in text)
    assert valid_text(text) == expected


def test_the_place_is_that_of_the_string_or_of_the_key() -> None:
    assert invalid_place({"a": [1, {"b": "\udfff"}]}) == "a[1].b"
    assert invalid_place({"a": {"\ud800": 1}}) == "a"
    assert invalid_place("\ud800") == "" and invalid_place("\U0001f600") is None
