"""A read-write lock for a state: one owner changes it, or any number of readers read it at once.

First come, first served: neither a stream of readers nor a busy owner keeps the other out.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transfuse.timeouts import Patience

__all__ = ["RWLock"]


class _Ticket:
    def __init__(self, *, changing: bool) -> None:
        self.changing = changing
        self.since = time.monotonic()


class RWLock:
    """A lock that readers share and the owner holds alone. The thread that holds it as owner may take it again."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        #: Those that wait, in the order of arrival.
        self._waiting: deque[_Ticket] = deque()
        self._readers: set[int] = set()
        self._owner: int | None = None
        self._depth = 0

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock as owner. Waits until every reader is done."""
        me = threading.get_ident()
        with self._changed:
            if me in self._readers:
                raise RuntimeError("the state is being read by this thread: it cannot be changed here")
            if self._owner != me:
                self._queue(_Ticket(changing=True), lambda: None)
                self._owner = me
            self._depth += 1
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                if not self._depth:
                    self._owner = None
                    self._changed.notify_all()

    @contextmanager
    def reading(self, meanwhile: Callable[[], object]) -> Iterator[None]:
        """Hold the lock as a reader. While waiting, call ``meanwhile`` now and then; an error from it ends the wait."""
        me = threading.get_ident()
        with self._changed:
            self._queue(_Ticket(changing=False), meanwhile)
            self._readers.add(me)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._readers.discard(me)
                self._changed.notify_all()

    def held_up(self) -> float:
        """For how many seconds an owner has been waiting to change the state; 0 if none waits."""
        with self._changed:
            since = [ticket.since for ticket in self._waiting if ticket.changing]
        return time.monotonic() - min(since) if since else 0.0

    def _queue(self, ticket: _Ticket, meanwhile: Callable[[], object]) -> None:
        self._waiting.append(ticket)
        try:
            while not self._may(ticket):
                self._changed.wait(Patience.SLICE_SECONDS)
                if self._may(ticket):
                    break
                self._changed.release()
                try:
                    meanwhile()
                finally:
                    self._changed.acquire()
        finally:
            self._waiting.remove(ticket)
            self._changed.notify_all()

    def _may(self, ticket: _Ticket) -> bool:
        if self._owner is not None or (ticket.changing and self._readers):
            return False
        before = list(self._waiting)[: self._waiting.index(ticket)]
        return not any(other.changing or ticket.changing for other in before)
