"""Memory for fresh storages: few large pieces instead of many small ones, on huge pages where the system gives them.

What costs in fresh memory is not asking for it but touching it first: a fault for every 4 KiB. So large storages are
allocated as torch does, and asked to lie on huge pages. Small ones are cut out of blocks, each as a storage of its
own over its piece of the block; the block goes when the last tensor that looks into it goes.

Such a small storage cannot be resized (``untyped_storage().resize_()``), like those that ``torch.from_numpy`` and
``torch.load(mmap=True)`` make. Otherwise it is like any other: it is saved, copied, pickled and shared with its own
bytes only.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from transfuse.errors import LimitExceeded
from transfuse.limits import MIB, Limits
from transfuse.state.leaves import dense
from transfuse.state.manifest import Manifest
from transfuse.state.tensors import Bools, Ints

__all__ = ["ALIGNMENT", "BLOCK_BYTES", "LARGE_BYTES", "Arena", "FreshMemory", "Supply", "allocate"]

#: Storages of this size or more are allocations of their own.
LARGE_BYTES = 1 * MIB
#: The largest block: what a small tensor that outlives all others keeps from being released.
BLOCK_BYTES = 16 * MIB
#: Every storage begins at a multiple of this, as torch's own allocations do.
ALIGNMENT = 64

#: Types of elements that numpy has too.
_NUMPY_TYPES = {torch.from_numpy(np.empty(0, code)).dtype: np.dtype(code) for code in "?bBhHiIlLefdFD"}

_HUGE = 2 * MIB
_MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


class Arena:
    """Fresh storages, by the numbers they have in a manifest."""

    def __init__(self, nbytes: Ints, needed: Bools, homes: Sequence[torch.device], home: Ints) -> None:
        """Allocate those that are ``needed``, each in ``homes[home]``. ``RuntimeError`` if there is no memory."""
        #: For each storage, the address of its first byte, if it is here, in main memory, and not empty; otherwise 0.
        self.address: Ints = np.zeros(len(nbytes), dtype=np.int64)
        #: For each storage, the block that it is a piece of, or -1, and at which byte of it.
        self.block: Ints = np.full(len(nbytes), -1, dtype=np.int64)
        self.offset: Ints = np.zeros(len(nbytes), dtype=np.int64)
        self.blocks: list[mmap.mmap] = []
        self._nbytes = nbytes
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._bytes: dict[int, torch.Tensor] = {}
        on_cpu = np.array([device.type == "cpu" for device in homes], dtype=bool)[home] if len(home) else needed
        small = needed & on_cpu & (nbytes > 0) & (nbytes < LARGE_BYTES)
        for number in np.flatnonzero(needed & ~small).tolist():
            self._storages[number] = _allocate(int(nbytes[number]), homes[int(home[number])])
        self._cut(np.flatnonzero(small))
        self._block_bytes = [torch.frombuffer(block, dtype=torch.uint8) for block in self.blocks]
        bases = np.array([block.data_ptr() for block in self._block_bytes], dtype=np.int64)
        self.address[small] = bases[self.block[small]] + self.offset[small]
        large = np.flatnonzero(needed & on_cpu & (nbytes >= LARGE_BYTES))
        self.address[large] = [self._storages[number].data_ptr() for number in large.tolist()]
        _ask_for_huge_pages(self.address[large], nbytes[large])

    def _cut(self, numbers: Ints) -> None:
        """Lay these storages one after another into as few blocks as hold them."""
        sizes = -(-self._nbytes[numbers] // ALIGNMENT) * ALIGNMENT
        ends = np.cumsum(sizes)
        first, begin = 0, 0
        while first < len(numbers):
            stop = int(np.searchsorted(ends, begin + BLOCK_BYTES, side="right"))
            self.block[numbers[first:stop]] = len(self.blocks)
            self.offset[numbers[first:stop]] = ends[first:stop] - sizes[first:stop] - begin
            self.blocks.append(_map(int(ends[stop - 1]) - begin))
            first, begin = stop, int(ends[stop - 1])

    def __contains__(self, number: int) -> bool:
        return number in self._storages or bool(self.block[number] >= 0)

    def bytes_of(self, number: int) -> torch.Tensor:
        """The memory of a storage, to write into. What is built to stay is built over :meth:`storage`."""
        known = self._bytes.get(number)
        if known is not None:
            return known
        block, size = int(self.block[number]), int(self._nbytes[number])
        if block >= 0:
            start = int(self.offset[number])
            return self._block_bytes[block][start : start + size]
        result = dense.over(self._storages[number], torch.uint8, 0, (size,), (1,))
        return self._bytes.setdefault(number, result)

    def storage(self, number: int) -> torch.UntypedStorage:
        """The storage itself, the same one at every call."""
        known = self._storages.get(number)
        if known is not None:
            return known
        block, start = self.blocks[int(self.block[number])], int(self.offset[number])
        piece = torch.frombuffer(block, dtype=torch.uint8, count=int(self._nbytes[number]), offset=start)
        return self._storages.setdefault(number, piece.untyped_storage())

    def tensor(self, block: int, offset: int, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        """A contiguous tensor over a piece of a block, and its storage, in one go. For storages not yet asked for."""
        known = _NUMPY_TYPES.get(dtype)
        if known is not None:  # At half the cost.
            return torch.from_numpy(np.ndarray(shape, known, self.blocks[block], offset))
        result = torch.frombuffer(self.blocks[block], dtype=dtype, count=prod(shape), offset=offset)
        if len(shape) == 1:
            return result
        return result.resize_(*shape) if shape else result.squeeze_(0)


class FreshMemory(NamedTuple):
    """All memory that a receive has allocated. A later receive of the same state may go on with it."""

    #: Which parts of the manifest are built over the arena.
    parts: Bools
    arena: Arena
    #: For each leaf that is a fresh DTensor, its local tensor.
    local_tensors: Mapping[int, torch.Tensor]
    #: With ``atomic``, the copies of targets that are written first, if they are not in the arena.
    copies: Sequence[torch.Tensor]

    def fits(self, parts: Bools, local_shapes: Mapping[int, tuple[int, ...]]) -> bool:
        """Whether this is the memory for these parts and local tensors of the same manifest. (Copies are looked at one
        by one.)
        """
        mine = {leaf: tuple(tensor.shape) for leaf, tensor in self.local_tensors.items()}
        return bool(np.array_equal(self.parts, parts)) and mine == dict(local_shapes)


class Supply(NamedTuple):
    """Where fresh memory comes from: a device, within limits, or what an earlier receive has left."""

    device: torch.device
    limits: Limits
    kept: FreshMemory | None = None


def allocate(manifest: Manifest, fresh: Bools, supply: Supply, extra_bytes: int = 0) -> Arena:
    """One fresh storage for each storage that has a fresh part. ``extra_bytes`` are allocated elsewhere."""
    parts, storages = manifest.parts, manifest.storages
    device, limits, _ = supply
    needed = np.zeros(len(storages), dtype=bool)
    needed[parts.storage[fresh]] = True
    # A fresh part that is empty needs a storage to look into, but none of its bytes.
    filled = np.zeros(len(storages), dtype=bool)
    filled[parts.storage[fresh & (parts.numel > 0)]] = True
    total = int(storages.nbytes[filled].astype(float).sum()) + extra_bytes
    if total > limits.max_receive_bytes:
        raise LimitExceeded(
            f"the source offers {total} bytes of fresh tensors, more than max_receive_bytes="
            f"{limits.max_receive_bytes}; raise it, or receive in place"
        )
    cpu = torch.device("cpu")
    homes = [device if torch.device(name).type == device.type else cpu for name in storages.devices]
    try:
        return Arena(np.where(filled, storages.nbytes, 0), needed, homes, storages.device)
    except RuntimeError as error:
        raise LimitExceeded(f"no memory for {total} bytes of fresh tensors; receive in place: {error}") from error


def _allocate(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """An allocation of its own, as torch makes them. In main memory it is not even filled in deterministic mode."""
    if device.type == "cpu":
        return torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
    return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()


def _map(nbytes: int) -> mmap.mmap:
    """A mapping of its own, which is returned to the system as soon as nobody uses it. malloc might keep it."""
    try:
        block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuntimeError(f"cannot map {nbytes} bytes: {error}") from error
    if _MADV_HUGEPAGE is not None and nbytes >= _HUGE:
        with suppress(OSError):
            block.madvise(_MADV_HUGEPAGE)
    return block


def _ask_for_huge_pages(addresses: Ints, nbytes: Ints) -> None:
    """Ask for huge pages under these allocations. Neighbours are taken together: a huge page may lie under several."""
    if _madvise is None or not len(addresses):
        return
    order = np.argsort(addresses)
    starts = addresses[order]
    ends = starts + nbytes[order]
    # Between two mappings next to each other lies the allocator's header, at most a page.
    cuts = np.flatnonzero(starts[1:] - ends[:-1] > 2 * mmap.PAGESIZE) + 1
    firsts, lasts = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(starts)]]) - 1
    for start, end in zip(starts[firsts].tolist(), ends[lasts].tolist(), strict=True):
        low, high = start + -start % mmap.PAGESIZE, end - end % mmap.PAGESIZE
        if high - low >= _HUGE:
            _madvise(low, high - low, _MADV_HUGEPAGE)  # Refused or not: the memory is the same.


def _find_madvise() -> ctypes._FuncPointer | None:
    if _MADV_HUGEPAGE is None:
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


_madvise = _find_madvise()
