"""Which regions travel, and in which order. Pure: both ends derive the same regions from the manifest and the want."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from transfuse._state.manifest import Manifest
from transfuse._state.region import Budget, Ints, Region, cover


class Cast(NamedTuple):
    """A region whose items travel as another dtype than they have in memory."""

    memory: torch.dtype
    wire: torch.dtype
    #: The region in memory, in items of the dtype ``memory``.
    region: Region


@dataclass(eq=False)
class Regions:
    """Columns of the regions that travel. Most are one run of memory; the others are in ``strided``."""

    storage: Ints
    #: Regions with different numbers here are never packed into one parcel: for example, they are on different devices.
    space: Ints
    start: Ints
    nbytes: Ints
    item: Ints
    #: A tensor whose region this is, in the same linear order; -1 for a region made by splitting overlapping tensors.
    tensor: Ints
    strided: dict[int, Region]
    #: Further tensors with the same region as ``tensor`` (tied weights).
    also: dict[int, tuple[int, ...]]
    #: Regions that the source converts when it packs them. They are in ``strided``, too.
    casts: dict[int, Cast] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.storage)

    def region(self, i: int) -> Region:
        if i in self.strided:
            return self.strided[i]
        item = int(self.item[i])
        return Region(int(self.start[i]), item, (int(self.nbytes[i]) // item,), (1,))

    def members(self, i: int) -> tuple[int, ...]:
        """The tensors whose region this is; none for a region made by splitting overlapping tensors."""
        row = int(self.tensor[i])
        return () if row < 0 else (row, *self.also.get(i, ()))


def lay_out(manifest: Manifest, apart: Sequence[int] = (), wanted: Sequence[int] = ()) -> Regions:
    """The regions of all storages, each element once. Of storages in ``apart``, only those of the ``wanted`` tensors.

    Regions are sorted by device, storage and first byte.
    """
    tensors = manifest.tensors
    # Most tensors are one run of memory that no other tensor shares: the run is the region.
    simple, others = tensors.alone & tensors.contiguous, tensors.numel > 0
    others &= ~simple
    if apart:
        separate = np.isin(tensors.storage, np.array(apart, dtype=np.int64))
        keep = np.zeros(len(tensors), dtype=bool)
        keep[np.array(wanted, dtype=np.int64)] = True
        others = (others | simple & separate) & (keep | ~separate)
        simple &= ~separate
    fast, slow = np.flatnonzero(simple), _slow(manifest, np.flatnonzero(others).tolist(), set(apart))

    def column(quick: Ints, rest: list[int]) -> Ints:
        return np.concatenate([quick, np.array(rest, dtype=np.int64)]) if rest else quick

    storage = column(tensors.storage[fast], [s for s, _, _ in slow])
    device = manifest.storages.device[storage]
    start = column(tensors.start[fast], [region.start for _, region, _ in slow])
    order = np.lexsort((start, storage, device))
    regions = Regions(
        storage=storage[order],
        space=device[order],
        start=start[order],
        nbytes=column(tensors.numel[fast] * tensors.item[fast], [region.nbytes for _, region, _ in slow])[order],
        item=column(tensors.item[fast], [region.item for _, region, _ in slow])[order],
        tensor=column(fast, [members[0] if members else -1 for _, _, members in slow])[order],
        strided={},
        also={},
    )
    for row in np.flatnonzero(order >= len(fast)).tolist():
        _, region, members = slow[order[row] - len(fast)]
        if not region.contiguous:
            regions.strided[row] = region
        if len(members) > 1:
            regions.also[row] = members[1:]
    return regions


def _slow(manifest: Manifest, numbers: list[int], apart: set[int]) -> list[tuple[int, Region, tuple[int, ...]]]:
    """Storage, region and members for tensors that share memory or are strided."""
    tensors = manifest.tensors
    by_storage: dict[int, list[tuple[int, Region, bool]]] = {}
    result: list[tuple[int, Region, tuple[int, ...]]] = []
    for row in numbers:
        storage, (region, overlapping) = int(tensors.storage[row]), tensors.region(row)
        if tensors.alone[row] and not overlapping:
            result.append((storage, region, (row,)))
        else:
            by_storage.setdefault(storage, []).append((row, region, overlapping))
    budget = Budget()
    for storage, regions in by_storage.items():
        if storage in apart:
            same: dict[Region, list[int]] = {}
            for row, region, _ in regions:
                same.setdefault(region, []).append(row)
            result += [(storage, region, tuple(members)) for region, members in same.items()]
        else:
            result += [(storage, region, members) for region, members in cover(regions, budget)]
    return result
