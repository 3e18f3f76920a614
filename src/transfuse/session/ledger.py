"""The ledger of a receive: which parcels are here and who brought them, who owes which, and which are still wanted."""

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

    def land(self, rank: int, numbers: Sequence[int]) -> None:
        """A source has brought these. What it no longer owes does not count: another brings it."""
        with self._changed:
            chosen = np.asarray(numbers, dtype=np.int64)
            self._landed[chosen[self._holder[chosen] == rank]] = True
            self._changed.notify_all()

    def give_back(self, rank: int) -> None:
        """A source does not bring what it owes: that is wanted again, or compared by another."""
        with self._changed:
            owed = (self._holder == rank) & ~self._landed
            self._holder[owed] = np.where(self._uncompared[owed], KEPT, NOBODY)
            self._changed.notify_all()

    def damaged(self, rank: int, numbers: Sequence[int]) -> None:
        """What this source has brought of these is not as it should be, whatever was here before."""
        with self._changed:
            chosen = np.asarray(numbers, dtype=np.int64)
            self._landed[chosen[self._holder[chosen] == rank]] = False

    def disown(self, rank: int) -> None:
        """What this source has brought does not count."""
        with self._changed:
            theirs = self._holder == rank
            self._landed[theirs], self._holder[theirs] = False, NOBODY
            self._changed.notify_all()

    # -- accounts

    def bytes_from(self, rank: int) -> int:
        """How much a source has brought."""
        with self._changed:
            return int(self._nbytes[self._landed & (self._holder == rank)].sum())

    def bytes_with(self, rank: int) -> int:
        """How much a source has brought or owes."""
        with self._changed:
            return int(self._nbytes[(self._holder == rank) & ~self._uncompared].sum())

    def bytes_of(self, numbers: Sequence[int]) -> int:
        return int(self._nbytes[np.asarray(numbers, dtype=np.int64)].sum())
