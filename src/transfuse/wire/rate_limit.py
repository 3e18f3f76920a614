"""A cap on how fast bytes go out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["RateLimit"]

#: What may be made up for after a pause, in seconds of the rate. Longer would let a burst through at full speed.
CREDIT_SECONDS = 0.05
SLICE_SECONDS = 0.05


class RateLimit:
    """Lets bytes go at no more than ``rate`` a second, however many threads ask. None: at any rate."""

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._lock = threading.Lock()
        self._due = time.monotonic()

    def at_once(self, most: int) -> int:
        """How many bytes to move at a time, so that they go evenly: ``most`` without a rate."""
        return most if self.rate is None else max(1, min(most, int(self.rate * CREDIT_SECONDS)))

    def take(self, nbytes: int, stopped: Callable[[], bool] = lambda: False) -> None:
        """Return when these bytes may go, or as soon as ``stopped`` says so."""
        if self.rate is None:
            return
        with self._lock:
            # Those before us have taken their time already; a pause longer than the credit is lost.
            self._due = max(self._due, time.monotonic() - CREDIT_SECONDS) + nbytes / self.rate
            due = self._due
        while (left := due - time.monotonic()) > 0 and not stopped():
            time.sleep(min(left, SLICE_SECONDS))
