"""Copy a described state into a slot, in several threads, and hash each bundle on the way.

What lies on a device lands in the slot by queued copies (:mod:`.device_commit`), and is hashed there. Where that is
impossible it passes through pinned memory a piece at a time: a bundle that another rank of this host holds, and that is
only hashed; a slot that cannot be pinned; a bundle that lies in several places.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from transfuse._keeper.bundle_table import COMPARED, NO_DIGEST, PRIVATE, Bundles, StoragePlaces
from transfuse._keeper.slot_file import SlotView
from transfuse._memory import blocks, device_copies, vm
from transfuse._memory.blocks import Task
from transfuse._state.leaves import dense
from transfuse._state.manifest import Described
from transfuse._state.region import Ints
from transfuse._state.tensors import Bools
from transfuse._tuning import BUNDLE_BYTES, HASHED_BLOCK_BYTES, PASSING_BYTES


@dataclass(eq=False)
class StateMemory:
    """Where the storages of a state lie: of the state itself, then of what belongs to the rank alone."""

    described: Sequence[Described]
    addresses: Ints = field(init=False)
    nbytes: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.addresses = np.concatenate([one.addresses for one in self.described])
        self.nbytes = np.concatenate([one.manifest.storages.nbytes for one in self.described])

    @cached_property
    def elsewhere(self) -> Ints:
        """The storages that are not in main memory."""
        return np.flatnonzero((self.addresses == 0) & (self.nbytes > 0))

    @cached_property
    def devices(self) -> list[torch.device]:
        """The devices on which storages lie."""
        return self.devices_of(self.elsewhere)

    def devices_of(self, storages: Ints) -> list[torch.device]:
        """The devices on which these storages lie, which are not in main memory."""
        names, places = self._places
        return sorted((torch.device(names[place]) for place in np.unique(places[storages]).tolist()), key=str)

    def on(self, device: torch.device, storages: Ints) -> Ints:
        """Those of these storages that lie on a device."""
        names, places = self._places
        found: Ints = storages[places[storages] == names.index(str(device))]
        return found

    @cached_property
    def _places(self) -> tuple[list[str], Ints]:
        """Names of devices, and for each storage the number of its own; -1 in main memory."""
        known: list[str] = []
        columns = []
        for one in self.described:
            mine = one.manifest.storages
            known += [name for name in mine.devices if name not in known]
            columns.append(np.array([known.index(name) for name in mine.devices], dtype=np.int64)[mine.device])
        return known, np.where(self.addresses > 0, -1, np.concatenate(columns))

    def on_one_device(self, count: int, storages: StoragePlaces) -> Bools:
        """Which of ``count`` bundles lie on a single device, whole."""
        known, place = self._places
        filled, of_storage = self.nbytes > 0, storages.bundles
        least, most = np.full(count, len(known)), np.full(count, -1)
        np.minimum.at(least, of_storage[filled], place[filled])
        np.maximum.at(most, of_storage[filled], place[filled])
        found: Bools = (least == most) & (most >= 0)
        return found

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
    landed: Bools | None = None,
    workers: int | None = None,
    seconds: float,
) -> list[bytes]:
    """Copy the bundles that have a place (not -1) into the slot. Return the digests of all bundles, if asked for.

    Without a slot bundles are only hashed.

    ``only``: the numbers of the bundles to handle now; for all others, what ``known`` says.
    Without ``digests``, bundles whose equality must be seen are hashed all the same.
    ``landed``: the bundles that have come from devices, and lie in the slot. Others come on this thread's streams, and
    each piece of them within ``seconds``. ``workers``: how many threads copy; None: one for each core.
    """
    work = _Work(memory, bundles, storages, slot, digests=digests)
    chosen = np.arange(len(bundles)) if only is None else only
    passing = np.zeros(len(bundles), dtype=bool)
    passing[storages.bundles[memory.elsewhere]] = True
    if landed is not None:
        passing &= ~landed
    blocks.run(list(work.tasks(chosen[~passing[chosen]].tolist())), workers)
    for tasks in work.pieces(chosen[passing[chosen]].tolist(), seconds):
        blocks.run(tasks, workers)
    return work.result(known)


class _PiecePart(NamedTuple):
    """A part of a piece: bytes of a storage, from ``low`` on, and where they lie in the buffer."""

    number: int
    storage: int
    low: int
    nbytes: int
    at: int


class _Work:
    def __init__(
        self, memory: StateMemory, bundles: Bundles, storages: StoragePlaces, slot: SlotView | None, *, digests: bool
    ) -> None:
        self._memory, self._bundles, self._slot = memory, bundles, slot
        self._places = np.full(len(bundles), -1) if slot is None else bundles.places
        self._of_storage, self._place_in_bundle = storages.bundles, storages.places
        modes = bundles.modes
        self._hashes = np.ones(len(bundles), dtype=bool) if digests else np.isin(modes, COMPARED)
        self._hashes &= modes != PRIVATE if not digests else True
        self._blocks: list[list[bytes]] = [[] for _ in range(len(bundles))]
        #: The storages of each bundle.
        order = np.argsort(self._of_storage, kind="stable")
        self._storages = np.split(order, np.searchsorted(self._of_storage[order], np.arange(1, len(bundles))))
        self._scratch = threading.local()
        self._elsewhere = frozenset(memory.elsewhere.tolist())
        #: Where storages lie that have been copied from a device for the piece that is hashed now.
        self._copies: dict[int, int] = {}

    def pieces(self, passing: Sequence[int], seconds: float) -> Iterator[list[Task]]:
        """What is to be done for bundles that pass through main memory, a piece at a time. Do it before the next."""
        wanted = [number for number in passing if self._hashes[number] or self._places[number] >= 0]
        if not wanted:
            return
        most = sum(int(self._bundles.nbytes[number]) for number in wanted)
        nbytes = min(most, max(PASSING_BYTES // 2, BUNDLE_BYTES))

        def bring(parts: Sequence[_PiecePart], buffer: torch.Tensor) -> None:
            runs = [
                (self._memory.bring(part.storage)[part.low :][: part.nbytes], buffer[part.at :][: part.nbytes])
                for part in parts
            ]
            device_copies.to_host(runs, padding=1)  # Between two runs of one device may lie one of another.

        pieces = device_copies.PinnedPair(nbytes, self._memory.devices, seconds)
        for parts, buffer in pieces.ahead(self._cut(wanted, nbytes), bring):
            yield list(self._use(parts, buffer.data_ptr()))

    def _cut(self, wanted: Sequence[int], most: int) -> Iterator[list[_PiecePart]]:
        """Cut bundles into pieces. A small bundle is whole in one piece; a large one is cut between blocks."""
        parts: list[_PiecePart] = []
        used = 0
        for number in wanted:
            there = [one for one in self._storages[number].tolist() if one in self._elsewhere]
            sizes = [int(self._memory.nbytes[storage]) for storage in there]
            if self._is_large(number):
                self._blocks[number] = blocks.places_for(sizes[0]) if self._hashes[number] else []
                low = 0
                while low < sizes[0]:
                    size = min(sizes[0] - low, (most - used) // HASHED_BLOCK_BYTES * HASHED_BLOCK_BYTES)
                    if sizes[0] - low <= most - used:
                        size = sizes[0] - low
                    if size:
                        parts.append(_PiecePart(number, there[0], low, size, used))
                        low, used = low + size, used + size
                    if low < sizes[0]:
                        yield parts
                        parts, used = [], 0
                continue
            if used + sum(sizes) > most:
                yield parts
                parts, used = [], 0
            for storage, size in zip(there, sizes, strict=True):
                parts.append(_PiecePart(number, storage, 0, size, used))
                used += size
        yield parts

    def _use(self, parts: Sequence[_PiecePart], address: int) -> Iterator[Task]:
        """What is to be done with a piece that has come."""
        small: list[int] = []
        for part in parts:
            if self._is_large(part.number):
                place = int(self._places[part.number])
                target = self._slot.address + place + part.low if self._slot is not None and place >= 0 else 0
                digests = self._blocks[part.number] if self._hashes[part.number] else None
                yield from blocks.copied(
                    address + part.at, target, part.nbytes, digests, part.low // HASHED_BLOCK_BYTES
                )
            else:
                self._copies[part.storage] = address + part.at
                small.append(part.number)
        for number in dict.fromkeys(small):
            yield self._small(number)

    def _is_large(self, number: int) -> bool:
        # By the size of the storage: a bundle may be a little larger, and its padding is hashed, too.
        storages = self._storages[number]
        return len(storages) == 1 and bool(self._memory.nbytes[storages[0]] >= HASHED_BLOCK_BYTES)

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
            buffer = self._scratch.buffer = np.zeros(max(nbytes, HASHED_BLOCK_BYTES), dtype=np.uint8)
        buffer[:nbytes] = 0
        return int(buffer.ctypes.data)

    def result(self, known: Sequence[bytes]) -> list[bytes]:
        if not self._hashes.any():
            return []
        known = known or [NO_DIGEST] * len(self._bundles)
        return [blocks.join(one) if one else old for one, old in zip(self._blocks, known, strict=True)]
