"""Collisions: targets in which one element would get two different source elements. Such targets are refused.

Callers find targets whose spans of memory overlap (``region.crowds``, in columns), and pass these to :func:`clash`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from transfuse._state.leaves import dense
from transfuse._state.leaves.layout import Box, intersect
from transfuse._state.region import Region, canonical, crowds, runs

#: Targets that interleave in memory are compared run by run, up to this many runs. Beyond that they are refused.
MAX_RUNS = 1 << 20


class Written(NamedTuple):
    """A block of a target tensor, and the source of what will be written into it."""

    tensor: torch.Tensor
    block: Box
    #: The number by which the caller knows the target.
    owner: int
    #: Identifies the source elements: blocks of the same memory with equal sources get the same bytes.
    source: Hashable
    #: Targets with equal images lie in memory exactly as their sources lie in their storage. So targets overlap only
    #: where the sources overlap in the same way. None if a target does not lie as its source does.
    image: Hashable | None = None
    #: Dimensions along which the source repeats elements.
    repeated: tuple[int, ...] = ()

    @property
    def start(self) -> int:
        """The address of the block's first element."""
        strides = self.tensor.stride()
        steps = sum(a * s for a, s in zip(self.block.start, strides, strict=True))
        return dense.start_of(self.tensor) + self.tensor.element_size() * steps

    @property
    def end(self) -> int:
        """One past the address of the block's last byte."""
        reach = 1 + sum((n - 1) * s for n, s in zip(self.block.sizes, self.tensor.stride(), strict=True))
        return self.start + self.tensor.element_size() * reach

    @property
    def layout(self) -> Hashable:
        tensor = self.tensor
        return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.stride(), tensor.dtype


class Collision(NamedTuple):
    """One target that collides with itself (``other`` is None), two that collide, or one that cannot be checked."""

    one: Written
    other: Written | None = None
    too_fine: bool = False

    def text(self, path: Callable[[int], str]) -> str:
        """A line for an error; ``path`` gives the path of an owner."""
        one = path(self.one.owner)
        if self.too_fine:
            return f"{one}: its target interleaves too finely with others to be checked; give it memory of its own"
        if self.other is None:
            return (
                f"{one}: elements of the target share memory (strides {self.one.tensor.stride()}) and would each get "
                "several different source elements; give it a target with memory of its own"
            )
        return (
            f"{one} and {path(self.other.owner)}: their targets share memory, but the source holds different elements "
            "for them; untie the targets, or tie the source"
        )


def find_collision(rows: Sequence[Written]) -> Collision | None:
    """The first collision among these blocks; None if there is none."""
    folded = next((row for row in rows if folds(row)), None)
    if folded is not None:
        return Collision(folded)
    names: dict[torch.device, int] = {}
    space = np.array([names.setdefault(row.tensor.device, len(names)) for row in rows], dtype=np.int64)
    start = np.array([row.start for row in rows], dtype=np.int64)
    end = np.array([row.end for row in rows], dtype=np.int64)
    found = (clash([rows[i] for i in crowd.tolist()]) for crowd in crowds(space, start, end))
    return next((collision for collision in found if collision is not None), None)


def folds(row: Written) -> bool:
    """Whether two elements of one target share memory, but their source elements do not."""
    if row.tensor.is_contiguous() or row.image is not None:
        return False
    form = canonical(row.block.sizes, row.tensor.stride())
    return bool(set(form.repeated) - set(row.repeated)) or form.overlapping


def clash(crowd: Sequence[Written]) -> Collision | None:
    """The first collision among targets whose spans of memory overlap."""
    images = {row.image for row in crowd}
    if len(images) == 1 and None not in images:
        return None
    rows = list({(row.source, row.layout, row.block): row for row in reversed(crowd)}.values())[::-1]
    if len(rows) < 2:
        return None
    # Most lie side by side in one tensor, or are columns of one fused weight. Then comparing blocks is enough.
    blocks = [row.block for row in rows] if len({row.layout for row in rows}) == 1 else _in_one_frame(rows)
    if blocks is None:
        return _compare_runs(rows)
    both = _overlap(blocks)
    return None if both is None else Collision(rows[both[0]], rows[both[1]])


def _overlap(blocks: Sequence[Box]) -> tuple[int, int] | None:
    """Two blocks of one tensor that have an element in common."""
    numbers = range(len(blocks))
    for d in range(len(blocks[0].start)):
        if len({(b.start[:d], b.start[d + 1 :], b.sizes[:d], b.sizes[d + 1 :]) for b in blocks}) == 1:
            # The blocks follow each other along dimension d.
            ordered = sorted(numbers, key=lambda i: blocks[i].start[d])
            pairs = (
                (i, j) for i, j in pairwise(ordered) if blocks[i].start[d] + blocks[i].sizes[d] > blocks[j].start[d]
            )
            return next(pairs, None)
    both = ((i, j) for i in numbers for j in numbers[i + 1 :] if intersect(blocks[i], blocks[j]))
    return next(both, None)


def _in_one_frame(rows: Sequence[Written]) -> list[Box] | None:
    """If all rows are views of one tensor (columns of a fused weight): their blocks as blocks of that tensor."""
    strides = rows[0].tensor.stride()
    if len({(row.tensor.untyped_storage().data_ptr(), row.tensor.stride(), row.tensor.dtype) for row in rows}) > 1:
        return None
    base = min(dense.offset_of(row.tensor) for row in rows)
    order = sorted(range(len(strides)), key=lambda d: -strides[d])
    result = []
    for row in rows:
        rest, start = dense.offset_of(row.tensor) - base, list(row.block.start)
        room = None
        for d in order:
            if strides[d] == 0:
                return None
            steps, rest = divmod(rest, strides[d])
            start[d] += steps
            if room is not None and (start[d] + row.block.sizes[d]) * strides[d] > room:
                return None  # The block wraps over into the next row.
            room = strides[d]
        if rest:
            return None
        result.append(Box(tuple(start), row.block.sizes))
    return result


def _compare_runs(rows: Sequence[Written]) -> Collision | None:
    """Find a collision by comparing runs of memory, for targets of any layout."""
    found: list[tuple[int, int, int]] = []
    for number, row in enumerate(rows):
        form = canonical(row.block.sizes, row.tensor.stride())
        if len(found) + prod(form.sizes) // (form.sizes[-1] if form.strides[-1:] == (1,) else 1) > MAX_RUNS:
            return Collision(row, too_fine=True)
        region = Region(row.start, row.tensor.element_size(), form.sizes, form.strides)
        found += [(low, high, number) for low, high in runs(region)]
    found.sort()
    # The end of the run that reaches furthest so far, and the row that it belongs to.
    furthest, owner = 0, -1
    for low, high, number in found:
        if low < furthest and number != owner:
            return Collision(rows[owner], rows[number])
        if high > furthest:
            furthest, owner = high, number
    return None
