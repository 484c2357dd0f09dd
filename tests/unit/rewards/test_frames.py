"""Frames: whatever was sent arrives in order; a single foreign byte anywhere is an error and never a message."""

import os
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from hone.rewards.frames import Channel, ChannelError, socket_pair
from hone.rewards.score import Score
from hone.rewards.worker import (
    LoadFailure,
    Outcome,
    Ready,
    Target,
    _load_from_file,
    decode_result,
    decode_start,
    encode_result,
)

NONCE = bytes(range(16))
BODIES = st.lists(st.binary(max_size=300), min_size=1, max_size=5)


def encoded(bodies: list[bytes], nonce: bytes = NONCE) -> list[bytes]:
    """Return the bytes of each frame as they are on the wire."""
    ours, theirs = socket_pair()
    channel, frames = Channel(ours, nonce), []
    with ours, theirs:
        for body in bodies:
            channel.send(body)
            frames.append(theirs.recv(1 << 16))
    return frames


def received(data: bytes, chunk: int = 1 << 16, **options: int) -> list[bytes]:
    """Return all messages in ``data``, written in chunks of a size, until the end of the stream."""
    ours, theirs = socket_pair()
    messages: list[bytes] = []

    def write() -> None:
        for start in range(0, len(data), chunk):
            theirs.sendall(data[start : start + chunk])
        theirs.shutdown(socket.SHUT_WR)

    writer = threading.Thread(target=write)
    writer.start()
    channel = Channel(ours, NONCE, **options)
    try:
        while True:
            body = channel.receive(10.0)
            assert body is not None
            messages.append(body)
    except EOFError:
        return messages
    finally:
        writer.join()
        ours.close()
        theirs.close()


@given(BODIES, st.integers(1, 500))
@examples(60)
def test_messages_arrive_in_order_however_they_are_cut(bodies: list[bytes], chunk: int) -> None:
    assert received(b"".join(encoded(bodies)), chunk) == bodies


@given(BODIES, st.binary(min_size=1, max_size=60), st.data())
@examples(60)
def test_foreign_bytes_between_frames_are_an_error(bodies: list[bytes], foreign: bytes, data: st.DataObject) -> None:
    frames = encoded([*bodies, b""])
    if frames[0].startswith(foreign[:1]):
        foreign = b"x" + foreign
    place = data.draw(st.integers(0, len(bodies)))
    with pytest.raises(ChannelError):
        received(b"".join([*frames[:place], foreign, *frames[place:]]))


def test_frames_of_others_are_an_error() -> None:
    first, second = encoded([b"a", b"b"])
    for data in (
        second,  # a message is missing
        first + first,  # one is repeated
        encoded([b"a"], nonce=bytes(16))[0],
        first[:20] + (os.getpid() + 1).to_bytes(4) + first[24:] + second,  # two processes send
    ):
        with pytest.raises(ChannelError):
            received(data)
    with pytest.raises(ChannelError):
        received(first, peer=os.getpid() + 1)
    with pytest.raises(ChannelError):
        received(encoded([b"abc"])[0], max_body=2)


def test_an_incomplete_frame_is_waited_for_and_then_ends_with_the_stream() -> None:
    ours, theirs = socket_pair()
    (frame,) = encoded([b"body"])
    channel = Channel(ours, NONCE)
    with ours, theirs:
        theirs.sendall(frame[:-1])
        assert channel.receive(0.01) is None and channel.receive(0.0) is None
        theirs.sendall(frame[-1:])
        assert channel.receive(0.0) == b"body"
        theirs.close()
        with pytest.raises(EOFError):
            channel.receive(1.0)


def test_messages_survive_their_encoding() -> None:
    score = Score(
        0.5, {"acc": 1.0}, {"pred": ["\ufffd", None, {"a": 1}], "nan": float("inf")}, None, turn_rewards=[0.5]
    )
    assert decode_result(encode_result(3, score, "trace")) == (3, Outcome(score, "trace"))
    number, outcome = decode_result(encode_result(3, [score, Score(1.0)], None))
    assert number == 3 and outcome.batch == [score, Score(1.0)] and outcome.score == score
    ready = decode_start(Ready(is_async=True).encode())
    failure = decode_start(LoadFailure("what", "fix", "trace").encode())
    assert ready == Ready(is_async=True)
    assert isinstance(failure, LoadFailure) and failure.args == ("what", "fix", "trace")
    for body in (b"{}", b"[]", b"\x80\x04.", b"[0, false, [], null]", b'{"ready": {"other": 1}}', b"[" * 5000):
        with pytest.raises(ValueError):
            decode_start(body)
        with pytest.raises(ValueError):
            decode_result(body)


@pytest.mark.parametrize(
    ("name", "advised"), [("score", "score_all"), ("limit", ""), ("_hidde", ""), ("LIMIT", ""), ("main", "many")]
)
def test_the_functions_of_a_file_are_advised(tmp_path: Path, name: str, advised: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text("LIMIT = 3\nlimit_ = 'a'\ndef score_all(x): ...\ndef _hidden(x): ...\ndef many(x): ...\n")
    with pytest.raises(LoadFailure) as caught:
        _load_from_file(Target(1.0, str(file), name))
    fix = str(caught.value.args[1])
    assert "LIMIT" not in fix and "limit_" not in fix and "_hidden" not in fix and advised in fix
