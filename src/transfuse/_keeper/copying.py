"""Copy a described state into a slot, in several threads, and hash each bundle on the way.

A bundle that another rank of this host holds is only hashed; what of it lies on a device passes through main memory a
piece at a time. A bundle's digest is the digest of its blocks' digests, so that several threads can hash a large one.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash

from transfuse._keeper.bundle_table import NO_DIGEST, PLAIN, PRIVATE, Bundles, Storages
from transfuse._keeper.slots import SlotView
from transfuse._memory import vm
from transfuse._state.leaves import dense
from transfuse._state.manifest import Described
from transfuse._state.mapped_file import MappedFile
from transfuse._state.region import Ints

#: A block is copied, then hashed while it is in the cache.
BLOCK_BYTES = 1 << 20
#: Of what lies on devices and is only hashed, so much is in main memory at once; a small bundle may lie in it whole.
PIECE_BYTES = 64 * BLOCK_BYTES


@dataclass(eq=False)
class Memory:
    """Where the storages of a state lie: of the state itself, then of what belongs to the rank alone."""

    described: Sequence[Described]
    addresses: Ints = field(init=False)
    nbytes: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.addresses = np.concatenate([one.addresses for one in self.described])
        self.nbytes = np.concatenate([one.manifest.storages.nbytes for one in self.described])

    def bring(self, storage: int) -> torch.Tensor:
        """The bytes of a storage that is not in main memory, where they are."""
        for one in self.described:
            count = len(one.manifest.storages)
            if storage < count:
                size = int(one.manifest.storages.nbytes[storage])
                return dense.over(one.storages[storage], torch.uint8, int(one.windows[storage]), (size,), (1,))
            storage -= count
        raise IndexError(storage)


def copy(
    memory: Memory,
    bundles: Bundles,
    storages: Storages,
    slot: SlotView | None,
    *,
    digests: bool,
    only: Ints | None = None,
    known: Sequence[bytes] = (),
    workers: int | None = None,
) -> list[bytes]:
    """Copy the bundles that have a place (not -1) into the slot. Return the digests of all bundles, if asked for.

    Without a slot bundles are only hashed.

    ``only``: the numbers of the bundles to handle now; for all others, what ``known`` says.
    Without ``digests``, bundles whose equality must be seen are hashed all the same.
    ``workers``: how many threads copy; None: one for each core.
    """
    work = _Work(memory, bundles, storages, slot, digests=digests)
    chosen = np.arange(len(bundles)) if only is None else only
    passing = work.bring_from_devices(chosen)
    _run(list(work.tasks(np.setdiff1d(chosen, passing).tolist())), workers)
    for tasks in work.pieces(passing.tolist()):
        _run(tasks, workers)
    return work.result(known)


def digests_at(addresses: Ints, nbytes: Ints, files: Sequence[MappedFile] = ()) -> list[bytes]:
    """The digests of bundles that lie in mapped slots, at these addresses. ``files``: the slots, for a reader."""
    result: list[list[bytes]] = [[] for _ in addresses]
    scratch = threading.local()
    tasks = []
    for number, (start, size) in enumerate(zip(addresses.tolist(), nbytes.tolist(), strict=True)):
        result[number] = [NO_DIGEST] * len(range(0, max(size, 1), BLOCK_BYTES))
        for block, low in enumerate(range(0, max(size, 1), BLOCK_BYTES)):
            tasks.append(_hashing(result[number], block, start + low, min(BLOCK_BYTES, size - low), files, scratch))
    _run(tasks)
    return [_join(blocks) for blocks in result]


def _hashing(
    into: list[bytes], block: int, address: int, nbytes: int, files: Sequence[MappedFile], scratch: threading.local
) -> Callable[[], None]:
    def task() -> None:
        if files and not hasattr(scratch, "buffer"):
            scratch.buffer = ctypes.create_string_buffer(BLOCK_BYTES)
        if files and vm.read_file(files, address, at := ctypes.addressof(scratch.buffer), nbytes):
            into[block] = _hash(at, nbytes)
        else:
            into[block] = _hash(address, nbytes)

    return task


class _Work:
    def __init__(
        self, memory: Memory, bundles: Bundles, storages: Storages, slot: SlotView | None, *, digests: bool
    ) -> None:
        self._memory, self._bundles, self._slot = memory, bundles, slot
        self._places = np.full(len(bundles), -1) if slot is None else bundles.places
        self._of_storage, self._place_in_bundle = storages.bundles, storages.places
        modes = bundles.modes
        self._hashes = np.ones(len(bundles), dtype=bool) if digests else (modes == PLAIN)
        self._hashes &= modes != PRIVATE if not digests else True
        self._blocks: list[list[bytes]] = [[] for _ in range(len(bundles))]
        #: The storages of each bundle.
        order = np.argsort(self._of_storage, kind="stable")
        self._storages = np.split(order, np.searchsorted(self._of_storage[order], np.arange(1, len(bundles))))
        self._scratch = threading.local()
        self._elsewhere: Ints = np.flatnonzero((memory.addresses == 0) & (memory.nbytes > 0))
        #: Where storages lie that have been copied from a device for the piece that is hashed now.
        self._copies: dict[int, int] = {}

    def bring_from_devices(self, chosen: Ints) -> Ints:
        """Copy what lies on devices and has a place, on the caller's streams. Return the bundles that have none."""
        passing = set()
        for storage in self._elsewhere[np.isin(self._of_storage[self._elsewhere], chosen)].tolist():
            number = int(self._of_storage[storage])
            place = int(self._places[number])
            if self._slot is not None and place >= 0:
                data, start = self._memory.bring(storage), place + int(self._place_in_bundle[storage])
                target = torch.frombuffer(self._slot.memory, dtype=torch.uint8, count=data.numel(), offset=start)
                target.copy_(data)
            else:
                passing.add(number)
        return np.array(sorted(passing), dtype=np.int64)

    def pieces(self, passing: Sequence[int]) -> Iterator[list[Callable[[], None]]]:
        """What is to be done for bundles on devices that are only hashed, a piece at a time. Do it before the next."""
        wanted = [number for number in passing if self._hashes[number]]
        most = sum(int(self._bundles.nbytes[number]) for number in wanted)
        buffer = torch.empty(min(most, PIECE_BYTES), dtype=torch.uint8)
        tasks: list[Callable[[], None]] = []
        used = 0

        def bring(storage: int, low: int, size: int) -> int:
            nonlocal used
            buffer[used : used + size].copy_(self._memory.bring(storage)[low : low + size])
            used += size
            return buffer.data_ptr() + used - size

        for number in wanted:
            there = np.intersect1d(self._storages[number], self._elsewhere).tolist()
            nbytes = sum(int(self._memory.nbytes[storage]) for storage in there)
            is_large = self._is_large(number)
            if is_large:
                self._blocks[number] = [NO_DIGEST] * len(range(0, nbytes, BLOCK_BYTES))
            low = 0
            while low < nbytes:
                # A small bundle comes whole, a large one in whole blocks.
                size, free = nbytes - low, buffer.numel() - used
                if size > free:
                    size = free // BLOCK_BYTES * BLOCK_BYTES if is_large else 0
                if not size:
                    yield tasks
                    tasks, used = [], 0
                    continue
                if is_large:
                    tasks += self._hash_blocks(number, bring(there[0], low, size), low, size)
                else:
                    self._copies |= {one: bring(one, 0, int(self._memory.nbytes[one])) for one in there}
                    tasks.append(self._small(number))
                low += size
        yield tasks

    def _hash_blocks(self, number: int, address: int, low: int, size: int) -> Iterator[Callable[[], None]]:
        """Hash a part of a large bundle, of which this many bytes lie at this address."""
        for at in range(0, size, BLOCK_BYTES):
            block, length = (low + at) // BLOCK_BYTES, min(BLOCK_BYTES, size - at)
            yield _hashing(self._blocks[number], block, address + at, length, (), self._scratch)

    def _is_large(self, number: int) -> bool:
        # By the size of the storage: a bundle may be a little larger, and its padding is hashed, too.
        storages = self._storages[number]
        return len(storages) == 1 and bool(self._memory.nbytes[storages[0]] >= BLOCK_BYTES)

    def tasks(self, chosen: Sequence[int]) -> Iterator[Callable[[], None]]:
        """What is to be done, large blocks first: so the threads end at about the same time."""
        small = []
        for number in chosen:
            if self._is_large(number):
                yield from self._large(number, int(self._storages[number][0]))
            elif self._places[number] >= 0 or self._hashes[number]:
                small.append(number)
        for number in small:
            yield self._small(number)

    def _source(self, storage: int) -> int:
        return self._copies.get(storage) or int(self._memory.addresses[storage])

    def _large(self, number: int, storage: int) -> Iterator[Callable[[], None]]:
        source, nbytes = self._source(storage), int(self._memory.nbytes[storage])
        place = int(self._places[number])
        target = self._slot.address + place if self._slot is not None and place >= 0 else 0
        blocks = [NO_DIGEST] * len(range(0, nbytes, BLOCK_BYTES))
        if self._hashes[number]:
            self._blocks[number] = blocks
        elif not target:
            return
        step = BLOCK_BYTES if self._hashes[number] else 8 * BLOCK_BYTES

        def task(low: int) -> None:
            size = min(step, nbytes - low)
            if target and source:
                ctypes.memmove(target + low, source + low, size)
            if self._hashes[number]:
                blocks[low // BLOCK_BYTES] = _hash((target or source) + low, size)

        for low in range(0, nbytes, step):
            yield lambda low=low: task(low)  # type: ignore[misc]

    def _small(self, number: int) -> Callable[[], None]:
        storages, nbytes = self._storages[number], int(self._bundles.nbytes[number])
        place = int(self._places[number])

        def task() -> None:
            target = self._slot.address + place if self._slot is not None and place >= 0 else self._empty(nbytes)
            sources = np.array([self._source(storage) for storage in storages.tolist()], dtype=np.int64)
            sizes, into = self._memory.nbytes[storages], self._place_in_bundle[storages] + target
            # What came from a device lies in the slot already.
            chosen = (sources > 0) & (sizes > 0)
            theirs, mine = vm.ranges(sources[chosen], sizes[chosen]), vm.ranges(into[chosen], sizes[chosen])
            try:
                vm.copy(theirs, mine)
            except OSError:  # A container may forbid process_vm_readv.
                for (source, size), (to, _) in zip(theirs.tolist(), mine.tolist(), strict=True):
                    ctypes.memmove(to, source, size)
            if self._hashes[number]:
                self._blocks[number] = [_hash(target, nbytes)]

        return task

    def _empty(self, nbytes: int) -> int:
        """Zeroed memory of this thread's own."""
        buffer = getattr(self._scratch, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._scratch.buffer = np.zeros(max(nbytes, BLOCK_BYTES), dtype=np.uint8)
        buffer[:nbytes] = 0
        return int(buffer.ctypes.data)

    def result(self, known: Sequence[bytes]) -> list[bytes]:
        if not self._hashes.any():
            return []
        known = known or [NO_DIGEST] * len(self._bundles)
        return [_join(blocks) if blocks else old for blocks, old in zip(self._blocks, known, strict=True)]


def _join(blocks: Sequence[bytes]) -> bytes:
    return blocks[0] if len(blocks) == 1 else xxhash.xxh3_128_digest(b"".join(blocks))


def _hash(address: int, nbytes: int) -> bytes:
    return xxhash.xxh3_128_digest((ctypes.c_char * nbytes).from_address(address))


def _run(tasks: Sequence[Callable[[], None]], workers: int | None = None) -> None:
    """Run all tasks, in several threads if there are many bytes."""
    numbers = itertools.count()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while not errors and (number := next(numbers)) < len(tasks):
                tasks[number]()
        except BaseException as error:
            errors.append(error)

    helpers = [
        threading.Thread(target=work, name="transfuse-copy", daemon=True)
        for _ in range(min(workers or vm.threads(), len(tasks) // 4) - 1)
    ]
    vm.run_in(helpers, work)
    if errors:
        raise errors[0]
