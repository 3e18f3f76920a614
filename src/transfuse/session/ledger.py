"""The ledger of a receive: which parcels are here and who brought them, who owes which, and which are still wanted.

A neighbour in a chain brings parcels for a source. It owes them as any source does; what it has brought still counts as
the source's, which is asked whether that holds.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from transfuse.state.tensors import Bools, Ints

__all__ = ["Ledger"]

#: Instead of a rank: nobody has been asked; it was here before.
NOBODY, KEPT = -1, -2


class Ledger:
    """Columns of all parcels. Every entry is made under ``changed``, which is notified."""

    def __init__(self, nbytes: Ints, changed: threading.Condition) -> None:
        self._changed = changed
        self._nbytes = nbytes
        #: Who owes a parcel, or brought it, or compares it.
        self._holder = np.full(len(nbytes), NOBODY, dtype=np.int64)
        self._landed: Bools = np.zeros(len(nbytes), dtype=bool)
        #: Parcels of which something was here before, and that no source has compared with its own yet.
        self._uncompared: Bools = np.zeros(len(nbytes), dtype=bool)
        #: Neighbours in a chain, and the source for which each brings parcels.
        self._sources: dict[int, int] = {}
        #: Where parcels are passed on: whether something has arrived, right or wrong, and the source's digests.
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
        """Which parcels are here, and as they should be."""
        with self._changed:
            return self._landed.copy()

    @property
    def uncompared(self) -> Bools:
        """Which parcels may be here already."""
        with self._changed:
            return self._uncompared.copy()

    # -- what was here before

    def keep(self, numbers: Sequence[int] | Ints) -> None:
        """Something is here that may be these. It is wanted from nobody until it has been compared."""
        with self._changed:
            chosen = np.asarray(numbers, dtype=np.int64)
            self._holder[chosen] = KEPT
            self._uncompared[chosen] = True

    def take_uncompared(self, rank: int, nbytes: float, among: Bools | None = None) -> Sequence[int]:
        """Let a source compare parcels of about so many bytes; their numbers."""
        with self._changed:
            return self._give(rank, self._uncompared & (self._holder == KEPT), nbytes, among)

    def compared(self, rank: int, numbers: Sequence[int], same: Bools) -> None:
        """A source has said which of the parcels that it compared are as it has them."""
        with self._changed:
            chosen = np.asarray(numbers, dtype=np.int64)
            mine = (self._holder[chosen] == rank) & self._uncompared[chosen]
            chosen, same = chosen[mine], same[mine]
            self._uncompared[chosen] = False
            self._landed[chosen] = same
            self._holder[chosen] = np.where(same, KEPT, NOBODY)
            self._changed.notify_all()

    @property
    def kept_bytes(self) -> int:
        """How much was here before and is as it should be."""
        with self._changed:
            return int(self._nbytes[self._landed & (self._holder == KEPT)].sum())

    # -- what sources bring

    def take(self, rank: int, nbytes: float, among: Bools | None = None) -> Sequence[int]:
        """Let a source owe wanted parcels of about so many bytes, one at least if there is any; their numbers."""
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
        """The same for parcels that follow each other, in the ``order`` in which the source numbers those it holds."""
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
        """A source has brought these, some of them ``wrong``. What it no longer owes does not count: another brings it.

        ``digests`` are the source's, if it sent any.
        """
        with self._changed:
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

    def give_back(self, rank: int) -> None:
        """A source or neighbour does not bring what it owes: that is wanted again, or compared by another."""
        with self._changed:
            owed = self._is_from(rank) & ~self._landed
            self._holder[owed] = np.where(self._uncompared[owed], KEPT, NOBODY)
            self._changed.notify_all()

    def disown(self, rank: int) -> None:
        """What this source has brought does not count."""
        with self._changed:
            theirs = self._is_from(rank)
            self._landed[theirs], self._holder[theirs] = False, NOBODY
            self._changed.notify_all()

    def _is_from(self, rank: int) -> Bools:
        """For each parcel, whether a source owes or brought it, itself or through a neighbour."""
        theirs: Bools = self._holder == rank
        for neighbour, source in self._sources.items():
            if source == rank:
                theirs |= self._holder == neighbour
        return theirs

    # -- chains

    def hand_over(self, rank: int, neighbour: int, numbers: Sequence[int]) -> None:
        """A neighbour brings what a source owes of these."""
        with self._changed:
            self._sources[neighbour] = rank
            chosen = np.asarray(numbers, dtype=np.int64)
            self._holder[chosen[self._holder[chosen] == rank]] = neighbour

    def keep_digests(self) -> None:
        """From now on parcels are passed on as they arrive, with the source's digests."""
        with self._changed:
            self._arrived, self._digests = np.zeros(len(self), dtype=bool), np.zeros(len(self), dtype=np.uint64)

    def wait_for(self, numbers: Sequence[int]) -> BaseException | None:
        """Wait until something has arrived for each of these, right or wrong; or why no more comes.

        Whoever gets a wrong one next compares it too.
        """
        with self._changed:
            while not self._arrived[numbers].all():
                if self._closed is not None:
                    return self._closed
                self._changed.wait()
            return None

    def digest(self, number: int) -> int:
        """The source's digest of a parcel that has arrived."""
        return int(self._digests[number])

    def close(self, cause: BaseException) -> None:
        """No more parcels come."""
        with self._changed:
            self._closed = self._closed or cause
            self._changed.notify_all()

    # -- accounts

    def bytes_from(self, rank: int) -> int:
        """How much a source has brought."""
        with self._changed:
            return int(self._nbytes[self._landed & self._is_from(rank)].sum())

    def bytes_with(self, rank: int) -> int:
        """How much a source has brought or owes."""
        with self._changed:
            return int(self._nbytes[self._is_from(rank) & ~self._uncompared].sum())

    def bytes_of(self, numbers: Sequence[int]) -> int:
        return int(self._nbytes[np.asarray(numbers, dtype=np.int64)].sum())
