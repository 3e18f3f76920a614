"""The ledger of a receive that only compares: each parcel is compared with one source, and none is fetched."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Self

import numpy as np

from transfuse._session.ledger import KEPT, Ledger
from transfuse._state.region import Ints
from transfuse._state.tensors import Bools


class ComparingLedger(Ledger):
    """A parcel that was compared counts as landed, whether it is the same or not. The source that said so brought it:
    at the end it is asked whether its tensors are unchanged, and if they are not, others compare.
    """

    def __init__(self, nbytes: Ints, changed: threading.Condition) -> None:
        super().__init__(nbytes, changed)
        #: Which of the parcels that were compared are different.
        self.differing: Bools = np.zeros(len(nbytes), dtype=bool)

    @classmethod
    def of_all(cls, nbytes: Ints, changed: threading.Condition) -> Self:
        """A ledger in which all parcels wait to be compared."""
        made = cls(nbytes, changed)
        made.keep(np.arange(len(nbytes)))
        return made

    def compared(self, rank: int, numbers: Sequence[int], same: Bools, patched: Bools) -> None:
        with self._changed:
            chosen = np.asarray(numbers, dtype=np.int64)
            mine = (self._holder[chosen] == rank) & self._uncompared[chosen]
            chosen, same = chosen[mine], same[mine]
            self._uncompared[chosen] = False
            self._landed[chosen] = True
            self.differing[chosen] = ~same
            self._changed.notify_all()

    def disown(self, rank: int) -> None:
        with self._changed:
            theirs = self._is_from(rank)
            self._landed[theirs], self._holder[theirs], self._uncompared[theirs] = False, KEPT, True
            self._changed.notify_all()

    @property
    def kept_bytes(self) -> int:
        with self._changed:
            return int(self._nbytes[self._landed & ~self.differing].sum())
