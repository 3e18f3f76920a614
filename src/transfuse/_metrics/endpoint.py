"""Answers ``GET /metrics`` and ``GET /healthz``, over HTTP, for anybody who reaches the address. It changes nothing."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from transfuse._metrics.address import MetricsAddress
from transfuse._metrics.samples import CONTENT_TYPE
from transfuse._tuning import METRICS_CLIENT_SECONDS, METRICS_END_SECONDS
from transfuse._wire.handshake import is_loopback, join_address
from transfuse._wire.http_server import HttpAnswer, HttpServer, Question, listen, names_this_machine

#: The most connections at a time: nobody needs more than one or two.
MAX_CONNECTIONS = 16

TEXT = {"Content-Type": "text/plain; charset=utf-8"}


class MetricsEndpoint:
    """Listens at an address, until it is closed."""

    def __init__(
        self, where: MetricsAddress, *, metrics: Callable[[], str], health: Callable[[], tuple[bool, str]]
    ) -> None:
        """``health`` says whether all is well, and one line. Raises ``OSError`` if nobody can listen there."""
        self._metrics, self._health, self._path = metrics, health, where.path
        self._is_loopback = not where.path and is_loopback(where.host)
        sock = _listen_at_path(where.path) if where.path else _listen_on_a_port(where)
        try:
            self.address = where.path or join_address(where.host, int(sock.getsockname()[1]))
            self._server = HttpServer(
                sock,
                name="keeper's metrics endpoint",
                seconds=METRICS_CLIENT_SECONDS,
                greet=lambda cut: None,
                gate=self._refusal,
                answer=self._answer,
                most=MAX_CONNECTIONS,
            )
        except BaseException:
            sock.close()
            raise

    def _refusal(self, question: Question) -> HttpAnswer | None:
        if self._is_loopback and not names_this_machine(question.headers.get("host")):
            return HttpAnswer(403, TEXT, b"this address answers to localhost and to loopback addresses\n")
        if question.method not in ("GET", "HEAD"):
            return HttpAnswer(405, {"Allow": "GET, HEAD"})
        return None

    @contextmanager
    def _answer(self, question: Question, visitor: None) -> Iterator[HttpAnswer]:
        path = question.target.partition("?")[0]
        if path == "/metrics":
            yield HttpAnswer(200, {"Content-Type": CONTENT_TYPE}, self._metrics().encode())
        elif path == "/healthz":
            is_well, line = self._health()
            yield HttpAnswer(200 if is_well else 503, dict(TEXT), f"{line}\n".encode())
        else:
            yield HttpAnswer(404, dict(TEXT), b"a keeper answers /metrics and /healthz\n")

    def close(self) -> None:
        if self._path:
            with suppress(OSError):
                os.unlink(self._path)
        self._server.close(cancel=False, patience=METRICS_END_SECONDS)


def _listen_on_a_port(where: MetricsAddress) -> socket.socket:
    """Listen on the first of the ports that is free."""
    for port in range(where.first, where.last + 1):
        try:
            return listen(where.host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == where.last:
                raise
    raise AssertionError("a range has a first port")


def _listen_at_path(path: str) -> socket.socket:
    """Listen at a path. A socket of somebody who is gone is replaced, and nothing else that has this name."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.lstat(path).st_mode) and not _is_answered(path):
                os.unlink(path)
        sock.bind(path)
        sock.listen(MAX_CONNECTIONS)
        return sock
    except BaseException:
        sock.close()
        raise


def _is_answered(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as asking:
        asking.settimeout(METRICS_END_SECONDS)
        try:
            asking.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            pass  # Whatever it is, it is somebody's.
        return True
