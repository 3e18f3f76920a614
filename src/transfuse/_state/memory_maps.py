"""Which memory of this process can be read, and which can be written, according to the kernel's list of mappings.

A tensor may lie in memory that is read-only (a file mapped with ``np.memmap(mode="r")``) or no longer mapped. Torch
cannot tell, and a write there ends the process. Reading ``/proc/self/maps`` once answers for any number of tensors, but
takes a millisecond or more. Newer kernels (6.11) also answer for one address at a time, in about a microsecond.
"""

from __future__ import annotations

import fcntl
import re
import struct
from contextlib import suppress

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

MAPS = "/proc/self/maps"
#: One line of the list: start, end, permissions; then offset, device, inode, and the file's name if there is a file.
_LINE = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) (..)([^\n]*)\n")
#: The first two letters of the permissions of readable memory, and of writable memory.
_READABLE, _WRITABLE = (b"r-", b"rw", b"-w"), (b"rw", b"-w")
#: Addresses with this many hexadecimal digits belong to the kernel.
_KERNELS_DIGITS = 16

_Line = tuple[bytes, bytes, bytes, bytes]

#: For at most this many ranges the kernel is asked one by one.
FEW = 256
#: The kernel's ``struct procmap_query``: its size, flags, the address; the mapping's start, end and permissions; and
#: nine fields that are not used here. And the request, ``PROCMAP_QUERY``.
_QUERY = struct.Struct("=6Q3Q4I2Q")
_PROCMAP_QUERY = 3 << 30 | _QUERY.size << 16 | ord("f") << 8 | 17
_MAY_READ, _MAY_WRITE = 1, 2


class Mappings:
    """This process's mappings. The list is read at the first question, and again before any refusal."""

    def __init__(self) -> None:
        self._lines: list[_Line] | None = None

    def faults(self, start: Ints, end: Ints, *, write: bool) -> dict[int, str]:
        """The rows with a byte in ``[start, end)`` that cannot be read (with ``write``, written), and the reason.

        Where the kernel provides no list, no row is reported. Pages that the kernel cannot fill, such as those of a
        file that has been shortened, are not noticed.
        """
        rows = np.arange(len(start))
        if self._lines is None and len(rows) <= FEW:
            rows = rows[~_are_usable(start.tolist(), end.tolist(), write)]
        # Look twice before refusing a row: other threads map and unmap memory while the list is read.
        for again in (False, True):
            if not len(rows):
                return {}
            if again or self._lines is None:
                self._lines = _list()
            if not self._lines:
                return {}
            low, high = _usable(self._lines, write)
            # The first entry of `low` and `high` is an empty range at 0, so every address has an entry at or before it.
            rows = rows[high[np.searchsorted(low, start[rows], side="right") - 1] < end[rows]]
        lines, starts = self._lines or [], [int(line[0], 16) for line in self._lines or []]
        below = np.searchsorted(np.array(starts, dtype=np.uint64), start[rows].astype(np.uint64), side="right") - 1
        return {
            row: _why(lines[max(at, 0) :], int(start[row]), write)
            for row, at in zip(rows.tolist(), below.tolist(), strict=True)
        }


def _are_usable(starts: list[int], ends: list[int], write: bool) -> npt.NDArray[np.bool_]:
    """Which of these ranges the kernel says can be used. If it says no, or knows no such question, the list decides."""
    found = np.zeros(len(starts), dtype=bool)
    with suppress(OSError), open(MAPS, "rb", buffering=0) as file:
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            at = start
            while at < end:
                answer = fcntl.ioctl(file, _PROCMAP_QUERY, _QUERY.pack(_QUERY.size, 0, at, *[0] * 12))
                _, _, _, _, until, permits, *_ = _QUERY.unpack(answer)
                if not permits & (_MAY_WRITE if write else _MAY_READ | _MAY_WRITE):
                    break
                at = until
            found[row] = at >= end
    return found


def _list() -> list[_Line]:
    """All mappings in the order of their addresses; empty if the list cannot be read."""
    try:
        with open(MAPS, "rb", buffering=0) as file:
            return _LINE.findall(file.read())
    except OSError:
        return []


def _usable(lines: list[_Line], write: bool) -> tuple[Ints, Ints]:
    """Ranges of readable (or writable) memory, adjacent ones merged, preceded by an empty range at address 0."""
    permits = _WRITABLE if write else _READABLE
    found = [line[:2] for line in lines if line[2] in permits and len(line[1]) < _KERNELS_DIGITS]
    low, high = np.array([(0, 0), *((int(a, 16), int(b, 16)) for a, b in found)], dtype=np.int64).T
    reached = np.maximum.accumulate(high)
    first = np.append(True, low[1:] > reached[:-1])
    return low[first], reached[np.append(first[1:], True)]


def _why(lines: list[_Line], at: int, write: bool) -> str:
    """Why the first unusable byte from ``at`` on cannot be used. The first of ``lines`` begins at or before ``at``."""
    for start, end, permits, rest in lines:
        if int(start, 16) > at:
            break
        if int(end, 16) <= at:
            continue
        if permits not in (_WRITABLE if write else _READABLE):
            name = b" ".join(rest.split()[4:]).decode("utf-8", "backslashreplace")
            return f"it is mapped {'read-only' if permits == b'r-' else 'without access'}{name and f' from {name}'}"
        at = int(end, 16)
    return "it is not mapped: it has been freed while the tensor was in use"
