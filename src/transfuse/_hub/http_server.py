"""An HTTP/1.1 server for a few clients that read large files, on Python's own ``http.server``.

What that module leaves open is bounded here: the number of connections, the size of a request, the time for it to
arrive, and how slowly a client may read. Each connection has a thread; requests on it are answered one after the other.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

from transfuse._hub import page
from transfuse._hub.commits import Visitor
from transfuse._hub.repository import HttpAnswer, Question
from transfuse._tuning import (
    HTTP_END_SECONDS,
    HTTP_IDLE_SECONDS,
    HTTP_LEAST_BYTES,
    HTTP_LISTEN_SECONDS,
    HTTP_MAX_BODY_BYTES,
    HTTP_MAX_HEAD_BYTES,
    HTTP_REQUEST_SECONDS,
    HTTP_ROOM_SECONDS,
    HTTP_SEND_BYTES,
)
from transfuse._wire.accepting import Accepting
from transfuse._wire.handshake import is_loopback

logger = logging.getLogger("transfuse")

#: The most connections. When there are more, the server closes the one that has been idle for longest.
MAX_CONNECTIONS = 64
#: Connections that the kernel keeps until the server takes them.
BACKLOG = 128

Answering = Callable[[Question, Visitor], AbstractContextManager[HttpAnswer]]


class HttpServer:
    """Listens on one address, and answers with ``answer``. ``leave`` is told of each connection that has ended."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: bytes | None,
        seconds: float,
        answer: Answering,
        leave: Callable[[Visitor], object],
        upkeep: Callable[[], object],
    ) -> None:
        self.answer, self.seconds = answer, seconds
        self._leave = leave
        self._token = None if token is None else hashlib.sha256(token).digest()
        self._is_loopback = is_loopback(host)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
        sock.settimeout(HTTP_LISTEN_SECONDS)
        self.port = int(sock.getsockname()[1])
        self._accepting = Accepting(
            sock, self._admit, self._serve, name="hub-listener", complain=_complain, between=upkeep
        )
        self._accepting.start()

    @property
    def is_closing(self) -> bool:
        return self._accepting.is_closed

    @property
    def connections(self) -> dict[threading.Thread, _HttpConnection]:
        return self._accepting.connections

    def close(self, *, cancel: bool, patience: float) -> None:
        """Stop listening. Answers that are being sent may end within ``patience`` seconds, unless ``cancel``."""
        connections = self._accepting.close()
        connections.pop(threading.current_thread(), None)
        for connection in connections.values():
            if cancel or connection.idle_since is not None:
                connection.cut()
        if not cancel:
            _join(connections, patience)
            for connection in connections.values():
                connection.cut()
        _join(connections, HTTP_END_SECONDS)

    def is_allowed(self, said: str | None) -> bool:
        """Whether an Authorization header carries the token. Takes the same time for any wrong one."""
        if self._token is None:
            return True
        scheme, _, secret = (said or "").partition(" ")
        given = hashlib.sha256(secret.strip().encode("latin-1", "replace")).digest()
        return hmac.compare_digest(given, self._token) and scheme.lower() == "bearer"

    def is_expected(self, host: str | None) -> bool:
        """Whether a Host header names this machine as a client does that was told to come here.

        A page in a browser on this machine can reach a loopback address by a name of its own (DNS rebinding). The token
        keeps it out; without one, names are refused.
        """
        if self._token is not None or not self._is_loopback:
            return True
        name = (host or "").rpartition(":")[0] if (host or "").count(":") == 1 else (host or "")
        name = name.rpartition("]")[0].lstrip("[") if name.startswith("[") else name
        return name.lower() == "localhost" or is_loopback(name)

    def _admit(self, sock: socket.socket, where: object) -> _HttpConnection | None:
        connection = _HttpConnection(sock, self)
        if self._make_room():
            return connection
        connection.turn_away()
        return None

    def _make_room(self) -> bool:
        """Whether one more connection may come in. If there are too many, close the one that is idle for longest."""
        connections = self.connections
        if len(connections) < MAX_CONNECTIONS:
            return True
        idle = [
            (since, i, thread)
            for i, (thread, one) in enumerate(connections.items())
            if (since := one.idle_since) is not None
        ]
        if not idle:
            return False
        thread = min(idle)[2]
        connections[thread].cut()
        # Only a thread that has ended makes room: a flood of connections must not become a flood of threads.
        thread.join(HTTP_ROOM_SECONDS)
        return not thread.is_alive()

    def _serve(self, connection: _HttpConnection) -> None:
        try:
            connection.run()
        except (OSError, ValueError) as error:
            logger.debug("a client of the hub has left: %s", error)
        except Exception:
            logger.exception("the hub failed to answer")
        finally:
            connection.close()
            self._leave(connection.visitor)


def _complain(what: str, error: Exception) -> None:
    logger.warning("the hub %s: %s", what, error)


def _join(threads: Iterable[threading.Thread], seconds: float) -> None:
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


