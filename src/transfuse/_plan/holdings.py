"""Holdings: which blocks of a leaf's tensors each rank holds, derived from the manifest of one rank.

Most leaves are one tensor, and every rank that has the leaf holds the whole tensor. Of a DTensor, ShardedTensor or
Block a rank holds blocks. Ranks with manifests of one likeness differ only in their coordinates in the meshes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from transfuse._state.leaves.block import BlockCodec, checked
from transfuse._state.leaves.codec import Coordinate
from transfuse._state.leaves.distributed import DTensorMeta, ShardedTensorCodec, checked_coordinate, layout_of
from transfuse._state.leaves.layout import Box, Layout, Run, intersect
from transfuse._state.leaves.spec import BLOCK, DTENSOR, Spec, is_sharded
from transfuse._state.manifest import Leaf, Manifest

#: The number of a tensor in the manifest, and for each dimension the runs of the global tensor that it consists of.
Shard = tuple[int, Sequence[Sequence[Run]]]


@dataclass(frozen=True, eq=False)
class Holding:
    """Who holds one tensor of a leaf."""

    #: The shape of the global tensor.
    shape: tuple[int, ...]
    #: The shards that the described rank holds.
    shards: Sequence[Shard]

    def find(self, block: Box) -> tuple[int, tuple[int, ...]]:
        """The number of the described rank's tensor that holds a block, and where in that tensor the block begins.

        ``ValueError`` if this rank does not hold the block.
        """
        for row, runs in self.shards:
            at = [_find(some, start, size) for some, start, size in zip(runs, block.start, block.sizes, strict=True)]
            if None not in at:
                return row, tuple(index for index in at if index is not None)
        raise ValueError(f"this rank does not hold block {block} of a tensor of shape {self.shape}")

    def cuts(self, dim: int, low: int, high: int) -> Sequence[int]:
        """The indices between ``low`` and ``high`` along a dimension at which another rank's elements begin."""
        return ()

    def who(self, block: Box) -> tuple[int, tuple[int, ...]] | None:
        """The holders of a block that no cut divides: a mesh and a coordinate in it, with -1 where any rank will do.

        Mesh -1 means that every rank holds the block; None means that no rank does.
        """
        return -1, ()


class Whole(Holding):
    """A tensor of which every rank holds all elements."""


@dataclass(frozen=True, eq=False)
class Spread(Holding):
    """A DTensor."""

    layout: Layout
    mesh: int
    #: The described rank's coordinate in the mesh.
    coordinate: Coordinate

    def cuts(self, dim: int, low: int, high: int) -> Sequence[int]:
        return self.layout.cuts(dim, low, high)

    def who(self, block: Box) -> tuple[int, tuple[int, ...]] | None:
        holders = self.layout.holders(block)
        return None if holders is None else (self.mesh, holders)


@dataclass(frozen=True, eq=False)
class Listed(Holding):
    """A ShardedTensor or Block: the manifest lists its boxes, and ranks with the same manifest hold the same boxes."""

    blocks: Sequence[Box]

    def cuts(self, dim: int, low: int, high: int) -> Sequence[int]:
        edges = {edge for b in self.blocks for edge in (b.start[dim], b.start[dim] + b.sizes[dim])}
        return sorted(edge for edge in edges if low < edge < high)

    def who(self, block: Box) -> tuple[int, tuple[int, ...]] | None:
        return (-1, ()) if any(intersect(b, block) == block for b in self.blocks) else None


def _find(runs: Sequence[Run], start: int, size: int) -> int | None:
    at = 0
    for low, length in runs:
        if low <= start and start + size <= low + length:
            return at + start - low
        at += length
    return None


class Holdings:
    """The holding of each tensor of a manifest, computed when it is first asked for."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._known: dict[tuple[int, int], Holding] = {}
        self._layouts: dict[tuple[Any, ...], Layout] = {}

    def of(self, leaf: int, tensor: int) -> Holding:
        """The holding of one tensor of a leaf; ``ValueError`` if there is no such tensor."""
        known = self._known.get((leaf, tensor))
        if known is None:
            known = self._known[leaf, tensor] = self._look(leaf, tensor)
        return known

    def count(self, leaf: int) -> int:
        """How many tensors a leaf has."""
        first, end = self.manifest.first_tensors[leaf : leaf + 2].tolist()
        return 1 if self._sharded(leaf) else int(end - first)

    def _sharded(self, leaf: int) -> Spec | None:
        """The spec of a leaf that is a shard of a global tensor; None for any other leaf."""
        if self.manifest.kinds[leaf] != Leaf.COMPOSITE:
            return None
        detail = self.manifest.detail(leaf)
        return Spec(*detail) if is_sharded(detail) else None

    def _look(self, leaf: int, tensor: int) -> Holding:
        manifest = self.manifest
        if not 0 <= leaf < len(manifest):
            raise ValueError(f"leaf {leaf} does not exist; the state has {len(manifest)} leaves")
        first, end = manifest.first_tensors[leaf : leaf + 2].tolist()
        spec = self._sharded(leaf)
        if not 0 <= tensor < (1 if spec else end - first):
            raise ValueError(f"tensor {tensor} of leaf {leaf} does not exist; the leaf has {end - first} tensors")
        if not spec:
            shape = manifest.tensors.shape(first + tensor)
            return Whole(shape, [(first + tensor, [[(0, size)] for size in shape])])
        if any(spec.children):
            raise ValueError(f"leaf {leaf} is a {spec.codec} of tensors that are not plain, which has no blocks")
        if spec.codec == DTENSOR:
            return self._spread(first, spec.meta)
        if spec.codec == BLOCK:
            block = BlockCodec.read(spec.meta)
            shape = block.shape
            rows = [(first, checked(Box(block.start, manifest.tensors.shape(first)), shape))]
        else:
            meta = ShardedTensorCodec.read(spec.meta)
            shape = meta.sizes
            rows = [(first + i, Box(*meta.shards[number][:2])) for i, number in enumerate(meta.local)]
        shards = [(row, [[run] for run in zip(*box, strict=True)]) for row, box in rows]
        return Listed(shape, shards, [box for _, box in rows])

    def _spread(self, row: int, meta: Any) -> Spread:
        manifest, m = self.manifest, msgspec.convert(meta, DTensorMeta)
        key = (m.mesh, m.shape, m.placements)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = layout_of(m, manifest.shared)
        described = manifest.coordinates[m.mesh] if m.mesh < len(manifest.coordinates) else None
        coordinate = checked_coordinate(layout, described)
        shards = [] if coordinate is None else [(row, layout.runs(coordinate))]
        return Spread(layout.shape, shards, layout, m.mesh, coordinate)
