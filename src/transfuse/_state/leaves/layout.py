"""Layouts: which elements of a global tensor each rank holds. Pure arithmetic, no tensors, no process groups.

Along each dimension a rank holds *runs*: (start, length) in the global tensor, one after another in the local tensor.
The rank holds the product of its runs along all dimensions. Only ``_StridedShard`` makes more than one run.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product
from typing import NamedTuple

from transfuse._state.leaves.codec import MeshDescription

Run = tuple[int, int]

#: The most pieces that a dimension may be cut into for all ranks together, and for one rank. A peer chooses the ranks
#: and the split factors.
MAX_SEGMENTS = 1 << 16
MAX_RUNS = 1 << 10
#: The most ranks of a mesh.
MAX_RANKS = 1 << 20


class ShardingStep(NamedTuple):
    """A mesh dimension that shards a tensor dimension: ``split_factor`` pieces, each sharded over ``ranks`` ranks."""

    ranks: int
    split_factor: int = 1


class Box(NamedTuple):
    """A box of a global tensor: where it starts and how large it is along each dimension."""

    start: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        result = 1
        for size in self.sizes:
            result *= size
        return result

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(self.start, self.sizes, strict=True)) + "]"


def intersect(one: Box, other: Box) -> Box | None:
    """The block that two blocks have in common; None if they have no element in common."""
    start = tuple(map(max, one.start, other.start))
    ends = (min(a + n, b + m) for a, n, b, m in zip(one.start, one.sizes, other.start, other.sizes, strict=True))
    sizes = tuple(end - low for end, low in zip(ends, start, strict=True))
    return Box(start, sizes) if all(size > 0 for size in sizes) else None


def numel_of_all(boxes: Iterable[Box]) -> int:
    """How many elements boxes of one tensor have together. An element that several have counts once."""
    filled = [box for box in boxes if box.numel]
    if not filled:
        return 0
    dims = range(len(filled[0].start))
    varying = [d for d in dims if len({(box.start[d], box.sizes[d]) for box in filled}) > 1]
    alike = math.prod(filled[0].sizes[d] for d in dims if d not in varying)
    if not varying:
        return alike
    first, *rest = varying
    spans = sorted((box.start[first], box.start[first] + box.sizes[first], box) for box in filled)
    total = 0
    if not rest:
        reached = 0
        for low, high, _ in spans:
            total += max(0, high - max(low, reached))
            reached = max(reached, high)
        return alike * total
    for low, high in pairwise(sorted({edge for start, end, _ in spans for edge in (start, end)})):
        inside = [box for start, end, box in spans if start <= low and high <= end]
        others = (Box(tuple(box.start[d] for d in rest), tuple(box.sizes[d] for d in rest)) for box in inside)
        total += (high - low) * numel_of_all(set(others))
    return alike * total


@lru_cache(maxsize=1 << 10)
def runs_of(size: int, steps: tuple[ShardingStep, ...], coordinate: tuple[int, ...]) -> tuple[Run, ...]:
    """The runs of a dimension of ``size`` that the rank at this coordinate (one number for each step) holds."""
    _check(steps)
    runs: list[Run] = [(0, size)]
    for step, index in zip(steps, coordinate, strict=True):
        total = sum(length for _, length in runs)
        piece = max(-(-total // step.split_factor), 1)
        wanted = []
        for low in range(0, total, piece):
            length = min(piece, total - low)
            # The same chunks as torch.chunk: equal sizes, then a smaller one, then empty ones.
            chunk = -(-length // step.ranks)
            wanted.append((low + min(chunk * index, length), low + min(chunk * (index + 1), length)))
        runs = list(_between(runs, wanted))
    return tuple(_joined(runs))


def _check(steps: Sequence[ShardingStep]) -> None:
    """Refuse to cut a dimension into more pieces than real shardings have."""
    ranks = runs = 1
    for step in steps:
        ranks, runs = ranks * step.ranks, runs * step.split_factor
    if ranks * runs > MAX_SEGMENTS or runs > MAX_RUNS:
        raise ValueError(
            f"a dimension is cut into {ranks * runs} pieces, {runs} for each of {ranks} ranks; at most {MAX_SEGMENTS} "
            f"in all and {MAX_RUNS} for one rank are accepted"
        )


def _between(runs: list[Run], wanted: list[tuple[int, int]]) -> Iterator[Run]:
    """The parts of ``runs`` at the ``wanted`` ranges. These count positions within the runs, and rise."""
    number, at = 0, 0
    for low, high in wanted:
        while low < high and number < len(runs):
            start, length = runs[number]
            first, last = max(low, at), min(high, at + length)
            if first < last:
                yield start + first - at, last - first
            if high < at + length:
                break
            number, at = number + 1, at + length


def _joined(runs: list[Run]) -> Iterator[Run]:
    """The same runs, with adjacent ones joined."""
    last: Run | None = None
    for start, length in runs:
        if last is not None and last[0] + last[1] == start:
            last = (last[0], last[1] + length)
            continue
        if last is not None:
            yield last
        last = (start, length)
    if last is not None:
        yield last


class _Segments(NamedTuple):
    """A dimension cut where the holder changes: for each segment its start (rising), end and holder's coordinate."""

    starts: list[int]
    ends: list[int]
    coordinates: list[tuple[int, ...]]


