"""Frames over a socket: a length, a body in msgpack, an HMAC if the two ends share a key, and descriptors of files.

Two kinds of connections speak in frames: those of a handshake (:mod:`.handshake`), and those between a worker and the
keeper of its host. What may be said over one is its :class:`Vocabulary`.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from transfuse._wire.secure import SecureSocket

MARK_BYTES = 32
#: The most descriptors that the kernel passes at a time, and the most beside one frame.
FILES_AT_ONCE, MAX_FILES = 250, 1 << 16

_LENGTH = struct.Struct("<I")
_COUNTER = struct.Struct("<Q")
_T = TypeVar("_T")
#: What a connection has: the kernel's socket, or one that encrypts.
AnySocket: TypeAlias = socket.socket | SecureSocket


class Vocabulary(NamedTuple):
    """The frames that may come over a connection, and how many bytes one may have."""

    decoder: msgspec.msgpack.Decoder[Any]
    most_bytes: int


class Malformed(ValueError):
    """What the other end sent is no frame. The text says what it did."""


class Closed(ConnectionError):
    """The other end has closed the connection."""


class Framed:
    """One connection. Its kind says how errors are told (:meth:`_explain`), and whether it is encrypted."""

    def __init__(
        self, sock: socket.socket, vocabulary: Vocabulary, *, has_key: bool = False, passes_files: bool = False
    ) -> None:
        """``has_key``: every frame has an HMAC. ``passes_files``: descriptors come beside frames."""
        own(sock)
        self._socket: AnySocket = sock
        self._vocabulary = vocabulary
        self._has_key, self._passes_files = has_key, passes_files
        self._sending_key = self._receiving_key = b""
        self._sent = self._received = 0

    def _explain(self, error: Exception, phase: str, seconds: float) -> Exception:
        """What to raise for an ``OSError`` or :class:`Malformed` while ``phase``, after these seconds."""
        raise NotImplementedError

    # -- ends

    def close(self) -> None:
        # Shut down first: this wakes a thread that waits for the other end.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def gone(self) -> bool:
        """Whether the other end has closed. Call it only while no frame is due from that end."""
        try:
            return self.has_news(0.0) and not self._socket.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def has_news(self, seconds: float) -> bool:
        """Whether the other end sends something, or closes, within these seconds."""
        # Not select(): it takes descriptors up to 1023 only, and a training process may have more.
        if isinstance(self._socket, SecureSocket) and self._socket.has_bytes():
            return True
        look = select.poll()
        look.register(self._socket, select.POLLIN)
        return bool(look.poll(seconds * 1000))

    @property
    def _unix_socket(self) -> socket.socket:
        """The socket of a connection that passes descriptors, which does not leave this host."""
        assert isinstance(self._socket, socket.socket)
        return self._socket

    # -- frames

    def send(self, frame: Any, seconds: float, files: Sequence[int] = ()) -> None:
        body, until, phase = msgspec.msgpack.encode(frame), time.monotonic() + seconds, "sending a frame"
        text = self._head(len(body), len(files)) + body
        self._send_bytes(text + self._mark(self._sending_key, self._sent, text), until, phase)
        self._sent += 1
        for low in range(0, len(files), FILES_AT_ONCE):
            some = files[low : low + FILES_AT_ONCE]
            self._do(partial(socket.send_fds, self._unix_socket, [b"\0"], some), until, phase)

    def receive(self, until: float | None, phase: str) -> tuple[Any, list[int]]:
        """The next frame, and the descriptors beside it."""
        files: list[int] = []
        started = time.monotonic()
        try:
            head = self._receive_bytes(len(self._head(0, 0)), until, phase)
            length, count = (*_LENGTH.iter_unpack(head), (0,))[:2]
            return self._body(head, length[0], count[0], files, until, phase), files
        except BaseException as error:
            for fd in files:
                os.close(fd)
            if isinstance(error, Malformed):
                raise self._explain(error, phase, time.monotonic() - started) from error
            raise

    def _body(self, head: bytes, length: int, count: int, files: list[int], until: float | None, phase: str) -> Any:
        if length > self._vocabulary.most_bytes or count > MAX_FILES:
            beside = f" with {count} descriptors" if self._passes_files else ""
            raise Malformed(f"announced a frame of {length} bytes{beside} while {phase}")
        body = self._receive_bytes(length, until, phase)
        due = self._mark(self._receiving_key, self._received, head + body)
        self._received += 1
        if not hmac.compare_digest(self._receive_bytes(len(due), until, phase), due):
            raise Malformed("sent a frame with a wrong HMAC: somebody else wrote it")
        while len(files) < count:
            data, some, flags, _ = self._do(partial(socket.recv_fds, self._unix_socket, 1, FILES_AT_ONCE), until, phase)
            files += some
            if flags & socket.MSG_CTRUNC:
                raise self._explain(OSError("this process has no descriptors left: raise ulimit -n"), phase, 0.0)
            if not data:
                raise self._explain(Closed(), phase, 0.0)
        try:
            return self._vocabulary.decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Malformed(f"sent a malformed frame: {error}") from error

    def _head(self, length: int, files: int) -> bytes:
        return _LENGTH.pack(length) + (_LENGTH.pack(files) if self._passes_files else b"")

    def _mark(self, key: bytes, number: int, text: bytes) -> bytes:
        return hmac.digest(key, _COUNTER.pack(number) + text, hashlib.sha256) if self._has_key else b""

    # -- bytes

    def _send_bytes(self, data: bytes, until: float | None, phase: str) -> None:
        self._do(partial(self._socket.sendall, data), until, phase)

    def _receive_bytes(self, count: int, until: float | None, phase: str) -> bytes:
        data = bytearray()
        while len(data) < count:
            chunk = self._do(partial(self._socket.recv, min(count - len(data), 1 << 20)), until, phase)
            if not chunk:
                raise self._explain(Closed(), phase, 0.0)
            data += chunk
        return bytes(data)

    def _do(self, operation: Callable[[], _T], until: float | None, phase: str) -> _T:
        started = time.monotonic()
        try:
            if until is not None and until <= started:
                raise TimeoutError
            self._socket.settimeout(None if until is None else until - started)
            return operation()
        except OSError as error:
            told = self._explain(error, phase, time.monotonic() - started)
            raise told from (None if isinstance(error, TimeoutError) else error)


#: The sockets of all connections, wherever they are in use now.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def own(sock: socket.socket) -> None:
    """This process alone has this connection: a child of a fork closes its copy."""
    _sockets.add(sock)


def _after_fork() -> None:
    """In the child of a fork: all connections are the parent's. Copies would hide its death from the other ends."""
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_after_fork)
