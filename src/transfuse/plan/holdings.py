"""Holdings: which blocks of a leaf's tensors ranks hold, as far as one rank's description says it.

Most leaves are one tensor, which every rank that has the leaf holds whole. Of a DTensor or ShardedTensor a rank holds
blocks. Ranks that describe the same state differ only in their places in its meshes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from transfuse.state.leaves.codec import Coordinate
from transfuse.state.leaves.distributed import DTensorMeta, ShardedTensorCodec, layout_of, place_in
from transfuse.state.leaves.layout import Block, Layout, Run, intersect
from transfuse.state.leaves.spec import DTENSOR, Spec, is_sharded
from transfuse.state.manifest import Leaf, Manifest

__all__ = ["Holding", "Holdings", "Listed", "Spread", "Whole"]

#: A part, and for each dimension the runs of the global tensor that it is made of.
Piece = tuple[int, Sequence[Sequence[Run]]]


@dataclass(frozen=True, eq=False)
class Holding:
    """One tensor of a leaf."""

    #: Of the global tensor.
    shape: tuple[int, ...]
    #: What the described rank holds of it.
    pieces: Sequence[Piece]

    def find(self, block: Block) -> tuple[int, tuple[int, ...]]:
        """The part that holds a block, and where in it the block begins; ``ValueError`` if none does."""
        for part, runs in self.pieces:
            at = [_find(some, start, size) for some, start, size in zip(runs, block.start, block.sizes, strict=True)]
            if None not in at:
                return part, tuple(place for place in at if place is not None)
        raise ValueError(f"block {block} of {self.shape} is not held here")

    def cuts(self, dim: int, low: int, high: int) -> Sequence[int]:
        """Where between these two places of a dimension one rank's elements end and another's begin."""
        return ()

    def who(self, block: Block) -> tuple[int, tuple[int, ...]] | None:
        """Who holds a block that no cut divides: a mesh and a place in it, with -1 where it does not matter.

        A mesh of -1 is everybody, None is nobody.
        """
        return -1, ()


class Whole(Holding):
    """A tensor that every rank holds whole."""


@dataclass(frozen=True, eq=False)
class Spread(Holding):
    """A DTensor."""

    layout: Layout
    mesh: int
    #: The described rank's place in the mesh.
    place: Coordinate

    def cuts(self, dim: int, low: int, high: int) -> Sequence[int]:
        return self.layout.cuts(dim, low, high)

    def who(self, block: Block) -> tuple[int, tuple[int, ...]] | None:
        holders = self.layout.holders(block)
        return None if holders is None else (self.mesh, holders)


@dataclass(frozen=True, eq=False)
class Listed(Holding):
    """A ShardedTensor: all shards are listed, and ranks that describe the same one hold the same of them."""

    blocks: Sequence[Block]

    def cuts(self, dim: int, low: int, high: int) -> Sequence[int]:
        edges = {edge for b in self.blocks for edge in (b.start[dim], b.start[dim] + b.sizes[dim])}
        return sorted(edge for edge in edges if low < edge < high)

    def who(self, block: Block) -> tuple[int, tuple[int, ...]] | None:
        return (-1, ()) if any(intersect(b, block) == block for b in self.blocks) else None


def _find(runs: Sequence[Run], start: int, size: int) -> int | None:
    at = 0
    for low, length in runs:
        if low <= start and start + size <= low + length:
            return at + start - low
        at += length
    return None


class Holdings:
    """What a described rank holds of its leaves, and what others hold by the same description."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._known: dict[tuple[int, int], Holding] = {}
        self._layouts: dict[tuple[Any, ...], Layout] = {}

    def of(self, leaf: int, tensor: int) -> Holding:
        """``ValueError`` if there is no such tensor."""
        known = self._known.get((leaf, tensor))
        if known is None:
            known = self._known[leaf, tensor] = self._look(leaf, tensor)
        return known

    def count(self, leaf: int) -> int:
        """How many tensors a leaf has."""
        first, end = self.manifest.first_parts[leaf : leaf + 2].tolist()
        return 1 if self._sharded(leaf) else int(end - first)

    def _sharded(self, leaf: int) -> Spec | None:
        """The spec of a leaf that is a shard of a global tensor, if it is."""
        if self.manifest.kinds[leaf] != Leaf.COMPOSITE:
            return None
        detail = self.manifest.detail(leaf)
        return Spec(*detail) if is_sharded(detail) else None

    def _look(self, leaf: int, tensor: int) -> Holding:
        manifest = self.manifest
        if not 0 <= leaf < len(manifest):
            raise ValueError(f"leaf {leaf} of {len(manifest)}")
        first, end = manifest.first_parts[leaf : leaf + 2].tolist()
        spec = self._sharded(leaf)
        if not 0 <= tensor < (1 if spec else end - first):
            raise ValueError(f"tensor {tensor} of a leaf that has {end - first}")
        if not spec:
            shape = manifest.parts.shape(first + tensor)
            return Whole(shape, [(first + tensor, [[(0, size)] for size in shape])])
        if any(spec.children):
            raise ValueError(f"a {spec.codec} that is made of other than plain tensors")
        if spec.codec == DTENSOR:
            return self._spread(first, spec.meta)
        meta = ShardedTensorCodec.read(spec.meta)
        blocks = [Block(*meta.shards[number][:2]) for number in meta.local]
        pieces = [(first + i, [[run] for run in zip(*block, strict=True)]) for i, block in enumerate(blocks)]
        return Listed(meta.sizes, pieces, blocks)

    def _spread(self, part: int, meta: Any) -> Spread:
        manifest, m = self.manifest, msgspec.convert(meta, DTensorMeta)
        key = (m.mesh, m.shape, m.placements)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = layout_of(m, manifest.shared)
        place = place_in(layout, manifest.coordinates[m.mesh] if m.mesh < len(manifest.coordinates) else None)
        return Spread(layout.shape, [] if place is None else [(part, layout.runs(place))], layout, m.mesh, place)
