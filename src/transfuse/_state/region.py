"""Regions: bytes of a storage, in strides. Pure arithmetic, no tensors.

All data that moves is made of regions. A region is read and written in its *linear order*: row-major over its
dimensions, which :func:`canonical` sorts from the largest stride to the smallest. A range of that order is a piece of
the region.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

#: Overlapping regions are split into exact byte ranges, up to this many runs in a plan: each run is an object and a
#: copy.
MAX_RUNS = 1 << 13


class Region(NamedTuple):
    """A region that starts at byte ``start`` of its storage; sizes and strides count items of ``item`` bytes."""

    start: int
    item: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.item * prod(self.sizes)

    @property
    def end(self) -> int:
        """One past the last byte that the region reaches."""
        if 0 in self.sizes:
            return self.start
        return self.start + self.item * (1 + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True)))

    @property
    def contiguous(self) -> bool:
        """Whether linear order is memory order without gaps."""
        return not self.sizes or (len(self.sizes) == 1 and self.strides[0] == 1)


class Form(NamedTuple):
    """How a tensor's dimensions map to a region: ``order`` lists the dimensions that the region has, from the largest
    stride to the smallest; ``repeated`` those of stride 0.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    order: tuple[int, ...]
    repeated: tuple[int, ...]
    overlapping: bool


def canonical(sizes: Sequence[int], strides: Sequence[int]) -> Form:
    """Sort dimensions by stride, drop those of size 1 or stride 0, and merge neighbours that are one run of memory."""
    if 0 in sizes:
        return Form((0,), (1,), tuple(range(len(sizes))), (), False)
    counted = [d for d in range(len(sizes)) if sizes[d] != 1 and strides[d] != 0]
    order = tuple(sorted(counted, key=lambda d: (-strides[d], d)))
    repeated = tuple(d for d in range(len(sizes)) if sizes[d] != 1 and strides[d] == 0)
    merged: list[tuple[int, int]] = []
    for d in order:
        if merged and merged[-1][1] == sizes[d] * strides[d]:
            merged[-1] = (merged[-1][0] * sizes[d], strides[d])
        else:
            merged.append((sizes[d], strides[d]))
    overlapping, reach = False, 1
    for size, stride in reversed(merged):
        overlapping = overlapping or stride < reach
        reach += (size - 1) * stride
    return Form(tuple(n for n, _ in merged), tuple(s for _, s in merged), order, repeated, overlapping)


def crowds(space: Ints, start: Ints, end: Ints) -> list[Ints]:
    """Groups of spans that overlap within one space (a storage, a device). No span may be empty.

    Each group lists the row numbers of two or more spans, in the order of their starts.
    """
    if len(space) < 2:
        return []
    if (space == space[0]).all():
        order = np.argsort(start, kind="stable")
        low, high = start[order], end[order]
    else:
        order = np.lexsort((start, space))
        low, high = (ranks[order] for ranks in _ranks(space, start, end))
    begins = np.ones(len(order) + 1, dtype=bool)
    begins[1:-1] = low[1:] >= np.maximum.accumulate(high)[:-1]
    first = np.flatnonzero(begins)
    many = np.flatnonzero(np.diff(first) > 1)
    groups = [order[a:b] for a, b in zip(first[many].tolist(), first[many + 1].tolist(), strict=True)]
    return [group[np.lexsort((group, end[group], start[group]))] for group in groups]


