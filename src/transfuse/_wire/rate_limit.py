"""A rate limit: how many bytes per second a source sends, or a receiver reads, at most."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from transfuse._tuning import RATE_CREDIT_SECONDS, RATE_SLICE_SECONDS


class RateLimit:
    """Lets at most ``rate`` bytes per second go, over all threads together. None: no limit."""

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._lock = threading.Lock()
        self._due = time.monotonic()

    def at_once(self, most: int) -> int:
        """How many bytes to move at a time so that they flow evenly: ``most`` if there is no limit."""
        return most if self.rate is None else max(1, min(most, int(self.rate * RATE_CREDIT_SECONDS)))

    def take(self, nbytes: int, stopped: Callable[[], bool] = lambda: False) -> None:
        """Wait until these bytes may go, or until ``stopped()`` is true."""
        if self.rate is None:
            return
        with self._lock:
            # ``_due`` counts the bytes of all earlier calls. A pause longer than the credit earns nothing more.
            self._due = max(self._due, time.monotonic() - RATE_CREDIT_SECONDS) + nbytes / self.rate
            due = self._due
        while (left := due - time.monotonic()) > 0 and not stopped():
            time.sleep(min(left, RATE_SLICE_SECONDS))
