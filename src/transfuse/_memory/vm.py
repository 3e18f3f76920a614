"""Memory by address: read another process's memory, gather and scatter this process's own.

Nearly everything here is ``process_vm_readv``. One call copies many ranges, the other process does nothing for it, and
a wrong address makes the call fail instead of ending the process. ctypes releases the GIL during the call, so several
threads read at once.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from transfuse._state.mapped_file import MappedFile
from transfuse._tuning import VM_CALL_BYTES, VM_LONG_BYTES, VM_THREAD_BYTES

T = TypeVar("T")

#: Rows of (address, length in bytes), laid out as the kernel's ``struct iovec``.
Ranges = npt.NDArray[np.uint64]

#: The most ranges in one call of the kernel, and the most bytes that one call asks for: few enough that a read stops
#: soon when it should, and that threads share the calls evenly.
MAX_RANGES = 1024
#: More threads than this only wait for memory bandwidth.
MAX_THREADS = 8
#: Up to this many ranges are copied one by one.
FEW = 8

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
_libc.pread.restype = ctypes.c_ssize_t
_libc.pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)


class ReadFailed(OSError):
    """The process cannot be read at all."""


def threads() -> int:
    """How many threads to use: the CPUs that this process may run on. (torchrun sets OMP_NUM_THREADS to 1.)"""
    return min(len(os.sched_getaffinity(0)), MAX_THREADS)


def ranges(addresses: npt.NDArray[Any], nbytes: npt.NDArray[Any]) -> Ranges:
    return np.stack([addresses.astype(np.uint64), nbytes.astype(np.uint64)], axis=1)


def join(theirs: Ranges, mine: Ranges) -> tuple[Ranges, Ranges]:
    """Join pairs of ranges that follow each other on both sides, and drop empty pairs."""
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


def split(
    theirs: Ranges, mine: Ranges, call_bytes: int, call_ranges: int = MAX_RANGES
) -> tuple[Ranges, Ranges, npt.NDArray[np.int64]]:
    """Split pairs longer than a call. Return all pairs, and the row at which each call begins (and the last ends)."""
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
        starts.append(max(starts[-1] + 1, min(by_bytes, starts[-1] + call_ranges)))
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
    is_mapped: bool = False,
    files: Sequence[MappedFile] = (),
) -> npt.NDArray[np.int64]:
    """Copy ``theirs`` of process ``pid`` into ``mine``, range by range. Return the rows that could not be read.

    One call of the kernel asks for ``call_bytes`` at most. The threads make the calls in the order of the ranges.
    Before each call ``begins(upto)`` is called: from now on the first ``upto`` bytes of ``mine``, counted over all
    ranges, may be written. After each call ``went_on(nbytes)`` is called with the bytes that the call asked for. An
    exception from either ends the read. :class:`ReadFailed` means that the process cannot be read at all.

    ``is_mapped``: the process is this one, and all of the memory is known to be mapped. Then long ranges are moved
    without the kernel, which takes half the time.

    ``files``: the process is this one, and its memory is mapped from these files. Long ranges are read from the files,
    so that no page of the mapping has to be touched.
    """
    split_theirs, split_mine, starts = split(theirs, mine, call_bytes or VM_CALL_BYTES)
    upto = np.concatenate([[0], np.cumsum(split_theirs[:, 1].astype(np.int64))])[starts]
    failed: list[int] = []

    def work(calls: Iterator[int]) -> None:
        for call in calls:
            low, high = int(starts[call]), int(starts[call + 1])
            begins(int(upto[call + 1]))
            are_long = upto[call + 1] - upto[call] >= (high - low) * VM_LONG_BYTES
            if is_mapped and are_long:
                _move(split_theirs, split_mine, low, high)
            elif files and are_long:
                failed.extend(_read_files(files, split_theirs, split_mine, low, high))
            else:
                failed.extend(_read(pid, split_theirs, split_mine, low, high))
            went_on(int(upto[call + 1] - upto[call]))

    calls = range(len(starts) - 1)
    share_out(calls, work, min(workers, len(calls), int(upto[-1]) // VM_THREAD_BYTES), "transfuse-reader")
    if not failed:
        return np.empty(0, dtype=np.int64)
    # Find the rows of the failed pieces: each piece lies inside the row that it was split from.
    ends = np.cumsum(theirs[:, 1].astype(np.int64))
    before = np.concatenate([[0], np.cumsum(split_theirs[:, 1].astype(np.int64))])
    return np.unique(np.searchsorted(ends, before[np.array(failed, dtype=np.int64)], side="right"))


def share_out(pieces: Sequence[T], work: Callable[[Iterator[T]], object], workers: int, name: str) -> None:
    """Run ``work`` here and in ``workers`` - 1 threads of this name, or as many as can be started. Return when all end.

    Each ``work`` gets an iterator, and all of these together give each piece once. After the first error nobody gets
    another piece, and the error is raised.
    """
    supply = iter(pieces)
    errors: list[BaseException] = []

    def taken() -> Iterator[T]:
        for piece in supply:
            if errors:
                return
            yield piece

    def run() -> None:
        try:
            work(taken())
        except BaseException as error:
            errors.append(error)

    started: list[threading.Thread] = []
    try:
        for _ in range(workers - 1):
            helper = threading.Thread(target=run, name=name, daemon=True)
            helper.start()
            started.append(helper)
    except RuntimeError:
        pass  # The system allows no more threads. Fewer threads do the work too.
    finally:
        run()
        for helper in started:
            helper.join()
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # An error holds the frames that it went through, and so this list.


def _move(theirs: Ranges, mine: Ranges, low: int, high: int) -> None:
    for (source, nbytes), (target, _) in zip(theirs[low:high].tolist(), mine[low:high].tolist(), strict=True):
        ctypes.memmove(target, source, nbytes)


def _read_files(files: Sequence[MappedFile], theirs: Ranges, mine: Ranges, low: int, high: int) -> list[int]:
    """Read rows ``low`` to ``high`` from the files that this memory is mapped from. Return the rows in none of them."""
    rows = zip(theirs[low:high].tolist(), mine[low:high].tolist(), strict=True)
    return [
        low + row
        for row, ((source, nbytes), (target, _)) in enumerate(rows)
        if not read_file(files, source, target, nbytes)
    ]


def read_file(files: Sequence[MappedFile], source: int, target: int, nbytes: int) -> bool:
    """Copy from memory that is mapped from one of these files, without touching the mapping. False: it is not."""
    file = next((one for one in files if one.address <= source and source + nbytes <= one.end), None)
    while file is not None and nbytes:
        done = _libc.pread(file.fd, target, nbytes, source - file.address)
        if done <= 0:
            break
        source, target, nbytes = source + done, target + done, nbytes - done
    return not nbytes


def _read(pid: int, theirs: Ranges, mine: Ranges, low: int, high: int) -> list[int]:
    """Read rows ``low`` to ``high``: one call, repeated if the kernel stops early. Return the rows it cannot read."""
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
        # The kernel stopped at this row. If the row was the first of the call, it cannot be read. If not, try it again
        # as the first of another call.
        stopped = int(np.searchsorted(ends, done, side="right"))
        if stopped == 0:
            failed.append(low)
            stopped = 1
        low += stopped
    return failed


def copy(theirs: Ranges, mine: Ranges, *, workers: int = 1, is_mapped: bool = False) -> None:
    """Copy within this process, range by range. ``OSError`` if that is not possible.

    ``is_mapped``: all of the memory is known to be mapped. Then it is always possible.
    """
    if len(theirs) <= FEW and workers == 1:
        _move(theirs, mine, 0, len(theirs))
        return
    theirs, mine = join(theirs, mine)
    try:
        unread = read(os.getpid(), theirs, mine, workers=workers, is_mapped=is_mapped)
    except ReadFailed:  # A container may forbid process_vm_readv.
        if not is_mapped:
            raise
        _move(theirs, mine, 0, len(theirs))
        return
    if len(unread):
        raise OSError(errno.EFAULT, "some of the memory cannot be read or written")


class _Span:
    """A span of this process's memory, described by numpy's array interface."""

    def __init__(self, address: int, count: int, dtype: np.dtype[Any]) -> None:
        self.__array_interface__ = {"data": (address, True), "shape": (count,), "typestr": dtype.str, "version": 3}


def peek(addresses: npt.NDArray[np.int64], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Read one item at each address. Nothing is checked: the addresses must be this process's own, and aligned."""
    if not addresses.size:
        return np.empty(addresses.shape, dtype=dtype)
    base, item = int(addresses.min()), dtype.itemsize
    # One view from the lowest address to the highest. Only the items at these addresses are read.
    span = np.asarray(_Span(base, (int(addresses.max()) - base) // item + 1, dtype))
    result: npt.NDArray[Any] = span[(addresses - base) // item]
    return result
