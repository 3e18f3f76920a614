"""Memory for fresh storages: few large allocations instead of many small ones, on huge pages where the system has them.

The cost of fresh memory is not the allocation but the first write: one page fault for every 4 KiB. So torch allocates
the large storages, and the arena asks the kernel to put them on huge pages. Small storages are cut out of large
mappings. Each is a storage of its own over its slice of the mapping. A mapping is released with the last tensor that
uses it.

Such a small storage cannot be resized (``untyped_storage().resize_()``). Storages made by ``torch.from_numpy`` and
``torch.load(mmap=True)`` cannot be resized either. In all other ways a small storage is an ordinary one: saving,
copying, pickling and sharing take its own bytes only.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import numpy as np
import torch

from transfuse._state.leaves import dense
from transfuse._state.region import Ints
from transfuse._state.tensors import Bools
from transfuse._tuning import ARENA_HUGE_BYTES, ARENA_LARGE_BYTES, ARENA_MAPPING_BYTES

#: Every storage begins at a multiple of this many bytes, as torch's own allocations do.
ALIGNMENT = 64

#: The dtypes that numpy has too.
_NUMPY_TYPES = {torch.from_numpy(np.empty(0, code)).dtype: np.dtype(code) for code in "?bBhHiIlLefdFD"}

#: Python names it from 3.13 on.
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
_MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


class Arena:
    """Fresh storages, numbered as in the manifest."""

    def __init__(self, nbytes: Ints, needed: Bools, homes: Sequence[torch.device], home: Ints) -> None:
        """Allocate every storage that is ``needed``, each on ``homes[home]``. ``RuntimeError`` if memory runs out."""
        #: For each storage, the address of its first byte; 0 if it is empty, not allocated, or not in main memory.
        self.address: Ints = np.zeros(len(nbytes), dtype=np.int64)
        #: For each storage, the number of the mapping that it is cut from (-1: none), and its first byte there.
        self.mapping: Ints = np.full(len(nbytes), -1, dtype=np.int64)
        self.offset: Ints = np.zeros(len(nbytes), dtype=np.int64)
        self.mappings: list[mmap.mmap] = []
        self._nbytes = nbytes
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._bytes: dict[int, torch.Tensor] = {}
        on_cpu = np.array([device.type == "cpu" for device in homes], dtype=bool)[home] if len(home) else needed
        small = needed & on_cpu & (nbytes > 0) & (nbytes < ARENA_LARGE_BYTES)
        for number in np.flatnonzero(needed & ~small).tolist():
            self._storages[number] = _allocate(int(nbytes[number]), homes[int(home[number])])
        self._cut(np.flatnonzero(small))
        self._mapping_bytes = [torch.frombuffer(mapping, dtype=torch.uint8) for mapping in self.mappings]
        bases = np.array([mapping.data_ptr() for mapping in self._mapping_bytes], dtype=np.int64)
        self.address[small] = bases[self.mapping[small]] + self.offset[small]
        large = np.flatnonzero(needed & on_cpu & (nbytes >= ARENA_LARGE_BYTES))
        self.address[large] = [self._storages[number].data_ptr() for number in large.tolist()]
        _ask_for_huge_pages(self.address[large], nbytes[large])

    def _cut(self, numbers: Ints) -> None:
        """Lay these storages one after another into as few mappings as hold them."""
        sizes = -(-self._nbytes[numbers] // ALIGNMENT) * ALIGNMENT
        ends = np.cumsum(sizes)
        first, begin = 0, 0
        while first < len(numbers):
            stop = int(np.searchsorted(ends, begin + ARENA_MAPPING_BYTES, side="right"))
            self.mapping[numbers[first:stop]] = len(self.mappings)
            self.offset[numbers[first:stop]] = ends[first:stop] - sizes[first:stop] - begin
            self.mappings.append(_map(int(ends[stop - 1]) - begin))
            first, begin = stop, int(ends[stop - 1])

    @property
    def nbytes(self) -> int:
        """How many bytes all storages have."""
        cut = int(self._nbytes[self.mapping >= 0].sum())
        return cut + sum(int(self._nbytes[number]) for number in self._storages if self.mapping[number] < 0)

    def __contains__(self, number: int) -> bool:
        return number in self._storages or bool(self.mapping[number] >= 0)

    def bytes_of(self, number: int) -> torch.Tensor:
        """The memory of a storage, to write into. Build tensors for the result over :meth:`storage` instead."""
        known = self._bytes.get(number)
        if known is not None:
            return known
        mapping, size = int(self.mapping[number]), int(self._nbytes[number])
        if mapping >= 0:
            start = int(self.offset[number])
            return self._mapping_bytes[mapping][start : start + size]
        result = dense.over(self._storages[number], torch.uint8, 0, (size,), (1,))
        return self._bytes.setdefault(number, result)

    def storage(self, number: int) -> torch.UntypedStorage:
        """The storage itself: the same object at every call."""
        known = self._storages.get(number)
        if known is not None:
            return known
        mapping, start = self.mappings[int(self.mapping[number])], int(self.offset[number])
        over = torch.frombuffer(mapping, dtype=torch.uint8, count=int(self._nbytes[number]), offset=start)
        return self._storages.setdefault(number, over.untyped_storage())

    def tensor(self, mapping: int, offset: int, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        """Make a contiguous tensor over a slice of a mapping, and its storage, in one step.

        Only for storages that :meth:`storage` has not returned yet.
        """
        known = _NUMPY_TYPES.get(dtype)
        if known is not None:  # Half the cost of torch.frombuffer.
            return torch.from_numpy(np.ndarray(shape, known, self.mappings[mapping], offset))
        result = torch.frombuffer(self.mappings[mapping], dtype=dtype, count=prod(shape), offset=offset)
        if len(shape) == 1:
            return result
        return result.resize_(*shape) if shape else result.squeeze_(0)


def reserve(nbytes: int, *, whole: bool) -> torch.Tensor:
    """A range of addresses, of one byte at least, that takes memory only where something is written.

    ``whole``: all of it will be written. ``RuntimeError`` if there is no room.
    """
    mapping = _map(max(nbytes, 1), is_whole=whole)
    with suppress(OSError):
        mapping.madvise(mmap.MADV_DONTFORK)  # A child does nothing with it, and should pay nothing for it.
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _allocate(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Allocate through torch. In main memory the bytes stay unfilled even in deterministic mode."""
    if device.type == "cpu":
        return torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
    return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()