@lru_cache(maxsize=64)
def _segments(size: int, steps: tuple[ShardingStep, ...]) -> _Segments:
    _check(steps)
    rows = sorted(
        (start, start + length, coordinate)
        for coordinate in product(*(range(step.ranks) for step in steps))
        for start, length in runs_of(size, steps, coordinate)
    )
    return _Segments([a for a, _, _ in rows], [b for _, b, _ in rows], [c for _, _, c in rows])


@dataclass(frozen=True)
class Layout:
    """How a global tensor is spread over a mesh.

    Placements are codes: ("R",) replicated, ("S", dim) sharded, ("X", dim, split factor) strided shard,
    ("P", reduction) partial.
    """

    shape: tuple[int, ...]
    mesh: MeshDescription
    placements: tuple[tuple[str | int, ...], ...]

    def __post_init__(self) -> None:
        ranks = 1
        for size in self.mesh.shape:
            ranks *= size
        if not 0 < ranks <= MAX_RANKS:
            raise ValueError(f"a mesh has {ranks} ranks, expected 1 to {MAX_RANKS}")

    @cached_property
    def by_dim(self) -> tuple[tuple[int, ...], ...]:
        """For each dimension of the tensor, the dimensions of the mesh that shard it, in order."""
        return tuple(
            tuple(m for m, code in enumerate(self.placements) if code[0] in ("S", "X") and code[1] == d)
            for d in range(len(self.shape))
        )

    @cached_property
    def steps(self) -> tuple[tuple[ShardingStep, ...], ...]:
        codes, sizes = self.placements, self.mesh.shape
        return tuple(
            tuple(ShardingStep(sizes[m], int(codes[m][2]) if codes[m][0] == "X" else 1) for m in dims)
            for dims in self.by_dim
        )

    @cached_property
    def partial(self) -> bool:
        """Whether a rank holds only its summand (or other operand) of a reduction."""
        return any(code[0] == "P" for code in self.placements)

    def runs(self, coordinate: Sequence[int]) -> tuple[tuple[Run, ...], ...]:
        """For each dimension of the tensor, the runs that the rank at this coordinate of the mesh holds."""
        return tuple(
            runs_of(size, steps, tuple(coordinate[m] for m in dims))
            for size, steps, dims in zip(self.shape, self.steps, self.by_dim, strict=True)
        )

    def local_shape(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        key = tuple(coordinate)
        known = self._local_shapes.get(key)
        if known is None:
            known = tuple(sum(length for _, length in runs) for runs in self.runs(coordinate))
            self._local_shapes[key] = known
        return known

    @cached_property
    def _local_shapes(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        return {}

    def cuts(self, dim: int, low: int, high: int) -> list[int]:
        """The indices between ``low`` and ``high`` along a dimension at which another rank's elements begin."""
        if not self.steps[dim]:
            return []
        starts = _segments(self.shape[dim], self.steps[dim]).starts
        return starts[bisect_right(starts, low) : bisect_left(starts, high)]

    def holders(self, block: Box) -> tuple[int, ...] | None:
        """The coordinate of the ranks that hold a block that no cut divides; None if no rank does.

        It is -1 along mesh dimensions where every rank holds the block.
        """
        fixed = [-1] * len(self.mesh.shape)
        for d, (start, size) in enumerate(zip(block.start, block.sizes, strict=True)):
            if not self.steps[d]:
                continue
            segments = _segments(self.shape[d], self.steps[d])
            row = bisect_right(segments.starts, start) - 1
            if row < 0 or start + size > segments.ends[row]:
                return None
            for m, index in zip(self.by_dim[d], segments.coordinates[row], strict=True):
                fixed[m] = index
        return tuple(fixed)


def blocks_of(runs: Sequence[Sequence[Run]]) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """The blocks that are the product of ``runs``, and where each block starts in the local tensor."""
    dims: list[list[tuple[int, int, int]]] = []
    for some in runs:
        at, rows = 0, []
        for start, length in some:
            rows.append((start, length, at))
            at += length
        dims.append(rows)
    for chosen in product(*dims):
        block = Box(tuple(s for s, _, _ in chosen), tuple(n for _, n, _ in chosen))
        yield block, tuple(at for _, _, at in chosen)
