"""One call at a time: another thread's call waits; one inside the first, as a signal handler makes it, is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from transfuse._errors import TransfuseError

T = TypeVar("T")


class OneCall:
    def __init__(self) -> None:
        # The same thread may take it again, so that a signal handler does not wait for the code that it interrupts.
        self._lock = threading.RLock()
        self._under_way = ""

    def run(self, name: str, work: Callable[[], T]) -> T:
        """Not a context manager: a handler that raises where Python begins its exit would leave the call under way."""
        with self._lock:
            if self._under_way:
                raise TransfuseError(
                    f"{name}() was called while {self._under_way}() is under way in this thread, by a signal handler "
                    f"or a callback: note the signal in the handler, and call {name}() between two steps"
                )
            self._under_way = name
            try:
                return work()
            finally:
                self._under_way = ""
