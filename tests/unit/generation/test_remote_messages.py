"""Frames between an engine's server and its client."""

from __future__ import annotations

import asyncio
import math
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.messages import check_message

from hone.data.types import StopReason
from hone.errors import ConfigError, GenerationError, ModelError
from hone.generation.protocol import Completion, Constraint, ConstraintKind, GenerationRequest, SamplingParams
from hone.generation.remote import messages

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
floats = st.floats(allow_nan=False, allow_infinity=False)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 9),
    temperature=floats,
    top_p=floats,
    stop_token_ids=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    stop=st.lists(st.text(), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    logit_bias=st.lists(st.tuples(st.integers(0, 9), floats), max_size=3).map(tuple),
    constraint=st.none() | st.builds(Constraint, st.sampled_from(ConstraintKind), st.text()),
    top_log_probs=st.integers(0, 20),
)


async def _read_all(data: bytes) -> list[messages.Message]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    received = []
    while (message := await messages.read(reader)) is not None:
        received.append(message)
    return received


@given(st.lists(st.dictionaries(st.text(), values, max_size=3), max_size=4))
def test_messages_arrive_as_they_were(sent):
    data = b"".join(messages.pack(message) for message in sent)
    assert asyncio.run(_read_all(data)) == sent


@given(st.dictionaries(st.text(), values, max_size=3), st.integers(0, 100))
def test_an_interrupted_stream_ends_without_a_message(message, missing):
    data = messages.pack(message)
    assert asyncio.run(_read_all(data[: max(0, len(data) - 1 - missing)])) == []


@given(samplings, st.lists(st.integers(0, 2**31), max_size=5), st.integers(0, 2**63), st.text())
def test_requests_arrive_as_they_were(sampling, prompt, seed, name):
    asked = GenerationRequest(name, prompt, sampling, seed, session=name or None)
    assert messages.request_of(_through_the_wire(messages.request_as_message(asked))) == asked


@given(st.lists(st.tuples(st.integers(0, 2**31), floats, floats), max_size=5), st.sampled_from(StopReason), floats)
def test_completions_arrive_as_they_were(tokens, reason, seconds):
    ids, log_probs, drawn = [list(column) for column in zip(*tokens, strict=True)] or [[], [], []]
    alternatives = [list(zip(ids, drawn, strict=True)) for _ in ids]
    done = Completion("x", ids, log_probs, drawn, reason, (3, 4), seconds, alternatives=alternatives)
    assert messages.completion_of(_through_the_wire(messages.completion_as_message(done))) == done


def _through_the_wire(message: messages.Message) -> messages.Message:
    return asyncio.run(_read_all(messages.pack(message)))[0]


@pytest.mark.parametrize("error", [ConfigError("a", why="b", fix="c", where="d"), GenerationError("a", why="b")])
def test_errors_arrive_as_they_were(error):
    arrived = messages.error_of(messages.error_as_message(error))
    assert (type(arrived), str(arrived)) == (type(error), str(error))


def test_other_errors_are_named():
    check_message(messages.error_of(messages.error_as_message(ZeroDivisionError("none"))), "ZeroDivisionError: none")
    assert isinstance(messages.error_of(messages.error_as_message(ModelError("m"))), GenerationError)


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\0\0\0\x02[]", b"\0\0\0\x01x", b"GET / HTTP/1.1\r\n\r\n"])
def test_other_data_than_messages_is_refused(data):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=lambda: (theirs.sendall(data), theirs.shutdown(socket.SHUT_WR)))
        sender.start()
        try:
            received = messages.receive(ours)
        except ValueError:
            received = None
        sender.join()
        assert received is None


def test_log_probs_of_impossible_tokens_survive():
    done = Completion("x", [1], [-math.inf], [0.0], StopReason.STOP)
    assert messages.completion_of(_through_the_wire(messages.completion_as_message(done))) == done
