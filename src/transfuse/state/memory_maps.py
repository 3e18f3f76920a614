"""Mappings: which memory of this process can be read, and which can be written, as the kernel lists it.

A tensor may lie in memory that is read-only (a file mapped with ``np.memmap(mode="r")``), or gone. Torch does not know,
and whoever writes there ends the process. One look at ``/proc/self/maps`` answers for any number of tensors.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

__all__ = ["Mappings"]

Ints = npt.NDArray[np.int64]

MAPS = "/proc/self/maps"
#: A line: start, end, what is permitted; then offset, device and inode, and the name of the file if there is one.
_LINE = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) (..)([^\n]*)\n")
#: What the first two letters of the permissions are where memory can be read, and where it can be written.
_READABLE, _WRITABLE = (b"r-", b"rw", b"-w"), (b"rw", b"-w")
#: Addresses of so many digits are the kernel's own.
_KERNELS_DIGITS = 16

_Line = tuple[bytes, bytes, bytes, bytes]


class Mappings:
    """This process's mappings. They are listed when they are first asked about, and again before a refusal."""

    def __init__(self) -> None:
        self._lines: list[_Line] | None = None

    def faults(self, start: Ints, end: Ints, *, write: bool) -> dict[int, str]:
        """For each row of which a byte in ``[start, end)`` cannot be read (with ``write``, written): why not.

        Where the kernel does not list its mappings, nothing is known to be wrong. Nor is it known of pages that the
        kernel cannot fill, as those of a file that has been shortened.
        """
        rows = np.arange(len(start))
        # Twice before anybody is refused: other threads map and unmap while the list is read.
        for again in (False, True):
            if not len(rows):
                return {}
            if again or self._lines is None:
                self._lines = _list()
            if not self._lines:
                return {}
            low, high = _usable(self._lines, write)
            # Row 0 of the two is below all memory.
            rows = rows[high[np.searchsorted(low, start[rows], side="right") - 1] < end[rows]]
        lines, starts = self._lines or [], [int(line[0], 16) for line in self._lines or []]
        below = np.searchsorted(np.array(starts, dtype=np.uint64), start[rows].astype(np.uint64), side="right") - 1
        return {
            row: _why(lines[max(at, 0) :], int(start[row]), write)
            for row, at in zip(rows.tolist(), below.tolist(), strict=True)
        }


def _list() -> list[_Line]:
    """All mappings in the order of their addresses; none if they cannot be had."""
    try:
        with open(MAPS, "rb", buffering=0) as file:
            return _LINE.findall(file.read())
    except OSError:
        return []


def _usable(lines: list[_Line], write: bool) -> tuple[Ints, Ints]:
    """Where memory can be read, or written: neighbours are one, and the first of them is nothing at 0."""
    permits = _WRITABLE if write else _READABLE
    found = [line[:2] for line in lines if line[2] in permits and len(line[1]) < _KERNELS_DIGITS]
    low, high = np.array([(0, 0), *((int(a, 16), int(b, 16)) for a, b in found)], dtype=np.int64).T
    reached = np.maximum.accumulate(high)
    first = np.append(True, low[1:] > reached[:-1])
    return low[first], reached[np.append(first[1:], True)]


def _why(lines: list[_Line], at: int, write: bool) -> str:
    """What is wrong with the first byte from here on that cannot be used. The first line begins at or before it."""
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
