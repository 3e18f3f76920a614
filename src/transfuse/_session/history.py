"""A source's history: what it last gave out to receivers with ``delta``, in the form in which it travels.

A receiver sends digests of what it holds. If that is what the source gave out before, and little of it has changed
since, the source sends a patch. So a base is proved, never assumed: a receiver that has missed something, or has
written to its tensors, has other digests, and gets whole parcels.

There is one copy of each parcel, and it moves on with the first receiver that asks for a new state. Receivers that come
later still hold what was given out before that: for them the patch is kept beside the copy, until the next change.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable
from typing import TypeAlias

import numpy as np
import torch

from transfuse._memory.digest import wide_digest_of
from transfuse._memory.patches import Bytes, bytes_of, item_of, patch_of
from transfuse._plan.parcels import Parcels

#: A plan: the digest of the state's structure, and everything else that it depends on.
Plan: TypeAlias = tuple[bytes, *tuple[Hashable, ...]]

logger = logging.getLogger("transfuse")

#: A patch is kept for later receivers if it is at most this part of its parcel.
KEPT_PART = 1 / 8
#: The largest plan that is remembered, in sizes of the state.
MOST_TIMES = 2
#: A plan makes room for another one when this many receivers with other plans have come since it was used; at once if
#: the state has changed its structure.
MOST_IDLE = 8


class GivenOut:
    """The parcels of one plan as they were last given out. Different threads may use different parcels at once."""

    def __init__(self, parcels: Parcels) -> None:
        #: Held by the conversation that asks.
        self.lock = threading.Lock()
        #: Threads count patches of different parcels.
        self._counting, self._patch_bytes = threading.Lock(), 0
        self.copy_bytes = parcels.total_bytes
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
            self._forget(number)
            if known is not None:
                patch = patch_of(copy, new, item_of(self._parcels, number))
                if patch is not None and len(patch) <= len(new) * KEPT_PART:
                    self._before[number] = known, patch
                    with self._counting:
                        self._patch_bytes += len(patch)
            copy[:] = new
            self._digests[number] = digest
        elif (before := self._before[number]) is not None:
            known, patch = before
        return digest, patch if patch is not None and held == known and held != digest else b""

    def _forget(self, number: int) -> None:
        before, self._before[number] = self._before[number], None
        with self._counting:
            self._patch_bytes -= 0 if before is None else len(before[1])

    @property
    def nbytes(self) -> int:
        """How much memory this takes: the copy, and patches for receivers that come late."""
        return self.copy_bytes + self._patch_bytes


class History:
    """What a source last gave out, for each plan that its receivers have: as much as the state has, or one plan.

    A plan may have more bytes than the state: weights that are tied here, and are not tied at the receiver. If there is
    no room for one more plan, its receivers get whole parcels, unless another plan has not been used for a while.
    """

    def __init__(self) -> None:
        self._lock, self._has_warned = threading.Lock(), False
        #: By plan: what was given out, and how many receivers with other plans have come since one with this plan.
        self._given: dict[Plan, tuple[GivenOut, int]] = {}

    def of(self, plan: Plan, parcels: Parcels, most_bytes: int) -> GivenOut | None:
        """What was given out by a plan, to another receiver with this plan; None if there is no room for it."""
        with self._lock:
            given, _ = self._given.pop(plan, (None, 0))
            self._given = {other: (one, idle + 1) for other, (one, idle) in self._given.items()}
            if given is None and not self._make_room(plan, parcels.total_bytes, most_bytes):
                if not self._has_warned:
                    logger.warning(
                        "transfuse: history=1 has no room for one more kind of receiver (other shards or types): "
                        "such receivers get whole blocks until another kind has not come for a while"
                    )
                self._has_warned = True
                return None
            given = given or GivenOut(parcels)
            self._given[plan] = given, 0
            return given

    def _make_room(self, plan: Plan, nbytes: int, most_bytes: int) -> bool:
        stay = {
            other: (given, idle)
            for other, (given, idle) in self._given.items()
            if idle <= MOST_IDLE and other[0] == plan[0]
        }
        held = sum(given.copy_bytes for given, _ in stay.values())
        if (held or nbytes > MOST_TIMES * most_bytes) and held + nbytes > most_bytes:
            return False
        self._given = stay
        return True

    @property
    def nbytes(self) -> int:
        """How much memory this takes."""
        with self._lock:
            return sum(given.nbytes for given, _ in self._given.values())
