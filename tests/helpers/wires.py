"""Which wire tests run on: streams, unless ``TRANSFUSE_STREAMS`` is 0 (``make test-group``); and what wires leave."""

from __future__ import annotations

import threading
import time

from transfuse import _workers
from transfuse._limits import allows_streams

__all__ = ["is_of_a_transfer", "over_streams", "threads_left"]


def over_streams() -> bool:
    """Whether conversations that begin over a group go on over streams."""
    return allows_streams()


def is_of_a_transfer(thread: threading.Thread) -> bool:
    """Whether this thread ends with its transfer. The process's port for streams stays, watches and workers linger."""
    stays = thread.name.startswith(("transfuse-streams", "transfuse-watch", _workers.IDLE))
    return thread.name.startswith("transfuse") and not stays


def threads_left(seconds: float = 0.0) -> list[str]:
    """The threads of transfers that have not ended after ``seconds``."""
    until = time.monotonic() + seconds
    while True:
        left = sorted(thread.name for thread in threading.enumerate() if is_of_a_transfer(thread))
        if not left or time.monotonic() >= until:
            return left
        time.sleep(0.02)
