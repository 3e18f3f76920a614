"""Copy memory in blocks, in several threads, and hash each block while it is in the cache.

The digest of a run of memory has 128 bits: that of its only block, or that of its blocks' digests. So several threads
can hash one run.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import xxhash

from transfuse._memory import vm
from transfuse._state.mapped_file import MappedFile
from transfuse._state.region import Ints
from transfuse._tuning import HASHED_BLOCK_BYTES

Task: TypeAlias = Callable[[], None]


def places_for(nbytes: int) -> list[bytes]:
    """Room for the digests of a run's blocks."""
    return [b""] * -(-nbytes // HASHED_BLOCK_BYTES)


def copied(source: int, target: int, nbytes: int, digests: list[bytes] | None, first: int = 0) -> Iterator[Task]:
    """What is to be done to copy a run of memory, and to put its blocks' digests into ``digests``, from ``first`` on.

    Without a source the bytes are at the target already; without a target they are only hashed.
    """
    step = 8 * HASHED_BLOCK_BYTES if digests is None else HASHED_BLOCK_BYTES

    def task(low: int) -> None:
        size = min(step, nbytes - low)
        if target and source:
            ctypes.memmove(target + low, source + low, size)
        if digests is not None:
            digests[first + low // HASHED_BLOCK_BYTES] = digest_at((target or source) + low, size)

    for low in range(0, nbytes, step):
        yield lambda low=low: task(low)  # type: ignore[misc]


def digests_at(addresses: Ints, sizes: Ints, files: Sequence[MappedFile] = ()) -> list[bytes]:
    """The digests of runs of memory. ``files``: the memory is mapped from these, and read from them instead."""
    result: list[list[bytes]] = []
    tasks: list[Task] = []
    scratch = threading.local()
    for address, nbytes in zip(addresses.tolist(), sizes.tolist(), strict=True):
        result.append(places_for(nbytes))
        tasks += _read(files, address, nbytes, result[-1], scratch) if files else copied(address, 0, nbytes, result[-1])
    run(tasks)
    return list(map(join, result))


def _read(
    files: Sequence[MappedFile], address: int, nbytes: int, digests: list[bytes], scratch: threading.local
) -> Iterator[Task]:
    def task(low: int) -> None:
        if not hasattr(scratch, "buffer"):
            scratch.buffer = ctypes.create_string_buffer(HASHED_BLOCK_BYTES)
        size, at = min(HASHED_BLOCK_BYTES, nbytes - low), ctypes.addressof(scratch.buffer)
        is_read = vm.read_file(files, address + low, at, size)
        digests[low // HASHED_BLOCK_BYTES] = digest_at(at if is_read else address + low, size)

    for low in range(0, nbytes, HASHED_BLOCK_BYTES):
        yield lambda low=low: task(low)  # type: ignore[misc]


def join(digests: Sequence[bytes]) -> bytes:
    """The digest of a run of memory from those of its blocks."""
    return digests[0] if len(digests) == 1 else xxhash.xxh3_128_digest(b"".join(digests))


def digest_at(address: int, nbytes: int) -> bytes:
    return xxhash.xxh3_128_digest((ctypes.c_char * nbytes).from_address(address))


def run(tasks: Sequence[Task], workers: int | None = None) -> None:
    """Do all tasks, in several threads if there are many. ``workers``: how many; None: one for each core."""

    def work(some: Iterator[Task]) -> None:
        for task in some:
            task()

    vm.share_out(tasks, work, min(workers or vm.threads(), len(tasks) // 4), "transfuse-copy")
