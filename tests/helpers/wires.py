"""Which wire tests run on: streams, unless ``TRANSFUSE_STREAMS`` is 0 (``make test-group``); and what wires leave."""

from __future__ import annotations

import threading
import time

from transfuse.limits import allows_streams

__all__ = ["over_streams", "threads_left"]

#: The thread that listens for streams, once a process has met another, for as long as the process lives.
LISTENS = "transfuse-streams"


def over_streams() -> bool:
    """Whether conversations that begin over a group go on over streams."""
    return allows_streams()


def threads_left(seconds: float = 0.0) -> list[str]:
    """The library's threads that have not ended after so many seconds, but for the one that listens."""
    until = time.monotonic() + seconds
    while True:
        names = sorted(thread.name for thread in threading.enumerate())
        left = [name for name in names if name.startswith("transfuse") and name != LISTENS]
        if not left or time.monotonic() >= until:
            return left
        time.sleep(0.02)
