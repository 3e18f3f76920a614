"""Accounts: which leaves of a described state have arrived, and which have not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any

import numpy as np

from transfuse.plan.parcels import Parcels
from transfuse.state.manifest import Manifest
from transfuse.state.tensors import Bools

__all__ = ["Paths", "account"]


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
