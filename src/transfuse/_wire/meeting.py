"""Meetings: how two processes that can already talk get a stream between them.

Each process listens on one port, at the address that its group uses. One end tells the other its *place*: this address,
and a token that is the secret of this process. The other end connects there, both prove that they know the token
(:mod:`.handshake`), and the number of the connection says whom it is for. A connection that nobody expects is closed.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeAlias

from transfuse._errors import LimitExceeded, TransfuseError, as_utf8
from transfuse._limits import port_range
from transfuse._timeouts import Patience
from transfuse._tls import TLS
from transfuse._tuning import MEETING_AGAIN_SECONDS
from transfuse._wire.framed import AnySocket
from transfuse._wire.handshake import ControlConnection, Join, connect, key_of, split_address
from transfuse._wire.listener import Listener
from transfuse._wire.messages import TOKEN_BYTES, Place

logger = logging.getLogger("transfuse")


def new_number() -> int:
    """A number for a new connection."""
    return 1 + secrets.randbits(61)


#: What has come of one number: a connection; None: it is no longer expected. (A queue, not a condition: an interrupt
#: inside a condition's Python code would come out as a RuntimeError.)
Arrival: TypeAlias = "queue.SimpleQueue[AnySocket | None]"


class Expected:
    """The connections that this end expects, by their numbers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[int, Arrival] = {}

    def add(self, number: int) -> None:
        with self._lock:
            self._numbers[number] = queue.SimpleQueue()

    def wait(self, number: int, seconds: float) -> AnySocket | None:
        """The connection of that number; None if it has not come, or is no longer expected."""
        arrival = self._numbers.get(number)
        if arrival is None:
            return None
        sock: AnySocket | None = None
        with suppress(queue.Empty):
            sock = arrival.get(timeout=seconds)
        for late in self._end(number):
            if sock is None:
                sock = late
            else:
                late.close()
        return sock

    def forget(self, number: int) -> None:
        """Expect it no longer: who waits for it gets None. If it has come meanwhile, close it."""
        arrival = self._numbers.get(number)
        for sock in self._end(number):
            sock.close()
        if arrival is not None:
            arrival.put(None)

    def _end(self, number: int) -> list[AnySocket]:
        """Expect it no longer. Returns what has come and was not taken."""
        with self._lock:
            arrival, come = self._numbers.pop(number, None), []
        with suppress(queue.Empty):
            while arrival is not None:
                come.append(arrival.get_nowait())
        return [sock for sock in come if sock is not None]

    def bring(self, number: int, control: ControlConnection) -> bool:
        """Hand a connection to the conversation that expects it. Whether there is one."""
        with self._lock:
            arrival = self._numbers.get(number)
            if arrival is None or not arrival.empty():
                return False
            arrival.put(control.release())
            return True


class Meeting(Protocol):
    """How the two ends of a conversation get further connections."""

    expected: Expected

    def place(self) -> Place | None:
        """Where the other end may connect. None: it knows, or it cannot."""

    def dial(self, place: Place | None, number: int, seconds: float) -> AnySocket:
        """Connect to the other end, which expects this number."""


def dial(address: str, key: bytes, number: int, seconds: float, tls: TLS | None = None) -> AnySocket:
    """Connect to an end that listens, prove the key, and say which connection this is."""
    control = connect(address, key, seconds, -1, tls=tls)
    try:
        control.send(Join(number), seconds)
    except BaseException:
        control.close()
        raise
    return control.release()


def dial_place(place: Place | None, number: int, seconds: float, tls: TLS | None = None) -> AnySocket:
    """Connect to a place that a peer has named."""
    if place is None:
        raise TransfuseError("the other end cannot be reached: it does not listen")
    try:
        ipaddress.ip_address(split_address(place.address)[0])
    except ValueError as error:
        # A name would have to be looked up, which takes as long as it takes, and nobody knows where it leads.
        raise TransfuseError(f"the other end named {place.address!r}, which is no address") from error
    return dial(place.address, key_of(place.token), number, seconds, tls)


class OwnPort:
    """The port of this process at one address, for connections that are encrypted in one way, or not at all."""

    def __init__(self, host: str, tls: TLS | None = None) -> None:
        self.expected = Expected()
        self._tls = tls
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
                tls=tls,
            )
        )
        self._place = Place(self._listener.address, token)
        self._listener.start()

    def place(self) -> Place:
        return self._place

    def dial(self, place: Place | None, number: int, seconds: float) -> AnySocket:
        return dial_place(place, number, seconds, self._tls)

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


class NoPort:
    """A process that cannot listen. It can still connect to others."""

    def __init__(self, tls: TLS | None = None) -> None:
        self.expected = Expected()
        self._tls = tls

    def place(self) -> Place | None:
        return None

    def dial(self, place: Place | None, number: int, seconds: float) -> AnySocket:
        return dial_place(place, number, seconds, self._tls)


def _first_free(listen: Callable[[int], Listener]) -> Listener:
    """Listen on the first port that ``TRANSFUSE_PORT`` allows and that is free."""
    first, last = port_range()
    for port in range(first, last):
        with suppress(OSError):
            return listen(port)
    return listen(last)


_Where: TypeAlias = tuple[str, TLS | None]
_ports: dict[_Where, OwnPort] = {}
#: Addresses on which this process cannot listen, and when that was last tried.
_refused: dict[_Where, float] = {}
_no_ports: dict[TLS | None, NoPort] = {}
_finding = threading.Lock()


def own_port(host: str | None, tls: TLS | None = None) -> OwnPort | NoPort:
    """The port of this process at this address, if it can listen there."""
    where = host or "", tls
    with _finding:
        again = time.monotonic() - _refused.get(where, float("-inf")) > MEETING_AGAIN_SECONDS
        if host is not None and where not in _ports and again:
            try:
                _ports[where] = OwnPort(host, tls)
            except (OSError, RuntimeError, LimitExceeded) as error:
                _refused[where] = time.monotonic()
                logger.warning("this process cannot listen on %s: %s", host, error)
        return _ports.get(where) or _no_ports.setdefault(tls, NoPort(tls))


def _after_fork() -> None:
    global _finding
    _finding = threading.Lock()
    _ports.clear()


os.register_at_fork(after_in_child=_after_fork)
