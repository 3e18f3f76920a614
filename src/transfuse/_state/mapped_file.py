"""A file that is mapped into this process, and can be read as a file, too.

The kernel maps a page when it is first touched, which costs more than half as much as copying it. A read through the
descriptor needs no mapping.
"""

from __future__ import annotations

import os
import weakref


class MappedFile:
    """Where a file lies in this process's memory, and a descriptor of it that is open as long as this object lives."""

    def __init__(self, address: int, nbytes: int, fd: int) -> None:
        self.address = address
        self.end = address + nbytes
        self.fd = os.dup(fd)
        weakref.finalize(self, os.close, self.fd)
