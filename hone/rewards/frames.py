"""Numbered frames between the pool and a worker process, over one socket.

    header: magic, nonce of the worker, pid of the sender, number of the frame, length of the body
    body:   pickle from the pool to the worker; JSON from the worker to the pool, since a reward function runs there

The receiver knows every byte of the next header except the length. So a byte that anything else writes to the socket (a library that
writes to inherited descriptors, a forked copy of the worker) is an error at once, and never read as an answer.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time

_HEADER = struct.Struct("!4s16sIQQ")
_KNOWN = _HEADER.size - 8
_MAGIC = b"HnRw"
_CHUNK = 1 << 16
NONCE_BYTES = 16
MAX_ANSWER = 1 << 28  # most bytes of a message from a worker


class ChannelError(Exception):
    """Error of a socket whose bytes are not the next frame."""


class Channel:
    """One end of a worker's socket.

    Args:
        peer: pid that the other end sends; None takes it from the first frame.
        max_body: most bytes of a received frame; None means no limit.
    """

    def __init__(
        self, connection: socket.socket, nonce: bytes, peer: int | None = None, *, max_body: int | None = None
    ) -> None:
        self.nonce, self.peer, self.pid, self.max_body = nonce, peer, os.getpid(), max_body
        self._connection = connection
        self._sent = self._received = 0
        self._buffer = bytearray()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def fileno(self) -> int:
        """Return the descriptor of the socket, -1 after :meth:`close`."""
        return self._connection.fileno()

    def send(self, body: bytes, timeout: float | None = None) -> None:
        """Send a frame. Raises OSError: the other end is closed, or does not read within ``timeout`` seconds."""
        self._connection.settimeout(timeout)
        self._connection.sendall(_HEADER.pack(_MAGIC, self.nonce, self.pid, self._sent, len(body)) + body)
        self._sent += 1

    def receive(self, timeout: float | None = None) -> bytes | None:
        """Return the next body, or None if it is not complete within ``timeout`` seconds.

        Raises:
            ChannelError: other bytes arrived.
            EOFError: the other end is closed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (body := self.buffered()) is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self.is_readable(left):
                return None
            try:
                data = self._connection.recv(_CHUNK)
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError("the channel is closed")
            self._buffer += data
        return body

    def is_readable(self, timeout: float | None = 0.0) -> bool:
        """Return whether bytes or the end of the stream arrive within ``timeout`` seconds."""
        return bool(self._poll.poll(None if timeout is None else timeout * 1000))

    def close(self) -> None:
        self._connection.close()

    def buffered(self) -> bytes | None:
        """Remove and return the next body if it has arrived completely with an earlier one, else None. Raises
        ChannelError: other bytes arrived.
        """
        if not self._buffer:
            return None
        if self.peer is None and len(self._buffer) >= _HEADER.size:
            self.peer = int(_HEADER.unpack_from(self._buffer)[2])
        if self.peer is not None:
            expected = _HEADER.pack(_MAGIC, self.nonce, self.peer, self._received, 0)[:_KNOWN]
        else:
            expected = _MAGIC + self.nonce
        start = bytes(self._buffer[: len(expected)])
        if start != expected[: len(start)]:
            raise ChannelError(f"it received bytes that are not message {self._received}: {start[:40]!r}")
        if len(self._buffer) < _HEADER.size:
            return None
        length = int(_HEADER.unpack_from(self._buffer)[4])
        if self.max_body is not None and length > self.max_body:
            raise ChannelError(f"message {self._received} would have {length} bytes")
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        self._received += 1
        return body


def socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
