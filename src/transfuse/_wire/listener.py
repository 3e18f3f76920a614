"""Listens on an address, and lets in whoever proves the token. Strangers get nothing, and keep nobody out."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from transfuse._errors import TransfuseError
from transfuse._wire.framed import Vocabulary
from transfuse._wire.handshake import VOCABULARY, ControlConnection, check_descriptors, join_address

logger = logging.getLogger("transfuse")
#: The listener logs at most one warning about strangers in so many seconds.
COMPLAINT_SECONDS = 1.0
#: The most connections that have not proved the token yet. When there are more, the oldest is closed: proving takes
#: milliseconds, so idle connections keep nobody out.
MAX_STRANGERS = 64
#: The most connections that the kernel holds until they are taken. When there are more, those who connect wait for a
#: second and longer: many ranks may connect to one at once.
BACKLOG = 1024


class Listener:
    """Hands each connection that has proved the token to ``attend``, in a thread of its own, and closes it afterwards.

    ``attend`` handles its own errors. ``complain`` gets what was wrong with a connection that was not let in.
    """

    def __init__(
        self,
        where: tuple[str, int],
        key: bytes,
        attend: Callable[[ControlConnection], object],
        *,
        name: str,
        rank: int,
        prove_seconds: float,
        complain: Callable[[str, Exception], object] | None = None,
        vocabulary: Vocabulary = VOCABULARY,
    ) -> None:
        """``where``: the address and the port; 0 takes a free one. ``rank``: of the other ends, in errors.

        ``complain``: gets errors that no other end hears of; None: they are logged.
        """
        self._key, self._attend, self._complain, self._vocabulary = key, attend, complain or self._log, vocabulary
        self._complained_at = float("-inf")
        self._name, self._rank, self._prove_seconds = name, rank, prove_seconds
        self.is_closed = False
        self._lock = threading.Lock()
        #: All connections, by their threads; and those that have not proved the token yet, oldest first.
        self.connections: dict[threading.Thread, ControlConnection] = {}
        self.strangers: dict[ControlConnection, None] = {}
        host = where[0]
        # A socket of our own: torch's store would listen on all interfaces, whatever host it is given.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server(where, family=family, backlog=BACKLOG)
        except OSError as error:
            check_descriptors(error, f"listening on {host}")
            raise
        self.port = int(self._socket.getsockname()[1])
        self.address = join_address(host, self.port)
        self._thread = threading.Thread(target=self._listen, name=f"transfuse-{name}", daemon=True)
        _all.add(self)

    def start(self) -> None:
        self._thread.start()

    def close(self, *, cancel: bool) -> Sequence[threading.Thread]:
        """Stop listening and hang up on strangers; with ``cancel`` on everybody. Returns the threads that end then."""
        self.is_closed = True
        # Shut down first: this wakes the thread that waits for connections.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        with self._lock:
            threads = list(self.connections)
            controls = list(self.connections.values() if cancel else self.strangers)
        for control in controls:
            control.hang_up()
        return threads

    def _leave_to_parent(self) -> None:
        """In the child of a fork: the port is the parent's. (So are the connections: see :mod:`.handshake`.)"""
        self.is_closed = True
        self._socket.close()

    def _listen(self) -> None:
        while not self.is_closed:
            try:
                sock, where = self._socket.accept()
            except OSError as error:
                if self.is_closed:
                    return
                self._complain("could not take a connection", error)
                time.sleep(0.1)  # Perhaps the process is out of descriptors, and that may pass.
                continue
            try:
                self._let_in(ControlConnection(sock, join_address(where[0], where[1]), self._rank, self._vocabulary))
            except (OSError, RuntimeError) as error:
                # The peer has gone already, or no thread could be started. The next connection may succeed.
                sock.close()
                self._complain("could not answer a connection", error)

    def _log(self, what: str, error: Exception) -> None:
        """Log a complaint about a stranger, as a warning at most once a second: strangers must not fill a log."""
        now = time.monotonic()
        loud = now - self._complained_at > COMPLAINT_SECONDS
        if loud:
            self._complained_at = now
        level = logging.WARNING if loud else logging.DEBUG
        logger.log(level, "the %s at %s: %s: %s", self._name, self.address, what, str(error))

    def _let_in(self, control: ControlConnection) -> None:
        thread = threading.Thread(target=self._answer, args=(control,), name=f"transfuse-{self._name}-in", daemon=True)
        with self._lock:
            self.connections[thread] = control
            self.strangers[control] = None
            crowd = list(self.strangers)[:-MAX_STRANGERS]
        for stranger in crowd:
            stranger.hang_up()
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                del self.connections[thread], self.strangers[control]
            raise

    def _answer(self, control: ControlConnection) -> None:
        """Attend to one connection from the first byte to the last."""
        try:
            try:
                control.admit(self._key, time.monotonic() + self._prove_seconds)
            except TransfuseError as error:
                if not self.is_closed:
                    self._complain("turned away", error)
                return
            finally:
                with self._lock:
                    del self.strangers[control]
            self._attend(control)
        finally:
            control.close()
            with self._lock:
                del self.connections[threading.current_thread()]


_all: weakref.WeakSet[Listener] = weakref.WeakSet()


def _after_fork() -> None:
    for listener in list(_all):
        listener._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
