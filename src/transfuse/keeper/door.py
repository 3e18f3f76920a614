"""How the keepers of different hosts talk: one listens at its door, another connects and asks.

Both ends prove the job's token first (:mod:`transfuse.remote.handshake`). A connection that does not gets nothing.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import msgspec

from transfuse.errors import PeerTimeout, TransfuseError, as_utf8
from transfuse.keeper.questions import Answer, No, Question, Round, State, decode_answer, decode_question
from transfuse.remote.handshake import Ask, ControlConnection, Told, connect, join_address, key_of

__all__ = ["ASK_SECONDS", "FIRST_PAUSE", "LONGEST_PAUSE", "Door", "Peer", "Visit", "ask"]

logger = logging.getLogger("transfuse.keeper")

#: How long a question to another keeper may take.
ASK_SECONDS = 5.0
#: A keeper that cannot be reached is asked again after the first, then twice as much, at most the second.
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
#: A connection to the door: how long it has to prove the token.
PROVE_SECONDS = 10.0
#: How often a connection, and the door, look whether they are still needed.
LISTEN_SECONDS = 0.5
#: The most connections at the door that have not proved the token yet, and the most that have.
MAX_STRANGERS, MAX_GUESTS = 64, 1024


# ------------------------------------------------------------------------------------------------------------ asking


def ask(control: ControlConnection, question: Question, seconds: float) -> Answer:
    control.send(Ask(msgspec.msgpack.encode(question)), seconds)
    told = control.expect(Told, seconds, "waiting for an answer", most_waits=0)
    try:
        answer = decode_answer(told.body)
    except TransfuseError as error:
        raise TransfuseError(f"the keeper at {control.name} gave {error}") from error
    if isinstance(answer, No):
        raise TransfuseError(f"the keeper at {control.name} refused: {as_utf8(answer.why[:1000])}")
    return answer


class Peer:
    """The leader's connection to another keeper."""

    def __init__(self, index: int, address: str, key: bytes) -> None:
        self.index, self.address = index, address
        self._key = key
        self._control: ControlConnection | None = None
        self._pause, self._again = FIRST_PAUSE, 0.0
        self.is_lost = False

    def ask(self, question: Round) -> State | None:
        """Its state; None if it cannot be reached now."""
        if time.monotonic() < self._again:
            return None
        for is_fresh in [True] if self._control is None else [False, True]:
            try:
                control = self._control
                if control is None:
                    control = self._control = connect(self.address, self._key, ASK_SECONDS, self.index)
                state = ask(control, question, ASK_SECONDS)
                if not isinstance(state, State):
                    raise TransfuseError(f"it answered with {type(state).__name__}")
            except (TransfuseError, OSError, ValueError) as error:
                self.close()
                # A connection may be old, if the keeper was started again. One that is silent is not asked twice.
                if is_fresh or isinstance(error, PeerTimeout):
                    self._lose(error)
                    return None
                continue
            if self.is_lost:
                logger.info("the keeper of host %d is back", self.index)
            self.is_lost, self._pause = False, FIRST_PAUSE
            return state
        return None

    def _lose(self, error: Exception) -> None:
        if not self.is_lost:
            logger.warning(
                "the keeper of host %d (%s) cannot be reached; no step is confirmed until it is back: %s",
                self.index,
                self.address,
                as_utf8(str(error)),
            )
        self.is_lost = True
        self._again = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def close(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            control.close()


# --------------------------------------------------------------------------------------------------------- answering


class Visit(Protocol):
    """One connection of another keeper that has proved the token: who answers it."""

    def answer(self, question: Question) -> Answer:
        """Answer, or raise why not."""

    def may_stay(self, silent: float) -> bool:
        """Whether the connection is still needed, after so many seconds without a question."""

    def end(self) -> None:
        """The connection is closed."""


class Door:
    """Where the keepers of other hosts ask. ``receive`` begins a visit for each of their connections."""

    def __init__(self, host: str, token: str, port: int, receive: Callable[[], Visit]) -> None:
        """``port``: the one to listen on, if it is free."""
        self._receive = receive
        self.host, self.token = host, token
        self._key = key_of(token)
        self._lock = threading.Lock()
        self._is_closed = False
        self._strangers: dict[ControlConnection, None] = {}
        self._guests: dict[ControlConnection, threading.Thread] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=MAX_STRANGERS)
        except OSError:
            if not port:
                raise
            self._socket = socket.create_server((host, 0), family=family, backlog=MAX_STRANGERS)
        self._socket.settimeout(LISTEN_SECONDS)
        self.port = int(self._socket.getsockname()[1])
        self.address = join_address(host, self.port)
        self._thread = threading.Thread(target=self._listen, name="transfuse-ring-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            controls = list(self._guests)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for control in controls:
            control.hang_up()

    def join(self, until: float) -> None:
        with self._lock:
            threads = [self._thread, *self._guests.values()]
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _listen(self) -> None:
        while not self._is_closed:
            try:
                sock, where = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                time.sleep(0.1)  # Perhaps the process is out of descriptors, and that may pass.
                continue
            try:
                self._let_in(ControlConnection(sock, join_address(where[0], where[1]), -1))
            except (OSError, RuntimeError) as error:
                sock.close()
                logger.debug("a connection to %s could not be answered: %s", self.address, str(error))

    def _let_in(self, control: ControlConnection) -> None:
        thread = threading.Thread(target=self._attend, args=(control,), name="transfuse-ring-guest", daemon=True)
        with self._lock:
            if self._is_closed or len(self._guests) >= MAX_GUESTS + MAX_STRANGERS:
                control.close()
                return
            self._strangers[control] = None
            self._guests[control] = thread
            crowd = list(self._strangers)[:-MAX_STRANGERS]
        for stranger in crowd:
            stranger.hang_up()
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                del self._strangers[control], self._guests[control]
            raise

    def _attend(self, control: ControlConnection) -> None:
        visit = self._receive()
        try:
            try:
                control.admit(self._key, time.monotonic() + PROVE_SECONDS)
            finally:
                with self._lock:
                    del self._strangers[control]
            self._converse(control, visit)
        except (TransfuseError, OSError, ValueError) as error:
            logger.debug("a connection to %s ends: %s", self.address, as_utf8(str(error)))
        except Exception:
            logger.exception("a question of another keeper could not be answered")
        finally:
            control.close()
            visit.end()
            with self._lock:
                del self._guests[control]

    def _converse(self, control: ControlConnection, visit: Visit) -> None:
        heard_at = time.monotonic()
        while not self._is_closed:
            if not control.has_news(LISTEN_SECONDS):
                if not visit.may_stay(time.monotonic() - heard_at):
                    return
                continue
            question = control.expect(Ask, ASK_SECONDS, "waiting for a question", most_waits=0)
            heard_at = time.monotonic()
            answer: Answer | No
            try:
                answer = visit.answer(decode_question(question.body))
            except (TransfuseError, ValueError, OSError) as error:
                answer = No(as_utf8(str(error)[:1000]))
            control.send(Told(msgspec.msgpack.encode(answer)), ASK_SECONDS)
