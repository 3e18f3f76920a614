"""A limit on file descriptors, for tests in worker processes."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

__all__ = ["leaving"]


@contextlib.contextmanager
def leaving(count: int) -> Iterator[None]:
    """In this process exactly ``count`` descriptors are free."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 0
    while count or is_open(limit):
        count -= not is_open(limit)
        limit += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def is_open(number: int) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")
