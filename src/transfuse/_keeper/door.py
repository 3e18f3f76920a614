"""How the keepers of different hosts talk: one listens at its door, another connects and asks.

Both ends prove the job's token first (:mod:`transfuse._wire.handshake`). A connection that does not gets nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, get_args

from transfuse._errors import PeerTimeout, ProtocolError, TransfuseError, as_utf8
from transfuse._keeper.questions import VOCABULARY, Answer, HostState, No, Question, Round
from transfuse._tls import TLS
from transfuse._tuning import (
    DOOR_ASK_SECONDS,
    DOOR_FIRST_PAUSE_SECONDS,
    DOOR_LISTEN_SECONDS,
    DOOR_LONGEST_PAUSE_SECONDS,
    DOOR_PROVE_SECONDS,
)
from transfuse._wire import handshake
from transfuse._wire.handshake import ControlConnection, key_of
from transfuse._wire.listener import Listener

logger = logging.getLogger("transfuse.keeper")


# ------------------------------------------------------------------------------------------------------------ asking


def connect(address: str, key: bytes, seconds: float, host: int, tls: TLS | None) -> ControlConnection:
    """Connect to the door of another host's keeper."""
    return handshake.connect(address, key, seconds, host, vocabulary=VOCABULARY, tls=tls)


def ask(control: ControlConnection, question: Question, seconds: float) -> Answer:
    control.send(question, seconds)
    answer: Answer | No = control.expect((*get_args(Answer), No), seconds, "waiting for an answer", most_waits=0)
    if isinstance(answer, No):
        raise TransfuseError(f"the keeper at {control.name} refused: {as_utf8(answer.why[:1000])}")
    return answer


class Peer:
    """The leader's connection to another keeper."""

    def __init__(self, index: int, address: str, key: bytes, tls: TLS | None) -> None:
        self.index, self.address = index, address
        self._key, self._tls = key, tls
        self._control: ControlConnection | None = None
        self._pause, self._again = DOOR_FIRST_PAUSE_SECONDS, 0.0
        self.is_lost = False

    def ask(self, question: Round) -> HostState | None:
        """Its state; None if it cannot be reached now."""
        if time.monotonic() < self._again:
            return None
        for is_fresh in [True] if self._control is None else [False, True]:
            try:
                control = self._control
                if control is None:
                    control = self._control = connect(self.address, self._key, DOOR_ASK_SECONDS, self.index, self._tls)
                state = ask(control, question, DOOR_ASK_SECONDS)
                if not isinstance(state, HostState):
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
            self.is_lost, self._pause = False, DOOR_FIRST_PAUSE_SECONDS
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
        self._pause = min(2 * self._pause, DOOR_LONGEST_PAUSE_SECONDS)

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
        """Whether the connection is still needed, after ``silent`` seconds without a question."""

    def end(self) -> None:
        """The connection is closed."""


class Door:
    """Where the keepers of other hosts ask. ``receive`` begins a visit for each of their connections."""

    def __init__(self, host: str, token: str, port: int, receive: Callable[[], Visit], tls: TLS | None = None) -> None:
        """``port``: the one to listen on, if it is free."""
        self._receive, self._tls = receive, tls
        self.host, self.token = host, token
        self._threads: Sequence[threading.Thread] = ()
        try:
            self._listener = self._listen_on(port)
        except OSError:
            if not port:
                raise
            self._listener = self._listen_on(0)
        self.port, self.address = self._listener.port, self._listener.address
        self._listener.start()

    def _listen_on(self, port: int) -> Listener:
        return Listener(
            (self.host, port),
            key_of(self.token),
            self._attend,
            name="ring-door",
            rank=-1,
            prove_seconds=DOOR_PROVE_SECONDS,
            complain=self._complain,
            vocabulary=VOCABULARY,
            tls=self._tls,
        )

    def close(self) -> None:
        self._threads = self._listener.close(cancel=True)

    def join(self, until: float) -> None:
        """Wait for the callers that were here when it was closed."""
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _complain(self, what: str, error: Exception) -> None:
        logger.debug("the door at %s: %s: %s", self.address, what, as_utf8(str(error)))

    def _attend(self, control: ControlConnection) -> None:
        visit = self._receive()
        try:
            self._converse(control, visit)
        except (TransfuseError, OSError, ValueError) as error:
            self._complain("a connection ends", error)
        except Exception:
            logger.exception("a question of another keeper could not be answered")
        finally:
            visit.end()

    def _converse(self, control: ControlConnection, visit: Visit) -> None:
        heard_at = time.monotonic()
        while not self._listener.is_closed:
            if not control.has_news(DOOR_LISTEN_SECONDS):
                if not visit.may_stay(time.monotonic() - heard_at):
                    return
                continue
            try:
                question = control.expect(get_args(Question), DOOR_ASK_SECONDS, "waiting for a question", most_waits=0)
            except ProtocolError as error:
                control.send(_refusal(error), DOOR_ASK_SECONDS)
                raise
            heard_at = time.monotonic()
            answer: Answer | No
            try:
                answer = visit.answer(question)
            except (TransfuseError, ValueError, OSError) as error:
                answer = _refusal(error)
            control.send(answer, DOOR_ASK_SECONDS)


def _refusal(error: Exception) -> No:
    return No(as_utf8(str(error)[:1000]))