def _map(nbytes: int, *, is_whole: bool = True) -> mmap.mmap:
    """Map fresh memory. A mapping returns to the system with its last user; malloc might keep it.

    ``is_whole``: all of it will be written. Otherwise the system keeps nothing ready for what will not be.
    """
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0 if is_whole else _NO_RESERVE))
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"cannot map {nbytes} bytes: {error}") from error
    if _MADV_HUGEPAGE is not None and nbytes >= ARENA_HUGE_BYTES and is_whole:
        with suppress(OSError):
            mapping.madvise(_MADV_HUGEPAGE)
    return mapping


def _ask_for_huge_pages(addresses: Ints, nbytes: Ints) -> None:
    """Ask for huge pages under these allocations. Neighbours are joined first: one huge page may hold several."""
    if _madvise is None or not len(addresses):
        return
    order = np.argsort(addresses)
    starts = addresses[order]
    ends = starts + nbytes[order]
    # The allocator's header lies between two neighbouring mappings. It takes a page at most.
    cuts = np.flatnonzero(starts[1:] - ends[:-1] > 2 * mmap.PAGESIZE) + 1
    firsts, lasts = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(starts)]]) - 1
    for start, end in zip(starts[firsts].tolist(), ends[lasts].tolist(), strict=True):
        low, high = start + -start % mmap.PAGESIZE, end - end % mmap.PAGESIZE
        if high - low >= ARENA_HUGE_BYTES:
            _madvise(low, high - low, _MADV_HUGEPAGE)  # A refusal does no harm: the memory works all the same.


def _find_madvise() -> ctypes._FuncPointer | None:
    if _MADV_HUGEPAGE is None:
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


_madvise = _find_madvise()
