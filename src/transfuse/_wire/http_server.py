"""An HTTP/1.1 server for a few clients that read large files, on Python's own ``http.server``.

What that module leaves open is bounded here: the number of connections, the size of a request, the time for it to
arrive, and how slowly a client may read. Each connection has a thread; requests on it are answered one after the other.
"""

from __future__ import annotations

import io
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any, Generic, Protocol, TypeVar

from transfuse._tls import TLS
from transfuse._tuning import (
    HTTP_END_SECONDS,
    HTTP_IDLE_SECONDS,
    HTTP_LEAST_BYTES,
    HTTP_LISTEN_SECONDS,
    HTTP_MAX_BODY_BYTES,
    HTTP_MAX_HEAD_BYTES,
    HTTP_REFUSE_SECONDS,
    HTTP_REQUEST_SECONDS,
    HTTP_ROOM_SECONDS,
    HTTP_SEND_BYTES,
)
from transfuse._wire import secure
from transfuse._wire.accepting import Accepting
from transfuse._wire.framed import AnySocket
from transfuse._wire.handshake import is_loopback, join_address
from transfuse._wire.secure import NotTrusted

logger = logging.getLogger("transfuse")

#: The most connections. When there are more, the server closes the one that has been idle for longest.
MAX_CONNECTIONS = 64
#: Connections that the kernel keeps until the server takes them.
BACKLOG = 128

_V = TypeVar("_V")


def _refusal(status: str, why: str) -> bytes:
    """An answer to who gets no other. The connection ends with it."""
    body = f"{why}\n".encode("ascii", "backslashreplace")
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


_TO_PLAIN = _refusal("400 Bad Request", "This hub is reached by https, and by clients that show a certificate.")


@dataclass(frozen=True)
class Question:
    """A request."""

    method: str
    target: str
    #: By names in small letters.
    headers: Mapping[str, str]
    body: bytes = b""


class Revocable(Protocol):
    @property
    def revoked(self) -> bool: ...


