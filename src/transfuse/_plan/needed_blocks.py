"""Needed blocks: which blocks of the sources' state a receiver needs, leaf by leaf, and their destinations.

Every leaf is matched with its target: shard by shard, under its own name or another, converted or not. One error lists
everything that does not fit. Nothing is allocated here: an :class:`Allocator` gives the tensors that arrive fresh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from transfuse._errors import TargetMismatch, UnsupportedLeaf
from transfuse._options import Options
from transfuse._plan.apply_rules import BlockPair, Linked, link
from transfuse._plan.catalogue import Catalogue
from transfuse._plan.cohorts import Cohort
from transfuse._plan.collisions import Written, find_collision
from transfuse._plan.destinations import Destination, Global, NeededBlock
from transfuse._plan.holdings import Listed, Spread
from transfuse._plan.local_blocks import LocalBlock, LocalBlocks, LocalTensors, blocks_at, global_shape
from transfuse._plan.match import FREED, UNWRITABLE, Prepared, advice, nothing_matches, unpaired
from transfuse._rules import MapPath
from transfuse._state import live_tensors, trees
from transfuse._state.leaves import dense, values
from transfuse._state.leaves.block import is_tensor
from transfuse._state.leaves.codec import BuildContext, CannotCarry, Coordinate, Shared
from transfuse._state.leaves.distributed import DTensorCodec, partial_remedy
from transfuse._state.leaves.layout import Box, Layout, intersect
from transfuse._state.leaves.registry import Registry
from transfuse._state.leaves.spec import BLOCK, Spec, is_block, is_dtensor, is_sharded_tensor, of_plain_tensors
from transfuse._state.manifest import Leaf
from transfuse._state.memory_maps import Mappings
from transfuse._state.tensors import Bools


class Allocator(Protocol):
    """Gives the tensors in fresh memory in which blocks land."""

    def allocate(self, wanted: Bools, local_shapes: Mapping[int, tuple[int, ...]]) -> None:
        """Allocate the ``wanted`` tensors of the manifest, and for these leaves local tensors of these shapes."""

    def tensor(self, row: int) -> torch.Tensor:
        """Tensor ``row`` of the manifest, which was wanted, without its flags."""

    def local_tensor(self, leaf: int) -> torch.Tensor: ...


class _Origin(NamedTuple):
    """A tensor of the sources: the numbers of the cohort, of the leaf in it, and of the tensor in the leaf."""

    cohort: int
    leaf: int
    tensor: int


class _LocalPart(NamedTuple):
    """The part of a global tensor that arrives fresh: the shape of the local tensor, and the blocks that it holds."""

    local_shape: tuple[int, ...]
    blocks: Sequence[LocalBlock]
    #: Of a Partial DTensor: this rank's coordinate in the mesh.
    coordinate: Coordinate = None


class _Asked(NamedTuple):
    """What a source is asked for. Destinations that need the same share one needed block."""

    tensor: Global
    block: Box
    #: The dtype on the wire; None for the source's dtype.
    wire: torch.dtype | None
    #: Of a Partial DTensor: the mesh coordinate of the sources that have the right values.
    coordinate: Coordinate


class NeededBlocks:
    """The blocks that are needed here, and the destinations in which they land."""

    def __init__(
        self,
        cohorts: Sequence[Cohort],
        prepared: Prepared,
        build_context: BuildContext,
        registry: Registry,
        options: Options,
        allocator: Allocator,
    ) -> None:
        self.cohorts = cohorts
        self.manifest = cohorts[0].manifest
        self.prepared = prepared
        self.build_context = build_context
        self.registry = registry
        self.blocks: list[NeededBlock] = []
        self.destinations: list[Destination] = []
        self.problems: list[str] = []
        #: The tree of the result, and for each of its leaves whether the first cohort or the target provides it.
        self.result = trees.Merged.all_of_source(None, 0)
        #: For leaves of the first cohort: the number of their target, and the fresh tensors of all that land fresh.
        self.partner: dict[int, int] = {}
        self.fresh: dict[int, list[Destination]] = {}
        #: For targets that a source's value replaces: the numbers of the cohort and of its leaf that has the value.
        self.replaced: dict[int, tuple[int, int]] = {}
        self._cast = options.cast
        self._allocator = allocator
        self._shared = Shared()
        self._local_blocks = LocalBlocks(self._shared)
        self._known: dict[_Asked, NeededBlock] = {}
        self._matched = 0

    # -- which leaf goes where

    def all_fresh(self) -> None:
        manifest = self.manifest
        self.result = trees.Merged.all_of_source(manifest.root, len(manifest))
        self._make_fresh(range(len(manifest)))

    def merged(self, strict: bool | None) -> None:
        """Match leaves with targets by their place in the tree. Leaves that only the source has arrive fresh."""
        found = trees.merge(self.manifest.root, self.prepared.root, keep_empty=strict is False)
        self.problems += found.conflicts
        alone, others, only_there = self._pair_by_path(found)
        self.result = found
        self._raise(unpaired(self.manifest, found, self.prepared, strict, others, only_there), strict)
        blobs = [leaf for leaf in self.partner if leaf in self.fresh]
        self._make_fresh([*alone, *blobs])

    def _pair_by_path(self, found: trees.Merged) -> tuple[list[int], set[int], list[str]]:
        """Match leaves with targets. Returns the leaves of the first cohort without a target, the targets that other
        cohorts fill, and the names of the other cohorts' leaves without a target.
        """
        alone = []
        for leaf, partner in enumerate(found.partner):
            if partner < 0:
                alone.append(leaf)
            else:
                self.partner[leaf] = partner
                self._pair(0, leaf, partner)
        paired = {*found.partner, *found.beyond}
        others: set[int] = set()
        only_there: list[str] = []
        for number, cohort in enumerate(self.cohorts[1:], 1):
            # Leaves that the first cohort lacks.
            other = trees.merge(cohort.manifest.root, self.prepared.root)
            for leaf, partner in enumerate(other.partner):
                if partner < 0:
                    only_there.append(cohort.names[leaf])
                elif partner not in paired:
                    paired.add(partner)
                    others.add(partner)
                    self._pair(number, leaf, partner)
        return alone, others, only_there

    def linked(self, map_path: MapPath | None, strict: bool | None, links: Sequence[BlockPair] | None = None) -> None:
        """Match leaves with targets by rules. The result is the target's tree; unmatched leaves are not received."""
        targets, sources = self.prepared, Catalogue(self.cohorts)
        linked = self._pair_by_rules(map_path, sources, links)
        lone: list[str] = []
        if strict:
            unused = [source for source in linked.unused if source not in linked.left_out]
            lone += [f"{sources.names[source]}: missing in the target" for source in unused[:100]]
        if strict is not False:
            paths = trees.paths(targets.root)
            lone += [f"{paths[target]}: only in the target" for target in linked.untouched[:100]]
        self._raise(lone, strict, may_be_none=links is not None)
        self._make_fresh(list(self.fresh))
        self.result = trees.Merged.all_of_target(targets.root, len(targets.leaves))

    def _pair_by_rules(
        self, map_path: MapPath | None, sources: Catalogue, links: Sequence[BlockPair] | None = None
    ) -> Linked:
        """Match leaves with targets by rules, or by ``links`` that were made of them."""
        if links is not None:
            linked = Linked(list(links), [], [], [])
        else:
            mine = [global_shape(leaf) for leaf in self.prepared.leaves]
            linked = link(map_path, sources.names, sources.shapes, trees.dotted(self.prepared.root), mine)
        self.problems += linked.problems
        if not linked.problems:
            for one in linked.links:
                self._pair(*sources.leaves[one.source], one.target, one)
        return linked

    def _raise(self, lone: Sequence[str], strict: bool | None, *, may_be_none: bool = False) -> None:
        """Raise one error with all that does not fit, and with the lines about leaves that only one side has."""
        self._check_writable()
        nothing = None
        if not self._matched and not self.problems and not may_be_none:
            nothing = nothing_matches(self.manifest, self.prepared, self.registry)
        if nothing is not None:
            raise nothing
        if self.problems or lone:
            raise TargetMismatch([*self.problems, *lone], advice=advice(lone, strict))

    def _check_writable(self) -> None:
        """Refuse targets in read-only or unmapped memory: a write there would end the process."""
        written = [destination for destination in self.destinations if not destination.fresh]
        tensors = live_tensors.read_any([destination.tensor for destination in written])
        found = tensors.faults(np.arange(len(written)), Mappings(), write=True)
        for target, why in {written[i].leaf: why for i, why in found.items()}.items():
            self._problem(target, UNWRITABLE.format(why))

    # -- one leaf and its target

    def _pair(self, number: int, leaf: int, partner: int, link: BlockPair | None = None) -> None:
        target = self.prepared.leaves[partner]
        cohort = self.cohorts[number]
        if isinstance(target, AsyncCollectiveTensor):
            target = target.wait()
        if cohort.is_value(leaf):
            if is_tensor(target):
                kind = type(values.decode(cohort.manifest.detail(leaf))).__name__
                self._problem(partner, f"kind: source is a value of type {kind}, target is a tensor")
            self.replaced[partner] = number, leaf
            return
        detail = cohort.manifest.detail(leaf)
        if cohort.manifest.kinds[leaf] == Leaf.COMPOSITE and self.registry.is_blob(detail):
            if is_tensor(target):
                self._problem(partner, f"kind: source is a {detail[0]}, target is a tensor")
            elif number:
                self._problem(partner, f"kind: a {detail[0]} comes only from the sources that describe the state")
            else:
                self.fresh[leaf] = []
                self.replaced[partner] = number, leaf
            return
        self._matched += 1
        try:
            found = self._local_blocks.open(cohort.manifest.detail(leaf), target)
        except CannotCarry as reason:
            self._problem(partner, f"the target cannot be filled: {reason}")
            return
        if found is None:
            self._pair_composite(number, leaf, partner, target, link)
            return
        holding = cohort.holdings.of(leaf, 0)
        if link is None:
            if holding.shape != found.shape:
                self._problem(partner, f"global shape: source {holding.shape}, target {found.shape}")
                return
            start = (0,) * len(found.shape)
            link = BlockPair(leaf, partner, start, start, found.shape)
        theirs = holding.layout if isinstance(holding, Spread) else None
        coordinate = self._partial_coordinate(partner, theirs, found)
        self._land(_Origin(number, leaf, 0), partner, link, found.tensors, coordinate)

    def _partial_coordinate(self, partner: int, theirs: Layout | None, target: LocalTensors) -> Coordinate:
        """For a Partial DTensor, the mesh coordinate of the source that has the right values."""
        mine = target.layout
        if not (theirs is not None and theirs.partial) and not (mine is not None and mine.partial):
            return None
        if theirs is None or mine is None:
            side = "source" if theirs is not None else "target"
            self._problem(
                partner, f"sharding: the {side} is a Partial DTensor, which has no value of its own; redistribute() it"
            )
            return None
        if (theirs.placements, theirs.mesh.shape) != (mine.placements, mine.mesh.shape):
            self._problem(partner, partial_remedy(theirs, mine))
            return None
        return target.coordinate

    def _pair_composite(self, number: int, leaf: int, partner: int, target: Any, link: BlockPair | None) -> None:
        """Match a leaf of several tensors, or of a kind that has no shards: each tensor travels whole."""
        cohort = self.cohorts[number]
        if number or link is not None:
            whole = link is None or not any((*link.source_start, *link.target_start))
            if not whole:
                self._problem(partner, f"kind: a {type(target).__name__} is neither split nor concatenated")
                return
        spec = cohort.manifest.detail(leaf)
        try:
            found, why = self.registry.fit(spec, target, self.build_context, self._shared)
        except CannotCarry as reason:
            found, why = [], [f"the target cannot be filled: {reason}"]
        for line in why:
            self._problem(partner, line)
        for inner, mine in enumerate(found):
            if mine is not None:
                self._land_whole((number, leaf, inner), partner, mine)

    def _land_whole(self, which: tuple[int, int, int], partner: int, mine: torch.Tensor) -> None:
        """Add what a target's tensor needs that has no shards. ``which``: cohort, leaf and tensor of the sources."""
        origin = _Origin(*which)
        shape = self.cohorts[origin.cohort].holdings.of(origin.leaf, origin.tensor).shape
        if shape != tuple(mine.shape):
            self._problem(partner, f"shape: source {shape}, target {tuple(mine.shape)}")
            return
        start = (0,) * len(shape)
        one = BlockPair(origin.leaf, partner, start, start, shape)
        self._land(origin, partner, one, [(mine, [(Box(start, shape), start)])], None)

    def _land(
        self,
        origin: _Origin,
        partner: int,
        link: BlockPair,
        tensors: Sequence[tuple[torch.Tensor, Sequence[LocalBlock]]],
        coordinate: Coordinate,
    ) -> None:
        """Add the blocks that the tensors of one target need."""
        theirs = self.cohorts[origin.cohort].dtype(origin.leaf, origin.tensor)
        window = Box(link.target_start, link.sizes)
        shift = tuple(map(int.__sub__, link.source_start, link.target_start))
        for mine, blocks in tensors:
            wire, why = self._wire(theirs, mine.dtype)
            if why:
                self._problem(partner, why)
                return
            if mine.numel() and not dense.has_memory(mine):
                self._problem(partner, FREED)
                return
            destination = self._destination(mine, partner, origin, wire)
            for block, at in blocks:
                both = intersect(block, window) if block.numel else None
                if both is None:
                    continue
                local = tuple(a + p - b for a, p, b in zip(at, both.start, block.start, strict=True))
                source = Box(tuple(map(int.__add__, both.start, shift)), both.sizes)
                travels = None if wire is None or wire == theirs else wire
                asked = _Asked(self._global(origin), source, travels, coordinate)
                self._need(asked, (wire or theirs).itemsize, destination, local)

    def _wire(self, theirs: torch.dtype, mine: torch.dtype) -> tuple[torch.dtype | None, str]:
        """The dtype in which items travel if source and target have different dtypes, or why the two do not fit."""
        if theirs == mine:
            return None, ""
        if not self._cast:
            hint = "; cast=True converts" if theirs.is_floating_point and mine.is_floating_point else ""
            return None, f"dtype: source {theirs}, target {mine}{hint}"
        if not (theirs.is_floating_point and mine.is_floating_point):
            return None, f"dtype: source {theirs}, target {mine}; only floating types are converted"
        if not dense.converts(theirs, mine):
            return None, f"dtype: source {theirs}, target {mine}; torch does not convert these"
        # The smaller of the two travels.
        return (mine if mine.itemsize < theirs.itemsize else theirs), ""

    def _destination(self, mine: torch.Tensor, partner: int, origin: _Origin, wire: torch.dtype | None) -> Destination:
        manifest = self.cohorts[origin.cohort].manifest
        first, end = manifest.first_tensors[origin.leaf : origin.leaf + 2].tolist()
        row = first + origin.tensor
        flags = int(manifest.tensors.flags[row]) if row < end else 0
        signs = dense.signs_between(mine, flags)
        if wire is not None and (signs is not None or flags & (dense.Flags.CONJUGATE | dense.Flags.NEGATIVE)):
            self._problem(partner, "dtype: a tensor with the neg bit is not converted; call resolve_neg() first")
        converted = wire if wire is not None and wire != mine.dtype else None
        destination = Destination(mine, partner, signs=signs, wire=converted)
        self.destinations.append(destination)
        return destination

    def _global(self, origin: _Origin) -> Global:
        """The tensor, with its leaf in every cohort that has it. A tied weight is the first leaf that it is tied to."""
        cohort, leaf = self.cohorts[origin.cohort], origin.leaf
        if len(self.cohorts) == 1:
            return Global(((0, cohort.aliases.get(leaf, leaf)),), origin.tensor)
        name = cohort.names[leaf]
        leaves = [(i, own) for i, c in enumerate(self.cohorts) if (own := c.numbers.get(name)) is not None]
        first = self._first_name(leaves, name)
        tied = [(i, self.cohorts[i].numbers.get(first)) for i, _ in leaves]
        alike = all(
            own is not None and _may_be_tied(self.cohorts[i], there, own)
            for (i, there), (_, own) in zip(leaves, tied, strict=True)
        )
        return Global(tuple((i, own) for i, own in tied if own is not None) if alike else tuple(leaves), origin.tensor)

    def _first_name(self, leaves: Sequence[tuple[int, int]], name: str) -> str:
        """The path of the leaf that a leaf is tied to, or its own path.

        Only a cohort that holds some of the leaf knows whether it is tied.
        """
        for number, leaf in leaves:
            cohort = self.cohorts[number]
            if not cohort.holds_none(leaf):
                return cohort.names[cohort.aliases.get(leaf, leaf)]
        return name

    def _need(self, asked: _Asked, item: int, destination: Destination, at: tuple[int, ...]) -> None:
        known = self._known.get(asked)
        if known is None:
            known = self._known[asked] = NeededBlock(*asked, item=item, destinations=[], tied=[])
            self.blocks.append(known)
        for other, there in known.destinations:
            if other.is_same(destination) and there == at:
                known.tied.append(destination)
                return
        known.destinations.append((destination, at))

    def _problem(self, partner: int, text: str) -> None:
        self.problems.append(f"{trees.paths(self.prepared.root)[partner]}: {text}")

    # -- leaves that have no target

    def _make_fresh(self, leaves: Sequence[int]) -> None:
        manifest = self.manifest
        wanted = np.zeros(len(manifest.tensors), dtype=bool)
        sharded = []
        for leaf in leaves:
            if manifest.kinds[leaf] == Leaf.VALUE:
                values.decode(manifest.detail(leaf))
                continue
            spec = manifest.detail(leaf)
            if is_sharded_tensor(spec):
                raise UnsupportedLeaf(manifest.paths[leaf], "a ShardedTensor is put together only in place")
            if (is_dtensor(spec) or is_block(spec)) and of_plain_tensors(spec):
                sharded.append(leaf)
                continue
            try:
                self.registry.promise(spec, self.build_context)
            except CannotCarry as reason:
                raise UnsupportedLeaf(manifest.paths[leaf], str(reason)) from reason
            wanted[manifest.first_tensors[leaf] : manifest.first_tensors[leaf + 1]] = True
        parts = {leaf: self._part_here(leaf) for leaf in sharded}
        self._allocator.allocate(wanted, {leaf: part.local_shape for leaf, part in parts.items()})
        for leaf in leaves:
            if manifest.kinds[leaf] == Leaf.VALUE:
                continue
            self.fresh[leaf] = []
            if leaf in parts:
                # Leaves that are tied at the source are tied here too.
                _, first = self._global(_Origin(0, leaf, 0)).leaves[0]
                local = self._allocator.local_tensor(first if parts.get(first) == parts[leaf] else leaf)
                self._fill(_Origin(0, leaf, 0), local, parts[leaf].blocks, parts[leaf].coordinate)
                continue
            for inner, row in enumerate(range(*manifest.first_tensors[leaf : leaf + 2].tolist())):
                # A dimension of stride 0 needs only one element.
                shape, strides = manifest.tensors.shape(row), manifest.tensors.stride(row)
                sizes = tuple(min(n, 1) if s == 0 else n for n, s in zip(shape, strides, strict=True))
                whole = Box((0,) * len(shape), sizes)
                self._fill(_Origin(0, leaf, inner), self._allocator.tensor(row), [(whole, whole.start)], None)

    def _part_here(self, leaf: int) -> _LocalPart:
        """The part of a DTensor or Block that arrives here, if it has no target."""
        spec = Spec(*self.manifest.detail(leaf))
        if spec.codec == BLOCK:
            box = self._fresh_box(leaf)
            return _LocalPart(box.sizes, [(box, (0,) * len(box.sizes))])
        try:
            layout, coordinate = DTensorCodec().layout_here(spec.meta, self.build_context)
        except CannotCarry as reason:
            raise UnsupportedLeaf(self.manifest.paths[leaf], str(reason)) from reason
        local_shape = (0,) if coordinate is None else layout.local_shape(coordinate)
        return _LocalPart(local_shape, blocks_at(layout, coordinate), coordinate if layout.partial else None)

    def _fresh_box(self, leaf: int) -> Box:
        """The box of a Block without a target: the one that all sources hold, or everything if they hold several."""
        shape = self.cohorts[0].holdings.of(leaf, 0).shape
        there = (self.cohorts[number].holdings.of(own, 0) for number, own in self._global(_Origin(0, leaf, 0)).leaves)
        found = {tuple(one.blocks) if isinstance(one, Listed) else () for one in there}
        boxes = found.pop() if len(found) == 1 else ()
        return boxes[0] if boxes else Box((0,) * len(shape), shape)

    def _fill(self, origin: _Origin, fresh: torch.Tensor, blocks: Sequence[LocalBlock], coordinate: Coordinate) -> None:
        destination = Destination(fresh, origin.leaf, fresh=True)
        self.destinations.append(destination)
        self.fresh[origin.leaf].append(destination)
        for block, at in blocks:
            if block.numel:
                asked = _Asked(self._global(origin), block, None, coordinate)
                self._need(asked, fresh.element_size(), destination, at)

    # -- targets that share memory

    def check_collisions(self) -> None:
        """Refuse targets in which one element would get two different source elements."""
        found = find_collision(self._written(self.blocks))
        if found is not None:
            # Leaves that no cohort holds are no mismatch: a source that holds them may say that they are tied.
            held = [need for need in self.blocks if not self._is_held_by_none(need.tensor)]
            found = find_collision(self._written(held))
        if found is not None:
            paths = trees.paths(self.prepared.root)
            raise TargetMismatch([found.text(paths.__getitem__)])

    @staticmethod
    def _written(needs: Sequence[NeededBlock]) -> list[Written]:
        """The blocks of targets that the needed blocks are written to."""
        return [
            Written(
                destination.tensor,
                Box(at, need.block.sizes),
                destination.leaf,
                (number, destination.signs, destination.wire),
            )
            for number, need in enumerate(needs)
            for destination, at in need.destinations
            if not destination.fresh
        ]

    def _is_held_by_none(self, tensor: Global) -> bool:
        return all(self.cohorts[number].holds_none(leaf) for number, leaf in tensor.leaves)


def _may_be_tied(cohort: Cohort, leaf: int, first: int) -> bool:
    """Whether two leaves of a cohort are tied, or its sources hold nothing of either, so that they may be."""
    if cohort.aliases.get(leaf, leaf) == first:
        return True
    return cohort.holds_none(leaf) and cohort.holds_none(first)