class _HttpConnection:
    """One client's connection."""

    def __init__(self, sock: socket.socket, server: HttpServer) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.server = sock, server
        self.visitor = Visitor(self.cut)
        #: Since when no request has begun to arrive; None while one is answered.
        self.idle_since: float | None = time.monotonic()

    def run(self) -> None:
        _Handler(self)

    def cut(self) -> None:
        """End this connection from another thread."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def turn_away(self) -> None:
        self.sock.settimeout(1.0)
        self.sock.sendall(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n")
        self.close()

    def close(self) -> None:
        self.cut()
        self.sock.close()


class _DeadlineReader(socket.SocketIO):
    """Reads from a socket until a moment that is set for each request, however slowly bytes trickle in."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, "r")
        self.sock, self.until = sock, 0.0

    def readinto(self, buffer: Any) -> int | None:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request has not arrived in time")
        self.sock.settimeout(left)
        return super().readinto(buffer)


class _TooLarge(ValueError):
    pass


class _Handler(BaseHTTPRequestHandler):
    """Reads requests and writes answers. The base class parses the request line and the headers."""

    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"
    server_version, sys_version = "transfuse", ""

    def __init__(self, connection: _HttpConnection) -> None:
        # Not the base's: it makes streams without deadlines.
        self._connection, self._hub = connection, connection.server
        self.connection = connection.sock
        self._arriving = _DeadlineReader(connection.sock)
        self._stream = io.BufferedReader(self._arriving, 64 << 10)
        self.wfile = _Writer(self)
        self.close_connection = False
        while not self.close_connection and not self._hub.is_closing:
            self._one_request()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _one_request(self) -> None:
        self._connection.idle_since = time.monotonic()
        self._arriving.until = time.monotonic() + HTTP_IDLE_SECONDS
        if not self._stream.peek(1):
            self.close_connection = True
            return None
        self._connection.idle_since = None
        self._arriving.until = time.monotonic() + HTTP_REQUEST_SECONDS
        self.close_connection = True
        try:
            self.raw_requestline, self.rfile = self._head()
        except _TooLarge:
            self.requestline, self.request_version, self.command = "", "HTTP/1.1", ""
            return self._finish(HttpAnswer(431))
        if not self.raw_requestline.strip() or not self.parse_request():
            return None  # The base class has answered.
        if self.request_version == "HTTP/0.9":
            return None
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit()):
            self.close_connection = True
            return self._finish(HttpAnswer(411))
        if int(length) > HTTP_MAX_BODY_BYTES:
            self.close_connection = True
            return self._finish(HttpAnswer(413))
        headers = {name.lower(): value for name, value in self.headers.items()}
        shown = page.is_wanted(self.command, headers.get("accept"))
        if not self._hub.is_allowed(self.headers.get("Authorization")):
            self.close_connection = True
            given = "another token was sent" if "Authorization" in self.headers else "no token was sent"
            advice = f"{given}: set HF_TOKEN to the token that this hub was started with"
            said = {"WWW-Authenticate": "Bearer", "X-Error-Message": advice}
            return self._finish(
                HttpAnswer(401, said | page.HEADERS, page.locked(headers)) if shown else HttpAnswer(401, said)
            )
        if not self._hub.is_expected(self.headers.get("Host")):
            self.close_connection = True
            return self._finish(HttpAnswer(403, page.HEADERS, page.wrong_name()) if shown else HttpAnswer(403))
        body = self._stream.read(int(length))
        if len(body) < int(length):
            self.close_connection = True
            return None
        question = Question(self.command, self.path, headers, body)
        with self._hub.answer(question, self._connection.visitor) as answer:
            self._finish(answer)
        return None

    def _head(self) -> tuple[bytes, io.BytesIO]:
        """The request line, and the headers as a stream."""
        lines: list[bytes] = []
        room = HTTP_MAX_HEAD_BYTES
        while not lines or lines[-1] not in (b"\r\n", b"\n", b""):
            line = self._stream.readline(room + 1)
            room -= len(line)
            if room < 0:
                raise _TooLarge
            lines.append(line)
        return lines[0], io.BytesIO(b"".join(lines[1:]))

    def _finish(self, answer: HttpAnswer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "HEAD" or not answer.body:
            return
        self.send(memoryview(answer.body), lambda: answer.commit is not None and answer.commit.revoked)

    def send(self, data: memoryview, revoked: Callable[[], bool] = lambda: False) -> None:
        """Send all of it, or raise: a client that stalls or trickles is left."""
        sock, seconds = self.connection, self._hub.seconds
        at = taken = 0
        since = time.monotonic()
        while at < len(data):
            if revoked():
                raise ConnectionAbortedError("the commit was given up")
            sock.settimeout(seconds)
            at += sock.send(data[at : at + HTTP_SEND_BYTES])
            now = time.monotonic()
            if now - since > seconds:
                if at - taken < HTTP_LEAST_BYTES and at < len(data):
                    raise TimeoutError(f"the client took {at - taken} bytes in {now - since:.0f} s")
                since, taken = now, at


class _Writer(io.BufferedIOBase):
    """What the base class writes its headers to."""

    def __init__(self, handler: _Handler) -> None:
        self._handler = handler

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._handler.send(memoryview(data))
        return len(data)
