"""Bare ``process_vm_readv``: several threads read ranges of another process's memory. Nothing is checked."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

__all__ = ["Reader", "cpus", "permit"]

#: A call takes at most this many ranges (the kernel's limit), and about this many bytes, so that threads share fairly.
RANGES, CALL_BYTES = 1024, 8 << 20

_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int,
    *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong),
    ctypes.c_ulong,
]


def cpus() -> int:
    """How many threads can run at once in this process."""
    return len(os.sched_getaffinity(0))


def permit(allowed: bool) -> None:
    """Allow or forbid any process of this user to read this one's memory. Does nothing where there is no Yama."""
    _libc.prctl(_PR_SET_PTRACER, _ANY if allowed else ctypes.c_ulong(0), 0, 0, 0)


class Reader:
    """Reads ranges of another process into ranges here. Both are pairs of address and size, with the same sizes."""

    def __init__(self, pid: int, remote: Sequence[tuple[int, int]], local: Sequence[tuple[int, int]]) -> None:
        self._pid = pid
        self._remote, self._local = _pieces(remote), _pieces(local)
        # Divide the ranges into calls: a new call begins when the one before has its most ranges or bytes.
        self._calls: list[tuple[int, int, int]] = []
        first, size = 0, 0
        lengths = self._local[:, 1].tolist()
        for index, length in enumerate(lengths):
            if index > first and (index - first == RANGES or size + length > CALL_BYTES):
                self._calls.append((first, index, size))
                first, size = index, 0
            size += length
        if lengths:
            self._calls.append((first, len(lengths), size))

    def read(self, threads: int) -> None:
        if threads == 1:
            self._read(self._calls)
            return
        # All threads take calls from one iterator, so that no thread waits for a slow one.
        left = iter(self._calls)
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(self._read, left) for _ in range(threads)]:
                done.result()

    def _read(self, calls: Iterable[tuple[int, int, int]]) -> None:
        local, remote = self._local.ctypes.data, self._remote.ctypes.data
        for first, end, size in calls:
            count, at = end - first, first * 16
            got = _libc.process_vm_readv(self._pid, local + at, count, remote + at, count, 0)
            if got != size:
                cause = os.strerror(ctypes.get_errno()) if got < 0 else f"{got} of {size} bytes"
                raise OSError(f"process_vm_readv: {cause}")


def _pieces(places: Sequence[tuple[int, int]]) -> np.ndarray:
    """An array of iovecs; large ranges are split."""
    return np.array(
        [(start + at, min(CALL_BYTES, size - at)) for start, size in places for at in range(0, size, CALL_BYTES)],
        dtype=np.uint64,
    ).reshape(-1, 2)
