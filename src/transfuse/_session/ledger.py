"""The ledger of a receive: which parcels have landed, which source brought each, and which source owes the others.

A source *owes* a parcel that it has been asked for. A neighbour in a chain owes parcels as a source does, and brings
them on behalf of a source. These parcels count as the source's: at the end the source is asked whether they still hold.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from transfuse._state.region import Ints
from transfuse._state.tensors import Bools

#: In place of a rank: nobody has been asked for the parcel; the parcel, or something in its place, was here before.
NOBODY, KEPT = -1, -2


class Ledger:
    """One column entry per parcel. Every change is made under ``changed``, and waiters are notified."""

    def __init__(self, nbytes: Ints, changed: threading.Condition) -> None:
        self._changed = changed
        self._nbytes = nbytes
        #: The rank that owes, brought or compares each parcel; or NOBODY, or KEPT.
        self._holder = np.full(len(nbytes), NOBODY, dtype=np.int64)
        self._landed: Bools = np.zeros(len(nbytes), dtype=bool)
        #: Parcels that may have been here before, and that no source has compared with its own yet.
        self._uncompared: Bools = np.zeros(len(nbytes), dtype=bool)
        #: For each uncompared parcel: the rank that has brought it; KEPT if it was here before.
        self._brought_by = np.full(len(nbytes), KEPT, dtype=np.int64)
        #: Parcels that were here before, and that patches have brought up to date.
        self._patched: Bools = np.zeros(len(nbytes), dtype=bool)
        #: For each lane: its source.
        self._lanes: dict[int, int] = {}
        #: For each neighbour in a chain: the source on whose behalf it brings parcels.
        self._sources: dict[int, int] = {}
        #: Only if this receiver passes parcels on: whether each has arrived, right or wrong, and the source's digest.
        self._arrived: Bools = np.zeros(0, dtype=bool)
        self._digests = np.zeros(0, dtype=np.uint64)
        #: Why no more parcels come.
        self._closed: BaseException | None = None

    def __len__(self) -> int:
        return len(self._nbytes)

    @property
    def complete(self) -> bool:
        with self._changed:
            return bool(self._landed.all())

    @property
    def landed(self) -> Bools:
        """Which parcels are here and right."""
        with self._changed:
            return self._landed.copy()

    @property
    def uncompared(self) -> Bools:
        """Which parcels may be here already, but have not been compared."""
        with self._changed:
            return self._uncompared.copy()

    # -- parcels that were here before

    def keep(self, numbers: Sequence[int] | Ints) -> None:
        """These parcels may be here already. They are asked for only if a comparison finds them different."""
        with self._changed:
            chosen = np.asarray(numbers, dtype=np.int64)
            self._holder[chosen] = KEPT
            self._uncompared[chosen] = True

    def doubt(self, rank: int, numbers: Sequence[int]) -> None:
        """``rank`` has brought these parcels. They count only if a comparison finds them equal to a source's."""
        with self._changed:
            chosen = np.asarray(numbers, dtype=np.int64)
            chosen = chosen[self._holder[chosen] == rank]
            self._holder[chosen] = KEPT
            self._uncompared[chosen] = True
            self._brought_by[chosen] = rank
            self._changed.notify_all()

    def doubted(self, numbers: Sequence[int]) -> Ints:
        """For each of these uncompared parcels, the rank that has brought it; negative if it was here before."""
        with self._changed:
            result: Ints = self._brought_by[np.asarray(numbers, dtype=np.int64)]
            return result

    def take_uncompared(self, rank: int, nbytes: float, among: Bools | None = None) -> Sequence[int]:
        """Assign about ``nbytes`` of uncompared parcels to ``rank``, to compare; return their numbers."""
        with self._changed:
            return self._give(rank, self._uncompared & (self._holder == KEPT), nbytes, among)

    def compared(self, rank: int, numbers: Sequence[int], same: Bools, patched: Bools) -> None:
        """Record a comparison: which of our parcels ``numbers`` equal the source's, and which do since a patch."""
        with self._changed:
            chosen = np.asarray(numbers, dtype=np.int64)
            mine = (self._holder[chosen] == rank) & self._uncompared[chosen]
            chosen, same, patched = chosen[mine], same[mine], patched[mine]
            self._uncompared[chosen] = False
            self._landed[chosen] = same | patched
            self._holder[chosen] = np.where(same, self._brought_by[chosen], np.where(patched, rank, NOBODY))
            self._patched[chosen] = patched
            self._brought_by[chosen] = KEPT
            self._changed.notify_all()

    @property
    def kept(self) -> Bools:
        """Which parcels were here before and are right."""
        with self._changed:
            kept: Bools = self._landed & (self._holder == KEPT)
            return kept

    @property
    def patched(self) -> Bools:
        """Which parcels were here before, and are right with their patches."""
        with self._changed:
            return self._patched.copy()

    @property
    def kept_bytes(self) -> int:
        """Bytes of the parcels that were here before and are right."""
        with self._changed:
            return int(self._nbytes[self.kept].sum())

    @property
    def unasked_bytes(self) -> int:
        """Bytes of the parcels that nobody has been asked for."""
        with self._changed:
            return int(self._nbytes[(self._holder == NOBODY) & ~self._landed].sum())

    # -- parcels that sources bring

    def take(self, rank: int, nbytes: float, among: Bools | None = None) -> Sequence[int]:
        """Assign about ``nbytes`` of unassigned parcels to ``rank``, at least one if any; return their numbers."""
        with self._changed:
            return self._give(rank, (self._holder == NOBODY) & ~self._landed, nbytes, among)

    def _give(self, rank: int, wanted: Bools, nbytes: float, among: Bools | None) -> Sequence[int]:
        if among is not None:
            wanted &= among
        numbers = np.flatnonzero(wanted)
        if not len(numbers):
            return ()
        sizes = self._nbytes[numbers]
        numbers = numbers[np.cumsum(sizes) - sizes < nbytes]
        self._holder[numbers] = rank
        if len(numbers) == len(self):
            return range(len(self))
        taken: list[int] = numbers.tolist()
        return taken

    def take_run(self, rank: int, nbytes: float, order: Ints | None = None) -> range:
        """As ``take``, for consecutive parcels in ``order``, the source's numbering of the parcels that it holds."""
        with self._changed:
            wanted = (self._holder == NOBODY) & ~self._landed
            wanted = wanted if order is None else wanted[order]
            first = int(wanted.argmax()) if wanted.any() else 0
            length = int(np.argmin(np.append(wanted[first:], False)))
            chosen = np.arange(first, first + length) if order is None else order[first : first + length]
            sizes = self._nbytes[chosen]
            length = int((np.cumsum(sizes) - sizes < nbytes).sum())
            self._holder[chosen[:length]] = rank
            return range(first, first + length)

    def land(self, rank: int, numbers: Sequence[int], wrong: Sequence[int] = (), digests: Sequence[int] = ()) -> None:
        """Record that ``rank`` has brought these parcels, and that those in ``wrong`` had a wrong digest.

        Parcels that ``rank`` no longer owes are ignored: another source brings them. ``digests`` are the source's, if
        it sent any.
        """
        with self._changed:
            if len(numbers) == 1:
                self._land_one(rank, numbers[0], right=not len(wrong), digest=digests[0] if len(digests) else None)
                return
            chosen = np.asarray(numbers, dtype=np.int64)
            mine = self._holder[chosen] == rank
            chosen = chosen[mine]
            self._landed[chosen] = True
            if len(wrong):
                self._landed[chosen[np.isin(chosen, np.asarray(wrong, dtype=np.int64))]] = False
            if len(self._arrived):
                if len(digests):
                    self._digests[chosen] = np.array(digests, dtype=np.uint64)[mine]
                self._arrived[chosen] = True
            self._changed.notify_all()

    def _land_one(self, rank: int, number: int, *, right: bool, digest: int | None) -> None:
        """As ``land``, for one parcel: in a chain every burst is one, and columns of one entry cost more than it."""
        if self._holder[number] != rank:
            return
        self._landed[number] = right
        if len(self._arrived):
            if digest is not None:
                self._digests[number] = digest
            self._arrived[number] = True
        self._changed.notify_all()

    def give_back(self, rank: int) -> None:
        """Release the parcels that ``rank`` owes: others may be asked for them, or may compare them.

        What a source's lanes owe, they give back themselves: until then they may still write to the parcels' memory.
        """
        with self._changed:
            owed = self._is_from(rank, lanes=False) & ~self._landed
            self._holder[owed] = np.where(self._uncompared[owed], KEPT, NOBODY)
            self._changed.notify_all()

    def give_back_some(self, rank: int, numbers: Sequence[int]) -> None:
        """Release these parcels, which ``rank`` owes."""
        with self._changed:
            chosen = np.asarray(numbers, dtype=np.int64)
            self._holder[chosen[self._holder[chosen] == rank]] = NOBODY
            self._changed.notify_all()

    def disown(self, rank: int) -> None:
        """Discard everything that this source has brought: these parcels are wanted again."""
        with self._changed:
            theirs = self._is_from(rank)
            self._landed[theirs], self._patched[theirs], self._holder[theirs] = False, False, NOBODY
            self._changed.notify_all()

    def add_lane(self, lane: int, rank: int) -> None:
        """Let ``lane`` bring parcels on behalf of the source ``rank``."""
        with self._changed:
            self._lanes[lane] = rank

    def _is_from(self, rank: int, *, lanes: bool = True) -> Bools:
        """For each parcel, whether ``rank`` owes or brought it, directly or through a neighbour or a lane."""
        theirs: Bools = self._holder == rank
        for lane, source in self._lanes.items() if lanes else ():
            if source == rank:
                theirs |= self._holder == lane
        for neighbour, source in self._sources.items():
            if source == rank:
                theirs |= self._holder == neighbour
        return theirs

    # -- chains

    def hand_over(self, rank: int, neighbour: int, numbers: Sequence[int]) -> None:
        """Let ``neighbour`` owe those of these parcels that ``rank`` owes."""
        with self._changed:
            self._sources[neighbour] = rank
            chosen = np.asarray(numbers, dtype=np.int64)
            self._holder[chosen[self._holder[chosen] == rank]] = neighbour

    def keep_digests(self) -> None:
        """Record arrivals and the source's digests from now on: this receiver passes parcels on."""
        with self._changed:
            self._arrived, self._digests = np.zeros(len(self), dtype=bool), np.zeros(len(self), dtype=np.uint64)

    def wait_for(self, numbers: Sequence[int]) -> BaseException | None:
        """Wait until each of these parcels has arrived, right or wrong. Return why no more parcels come, or None.

        A wrong parcel may be passed on: the next receiver compares the source's digest too.
        """
        with self._changed:
            while not self.has_arrived(numbers):
                if self._closed is not None:
                    return self._closed
                self._changed.wait()
            return None

    def has_arrived(self, numbers: Sequence[int]) -> bool:
        """Whether each of these parcels has arrived, right or wrong."""
        if len(numbers) == 1:
            return bool(self._arrived[numbers[0]])
        return bool(self._arrived[numbers].all())

    def digest(self, number: int) -> int:
        """The source's digest of a parcel that has arrived."""
        return int(self._digests[number])

    def close(self, cause: BaseException) -> None:
        """Wake all that wait for parcels: no more come, for this cause."""
        with self._changed:
            self._closed = self._closed or cause
            self._changed.notify_all()

    # -- totals

    def bytes_from(self, rank: int) -> int:
        """Bytes that a source has brought, also those that are still to be compared."""
        with self._changed:
            return int(self._nbytes[(self._landed & self._is_from(rank)) | (self._brought_by == rank)].sum())

    def bytes_with(self, rank: int) -> int:
        """Bytes that a source has brought or owes."""
        with self._changed:
            theirs = (self._is_from(rank) & ~self._uncompared) | (self._brought_by == rank)
            return int(self._nbytes[theirs].sum())

    def bytes_of(self, numbers: Sequence[int]) -> int:
        if len(numbers) == 1:
            return int(self._nbytes[numbers[0]])
        return int(self._nbytes[np.asarray(numbers, dtype=np.int64)].sum())
