"""File descriptors: gloo ends the process when it runs out of them, so they are counted before gloo is asked.

Whoever is about to form a group keeps what that takes. Groups that are formed at the same time in this process do not
count on the same descriptors, and a server takes no connection that would use up what is kept. What other code opens
between the count and gloo's last step is not known here: :data:`MARGIN` is for that, and for what cannot be counted (a
thread that is blocked in ``accept`` holds a number that nobody sees).
"""

from __future__ import annotations

import fcntl
import os
import resource
import threading
from types import TracebackType
from typing import Self

from transfuse.errors import LimitExceeded

__all__ = ["CONTROL", "GROUP", "LISTENER", "MARGIN", "Kept", "check", "free", "keep", "spare"]

#: A server's socket, on which readers arrive.
LISTENER = 1
#: A connection through a server's door.
CONTROL = 1
#: A private group of two: gloo's pipe (2), epoll, listening socket and connection, and one more that its ``accept``
#: asks for when nobody is left to be taken. tests/remote/test_descriptors.py finds out whether it is still so.
GROUP = 6
#: Left over: other threads open files too, and the memory route and Python's imports open one for a moment.
MARGIN = 8

_lock = threading.Lock()
_kept = 0


class Kept:
    """Descriptors that are kept for what is about to open them, until this is left."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.give_back()

    def give_back(self) -> None:
        global _kept
        with _lock:
            _kept -= self._count
            self._count = 0


def keep(count: int, purpose: str, times: int = 1) -> list[Kept]:
    """Keep ``count`` descriptors for each of so many; :class:`LimitExceeded` if not all of them can be had."""
    global _kept
    with _lock:
        _check(count * times, purpose)
        _kept += count * times
    return [Kept(count) for _ in range(times)]


def check(count: int, purpose: str) -> None:
    """Raise :class:`LimitExceeded` if not so many descriptors can be had."""
    with _lock:
        _check(count, purpose)


def spare() -> bool:
    """Whether one more can be opened without touching what is kept."""
    with _lock:
        return _kept == 0 or free(_kept + 1) > _kept


def _check(count: int, purpose: str) -> None:
    there = free(_kept + count + MARGIN)
    if there < _kept + count + MARGIN:
        others = f", of which {_kept} are kept for groups that are being formed" if _kept else ""
        raise LimitExceeded(
            f"{purpose} takes {count + MARGIN} free file descriptors ({MARGIN} of them to spare), and {there} are free"
            f"{others}: raise the limit of the process (ulimit -n, now {_limit()}), "
            "or close files that it does not need"
        )


def free(enough: int) -> int:
    """How many more this process may open, counted up to ``enough``.

    The limit is on numbers: what is free is every number below it that is not open. Asked from the top, where nearly
    all are, this takes few calls, and no descriptor.
    """
    limit = _limit()
    if limit == resource.RLIM_INFINITY:
        return enough
    found = 0
    for number in range(limit - 1, -1, -1):
        if found >= enough:
            break
        found += not _is_open(number)
    return found


def _limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _is_open(number: int) -> bool:
    try:
        fcntl.fcntl(number, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def _forget() -> None:
    """In a fork, which does not form its parent's groups."""
    global _lock, _kept
    _lock, _kept = threading.Lock(), 0


os.register_at_fork(after_in_child=_forget)
