"""What a failed receive leaves behind: parcels that have arrived and need not come again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from transfuse.manifest import Manifest, Wire
from transfuse.parcels import Parcels
from transfuse.parts import Bools
from transfuse.target import Fresh

__all__ = ["Partial", "account"]


@dataclass(eq=False)
class Partial:
    """Part of a state, received. Give it to ``recv_checkpoint(…, resume=…)``, and drop it afterwards."""

    step: int | None
    manifest: Wire
    parcel_bytes: int
    apart: list[int]
    parts: list[int]
    #: Which parcels have arrived, how many bytes each has, and the digest of those that have.
    landed: Bools
    nbytes: npt.NDArray[np.int64]
    digests: npt.NDArray[np.uint64]
    #: Where those lie that have no target. The others lie in the targets.
    memory: Fresh
    #: Target leaves that are half-written.
    torn: tuple[str, ...]
    #: Whether a receive has gone on from here: the memory is then that one's.
    spent: bool = False

    @property
    def received_bytes(self) -> int:
        return int(self.nbytes[self.landed].sum())

    def __repr__(self) -> str:
        return f"Partial(step={self.step}, {self.received_bytes} of {int(self.nbytes.sum())} bytes)"


class Paths(Sequence[str]):
    """Paths of some leaves, each made when somebody reads it."""

    def __init__(self, manifest: Manifest, chosen: Bools) -> None:
        self._paths = manifest.paths
        self._chosen = chosen
        self._numbers = np.flatnonzero(chosen)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        return compress(self._paths, self._chosen.tolist())

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self._paths[int(number)] for number in self._numbers[i]]
        return self._paths[int(self._numbers[i])]

    def __reduce__(self) -> tuple[object, ...]:
        return tuple, (list(self),)


def account(
    manifest: Manifest, cut: Parcels, landed: Bools, apart: Sequence[int], wanted: Sequence[int]
) -> tuple[Sequence[str], Sequence[str]]:
    """Paths of the leaves of which everything has landed, and of all others.

    Of the storages ``apart`` only the ``wanted`` parts were asked for; the others see the same memory.
    """
    boxes, parts = cut.boxes, manifest.parts
    late = ~landed
    # Boxes of parcels that have not landed: each parcel is a run of boxes.
    edges = np.zeros(len(boxes) + 1, dtype=np.int64)
    np.add.at(edges, cut.first[late], 1)
    np.add.at(edges, (cut.first + cut.count)[late], -1)
    open_boxes = np.flatnonzero(np.cumsum(edges)[:-1] > 0)
    missing = np.zeros(len(parts), dtype=bool)
    members = boxes.part[open_boxes]
    missing[members[members >= 0]] = True
    # A box of tangled parts, and memory of which a part stands for others.
    tangled = np.isin(parts.storage, boxes.storage[open_boxes[members < 0]])
    missing |= tangled
    if apart:
        unasked = np.isin(parts.storage, np.intersect1d(boxes.storage[open_boxes], np.array(apart, dtype=np.int64)))
        unasked[np.array(wanted, dtype=np.int64)] = False
        missing |= unasked
    for box in open_boxes.tolist() if boxes.also else ():
        missing[list(boxes.also.get(box, ()))] = True
    leaves = np.zeros(len(manifest), dtype=bool)
    leaves[manifest.leaves_of(np.flatnonzero(missing))] = True
    return Paths(manifest, ~leaves), Paths(manifest, leaves)
