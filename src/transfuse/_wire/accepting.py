"""Takes connections on a socket that listens, and attends to each in a thread of its own."""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from transfuse._tuning import ACCEPT_AGAIN_SECONDS


class Connection(Protocol):
    def close(self) -> None: ...


_C = TypeVar("_C", bound=Connection)


class Accepting(Generic[_C]):
    """Makes a connection of each socket, and attends to it. Nothing that goes wrong with one keeps the next one out."""

    def __init__(
        self,
        sock: socket.socket,
        admit: Callable[[socket.socket, Any], _C | None],
        attend: Callable[[_C], object],
        *,
        name: str,
        complain: Callable[[str, Exception], object],
        between: Callable[[], object] = lambda: None,
    ) -> None:
        """``admit``: gets a socket and its address, bounds the crowd, and makes the connection; None: it is closed.

        ``attend``: handles its own errors. The connection is closed after it. ``complain``: gets errors that no other
        end hears of. ``between``: called before each wait, which ends after the socket's timeout if it has one.
        """
        self._socket, self._admit, self._attend = sock, admit, attend
        self._name, self._complain, self._between = name, complain, between
        self.is_closed = False
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, _C] = {}
        self._thread = threading.Thread(target=self._listen, name=f"transfuse-{name}", daemon=True)
        _all.add(self)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> dict[threading.Thread, _C]:
        """Take no more connections. Returns those that are there."""
        self.is_closed = True
        # Shut down first: this wakes the thread that waits for connections.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._thread.ident is not None:
            self._thread.join()
        return self.connections

    @property
    def connections(self) -> dict[threading.Thread, _C]:
        """All that are attended to now, oldest first."""
        with self._lock:
            return dict(self._connections)

    def _leave_to_parent(self) -> None:
        """In the child of a fork: the port is the parent's. (So are the connections: see :mod:`.framed`.)"""
        self.is_closed = True
        self._socket.close()

    def _listen(self) -> None:
        while not self.is_closed:
            self._between()
            try:
                sock, where = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self.is_closed:
                    return
                self._complain("could not take a connection", error)
                time.sleep(ACCEPT_AGAIN_SECONDS)
                continue
            try:
                connection = self._admit(sock, where)
                if connection is None:
                    sock.close()
                else:
                    self._let_in(connection)
            except (OSError, RuntimeError) as error:
                # The peer has gone already, or no thread could be started. The next connection may succeed.
                sock.close()
                self._complain("could not answer a connection", error)

    def _let_in(self, connection: _C) -> None:
        thread = threading.Thread(target=self._run, args=(connection,), name=f"transfuse-{self._name}-in", daemon=True)
        with self._lock:
            self._connections[thread] = connection
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                del self._connections[thread]
            raise

    def _run(self, connection: _C) -> None:
        try:
            self._attend(connection)
        finally:
            connection.close()
            with self._lock:
                del self._connections[threading.current_thread()]


_all: weakref.WeakSet[Accepting[Any]] = weakref.WeakSet()


def _after_fork() -> None:
    for accepting in list(_all):
        accepting._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
