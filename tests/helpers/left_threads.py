"""Which threads a transfer must not leave behind."""

from __future__ import annotations

import threading

__all__ = ["is_of_a_transfer"]


def is_of_a_transfer(thread: threading.Thread) -> bool:
    """Whether this thread should end with its transfer. The process's port for streams, and their watch, stay."""
    return thread.name.startswith("transfuse") and not thread.name.startswith("transfuse-streams")
