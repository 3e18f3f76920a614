"""Sharding: which elements of a global tensor each rank holds. Pure arithmetic, no tensors, no process groups.

Along each dimension a rank holds *runs*, (start, length) in the global tensor, one after another in its local tensor;
what it holds in all is their product. Mostly there is one run; only ``_StridedShard`` makes several.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import NamedTuple

from transfuse.state.leaves.codec import MeshDescription

__all__ = ["Block", "Layout", "Run", "Step", "blocks_of", "intersect", "runs_of"]

Run = tuple[int, int]

#: No dimension is cut into more pieces for all ranks together, or into more for one: a peer chooses ranks and split
#: factors.
MAX_SEGMENTS = 1 << 16
MAX_RUNS = 1 << 10
#: A mesh has no more ranks than this.
MAX_RANKS = 1 << 20


class Step(NamedTuple):
    """One mesh dimension that shards a tensor dimension: over how many ranks, after a split into how many pieces."""

    ranks: int
    split_factor: int = 1


class Block(NamedTuple):
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


def intersect(one: Block, other: Block) -> Block | None:
    """What two blocks have in common, if anything."""
    start = tuple(map(max, one.start, other.start))
    ends = (min(a + n, b + m) for a, n, b, m in zip(one.start, one.sizes, other.start, other.sizes, strict=True))
    sizes = tuple(end - low for end, low in zip(ends, start, strict=True))
    return Block(start, sizes) if all(size > 0 for size in sizes) else None


@lru_cache(maxsize=1 << 10)
def runs_of(size: int, steps: tuple[Step, ...], coordinate: tuple[int, ...]) -> tuple[Run, ...]:
    """The runs of a dimension of ``size`` that the rank at this coordinate (one number for each step) holds."""
    _check(steps)
    runs: list[Run] = [(0, size)]
    for step, place in zip(steps, coordinate, strict=True):
        total = sum(length for _, length in runs)
        piece = max(-(-total // step.split_factor), 1)
        wanted = []
        for low in range(0, total, piece):
            part = min(piece, total - low)
            # As torch.chunk: all but the last have the same size, and the last ones may be empty.
            chunk = -(-part // step.ranks)
            wanted.append((low + min(chunk * place, part), low + min(chunk * (place + 1), part)))
        runs = list(_between(runs, wanted))
    return tuple(_joined(runs))


def _check(steps: Sequence[Step]) -> None:
    """Refuse to cut a dimension into more pieces than any sharding does."""
    ranks = runs = 1
    for step in steps:
        ranks, runs = ranks * step.ranks, runs * step.split_factor
    if ranks * runs > MAX_SEGMENTS or runs > MAX_RUNS:
        raise ValueError(f"a dimension in {ranks * runs} pieces, {runs} for each of {ranks} ranks")


def _between(runs: list[Run], wanted: list[tuple[int, int]]) -> Iterator[Run]:
    """What lies between pairs of rising places of the runs' own order."""
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
    """The same with neighbours made one."""
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
    """A dimension cut into what different coordinates hold: rising starts, ends, and the coordinate of each."""

    starts: list[int]
    ends: list[int]
    coordinates: list[tuple[int, ...]]


@lru_cache(maxsize=64)
def _segments(size: int, steps: tuple[Step, ...]) -> _Segments:
    _check(steps)
    rows = sorted(
        (start, start + length, coordinate)
        for coordinate in product(*(range(step.ranks) for step in steps))
        for start, length in runs_of(size, steps, coordinate)
    )
    return _Segments([a for a, _, _ in rows], [b for _, b, _ in rows], [c for _, _, c in rows])


@dataclass(frozen=True)
class Layout:
    """How a global tensor is spread over a mesh. Placements are codes: R, S dim, X dim factor (strided), P what."""

    shape: tuple[int, ...]
    mesh: MeshDescription
    placements: tuple[tuple[str | int, ...], ...]

    def __post_init__(self) -> None:
        ranks = 1
        for size in self.mesh.shape:
            ranks *= size
        if not 0 < ranks <= MAX_RANKS:
            raise ValueError(f"a mesh of {ranks} ranks")

    @cached_property
    def by_dim(self) -> tuple[tuple[int, ...], ...]:
        """For each dimension of the tensor, the dimensions of the mesh that shard it, in order."""
        return tuple(
            tuple(m for m, code in enumerate(self.placements) if code[0] in ("S", "X") and code[1] == d)
            for d in range(len(self.shape))
        )

    @cached_property
    def steps(self) -> tuple[tuple[Step, ...], ...]:
        codes, sizes = self.placements, self.mesh.shape
        return tuple(
            tuple(Step(sizes[m], int(codes[m][2]) if codes[m][0] == "X" else 1) for m in dims) for dims in self.by_dim
        )

    @cached_property
    def partial(self) -> bool:
        """Whether what a rank holds is only its part of a reduction."""
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
        """Where between these two places of a dimension one rank's elements end and another's begin."""
        if not self.steps[dim]:
            return []
        starts = _segments(self.shape[dim], self.steps[dim]).starts
        return starts[bisect_right(starts, low) : bisect_left(starts, high)]

    def holders(self, block: Block) -> tuple[int, ...] | None:
        """The coordinate of who holds a block that no cut divides; -1 along mesh dimensions where everybody does."""
        fixed = [-1] * len(self.mesh.shape)
        for d, (start, size) in enumerate(zip(block.start, block.sizes, strict=True)):
            if not self.steps[d]:
                continue
            segments = _segments(self.shape[d], self.steps[d])
            row = bisect_right(segments.starts, start) - 1
            if row < 0 or start + size > segments.ends[row]:
                return None
            for m, place in zip(self.by_dim[d], segments.coordinates[row], strict=True):
                fixed[m] = place
        return tuple(fixed)


def blocks_of(runs: Sequence[Sequence[Run]]) -> Iterator[tuple[Block, tuple[int, ...]]]:
    """The blocks whose product runs make, and where each starts in the local tensor."""
    dims: list[list[tuple[int, int, int]]] = []
    for some in runs:
        at, rows = 0, []
        for start, length in some:
            rows.append((start, length, at))
            at += length
        dims.append(rows)
    for chosen in product(*dims):
        block = Block(tuple(s for s, _, _ in chosen), tuple(n for _, n, _ in chosen))
        yield block, tuple(at for _, _, at in chosen)
