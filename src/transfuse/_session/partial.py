"""Partial: the parcels that a failed receive has, so that a later receive need not fetch them again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transfuse._memory.fresh import FreshMemory
from transfuse._state.tensors import Bools


@dataclass(eq=False)
class Partial:
    """The part of a state that a failed receive has. Pass it to ``recv_checkpoint(…, resume=…)`` once, then drop it."""

    step: int | None
    #: The likeness that the sources' offers had.
    likeness: bytes
    parcel_bytes: int
    #: Identifies the plan: what lands where, in which parcels.
    fingerprint: int
    #: Which parcels have arrived, and how many bytes each has.
    landed: Bools
    nbytes: npt.NDArray[np.int64]
    #: The memory of parcels that have no target or landed in a copy (``atomic``). All others lie in the targets.
    memory: FreshMemory
    #: Paths of the target leaves that are half-written.
    torn: tuple[str, ...]
    #: Whether a receive has resumed from this: ``memory`` then belongs to that receive.
    spent: bool = False

    @property
    def received_bytes(self) -> int:
        return int(self.nbytes[self.landed].sum())

    def __repr__(self) -> str:
        return f"Partial(step={self.step}, {self.received_bytes} of {int(self.nbytes.sum())} bytes)"
