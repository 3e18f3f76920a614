"""Listens on an address, and lets in peers that prove the token. Strangers get nothing, and keep nobody out."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from transfuse._errors import PeerNotTrusted, TransfuseError
from transfuse._tls import TLS, credentials
from transfuse._tuning import LISTENER_COMPLAINT_SECONDS
from transfuse._wire.accepting import Accepting
from transfuse._wire.framed import Vocabulary
from transfuse._wire.handshake import VOCABULARY, ControlConnection, check_descriptors, join_address

logger = logging.getLogger("transfuse")
#: The most connections that have not proved the token yet. When there are more, the oldest is closed: proving takes
#: milliseconds, so idle connections keep nobody out.
MAX_STRANGERS = 64
#: The most connections that the kernel holds until they are taken. When there are more, those that connect wait for a
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
        tls: TLS | None = None,
    ) -> None:
        """``where``: the address and the port; 0 takes a free one. ``rank``: of the other ends, in errors.

        ``complain``: gets errors that no other end hears of; None: they are logged.
        """
        self._key, self._attend, self._complain, self._vocabulary = key, attend, complain or self._log, vocabulary
        self._complained_at = float("-inf")
        self._tls = tls
        if tls is not None:
            credentials(tls)  # Refuse files that cannot be used here, before anybody comes.
        self._name, self._rank, self._prove_seconds = name, rank, prove_seconds
        host = where[0]
        # A socket of our own: torch's store would listen on all interfaces, whatever host it is given.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            sock = socket.create_server(where, family=family, backlog=BACKLOG)
        except OSError as error:
            check_descriptors(error, f"listening on {host}")
            raise
        self.port = int(sock.getsockname()[1])
        self.address = join_address(host, self.port)
        self._accepting = Accepting(sock, self._admit, self._answer, name=name, complain=self._complain)

    def start(self) -> None:
        self._accepting.start()

    @property
    def is_closed(self) -> bool:
        return self._accepting.is_closed

    @property
    def connections(self) -> dict[threading.Thread, ControlConnection]:
        """All connections, by their threads."""
        return self._accepting.connections

    @property
    def strangers(self) -> list[ControlConnection]:
        """The connections that have not proved the token yet, oldest first."""
        return [control for control in self.connections.values() if not control.is_proved]

    def close(self, *, cancel: bool) -> Sequence[threading.Thread]:
        """Stop listening and hang up on strangers; with ``cancel`` on everybody. Returns the threads that end then."""
        connections = self._accepting.close()
        for control in connections.values():
            if cancel or not control.is_proved:
                control.hang_up()
        return list(connections)

    def _admit(self, sock: socket.socket, where: Any) -> ControlConnection:
        control = ControlConnection(sock, join_address(where[0], where[1]), self._rank, self._vocabulary)
        strangers = self.strangers
        for stranger in strangers[: max(0, len(strangers) + 1 - MAX_STRANGERS)]:
            stranger.hang_up()
        return control

    def _log(self, what: str, error: Exception) -> None:
        """Log a complaint about a stranger, as a warning at most once a second: strangers must not fill a log."""
        now = time.monotonic()
        loud = now - self._complained_at > LISTENER_COMPLAINT_SECONDS
        if loud:
            self._complained_at = now
        level = logging.WARNING if loud else logging.DEBUG
        logger.log(level, "the %s at %s: %s: %s", self._name, self.address, what, str(error))

    def _answer(self, control: ControlConnection) -> None:
        try:
            control.admit(self._key, time.monotonic() + self._prove_seconds, self._tls)
        except TransfuseError as error:
            if not self.is_closed:
                # Who keeps this end's certificates must hear of it, whatever else becomes of the connection.
                complain = self._log if isinstance(error, PeerNotTrusted) else self._complain
                complain("turned away", error)
            return
        self._attend(control)
