"""Memory by address: reading another process's, and gathering and scattering one's own.

Nearly all of it is ``process_vm_readv``, which takes many ranges in one call, copies without a second process's help,
and fails instead of faulting where an address is wrong. ctypes drops the GIL around it: several threads read at once.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["AVAILABLE", "Ranges", "ReadFailed", "copy", "join", "peek", "ranges", "read", "run_in", "threads"]

#: Rows of (address, bytes): what the kernel calls an iovec.
Ranges = npt.NDArray[np.uint64]

#: Ranges that one call takes, and bytes that one call of ours asks for: short enough to stop and to share out.
MAX_RANGES = 1024
CALL_BYTES = 8 << 20
#: More threads than this only queue for the memory.
MAX_THREADS = 8
#: So few ranges are copied one by one.
FEW = 8
#: Below this a second thread costs more than it brings.
THREAD_BYTES = 4 << 20

_libc: Any = ctypes.CDLL(None, use_errno=True)
AVAILABLE = hasattr(_libc, "process_vm_readv")
if AVAILABLE:
    _libc.process_vm_readv.restype = ctypes.c_ssize_t
    _libc.process_vm_readv.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    )


class ReadFailed(OSError):
    """A process cannot be read at all."""


def threads() -> int:
    """Threads worth using: the CPUs this process may run on. (OMP_NUM_THREADS says something else under torchrun.)"""
    return min(len(os.sched_getaffinity(0)), MAX_THREADS)


def ranges(addresses: npt.NDArray[Any], nbytes: npt.NDArray[Any]) -> Ranges:
    return np.stack([addresses.astype(np.uint64), nbytes.astype(np.uint64)], axis=1)


def join(theirs: Ranges, mine: Ranges) -> tuple[Ranges, Ranges]:
    """Pairs of ranges with neighbours on both sides made one, and without empty ones."""
    keep = theirs[:, 1] > 0
    if not keep.all():
        theirs, mine = theirs[keep], mine[keep]
    if len(theirs) < 2:
        return theirs, mine
    follows = (theirs[1:, 0] == theirs[:-1].sum(axis=1)) & (mine[1:, 0] == mine[:-1].sum(axis=1))
    if not follows.any():
        return theirs, mine
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    sizes = np.add.reduceat(theirs[:, 1], first)
    return ranges(theirs[first, 0], sizes), ranges(mine[first, 0], sizes)


def _split(theirs: Ranges, mine: Ranges, call_bytes: int) -> tuple[Ranges, Ranges, npt.NDArray[np.int64]]:
    """The same pairs with none longer than a call, and where each call begins (and the last one ends)."""
    sizes = theirs[:, 1].astype(np.int64)
    pieces = -(-sizes // call_bytes)
    if len(sizes) and pieces.max() > 1:
        row = np.repeat(np.arange(len(sizes)), pieces)
        at = (np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * call_bytes
        length = np.minimum(call_bytes, sizes[row] - at)
        theirs, mine = (ranges(side[row, 0] + at.astype(np.uint64), length) for side in (theirs, mine))
        sizes = length
    ends = np.cumsum(sizes)
    starts = [0]
    while starts[-1] < len(sizes):
        begun = int(ends[starts[-1] - 1]) if starts[-1] else 0
        by_bytes = int(np.searchsorted(ends, begun + call_bytes, side="right"))
        starts.append(max(starts[-1] + 1, min(by_bytes, starts[-1] + MAX_RANGES)))
    return np.ascontiguousarray(theirs), np.ascontiguousarray(mine), np.array(starts, dtype=np.int64)


def read(
    pid: int,
    theirs: Ranges,
    mine: Ranges,
    *,
    workers: int = 1,
    call_bytes: int = 0,
    begins: Callable[[int], object] = lambda upto: None,
    went_on: Callable[[int], object] = lambda nbytes: None,
) -> npt.NDArray[np.int64]:
    """Copy ``theirs`` of process ``pid`` into ``mine``, range by range; the rows of the ranges that could not be read.

    A call asks for ``call_bytes`` at most. Calls are made in the order of the ranges, in any of the threads.
    ``begins`` is told before each how far, in bytes of all ranges, ``mine`` may be written now; ``went_on`` after each
    how many bytes it read. What they raise ends the read. :class:`ReadFailed` says that the process cannot be read at
    all.
    """
    split_theirs, split_mine, starts = _split(theirs, mine, call_bytes or CALL_BYTES)
    upto = np.concatenate([[0], np.cumsum(split_theirs[:, 1].astype(np.int64))])[starts]
    calls = itertools.count()
    failed: list[int] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while not errors and (call := next(calls)) < len(starts) - 1:
                low, high = int(starts[call]), int(starts[call + 1])
                begins(int(upto[call + 1]))
                failed.extend(_read(pid, split_theirs, split_mine, low, high))
                went_on(int(upto[call + 1] - upto[call]))
        except BaseException as error:
            errors.append(error)

    helpers = [
        threading.Thread(target=work, name="transfuse-reader", daemon=True)
        for _ in range(min(workers, len(starts) - 1, int(upto[-1]) // THREAD_BYTES) - 1)
    ]
    run_in(helpers, work)
    if errors:
        raise errors[0]
    if not failed:
        return np.empty(0, dtype=np.int64)
    # Back from pieces to rows: a piece lies inside the row it was split from.
    ends = np.cumsum(theirs[:, 1].astype(np.int64))
    before = np.concatenate([[0], np.cumsum(split_theirs[:, 1].astype(np.int64))])
    return np.unique(np.searchsorted(ends, before[np.array(failed, dtype=np.int64)], side="right"))


def run_in(helpers: list[threading.Thread], work: Callable[[], None]) -> None:
    """Do work here and in helpers, as many as can be started; all are done when this returns."""
    started: list[threading.Thread] = []
    try:
        for helper in helpers:
            helper.start()
            started.append(helper)
    except RuntimeError:
        pass  # No more threads to be had: fewer do it too.
    finally:
        work()
        for helper in started:
            helper.join()


def _read(pid: int, theirs: Ranges, mine: Ranges, low: int, high: int) -> list[int]:
    """One call for rows ``low`` to ``high``, repeated where the kernel stops early; the rows it cannot read."""
    failed: list[int] = []
    while low < high:
        done = _libc.process_vm_readv(pid, mine[low:].ctypes.data, high - low, theirs[low:].ctypes.data, high - low, 0)
        if done < 0:
            code = ctypes.get_errno()
            if code not in (errno.EFAULT, errno.EINVAL, errno.ENOMEM):
                raise ReadFailed(code, os.strerror(code))
            done = 0
        ends = np.cumsum(theirs[low:high, 1].astype(np.int64))
        if done == ends[-1]:
            return failed
        # The row that stopped it: once more by itself if it was not the first, otherwise it is bad.
        stopped = int(np.searchsorted(ends, done, side="right"))
        if stopped == 0:
            failed.append(low)
            stopped = 1
        low += stopped
    return failed


def copy(theirs: Ranges, mine: Ranges) -> None:
    """Copy within this process, range by range. ``OSError`` where that is not possible."""
    if len(theirs) <= FEW:
        for (source, nbytes), (target, _) in zip(theirs.tolist(), mine.tolist(), strict=True):
            ctypes.memmove(target, source, nbytes)
        return
    theirs, mine = join(theirs, mine)
    if len(read(os.getpid(), theirs, mine)):
        raise OSError(errno.EFAULT, "memory that cannot be read")


class _Span:
    """Memory of this process from an address on, as numpy wants to be told of it."""

    def __init__(self, address: int, count: int, dtype: np.dtype[Any]) -> None:
        self.__array_interface__ = {"data": (address, True), "shape": (count,), "typestr": dtype.str, "version": 3}


def peek(addresses: npt.NDArray[np.int64], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """What lies at these addresses, one item each. They are this process's own, and aligned: nothing is checked."""
    if not addresses.size:
        return np.empty(addresses.shape, dtype=dtype)
    base, item = int(addresses.min()), dtype.itemsize
    # A view of everything in between, of which only these items are looked at.
    span = np.asarray(_Span(base, (int(addresses.max()) - base) // item + 1, dtype))
    result: npt.NDArray[Any] = span[(addresses - base) // item]
    return result
