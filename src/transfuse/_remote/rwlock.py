"""A read-write lock for a state: one owner changes it, or any number of readers read it at once.

First come, first served: neither a stream of readers nor a busy owner keeps the other out. An interrupt at any moment
leaves the lock to others: taking it and noting that are one step, and a wait that nobody ends wakes by itself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transfuse._timeouts import Patience


class _LockTicket:
    def __init__(self, *, changing: bool) -> None:
        self.changing = changing
        self.since = time.monotonic()


class RWLock:
    """A lock that readers share and the owner holds alone. The thread that holds it as owner may take it again."""

    def __init__(self) -> None:
        # Entered itself: the methods of a Condition are Python, and an interrupt within them would leave it locked.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        #: Those that wait, in the order of arrival.
        self._waiting: deque[_LockTicket] = deque()
        self._readers: set[int] = set()
        self._owner: int | None = None
        self._depth = 0

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock as owner. Waits until every reader is done."""
        me, holds = threading.get_ident(), False
        try:
            with self._lock:
                if me in self._readers:
                    raise RuntimeError("the state is being read by this thread: it cannot be changed here")
                if self._owner != me:
                    self._queue(_LockTicket(changing=True), lambda: None)
                    self._owner = me
                self._depth += 1
                holds = True
            yield
        finally:
            with self._lock:
                if holds:
                    self._depth -= 1
                    if not self._depth:
                        self._owner = None
                self._changed.notify_all()

    @contextmanager
    def reading(self, meanwhile: Callable[[], object]) -> Iterator[None]:
        """Hold the lock as a reader. While waiting, call ``meanwhile`` now and then; an error from it ends the wait."""
        me = threading.get_ident()
        try:
            with self._lock:
                if self._owner == me:
                    raise RuntimeError("the state is being changed by this thread: it cannot be read here")
                self._queue(_LockTicket(changing=False), meanwhile)
                self._readers.add(me)
                self._changed.notify_all()
            yield
        finally:
            with self._lock:
                self._readers.discard(me)
                self._changed.notify_all()

    @contextmanager
    def trying(self) -> Iterator[bool]:
        """Hold the lock as a reader if it can be had at once. Yields whether it can."""
        me = threading.get_ident()
        try:
            with self._lock:
                may = self._owner is None and not any(ticket.changing for ticket in self._waiting)
                if may:
                    self._readers.add(me)
            yield may
        finally:
            with self._lock:
                self._readers.discard(me)
                self._changed.notify_all()

    def held_up(self) -> float:
        """For how many seconds an owner has been waiting to change the state; 0 if none waits."""
        with self._lock:
            since = [ticket.since for ticket in self._waiting if ticket.changing]
        return time.monotonic() - min(since) if since else 0.0

    def _queue(self, ticket: _LockTicket, meanwhile: Callable[[], object]) -> None:
        try:
            self._waiting.append(ticket)
            while not self._may(ticket):
                self._changed.wait(Patience.SLICE_SECONDS)
                if self._may(ticket):
                    break
                try:
                    self._lock.release()
                    meanwhile()
                finally:
                    self._lock.acquire()
        finally:
            if ticket in self._waiting:
                self._waiting.remove(ticket)

    def _may(self, ticket: _LockTicket) -> bool:
        if self._owner is not None or (ticket.changing and self._readers):
            return False
        before = list(self._waiting)[: self._waiting.index(ticket)]
        return not any(other.changing or ticket.changing for other in before)
