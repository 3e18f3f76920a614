"""Meetings: how two processes that can already talk get a stream between them.

Each process listens on one port, at the address that its group uses. One end tells the other its *place*: this address,
and a token that is the secret of this process. The other end connects there, both prove that they know the token
(:mod:`.handshake`), and the number of the connection says whom it is for. A connection that nobody expects is closed.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from transfuse.errors import TransfuseError, as_utf8
from transfuse.limits import port_range
from transfuse.timeouts import Patience
from transfuse.wire.handshake import ControlConnection, Join, connect, key_of, split_address
from transfuse.wire.listener import Listener
from transfuse.wire.messages import TOKEN_BYTES, Place

__all__ = ["Expected", "Meeting", "OwnPort", "dial", "new_number", "own_port"]

logger = logging.getLogger("transfuse")


def new_number() -> int:
    """A number for a new connection."""
    return 1 + secrets.randbits(61)


class Expected:
    """The connections that this end expects, by their numbers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        #: None: it has not come yet.
        self._numbers: dict[int, socket.socket | None] = {}

    def add(self, number: int) -> None:
        with self._changed:
            self._numbers[number] = None

    def wait(self, number: int, seconds: float) -> socket.socket | None:
        """The connection of that number; None if it has not come, or is no longer expected."""
        with self._changed:
            self._changed.wait_for(lambda: self._numbers.get(number, self) is not None, seconds)
            return self._numbers.pop(number, None)

    def forget(self, number: int) -> None:
        """Expect it no longer: who waits for it gets None. If it has come meanwhile, close it."""
        with self._changed:
            sock = self._numbers.pop(number, None)
            self._changed.notify_all()
        if sock is not None:
            sock.close()

    def bring(self, number: int, control: ControlConnection) -> bool:
        """Hand a connection to whoever expects it. Whether anybody does."""
        with self._changed:
            if self._numbers.get(number, self) is not None:
                return False
            self._numbers[number] = control.release()
            self._changed.notify_all()
            return True


class Meeting(Protocol):
    """How the two ends of a conversation get further connections."""

    expected: Expected

    def place(self) -> Place | None:
        """Where the other end may connect. None: it knows, or it cannot."""

    def dial(self, place: Place | None, number: int, seconds: float) -> socket.socket:
        """Connect to the other end, which expects this number."""


def dial(address: str, key: bytes, number: int, seconds: float) -> socket.socket:
    """Connect to an end that listens, prove the key, and say which connection this is."""
    control = connect(address, key, seconds, -1)
    try:
        control.send(Join(number), seconds)
    except BaseException:
        control.close()
        raise
    return control.release()


class OwnPort:
    """The port of this process at one address."""

    def __init__(self, host: str) -> None:
        self.expected = Expected()
        token = secrets.token_bytes(TOKEN_BYTES)
        self._listener = _first_free(
            lambda port: Listener(
                (host, port),
                key_of(token),
                self._attend,
                name="streams",
                rank=-1,
                prove_seconds=Patience.HANDSHAKE_SECONDS,
                complain=self._complain,
            )
        )
        self._place = Place(self._listener.address, token)
        self._listener.start()

    def place(self) -> Place:
        return self._place

    def dial(self, place: Place | None, number: int, seconds: float) -> socket.socket:
        if place is None:
            raise TransfuseError("the other end cannot be reached: it does not listen")
        try:
            ipaddress.ip_address(split_address(place.address)[0])
        except ValueError as error:
            # A name would have to be looked up, which takes as long as it takes, and nobody knows where it leads.
            raise TransfuseError(f"the other end named {place.address!r}, which is no address") from error
        return dial(place.address, key_of(place.token), number, seconds)

    def _attend(self, control: ControlConnection) -> None:
        try:
            seconds = Patience.HANDSHAKE_SECONDS
            number = control.expect(Join, seconds, "waiting for the number of a connection", most_waits=0).number
        except TransfuseError as error:
            self._complain("a connection ends", error)
            return
        if not self.expected.bring(number, control):
            logger.debug("%s: a connection came that nobody expects any more", self._place.address)

    def _complain(self, what: str, error: Exception) -> None:
        logger.info("the port for streams, %s: %s: %s", self._listener.address, what, as_utf8(str(error)))

    def leave_to_parent(self) -> None:
        """In the child of a fork: the port is the parent's."""
        self._listener.leave_to_parent()


def _first_free(listen: Callable[[int], Listener]) -> Listener:
    """Listen on the first port that ``TRANSFUSE_PORT`` allows and that is free."""
    first, last = port_range()
    for port in range(first, last):
        with suppress(OSError):
            return listen(port)
    return listen(last)


_ports: dict[str, OwnPort] = {}
#: Addresses on which this process cannot listen, and when that was last tried.
_refused: dict[str, float] = {}
_finding = threading.Lock()
#: Seconds until listening on an address is tried again.
AGAIN_SECONDS = 60.0


def own_port(host: str) -> OwnPort | None:
    """The port of this process at this address; None if it cannot listen there."""
    with _finding:
        if host not in _ports and time.monotonic() - _refused.get(host, float("-inf")) > AGAIN_SECONDS:
            try:
                _ports[host] = OwnPort(host)
            except (OSError, RuntimeError) as error:
                _refused[host] = time.monotonic()
                logger.warning("this process cannot listen on %s: %s", host, error)
        return _ports.get(host)


def _after_fork() -> None:
    global _finding
    _finding = threading.Lock()
    for port in _ports.values():
        port.leave_to_parent()
    _ports.clear()


os.register_at_fork(after_in_child=_after_fork)