@dataclass
class HttpAnswer:
    """A response. ``body`` is sent if the method is not HEAD; its length is announced anyway."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | memoryview = b""
    #: What the body lies in, if that may be given up while the body is sent.
    part_of: Revocable | None = None


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on an address, for a server. An empty host: on all addresses of this machine."""
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server((host, port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def names_this_machine(host: str | None) -> bool:
    """Whether a Host header names this machine as a client does that was told to come to a loopback address.

    A page in a browser on this machine can reach a loopback address by a name of its own (DNS rebinding).
    """
    name = (host or "").rpartition(":")[0] if (host or "").count(":") == 1 else (host or "")
    name = name.rpartition("]")[0].lstrip("[") if name.startswith("[") else name
    return name.lower() == "localhost" or is_loopback(name)


class HttpServer(Generic[_V]):
    """Listens on a socket, and answers with ``answer``. Each connection is a visitor, whom ``greet`` makes.

    ``gate`` sees a request before its body is read, and refuses it by an answer: then the connection ends. ``leave`` is
    told of each visitor whose connection has ended.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        name: str,
        seconds: float,
        tls: TLS | None = None,
        greet: Callable[[Callable[[], None]], _V],
        gate: Callable[[Question], HttpAnswer | None],
        answer: Callable[[Question, _V], AbstractContextManager[HttpAnswer]],
        leave: Callable[[_V], object] = lambda visitor: None,
        upkeep: Callable[[], object] = lambda: None,
        most: int | None = None,
    ) -> None:
        """``name``: what it is, in the log. ``greet`` gets what ends the connection.

        ``seconds``: how long a client that takes nothing keeps its connection. ``most``: how many connections there may
        be; None: `MAX_CONNECTIONS`. With ``tls`` its clients come by https, and show a certificate.
        """
        self.answer, self.seconds, self.greet, self.gate, self.tls = answer, seconds, greet, gate, tls
        self._leave, self._name, self._most = leave, name, most
        sock.settimeout(HTTP_LISTEN_SECONDS)
        self.port = 0 if sock.family == socket.AF_UNIX else int(sock.getsockname()[1])
        self._accepting = Accepting(
            sock, self._admit, self._serve, name=f"{name}-listener", complain=self._complain, between=upkeep
        )
        self._accepting.start()

    @property
    def is_closing(self) -> bool:
        return self._accepting.is_closed

    @property
    def connections(self) -> dict[threading.Thread, _HttpConnection[_V]]:
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

    def _admit(self, sock: socket.socket, where: Any) -> _HttpConnection[_V] | None:
        connection = _HttpConnection(sock, self, where)
        if self._make_room():
            return connection
        connection.turn_away()
        return None

    def _make_room(self) -> bool:
        """Whether one more connection may come in. If there are too many, close the one that is idle for longest."""
        connections = self.connections
        if len(connections) < (MAX_CONNECTIONS if self._most is None else self._most):
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

    def _serve(self, connection: _HttpConnection[_V]) -> None:
        try:
            connection.run()
        except NotTrusted as error:
            self._complain("has turned a client away", NotTrusted(f"{connection.name} {error}"))
        except (OSError, ValueError) as error:
            logger.debug("a client of the %s has left: %s", self._name, error)
        except Exception:
            logger.exception("the %s failed to answer", self._name)
        finally:
            connection.close()
            self._leave(connection.visitor)

    def _complain(self, what: str, error: Exception) -> None:
        logger.warning("the %s %s: %s", self._name, what, error)


def _join(threads: Iterable[threading.Thread], seconds: float) -> None:
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


class _HttpConnection(Generic[_V]):
    """One client's connection."""

    def __init__(self, sock: socket.socket, server: HttpServer[_V], where: Any) -> None:
        self.name = "a process of this host"
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.name = join_address(where[0], where[1])
        self.sock: AnySocket = sock
        self._plain, self.server = sock, server
        self.visitor = server.greet(self.cut)
        #: Since when no request has begun to arrive; None while one is answered.
        self.idle_since: float | None = time.monotonic()

    def run(self) -> None:
        if self.server.tls is not None:
            self._encrypt(self.server.tls)
        _Handler(self)

    def _encrypt(self, tls: TLS) -> None:
        sock = secure.secured(self._plain, tls, HTTP_REQUEST_SECONDS, listens=True, to_plain=_TO_PLAIN)
        refusal = secure.why_not(tls, sock.cipher)
        if refusal:
            sock.sendall(
                _refusal("403 Forbidden", f"This hub does not accept you: your client {refusal.split(', and')[0]}")
            )
            secure.say_goodbye(self._plain)
            raise NotTrusted(refusal)
        self.sock = sock

    def refuse_to_encrypt(self) -> None:
        """The client has begun to encrypt, and this server does not."""
        secure.refuse_in_plain(self._plain)
        raise NotTrusted("comes by https, and this server has no tls=: its clients come by http")

    def cut(self) -> None:
        """End this connection from another thread."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def turn_away(self) -> None:
        if self.server.tls is not None:
            return self.close()
        self.sock.settimeout(HTTP_REFUSE_SECONDS)
        self.sock.sendall(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n")
        return self.close()

    def close(self) -> None:
        self.cut()
        self.sock.close()


class _DeadlineReader(io.RawIOBase):
    """Reads from a socket until a moment that is set for each request, however slowly bytes trickle in."""

    def __init__(self, sock: AnySocket) -> None:
        super().__init__()
        self.sock, self.until = sock, 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request has not arrived in time")
        self.sock.settimeout(left)
        return self.sock.recv_into(buffer)


class _TooLarge(ValueError):
    pass


class _Handler(BaseHTTPRequestHandler):
    """Reads requests and writes answers. The base class parses the request line and the headers."""

    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"
    server_version, sys_version = "transfuse", ""

    def __init__(self, connection: _HttpConnection[_V]) -> None:
        # Not the base's: it makes streams without deadlines.
        self._connection, self._server = connection, connection.server
        self.connection: Any = connection.sock
        self._arriving = _DeadlineReader(connection.sock)
        self._stream = io.BufferedReader(self._arriving, 64 << 10)
        self.wfile = _Writer(self)
        self.close_connection = False
        while not self.close_connection and not self._server.is_closing:
            self._one_request()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _one_request(self) -> None:
        self._connection.idle_since = time.monotonic()
        self._arriving.until = time.monotonic() + HTTP_IDLE_SECONDS
        first = self._stream.peek(1)[:1]
        if not first:
            self.close_connection = True
            return None
        if first == secure.HANDSHAKE[:1] and self._server.tls is None:
            self._connection.refuse_to_encrypt()
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
        if self._server.tls is not None:
            headers["x-forwarded-proto"] = "https"  # So pages name the endpoint as the client has reached it.
        refusal = self._server.gate(Question(self.command, self.path, headers))
        if refusal is not None:
            self.close_connection = True
            return self._finish(refusal)
        body = self._stream.read(int(length))
        if len(body) < int(length):
            self.close_connection = True
            return None
        question = Question(self.command, self.path, headers, body)
        with self._server.answer(question, self._connection.visitor) as answer:
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
        self.send(memoryview(answer.body), lambda: answer.part_of is not None and answer.part_of.revoked)

    def send(self, data: memoryview, revoked: Callable[[], bool] = lambda: False) -> None:
        """Send all of it, or raise: a client that stalls or trickles is left."""
        sock, seconds = self.connection, self._server.seconds
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
