"""The ledger of a receive: which parcels are here and who brought them, who owes which, and which are still wanted."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from transfuse.parts import Bools, Ints

__all__ = ["Ledger"]

#: Instead of a rank: nobody has been asked, and nobody has to be.
NOBODY, KEPT = -1, -2


class Ledger:
    """Columns of all parcels. Every entry is made under ``changed``, which is notified."""

    def __init__(self, nbytes: Ints, changed: threading.Condition) -> None:
        self._changed = changed
        self._nbytes = nbytes
        #: Who owes a parcel or brought it.
        self._holder = np.full(len(nbytes), NOBODY, dtype=np.int64)
        self._landed: Bools = np.zeros(len(nbytes), dtype=bool)
        self._digests = np.zeros(len(nbytes), dtype=np.uint64)
        self._digested: Bools = np.zeros(len(nbytes), dtype=bool)

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
    def digests(self) -> tuple[npt.NDArray[np.uint64], Bools]:
        """The digest of each parcel, and of which it is known."""
        with self._changed:
            return self._digests.copy(), self._digested & self._landed

    def take(self, rank: int, nbytes: float, among: Bools | None = None) -> Sequence[int]:
        """Let a source owe wanted parcels of about so many bytes, one at least if there is any; their numbers."""
        with self._changed:
            wanted = (self._holder == NOBODY) & ~self._landed
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

    def take_run(self, rank: int, nbytes: float) -> range:
        """The same for parcels that follow each other."""
        with self._changed:
            wanted = (self._holder == NOBODY) & ~self._landed
            first = int(wanted.argmax()) if wanted.any() else 0
            length = int(np.argmin(np.append(wanted[first:], False)))
            sizes = self._nbytes[first : first + length]
            length = int((np.cumsum(sizes) - sizes < nbytes).sum())
            self._holder[first : first + length] = rank
            return range(first, first + length)

    def land(self, rank: int, numbers: Sequence[int], digests: Sequence[int] = ()) -> None:
        """A source has brought these. What it no longer owes does not count: another brings it."""
        with self._changed:
            chosen = np.asarray(numbers, dtype=np.int64)
            mine = self._holder[chosen] == rank
            chosen = chosen[mine]
            self._landed[chosen] = True
            self._digested[chosen] = bool(len(digests))
            if len(digests):
                self._digests[chosen] = np.asarray(digests, dtype=np.uint64)[mine]
            self._changed.notify_all()

    def keep(self, numbers: Sequence[int], digests: npt.NDArray[np.uint64]) -> None:
        """These were here before."""
        with self._changed:
            self._holder[np.asarray(numbers, dtype=np.int64)] = KEPT
            self.land(KEPT, numbers, digests.tolist())

    def give_back(self, rank: int) -> None:
        """A source does not bring what it owes: that is wanted again."""
        with self._changed:
            self._holder[(self._holder == rank) & ~self._landed] = NOBODY
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

    def unkeep(self, numbers: Sequence[int]) -> None:
        """These are not what they should be after all."""
        with self._changed:
            chosen = np.asarray(numbers, dtype=np.int64)
            chosen = chosen[self._holder[chosen] == KEPT]
            self._landed[chosen], self._holder[chosen] = False, NOBODY
            self._changed.notify_all()

    def kept(self) -> Sequence[int]:
        with self._changed:
            numbers: list[int] = np.flatnonzero(self._landed & (self._holder == KEPT)).tolist()
            return numbers

    def bytes_from(self, rank: int) -> int:
        """How much a source has brought."""
        with self._changed:
            return int(self._nbytes[self._landed & (self._holder == rank)].sum())

    def bytes_with(self, rank: int) -> int:
        """How much a source has brought or owes."""
        with self._changed:
            return int(self._nbytes[self._holder == rank].sum())

    def bytes_of(self, numbers: Sequence[int]) -> int:
        return int(self._nbytes[np.asarray(numbers, dtype=np.int64)].sum())
