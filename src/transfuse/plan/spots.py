"""Spots: the tensors here in which blocks land, what is needed to fill them, and that no two of them collide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from transfuse.state.leaves import dense
from transfuse.state.leaves.codec import Coordinate
from transfuse.state.leaves.dense import Signs
from transfuse.state.leaves.layout import Block, intersect
from transfuse.state.region import canonical, crowds

__all__ = ["Collision", "Global", "Need", "Spot", "find_collision", "has_memory"]

#: Targets of different layout that interleave in memory are compared element by element up to this many.
MAX_ELEMENTS = 1 << 20


@dataclass(eq=False)
class Spot:
    """A tensor that blocks land in: a target's, or a fresh one."""

    tensor: torch.Tensor
    #: The number of the target leaf, or ~ the leaf of the first cohort that has none.
    target: int
    signs: Signs | None = None
    #: As what items arrive, if they are converted here.
    wire: torch.dtype | None = None
    #: With ``atomic``, what is written in the end.
    final: torch.Tensor | None = None
    item: int = field(init=False)
    strides: tuple[int, ...] = field(init=False)
    offset: int = field(init=False)

    def __post_init__(self) -> None:
        self.item, self.strides = self.tensor.element_size(), self.tensor.stride()
        self.offset = dense.offset_of(self.tensor)

    @cached_property
    def address(self) -> int:
        """Of its storage, in main memory; otherwise 0."""
        return self.tensor.untyped_storage().data_ptr() if self.tensor.device.type == "cpu" else 0

    @property
    def fresh(self) -> bool:
        return self.target < 0

    @property
    def own(self) -> torch.Tensor:
        """What is written in the end."""
        return self.tensor if self.final is None else self.final

    def is_same(self, other: Spot) -> bool:
        """Whether another spot is the same memory, and gets the same bytes for the same block."""
        a, b = self.own, other.own
        return (
            a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0
            and (a.storage_offset(), a.stride(), a.dtype) == (b.storage_offset(), b.stride(), b.dtype)
            and (self.signs, self.wire) == (other.signs, other.wire)
        )


class Global(NamedTuple):
    """A tensor of the sources' state: its leaf in each cohort that has it, and which of the leaf's tensors it is."""

    leaves: tuple[tuple[int, int], ...]
    number: int


class Need(NamedTuple):
    """A block of a tensor that is needed here, as what it travels, and where it lands."""

    tensor: Global
    block: Block
    #: None: as the source has it.
    wire: torch.dtype | None
    item: int
    #: Only sources in this place of the mesh have the right values (of a Partial DTensor).
    place: Coordinate
    #: Spots, and where in each the block begins.
    spots: list[tuple[Spot, tuple[int, ...]]]


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's storage is there: FSDP frees those of parameters that are not gathered."""
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return bool((tensor.storage_offset() + reach) * tensor.element_size() <= tensor.untyped_storage().nbytes())


class Collision(NamedTuple):
    """Targets of which one element would get two different source elements: one that folds, or two that overlap."""

    one: int
    other: int | None


class _Row(NamedTuple):
    tensor: torch.Tensor
    target: int
    block: Block


def find_collision(needs: Sequence[Need]) -> Collision | None:
    """The first two targets that share memory and get different elements, if there are any."""
    rows = [
        _Row(spot.own, spot.target, Block(at, need.block.sizes))
        for need in needs
        for spot, at in need.spots
        if not spot.fresh
    ]
    if not rows:
        return None
    folded = next((row for row in rows if _is_folded(row)), None)
    if folded is not None:
        return Collision(folded.target, None)
    names: dict[torch.device, int] = {}
    space = np.array([names.setdefault(row.tensor.device, len(names)) for row in rows], dtype=np.int64)
    start, end = np.array([_span(row) for row in rows], dtype=np.int64).T
    for crowd in crowds(space, start, end):
        members = [rows[i] for i in crowd.tolist()]
        if not _are_apart(members):
            return Collision(members[0].target, members[1].target)
    return None


def _is_folded(row: _Row) -> bool:
    sizes, strides = row.block.sizes, row.tensor.stride()
    if row.tensor.is_contiguous():
        return False
    form = canonical(sizes, strides)
    return bool(form.repeated) or form.overlapping


def _span(row: _Row) -> tuple[int, int]:
    """The bytes that a block of a tensor reaches over."""
    tensor, (start, sizes) = row.tensor, row.block
    item, strides = tensor.element_size(), tensor.stride()
    low = dense.start_of(tensor) + item * sum(a * s for a, s in zip(start, strides, strict=True))
    return low, low + item * (1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)))


def _are_apart(rows: Sequence[_Row]) -> bool:
    """Whether blocks whose reaches overlap have no element in common."""
    layouts = {
        (row.tensor.untyped_storage().data_ptr(), row.tensor.storage_offset(), row.tensor.stride()) for row in rows
    }
    if len(layouts) == 1:  # Side by side in one tensor.
        return _disjoint([row.block for row in rows])
    shifted = _in_one_frame(rows)
    if shifted is not None:
        return _disjoint(shifted)
    if sum(row.block.numel for row in rows) > MAX_ELEMENTS:
        return False
    places = np.concatenate([_places(row) for row in rows])
    return len(np.unique(places)) == len(places)


def _disjoint(blocks: list[Block]) -> bool:
    """Whether no two blocks have an element in common."""
    for d in range(len(blocks[0].start)):
        # Mostly they follow each other along one dimension.
        if len({(b.start[:d], b.start[d + 1 :], b.sizes[:d], b.sizes[d + 1 :]) for b in blocks}) == 1:
            ordered = sorted(blocks, key=lambda block: block.start[d])
            return all(a.start[d] + a.sizes[d] <= b.start[d] for a, b in pairwise(ordered))
    return not any(intersect(a, b) for i, a in enumerate(blocks) for b in blocks[i + 1 :])


def _in_one_frame(rows: Sequence[_Row]) -> list[Block] | None:
    """Blocks of views of one tensor (columns of a fused weight) as blocks of it, if that is what they are."""
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
                return None  # It reaches over into the next row.
            room = strides[d]
        if rest:
            return None
        result.append(Block(tuple(start), row.block.sizes))
    return result


def _places(row: _Row) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The address of every element of a block."""
    low, _ = _span(row)
    place = np.array([low], dtype=np.int64)
    for n, s in zip(row.block.sizes, row.tensor.stride(), strict=True):
        place = (place[:, None] + np.arange(n) * (s * row.tensor.element_size())).ravel()
    return place
