"""What a failed receive leaves behind: parcels that have arrived and need not come again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transfuse.memory.arena import FreshMemory
from transfuse.state.tensors import Bools

__all__ = ["Partial"]


@dataclass(eq=False)
class Partial:
    """Part of a state, received. Give it to ``recv_checkpoint(…, resume=…)``, and drop it afterwards."""

    step: int | None
    #: What the sources' descriptions have in common.
    likeness: bytes
    parcel_bytes: int
    #: Of what lands where, in which parcels.
    fingerprint: int
    #: Which parcels have arrived, and how many bytes each has.
    landed: Bools
    nbytes: npt.NDArray[np.int64]
    #: Where those lie that have no target, or that lay aside (``atomic``). The others lie in the targets.
    memory: FreshMemory
    #: Target leaves that are half-written.
    torn: tuple[str, ...]
    #: Whether a receive has gone on from here: the memory is then that one's.
    spent: bool = False

    @property
    def received_bytes(self) -> int:
        return int(self.nbytes[self.landed].sum())

    def __repr__(self) -> str:
        return f"Partial(step={self.step}, {self.received_bytes} of {int(self.nbytes.sum())} bytes)"
