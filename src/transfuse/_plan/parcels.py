"""Parcels: the units in which regions travel. Pure: both ends derive the same sequence, so no parcel has a header.

A parcel is either several small regions of one space, one after another, each aligned to the largest item among them,
or a range of one large region. A burst is a run of parcels, followed by a record in each direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from transfuse._plan.regions import Regions
from transfuse._state.region import Ints
from transfuse._state.tensors import Bools


class Most(NamedTuple):
    """The largest burst: bytes in all, and bytes of parcels that pass through staging at the source."""

    nbytes: int
    staged_bytes: int


class Extent(NamedTuple):
    """Bytes ``[low, high)`` of a region in its linear order, at byte ``position`` of the parcel."""

    region: int
    low: int
    high: int
    position: int


class RegionRanges(NamedTuple):
    """Columns of ranges of regions: the parcel of each, its region, and the bytes from ``low`` on."""

    parcel: Ints
    region: Ints
    low: Ints
    nbytes: Ints


@dataclass(eq=False)
class Parcels:
    """Columns of all parcels. A parcel is ``count`` regions from ``first`` on, or the bytes from ``low`` on of one."""

    regions: Regions
    first: Ints
    count: Ints
    low: Ints
    nbytes: Ints
    #: For each region, where in its parcel it begins; 0 for a region that is cut into several parcels.
    position: Ints
    #: Whether both ends treat every parcel as staged, because the receiver does not know the source's memory layout.
    all_staged: bool = False

    def __len__(self) -> int:
        return len(self.first)

    @cached_property
    def staged(self) -> npt.NDArray[np.bool_]:
        """Which parcels are not a single run of memory at the source, and so pass through staging."""
        if self.all_staged:
            return np.ones(len(self), dtype=bool)
        strided = np.zeros(len(self.regions), dtype=bool)
        strided[list(self.regions.strided)] = True
        return (self.count > 1) | strided[self.first]

    @cached_property
    def payload(self) -> Ints:
        """For each parcel, how many of its bytes are data: regions of different item sizes may have gaps between."""
        before = np.concatenate([[0], np.cumsum(self.regions.nbytes)])
        return np.where(self.count > 1, before[self.first + self.count] - before[self.first], self.nbytes)

    @property
    def total_bytes(self) -> int:
        return int(self.payload.sum())

    def of_all_regions(self, good: Bools) -> Bools:
        """For each parcel, whether all its regions are good."""
        bad = np.concatenate([[0], np.cumsum(~good)]).astype(np.int64)
        result: Bools = bad[self.first + self.count] == bad[self.first]
        return result

    def ranges(self, chosen: Ints) -> RegionRanges:
        """The ranges of regions of which these parcels consist."""
        count = self.count[chosen]
        parcel = np.repeat(chosen, count)
        region = np.repeat(self.first[chosen] - np.cumsum(count) + count, count) + np.arange(int(count.sum()))
        # A parcel of several regions has them whole. A parcel of one region may be a range of it.
        alone = self.count[parcel] == 1
        low = np.where(alone, self.low[parcel], 0)
        return RegionRanges(parcel, region, low, np.where(alone, self.nbytes[parcel], self.regions.nbytes[region]))

    def columns(self, parcel: int) -> tuple[slice, Ints]:
        """The regions of a parcel, and the position in the parcel at which each begins.

        A parcel of several regions has all of each. A parcel of one region has the bytes of it from ``low`` on, as many
        as the parcel is long.
        """
        chosen = slice(int(self.first[parcel]), int(self.first[parcel] + self.count[parcel]))
        return chosen, self.position[chosen]

    def extents(self, parcel: int) -> Iterator[Extent]:
        chosen, positions = self.columns(parcel)
        if chosen.stop - chosen.start == 1:
            low = int(self.low[parcel])
            yield Extent(chosen.start, low, low + int(self.nbytes[parcel]), 0)
            return
        sizes = self.regions.nbytes[chosen].tolist()
        for region, (size, position) in enumerate(zip(sizes, positions.tolist(), strict=True), chosen.start):
            yield Extent(region, 0, size, position)


def cut(regions: Regions, parcel_bytes: int, *, all_staged: bool = False) -> Parcels:
    """Cut regions into parcels of at most ``parcel_bytes``. A region of an eighth of that or more is not packed.

    The number of bytes before a small region decides which parcel the region goes into: a parcel takes the regions that
    begin within its first seven eighths. So all regions are placed at once, in columns.
    """
    n, alone = len(regions), parcel_bytes // 8
    large = regions.nbytes >= alone
    # Runs of small regions of one space. Each large region is a run by itself.
    begins = np.ones(n, dtype=bool)
    begins[1:] = large[1:] | large[:-1] | (np.diff(regions.space) != 0)
    run, heads = np.cumsum(begins) - 1, np.flatnonzero(begins)
    step = np.maximum.reduceat(regions.item, heads)[run] if n else regions.item
    space = np.where(large, 0, -(-regions.nbytes // step) * step)
    before = np.cumsum(space) - space
    begins[1:] |= np.diff((before - before[heads][run]) // (parcel_bytes - alone)) != 0
    first = np.flatnonzero(begins)
    position = before - before[first][np.cumsum(begins) - 1]

    count = np.diff(first, append=n)
    last = first + count - 1
    nbytes = position[last] + regions.nbytes[last]
    counts = np.where(large[first], -(-nbytes // parcel_bytes), 1)
    which = np.repeat(np.arange(len(first)), counts)
    low = (np.arange(len(which)) - (np.cumsum(counts) - counts)[which]) * parcel_bytes
    nbytes = np.minimum(nbytes[which] - low, parcel_bytes)
    return Parcels(regions, first[which], count[which], low, nbytes, position, all_staged=all_staged)


def bursts(parcels: Parcels, numbers: Sequence[int], most: Most) -> list[list[int]]:
    """Group the parcels with these numbers into bursts of at least one parcel each."""
    result: list[list[int]] = []
    room = staged_room = 0
    chosen = np.asarray(numbers, dtype=np.int64)
    sizes, staged = parcels.nbytes[chosen], parcels.staged[chosen]
    for number, size, aside in zip(numbers, sizes.tolist(), np.where(staged, sizes, 0).tolist(), strict=True):
        if not result or size > room or aside > staged_room:
            result.append([])
            room, staged_room = most
        result[-1].append(number)
        room -= size
        staged_room -= aside
    return result


def fingerprint(parcels: Parcels, picked: int | None = None) -> int:
    """A digest of the regions and how they are cut into parcels. Both ends must compute the same digest.

    ``picked`` is the digest of the wanted blocks, if the regions come from wanted blocks: then only the source knows
    where the regions lie, and their addresses are left out.
    """
    digest = xxhash.xxh3_64()
    regions = parcels.regions
    for column in (regions.nbytes, regions.item, parcels.first, parcels.count, parcels.low):
        digest.update(column.astype("<i8").tobytes())
    if picked is not None:
        digest.update(picked.to_bytes(8, "little"))
        return digest.intdigest()
    for column in (regions.storage, regions.start):
        digest.update(column.astype("<i8").tobytes())
    for number in sorted(regions.strided):
        digest.update(repr((number, tuple(regions.strided[number]))).encode())
    return digest.intdigest()
