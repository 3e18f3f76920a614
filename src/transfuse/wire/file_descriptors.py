"""File descriptors: gloo ends the process when it runs out of them, so count the free ones before calling gloo.

Code that is about to form a group reserves the descriptors that this takes (:func:`keep`). So two groups that are
formed at once do not count on the same descriptors, and a server accepts no connection that would use up reserved ones.
:data:`MARGIN` covers what cannot be known here: descriptors that other code opens between the count and gloo's last
step, and descriptors that cannot be counted (a thread that is blocked in ``accept`` holds one that no call shows).
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

#: The socket on which a server listens for readers.
LISTENER = 1
#: A control connection.
CONTROL = 1
#: A pair group: gloo's pipe (2), epoll, listening socket and connection, and one more that gloo's ``accept`` asks for
#: when no connection is left to accept. tests/remote/test_descriptors.py checks this number.
GROUP = 6
#: To spare: other threads open files too, and the memory route and Python's imports open one for a moment.
MARGIN = 8

_lock = threading.Lock()
_kept = 0


class Kept:
    """Reserved descriptors. Leaving the ``with`` block gives them back: by then gloo has opened its own."""

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
    """Reserve ``count`` descriptors, ``times`` times. Raise :class:`LimitExceeded` if not all of them are free."""
    global _kept
    with _lock:
        _check(count * times, purpose)
        _kept += count * times
    return [Kept(count) for _ in range(times)]


def check(count: int, purpose: str) -> None:
    """Raise :class:`LimitExceeded` if fewer than ``count`` descriptors are free."""
    with _lock:
        _check(count, purpose)


def spare() -> bool:
    """Whether one more descriptor can be opened without using up reserved ones."""
    with _lock:
        return _kept == 0 or free(_kept + 1) > _kept


def _check(count: int, purpose: str) -> None:
    there = free(_kept + count + MARGIN)
    if there < _kept + count + MARGIN:
        others = f", of which {_kept} are reserved for groups that are being formed" if _kept else ""
        raise LimitExceeded(
            f"{purpose} takes {count + MARGIN} free file descriptors ({MARGIN} of them to spare), and {there} are free"
            f"{others}: raise the limit of the process (ulimit -n, now {_limit()}), "
            "or close files that it does not need"
        )


def free(enough: int) -> int:
    """How many more descriptors this process may open, counted up to ``enough``.

    The system limits the numbers: every number below the limit that is not open is free. Nearly all high numbers are
    free, so counting from the top takes few calls, and it needs no descriptor itself.
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
    """In a fork: forget the reservations. A fork does not form its parent's groups."""
    global _lock, _kept
    _lock, _kept = threading.Lock(), 0


os.register_at_fork(after_in_child=_forget)
