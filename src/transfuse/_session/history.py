"""A source's history: what it last gave out to receivers with ``delta``, in the form in which it travels.

A receiver sends digests of what it holds. If that is what the source gave out before, and little of it has changed
since, the source sends a patch. So a base is proved, never assumed: a receiver that has missed something, or has
written to its tensors, has other digests, and gets whole parcels.

There is one copy of each parcel, and it moves on with the first receiver that asks for a new state. Receivers that come
later still hold what was given out before that: for them the patch is kept beside the copy, until the next change.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

import numpy as np
import torch

from transfuse._memory.digest import wide_digest_of
from transfuse._memory.patches import Bytes, bytes_of, item_of, patch_of
from transfuse._plan.parcels import Parcels

#: A patch is kept for later receivers if it is at most this part of its parcel.
KEPT_PART = 1 / 8


class GivenOut:
    """The parcels of one plan as they were last given out. Different threads may use different parcels at once."""

    def __init__(self, parcels: Parcels) -> None:
        #: Held by the conversation that asks.
        self.lock = threading.Lock()
        self.nbytes = parcels.total_bytes
        self._parcels = parcels
        self._ends = np.cumsum(parcels.nbytes)
        self._bytes: Bytes = np.empty(int(parcels.nbytes.sum()), dtype=np.uint8)
        self._digests: list[bytes | None] = [None] * len(parcels)
        #: For each parcel: the digest of what was given out before that, and what has changed since.
        self._before: list[tuple[bytes, bytes] | None] = [None] * len(parcels)

    def give(self, number: int, data: torch.Tensor, held: bytes) -> tuple[bytes, bytes]:
        """Give out a parcel, in main memory, to a receiver that holds one with the digest ``held``.

        Returns the parcel's digest, and the patch that turns the receiver's parcel into it. The patch is empty if the
        receiver has this parcel already, or needs the whole of it.
        """
        digest, known, patch = wide_digest_of(data), self._digests[number], None
        if digest != known:
            end = int(self._ends[number])
            copy, new = self._bytes[end - int(self._parcels.nbytes[number]) : end], bytes_of(data)
            self._before[number] = None
            if known is not None:
                patch = patch_of(copy, new, item_of(self._parcels, number))
                if patch is not None and len(patch) <= len(new) * KEPT_PART:
                    self._before[number] = known, patch
            copy[:] = new
            self._digests[number] = digest
        elif (before := self._before[number]) is not None:
            known, patch = before
        return digest, patch if patch is not None and held == known and held != digest else b""


class History:
    """What a source last gave out, for each plan that its receivers have. Together no larger than the state itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given: OrderedDict[Hashable, GivenOut] = OrderedDict()

    def of(self, plan: Hashable, parcels: Parcels, most_bytes: int) -> GivenOut | None:
        """What was given out by a plan; None if there is no room for it. What was used least lately goes first."""
        with self._lock:
            given = self._given.pop(plan, None) or GivenOut(parcels)
            if given.nbytes > most_bytes:
                return None
            self._given[plan] = given
            while self._total() > most_bytes:
                self._given.popitem(last=False)
            return given

    @property
    def nbytes(self) -> int:
        """How much memory this takes, patches not counted."""
        with self._lock:
            return self._total()

    def _total(self) -> int:
        return sum(given.nbytes for given in self._given.values())
