"""Spans of text that two tokenizers end at the same place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import spans as oracle
from support.examples import examples
from support.templates import tokenizer
from transformers import PreTrainedTokenizerBase

from hone.data.chat import encode_texts
from hone.data.spans import aligned_ends, shares_tokenizer, spans_of, token_bytes

BYTES, OTHER_BYTES, METASPACE = tokenizer("qwen2_5"), tokenizer("llama3_1"), tokenizer("gemma3")
ALL = (BYTES, OTHER_BYTES, METASPACE)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20) | st.sampled_from(
    ["It is sunny in Rome.", "naïve 中文 🙂🙂", "a  b\n\n c", "<|im_end|> is text"]
)


def encoded(reader: PreTrainedTokenizerBase, text: str) -> list[int]:
    return encode_texts(reader, [text])[0]


@st.composite
def _two_cuts(draw: st.DrawFn) -> tuple[list[bytes], list[bytes]]:
    """Two ways to cut the same bytes, with empty pieces."""
    data = draw(st.binary(min_size=1, max_size=12))

    def cut() -> list[bytes]:
        places = sorted(draw(st.lists(st.integers(0, len(data)), max_size=6)))
        return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]

    return cut(), cut()


@examples(200)
@given(_two_cuts())
def test_ends_are_those_of_the_oracle(cuts: tuple[list[bytes], list[bytes]]) -> None:
    assert aligned_ends(*cuts) == oracle.aligned_ends(*cuts)


@examples(60)
@given(TEXTS, st.sampled_from(ALL))
def test_the_bytes_of_tokens_are_those_of_the_text(text: str, reader: PreTrainedTokenizerBase) -> None:
    ids = encoded(reader, text)
    assert b"".join(token_bytes(reader, ids)).decode() == reader.decode(ids, skip_special_tokens=False)


@examples(60)
@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=12), st.sampled_from(ALL))
def test_bytes_of_any_tokens_are_valid_text(numbers: list[int], reader: PreTrainedTokenizerBase) -> None:
    """A policy samples parts of characters too."""
    ids = [number % len(reader) for number in numbers]
    pieces = token_bytes(reader, ids)
    assert len(pieces) == len(ids)
    assert b"".join(pieces).decode() == reader.backend_tokenizer.decode(ids, skip_special_tokens=False)


@examples(60)
@given(TEXTS.filter(bool), st.sampled_from(ALL), st.sampled_from(ALL), st.booleans())
def test_every_span_has_the_same_text_on_both_sides(
    text: str, policy: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, stopped: bool
) -> None:
    end = policy.eos_token_id
    response = [*encoded(policy, text), *([end] if stopped else [])]
    if not response:
        return
    spans = spans_of(response, policy, teacher, (end,))
    assert spans.policy[-1] == spans.teacher[-1] == len(set(spans.policy)) - 1 == len(set(spans.teacher)) - 1
    assert spans.policy == sorted(spans.policy) and spans.teacher == sorted(spans.teacher)
    assert len(spans.policy) == len(response) and len(spans.teacher) == len(spans.teacher_ids) > 0
    if stopped:
        assert spans.teacher_ids[-1] == teacher.eos_token_id
    one, other = (
        token_bytes(policy, response[: len(response) - stopped]),
        token_bytes(teacher, spans.teacher_ids[: len(spans.teacher_ids) - stopped]),
    )
    if b"".join(one) == b"".join(other):
        for span in set(spans.policy):
            mine = b"".join(piece for piece, number in zip(one, spans.policy, strict=False) if number == span)
            theirs = b"".join(piece for piece, number in zip(other, spans.teacher, strict=False) if number == span)
            assert mine == theirs


@examples(60)
@given(TEXTS.filter(bool), st.sampled_from(ALL))
def test_with_the_same_tokenizer_every_token_is_a_span(text: str, reader: PreTrainedTokenizerBase) -> None:
    ids = encoded(reader, text)
    if not ids or reader.decode(ids, skip_special_tokens=False) != text or 0 in map(len, token_bytes(reader, ids)):
        return
    response = [*ids, reader.eos_token_id]
    spans = spans_of(response, reader, reader, (reader.eos_token_id,))
    assert spans.teacher_ids == response
    assert spans.policy == spans.teacher == list(range(len(response)))


def test_an_end_without_text_and_a_text_without_an_end() -> None:
    end = BYTES.eos_token_id
    only_end = spans_of([end], BYTES, OTHER_BYTES, (end,))
    assert (only_end.teacher_ids, only_end.policy, only_end.teacher) == ([OTHER_BYTES.eos_token_id], [0], [0])
    cut_off = spans_of(encoded(BYTES, "sunny"), BYTES, OTHER_BYTES, (end,))
    assert OTHER_BYTES.decode(cut_off.teacher_ids) == "sunny"


@pytest.mark.parametrize("text", ["It is sunny in Rome.", "assistant analysis final"])
def test_spans_are_short_where_tokenizers_agree(text: str) -> None:
    response = encoded(BYTES, text)
    assert max(spans_of(response, BYTES, OTHER_BYTES).policy) + 1 > len(response) / 3


def test_tokenizers_are_compared_by_their_tokens() -> None:
    assert shares_tokenizer(BYTES, BYTES) and not shares_tokenizer(BYTES, OTHER_BYTES)
