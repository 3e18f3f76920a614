"""Copy a described state into a slot, in several threads, and hash each bundle on the way.

A bundle that another rank of this host holds is only hashed; what of it lies on a device passes through main memory a
piece at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from transfuse._keeper.bundle_table import NO_DIGEST, PLAIN, PRIVATE, Bundles, StoragePlaces
from transfuse._keeper.slots import SlotView
from transfuse._memory import blocks, vm
from transfuse._memory.blocks import BLOCK_BYTES, Task
from transfuse._state.leaves import dense
from transfuse._state.manifest import Described
from transfuse._state.region import Ints

#: Of what lies on devices and is only hashed, so much is in main memory at once; a small bundle may lie in it whole.
PIECE_BYTES = 64 * BLOCK_BYTES


@dataclass(eq=False)
class StateMemory:
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
    memory: StateMemory,
    bundles: Bundles,
    storages: StoragePlaces,
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
    blocks.run(list(work.tasks(np.setdiff1d(chosen, passing).tolist())), workers)
    for tasks in work.pieces(passing.tolist()):
        blocks.run(tasks, workers)
    return work.result(known)


class _Work:
    def __init__(
        self, memory: StateMemory, bundles: Bundles, storages: StoragePlaces, slot: SlotView | None, *, digests: bool
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

    def pieces(self, passing: Sequence[int]) -> Iterator[list[Task]]:
        """What is to be done for bundles on devices that are only hashed, a piece at a time. Do it before the next."""
        wanted = [number for number in passing if self._hashes[number]]
        most = sum(int(self._bundles.nbytes[number]) for number in wanted)
        buffer = torch.empty(min(most, PIECE_BYTES), dtype=torch.uint8)
        tasks: list[Task] = []
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
                self._blocks[number] = blocks.places_for(nbytes)
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
                    at = bring(there[0], low, size)
                    tasks += blocks.copied(at, 0, size, self._blocks[number], low // BLOCK_BYTES)
                else:
                    self._copies |= {one: bring(one, 0, int(self._memory.nbytes[one])) for one in there}
                    tasks.append(self._small(number))
                low += size
        yield tasks

    def _is_large(self, number: int) -> bool:
        # By the size of the storage: a bundle may be a little larger, and its padding is hashed, too.
        storages = self._storages[number]
        return len(storages) == 1 and bool(self._memory.nbytes[storages[0]] >= BLOCK_BYTES)

    def tasks(self, chosen: Sequence[int]) -> Iterator[Task]:
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

    def _large(self, number: int, storage: int) -> Iterator[Task]:
        nbytes, place = int(self._memory.nbytes[storage]), int(self._places[number])
        target = self._slot.address + place if self._slot is not None and place >= 0 else 0
        digests = None
        if self._hashes[number]:
            digests = self._blocks[number] = blocks.places_for(nbytes)
        elif not target:
            return
        yield from blocks.copied(self._source(storage), target, nbytes, digests)

    def _small(self, number: int) -> Task:
        storages, nbytes = self._storages[number], int(self._bundles.nbytes[number])
        place = int(self._places[number])

        def task() -> None:
            target = self._slot.address + place if self._slot is not None and place >= 0 else self._empty(nbytes)
            sources = np.array([self._source(storage) for storage in storages.tolist()], dtype=np.int64)
            sizes, into = self._memory.nbytes[storages], self._place_in_bundle[storages] + target
            # What came from a device lies in the slot already.
            chosen = (sources > 0) & (sizes > 0)
            theirs, mine = vm.ranges(sources[chosen], sizes[chosen]), vm.ranges(into[chosen], sizes[chosen])
            vm.copy(theirs, mine, is_mapped=True)
            if self._hashes[number]:
                self._blocks[number] = [blocks.digest_at(target, nbytes)]

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
        return [blocks.join(one) if one else old for one, old in zip(self._blocks, known, strict=True)]