def _ranks(space: Ints, start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Starts and ends as ranks in one common order, in which all points of a space come before those of the next."""
    spaces, points = np.concatenate([space, space]), np.concatenate([start, end])
    order = np.lexsort((points, spaces))
    step = (np.diff(spaces[order]) != 0) | (np.diff(points[order]) != 0)
    ranks = np.zeros(len(order), dtype=np.int64)
    ranks[order[1:]] = np.cumsum(step)
    return ranks[: len(space)], ranks[len(space) :]


def blocks(sizes: Sequence[int], low: int, high: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the range ``[low, high)`` of linear order into rectangular blocks: (first index, sizes) of each, in order."""
    if high <= low:
        return
    if len(sizes) <= 1:
        yield ((low,), (high - low,)) if sizes else ((), ())
        return
    row = prod(sizes[1:])
    first, skipped = divmod(low, row)
    if skipped:
        stop = min(high, (first + 1) * row)
        for index, shape in blocks(sizes[1:], skipped, stop - first * row):
            yield (first, *index), (1, *shape)
        first, low = first + 1, stop
    last, rest = divmod(high, row)
    if last > first:
        yield (first, *[0] * (len(sizes) - 1)), (last - first, *sizes[1:])
    if rest and high > low:
        for index, shape in blocks(sizes[1:], 0, rest):
            yield (last, *index), (1, *shape)


class Budget:
    """How many runs of memory the covers of one plan may still be split into."""

    def __init__(self) -> None:
        self._left = MAX_RUNS

    def take(self, runs: int) -> bool:
        if runs > self._left:
            return False
        self._left -= runs
        return True


def cover(tensors: Sequence[tuple[int, Region, bool]], budget: Budget) -> list[tuple[Region, tuple[int, ...]]]:
    """Regions that hold every element of these tensors of one storage, each element once.

    ``tensors`` are (number, region, whether it overlaps itself). A region that is exactly the region of some tensors
    comes with their numbers. A region made by splitting overlapping tensors comes with no numbers.
    """
    members: dict[Region, list[int]] = {}
    tangled_alone = set()
    for number, region, overlapping in tensors:
        if region.nbytes:
            members.setdefault(region, []).append(number)
            if overlapping:
                tangled_alone.add(region)
    result: list[tuple[Region, tuple[int, ...]]] = []
    group: list[Region] = []
    reach = -1
    for region in sorted(members):
        if group and region.start >= reach:
            result += _settle(group, members, tangled_alone, budget)
            group = []
        group.append(region)
        reach = max(reach, region.end)
    if group:
        result += _settle(group, members, tangled_alone, budget)
    return result


def _settle(
    group: list[Region], members: dict[Region, list[int]], tangled_alone: set[Region], budget: Budget
) -> list[tuple[Region, tuple[int, ...]]]:
    """Cover one group of regions whose spans overlap."""
    if len(group) == 1 and group[0] not in tangled_alone:
        return [(group[0], tuple(members[group[0]]))]
    ranges = _merge([(region.start, region.end) for region in group if region.contiguous])
    loose = [b for b in group if not b.contiguous and not any(lo <= b.start and b.end <= hi for lo, hi in ranges)]
    count = sum(prod(region.sizes[:-1]) if region.strides[-1] == 1 else prod(region.sizes) for region in loose)
    if not budget.take(count):
        # Too fine to split. Two exact covers are left: every region by itself, which sends some bytes more than once,
        # or everything from the first byte to the last. Take the one that moves fewer bytes.
        hull = Region(group[0].start, 1, (max(region.end for region in group) - group[0].start,), (1,))
        if sum(region.nbytes for region in group) <= hull.nbytes:
            return [(region, tuple(members[region])) for region in group]
        return [(hull, ())]
    for region in loose:
        ranges += runs(region)
    return [(region, ()) for region in _regular(_merge(ranges))]


def runs(region: Region) -> list[tuple[int, int]]:
    """The byte ranges of a region, one for each run of memory."""
    sizes, strides, run = list(region.sizes), list(region.strides), region.item
    if strides and strides[-1] == 1:
        run *= sizes.pop()
        strides.pop()
    starts = np.array([region.start], dtype=np.int64)
    for size, stride in zip(sizes, strides, strict=True):
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * (stride * region.item)).ravel()
    return [(int(start), int(start) + run) for start in starts]


def _merge(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def _regular(ranges: list[tuple[int, int]]) -> list[Region]:
    """Byte ranges as regions; ranges of equal size at equal distances become one region."""
    if len(ranges) > 2:
        (start, end), (second, _) = ranges[:2]
        step, width = second - start, end - start
        if all(lo == start + i * step and hi - lo == width for i, (lo, hi) in enumerate(ranges)):
            return [Region(start, 1, (len(ranges), width), (step, 1))]
    return [Region(low, 1, (high - low,), (1,)) for low, high in ranges]
