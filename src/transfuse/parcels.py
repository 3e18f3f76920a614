"""Parcels: in what pieces boxes travel. Pure; both ends derive the same sequence, so that no parcel has a header.

A parcel is either several small boxes one after another, each at a multiple of its item size, or a range of one
large box. A burst is a run of parcels after which both ends exchange one record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash

from transfuse.manifest import Ints
from transfuse.plan import Boxes

__all__ = ["Parcels", "Piece", "bursts", "cut", "fingerprint"]


class Piece(NamedTuple):
    """Bytes ``[low, high)`` of a box in its linear order, at byte ``position`` of the parcel."""

    box: int
    low: int
    high: int
    position: int


@dataclass(eq=False)
class Parcels:
    """Columns of all parcels: boxes ``first … first + count``, or bytes from ``low`` of a single box."""

    boxes: Boxes
    first: Ints
    count: Ints
    low: Ints
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.first)

    @property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum())

    def pieces(self, parcel: int) -> Iterator[Piece]:
        first, count = int(self.first[parcel]), int(self.count[parcel])
        if count == 1:
            low = int(self.low[parcel])
            yield Piece(first, low, low + int(self.nbytes[parcel]), 0)
            return
        position = 0
        sizes = self.boxes.nbytes[first : first + count].tolist()
        items = self.boxes.item[first : first + count].tolist()
        for box, (size, item) in enumerate(zip(sizes, items, strict=True), first):
            position += -position % item
            yield Piece(box, 0, size, position)
            position += size


def cut(boxes: Boxes, parcel_bytes: int) -> Parcels:
    """Cut boxes into parcels of at most ``parcel_bytes``. A box of an eighth of that or more is not packed."""
    columns: list[tuple[int, int, int, int]] = []
    alone = parcel_bytes // 8
    first, position = 0, 0
    for i, (size, item) in enumerate(zip(boxes.nbytes.tolist(), boxes.item.tolist(), strict=True)):
        aligned = position + -position % item
        if size >= alone or aligned + size > parcel_bytes:
            if position:
                columns.append((first, i - first, 0, position))
            first, position, aligned = i, 0, 0
        if size >= alone:
            columns += [(i, 1, low, min(parcel_bytes, size - low)) for low in range(0, size, parcel_bytes)]
            first = i + 1
        else:
            position = aligned + size
    if position:
        columns.append((first, len(boxes) - first, 0, position))
    table = np.array(columns, dtype=np.int64).reshape(-1, 4)
    return Parcels(boxes, *(np.ascontiguousarray(table[:, i]) for i in range(4)))


def bursts(parcels: Parcels, numbers: Sequence[int], burst_bytes: int) -> list[list[int]]:
    """Group the parcels with these numbers into bursts of at most ``burst_bytes`` (one parcel at least)."""
    result: list[list[int]] = []
    room = 0
    for number in numbers:
        size = int(parcels.nbytes[number])
        if not result or size > room:
            result.append([])
            room = burst_bytes
        result[-1].append(number)
        room -= size
    return result


def fingerprint(parcels: Parcels) -> int:
    """A digest of what travels in which pieces. Both ends must arrive at the same one."""
    digest = xxhash.xxh3_64()
    boxes = parcels.boxes
    for column in (boxes.storage, boxes.start, boxes.nbytes, boxes.item, parcels.first, parcels.count, parcels.low):
        digest.update(column.astype("<i8").tobytes())
    for number in sorted(boxes.strided):
        digest.update(repr((number, tuple(boxes.strided[number]))).encode())
    return digest.intdigest()
