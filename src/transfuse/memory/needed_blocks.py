"""Needed blocks: which blocks of the sources' state a receiver needs, leaf by leaf, and where they land.

Every leaf is matched with its target: shard by shard, under its own name or another, converted or not. One error lists
everything that does not fit. A *spot* is a destination: a tensor here, of a target or fresh, in which blocks land.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from transfuse.errors import TargetMismatch, UnsupportedLeaf
from transfuse.memory.arena import FreshMemory, Supply, allocate
from transfuse.options import Options
from transfuse.plan.apply_rules import Link, Linked, link
from transfuse.plan.cohorts import Cohort
from transfuse.plan.collisions import Written, find_collision
from transfuse.plan.destinations import Global, Need, Spot
from transfuse.plan.holdings import Spread
from transfuse.plan.match import FREED, UNWRITABLE, Prepared, nothing_matches, unpaired
from transfuse.rules import MapPath
from transfuse.state import live_tensors, trees
from transfuse.state.leaves import dense, values
from transfuse.state.leaves.codec import BuildContext, CannotCarry, Coordinate, Shared, tensor_type
from transfuse.state.leaves.distributed import DTensorCodec, layout_in, partial_remedy
from transfuse.state.leaves.layout import Block, Layout, blocks_of, intersect
from transfuse.state.leaves.registry import Registry
from transfuse.state.leaves.spec import Spec, is_dtensor, is_sharded, is_sharded_tensor, of_plain_tensors
from transfuse.state.manifest import Leaf
from transfuse.state.memory_maps import Mappings

__all__ = ["Catalogue", "Late", "Needs", "global_shape"]


class Catalogue:
    """All leaves of all sources, by dotted path."""

    def __init__(self, cohorts: Sequence[Cohort]) -> None:
        self.cohorts = cohorts
        found: dict[str, tuple[int, int]] = {}
        self.names: list[str] = []
        self.rows: list[tuple[int, int]] = []
        for number, cohort in enumerate(cohorts):
            for leaf, path in enumerate(trees.dotted(cohort.manifest.root)):
                if number and path in found:
                    continue  # An earlier cohort has this leaf too, and the two agree.
                found[path] = number, leaf
                self.names.append(path)
                self.rows.append((number, leaf))

    @cached_property
    def shapes(self) -> list[tuple[int, ...] | None]:
        """The global shape of each leaf; None for a leaf that is no tensor."""
        return [self.cohorts[number].shape(leaf) for number, leaf in self.rows]

    def dtype(self, leaf: int) -> torch.dtype:
        number, own = self.rows[leaf]
        return self.cohorts[number].dtype(own, 0)

    def value(self, leaf: int) -> Any:
        """The value of a leaf that is no tensor. ``ValueError`` for tensors, and for values that travel as parcels."""
        number, own = self.rows[leaf]
        if not self.cohorts[number].is_value(own):
            raise ValueError(f"leaf {self.names[leaf]} is no plain value: its bytes come only with the parcels")
        return values.decode(self.cohorts[number].manifest.detail(own))


Late = Callable[[Catalogue], tuple[object, list[Link]]]


class Needs:
    """The blocks that are needed here, and the spots in which they land."""

    def __init__(
        self,
        cohorts: Sequence[Cohort],
        prepared: Prepared,
        build_context: BuildContext,
        kinds: Registry,
        options: Options,
        supply: Supply,
    ) -> None:
        self.cohorts = cohorts
        self.manifest = cohorts[0].manifest
        self.prepared = prepared
        self.build_context = build_context
        self.kinds = kinds
        self.needs: list[Need] = []
        self.spots: list[Spot] = []
        self.problems: list[str] = []
        #: The tree of the result, and for each of its leaves whether the first cohort or the target provides it.
        self.result = trees.Merged.all_of_source(None, 0)
        #: For leaves of the first cohort: the number of their target, and the fresh tensors of all that land fresh.
        self.partner: dict[int, int] = {}
        self.fresh: dict[int, list[Spot]] = {}
        #: For targets that a source's value replaces: the numbers of the cohort and of its leaf that has the value.
        self.replaced: dict[int, tuple[int, int]] = {}
        self.atomic = options.atomic
        self._cast = options.cast
        self._supply = supply
        self._shared = Shared()
        #: For each layout, the blocks that this rank holds.
        self._blocks: dict[int, list[tuple[Block, tuple[int, ...]]]] = {}
        self._known: dict[tuple[Any, ...], Need] = {}
        #: With ``atomic``, the copy of each target.
        self._copies: dict[tuple[Any, ...], torch.Tensor] = {}
        self._matched = 0
        self._memory: FreshMemory | None = None

    @property
    def memory(self) -> FreshMemory:
        """The allocated memory. It exists once the leaves have been matched with their targets."""
        assert self._memory is not None
        return self._memory

    # -- which leaf goes where

    def all_fresh(self) -> None:
        manifest = self.manifest
        self.result = trees.Merged.all_of_source(manifest.root, len(manifest))
        self._make_fresh(range(len(manifest)))

    def merged(self, strict: bool) -> None:
        """Match leaves with targets by their place in the tree. Leaves that only the source has arrive fresh."""
        found = trees.merge(self.manifest.root, self.prepared.root)
        self.problems += found.conflicts
        alone = []
        for leaf, partner in enumerate(found.partner):
            if partner < 0:
                alone.append(leaf)
            else:
                self.partner[leaf] = partner
                self._pair(0, leaf, partner)
        paired = set(found.partner)
        only_there: list[str] = []
        for number, cohort in enumerate(self.cohorts[1:], 1):
            # Leaves that the first cohort lacks.
            other = trees.merge(cohort.manifest.root, self.prepared.root)
            for leaf, partner in enumerate(other.partner):
                if partner < 0:
                    only_there.append(cohort.names[leaf])
                elif partner not in paired:
                    paired.add(partner)
                    self._pair(number, leaf, partner)
        self.result = found
        if strict:
            self.problems += self._unpaired(found, paired, only_there)
        self._raise()
        blobs = [leaf for leaf in self.partner if leaf in self.fresh]
        self._make_fresh([*alone, *blobs])

    def _unpaired(self, found: trees.Merged, paired: set[int], only_there: list[str]) -> list[str]:
        """One line for each leaf that only the sources have, all cohorts together, or only the target."""
        lines = unpaired(self.manifest, found, self.prepared)
        if len(self.cohorts) == 1:
            return lines
        paths = trees.paths(self.prepared.root)
        completed = {f"{paths[partner]}: only in the target" for partner in paired if partner >= 0}
        lines += [f"{path}: missing in the target" for path in only_there]
        return [line for line in dict.fromkeys(lines) if line not in completed]

    def linked(self, map_path: MapPath | None, strict: bool, links: Sequence[Link] | None = None) -> None:
        """Match leaves with targets by rules. The result is the target's tree; unmatched leaves are not received."""
        targets, sources = self.prepared, Catalogue(self.cohorts)
        if links is not None:
            linked = Linked(list(links), [], [], [])
        else:
            mine = [global_shape(leaf) for leaf in targets.leaves]
            linked = link(map_path, sources.names, sources.shapes, trees.dotted(targets.root), mine)
        self.problems += linked.problems
        if not linked.problems:
            for one in linked.links:
                self._pair(*sources.rows[one.source], one.target, one)
        if strict:
            names, paths = sources.names, trees.paths(targets.root)
            self.problems += [f"{names[source]}: missing in the target" for source in linked.unused[:100]]
            self.problems += [f"{paths[target]}: only in the target" for target in linked.untouched[:100]]
        self._raise(may_be_none=links is not None)
        self._make_fresh(list(self.fresh))
        self.result = trees.Merged.all_of_target(targets.root, len(targets.leaves))

    def _raise(self, *, may_be_none: bool = False) -> None:
        self._check_writable()
        if self.problems:
            raise TargetMismatch(self.problems)
        nothing = None
        if not self._matched and not may_be_none:
            nothing = nothing_matches(self.manifest, self.prepared, self.kinds)
        if nothing is not None:
            raise nothing

    def _check_writable(self) -> None:
        """Refuse targets in read-only or unmapped memory: a write there would end the process."""
        spots = [spot for spot in self.spots if not spot.fresh]
        found = live_tensors.read_any([spot.own for spot in spots]).faults(
            np.arange(len(spots)), Mappings(), write=True
        )
        for target, why in {spots[i].leaf: why for i, why in found.items()}.items():
            self._problem(target, UNWRITABLE.format(why))

    # -- one leaf and its target

    def _pair(self, number: int, leaf: int, partner: int, link: Link | None = None) -> None:
        target = self.prepared.leaves[partner]
        cohort = self.cohorts[number]
        if isinstance(target, AsyncCollectiveTensor):
            target = target.wait()
        if cohort.is_value(leaf):
            if isinstance(target, torch.Tensor):
                kind = type(values.decode(cohort.manifest.detail(leaf))).__name__
                self._problem(partner, f"kind: source is a value of type {kind}, target is a tensor")
            self.replaced[partner] = number, leaf
            return
        detail = cohort.manifest.detail(leaf)
        if cohort.manifest.kinds[leaf] == Leaf.COMPOSITE and self.kinds.is_blob(detail):
            if isinstance(target, torch.Tensor):
                self._problem(partner, f"kind: source is a {detail[0]}, target is a tensor")
            elif number:
                self._problem(partner, f"kind: a {detail[0]} comes only from the sources that describe the state")
            else:
                self.fresh[leaf] = []
                self.replaced[partner] = number, leaf
            return
        self._matched += 1
        try:
            found = self._open(cohort, leaf, target)
        except CannotCarry as reason:
            self._problem(partner, f"the target cannot be filled: {reason}")
            return
        if found is None:
            self._pair_composite(number, leaf, partner, target, link)
            return
        shape, tensors, mine = found
        holding = cohort.holdings.of(leaf, 0)
        if link is None:
            if holding.shape != shape:
                self._problem(partner, f"global shape: source {holding.shape}, target {shape}")
                return
            link = Link(leaf, partner, (0,) * len(shape), (0,) * len(shape), shape)
        theirs = holding.layout if isinstance(holding, Spread) else None
        place = self._partial_place(cohort, leaf, partner, theirs, mine)
        self._land(number, leaf, 0, partner, link, tensors, place)

    def _partial_place(
        self, cohort: Cohort, leaf: int, partner: int, theirs: Layout | None, mine: tuple[Layout, Coordinate] | None
    ) -> Coordinate:
        """For a Partial DTensor, the mesh coordinate of the source that has the right values."""
        if not (theirs is not None and theirs.partial) and not (mine is not None and mine[0].partial):
            return None
        if theirs is None or mine is None:
            side = "source" if theirs is not None else "target"
            self._problem(
                partner, f"sharding: the {side} is a Partial DTensor, which has no value of its own; redistribute() it"
            )
            return None
        if (theirs.placements, theirs.mesh.shape) != (mine[0].placements, mine[0].mesh.shape):
            self._problem(partner, partial_remedy(theirs, mine[0]))
            return None
        return mine[1]

    def _pair_composite(self, number: int, leaf: int, partner: int, target: Any, link: Link | None) -> None:
        """Match a leaf of several tensors, or of a kind that has no shards: each tensor travels whole."""
        cohort = self.cohorts[number]
        if number or link is not None:
            whole = link is None or not any((*link.source_start, *link.target_start))
            if not whole:
                self._problem(partner, f"kind: a {type(target).__name__} is neither split nor concatenated")
                return
        spec = cohort.manifest.detail(leaf)
        try:
            found, why = self.kinds.fit(spec, target, self.build_context, self._shared)
        except CannotCarry as reason:
            found, why = [], [f"the target cannot be filled: {reason}"]
        for line in why:
            self._problem(partner, line)
        for tensor, destination in enumerate(found):
            if destination is None:
                continue
            shape = cohort.holdings.of(leaf, tensor).shape
            if shape != tuple(destination.shape):
                self._problem(partner, f"shape: source {shape}, target {tuple(destination.shape)}")
                continue
            whole_block = Block((0,) * len(shape), shape)
            one = Link(leaf, partner, whole_block.start, whole_block.start, shape)
            self._land(number, leaf, tensor, partner, one, [(destination, [(whole_block, whole_block.start)])], None)

    def _open(
        self, cohort: Cohort, leaf: int, target: Any
    ) -> tuple[tuple[int, ...], list[tuple[torch.Tensor, list[tuple[Block, tuple[int, ...]]]]], Any] | None:
        """The target's global shape, its tensors with the blocks of each, and its layout; None for a composite."""
        spec = cohort.manifest.detail(leaf)
        plain = type(spec) is int
        sharded = is_sharded(spec)
        if sharded and not of_plain_tensors(spec):
            raise CannotCarry(f"a {Spec(*spec).codec} of other than plain tensors comes only from its own shard")
        dense.check_initialized(target)
        if dense.is_plain(target):
            dense.check(target)
            if not plain and not sharded:
                return None
            shape = tuple(target.shape)
            start = (0,) * len(shape)
            return shape, [(target, [(Block(start, shape), start)])], None
        if isinstance(target, DTensor):
            if not plain and not sharded:
                return None
            local = target._local_tensor
            if isinstance(local, AsyncCollectiveTensor):
                local = local.wait()
            if not dense.is_plain(local):
                raise CannotCarry(f"a DTensor of {tensor_type(local)}, which gets only its own shard")
            dense.check(local)
            DTensorCodec().open(target, self._shared)  # Raises if the local tensor is not this rank's shard.
            layout, mesh = layout_in(target, self._shared)
            place = self._shared.coordinates[mesh]
            blocks = self._blocks.get(id(layout))
            if blocks is None:
                blocks = self._blocks[id(layout)] = [] if place is None else list(blocks_of(layout.runs(place)))
            return tuple(target.shape), [(local, blocks)], (layout, place)
        if isinstance(target, ShardedTensor):
            if not plain and not sharded:
                return None
            shards = [
                (
                    shard.tensor,
                    [
                        (
                            Block(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)),
                            (0,) * shard.tensor.ndim,
                        )
                    ],
                )
                for shard in target.local_shards()
            ]
            return tuple(target.metadata().size), shards, None
        if plain or sharded:
            kind = tensor_type(target) if isinstance(target, torch.Tensor) else f"value of type {type(target).__name__}"
            raise CannotCarry(f"it is a {kind}, and the source's a tensor; put a tensor in its place")
        return None

    def _land(
        self,
        number: int,
        leaf: int,
        tensor: int,
        partner: int,
        link: Link,
        tensors: Sequence[tuple[torch.Tensor, Sequence[tuple[Block, tuple[int, ...]]]]],
        place: Coordinate,
    ) -> None:
        """Add the blocks that the tensors of one target need."""
        cohort = self.cohorts[number]
        theirs = cohort.dtype(leaf, tensor)
        window = Block(link.target_start, link.sizes)
        for mine, blocks in tensors:
            wire, why = self._wire(theirs, mine.dtype)
            if why:
                self._problem(partner, why)
                return
            if mine.numel() and not dense.has_memory(mine):
                self._problem(partner, FREED)
                return
            spot = self._spot(mine, partner, number, leaf, tensor, wire)
            for block, at in blocks:
                part = intersect(block, window) if block.numel else None
                if part is None:
                    continue
                shift = tuple(map(int.__sub__, link.source_start, link.target_start))
                local = tuple(a + p - b for a, p, b in zip(at, part.start, block.start, strict=True))
                source = Block(tuple(map(int.__add__, part.start, shift)), part.sizes)
                travels = None if wire is None or wire == theirs else wire
                self._need(
                    self._tensor(number, leaf, tensor), source, travels, (wire or theirs).itemsize, place, spot, local
                )

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

    def _spot(
        self, mine: torch.Tensor, partner: int, number: int, leaf: int, tensor: int, wire: torch.dtype | None
    ) -> Spot:
        manifest = self.cohorts[number].manifest
        first, end = manifest.first_parts[leaf : leaf + 2].tolist()
        flags = int(manifest.parts.flags[first + tensor]) if first + tensor < end else 0
        signs = dense.signs_between(mine, flags)
        if wire is not None and (signs is not None or flags & (dense.Flags.CONJUGATE | dense.Flags.NEGATIVE)):
            self._problem(partner, "dtype: a tensor with the neg bit is not converted; call resolve_neg() first")
        converted = wire if wire is not None and wire != mine.dtype else None
        final = None
        if self.atomic:
            mine, final = self._copy_of(mine), mine
        spot = Spot(mine, partner, signs=signs, wire=converted, final=final)
        self.spots.append(spot)
        return spot

    def _copy_of(self, target: torch.Tensor) -> torch.Tensor:
        """The copy of a target: one for each memory, with the same raw items but no conj or neg bit.

        An earlier receive of the same state into the same target made the same copies in the same order, so a copy that
        is kept from there is found by its number.
        """
        key = (
            target.untyped_storage().data_ptr(),
            target.storage_offset(),
            target.dtype,
            target.shape,
            target.stride(),
        )
        known = self._copies.get(key)
        if known is None:
            kept, number = self._supply.kept, len(self._copies)
            if kept is not None and number < len(kept.copies) and _are_alike(kept.copies[number], target):
                known = kept.copies[number]
            else:
                known = torch.empty(target.shape, dtype=target.dtype, device=target.device)
            self._copies[key] = known
        return known

    def _tensor(self, number: int, leaf: int, tensor: int) -> Global:
        """The tensor, with its leaf in every cohort that has it. A tied weight is the first leaf that it is tied to."""
        mine = self.cohorts[number]
        if len(self.cohorts) == 1:
            return Global(((0, mine.aliases.get(leaf, leaf)),), tensor)
        rows = [(i, own) for i, c in enumerate(self.cohorts) if (own := c.numbers.get(mine.names[leaf])) is not None]
        first = self._first_name(rows, mine.names[leaf])
        tied = [(i, self.cohorts[i].numbers.get(first)) for i, _ in rows]
        alike = all(
            own is not None and _may_be_tied(self.cohorts[i], there, own)
            for (i, there), (_, own) in zip(rows, tied, strict=True)
        )
        return Global(tuple((i, own) for i, own in tied if own is not None) if alike else tuple(rows), tensor)

    def _first_name(self, rows: Sequence[tuple[int, int]], name: str) -> str:
        """The path of the leaf that a leaf is tied to, or its own path.

        Only a cohort that holds some of the leaf knows whether it is tied.
        """
        for number, leaf in rows:
            cohort = self.cohorts[number]
            if not cohort.holds_none(leaf):
                return cohort.names[cohort.aliases.get(leaf, leaf)]
        return name

    def _need(
        self,
        tensor: Global,
        block: Block,
        wire: torch.dtype | None,
        item: int,
        place: Coordinate,
        spot: Spot,
        at: tuple[int, ...],
    ) -> None:
        key = (tensor, block, wire, place)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = Need(tensor, block, wire, item, place, [], [])
            self.needs.append(known)
        for other, there in known.spots:
            if other.is_same(spot) and there == at:
                known.tied.append(spot)
                return
        known.spots.append((spot, at))

    def _problem(self, partner: int, text: str) -> None:
        self.problems.append(f"{trees.paths(self.prepared.root)[partner]}: {text}")

    # -- leaves that have no target

    def _make_fresh(self, leaves: Sequence[int]) -> None:
        manifest = self.manifest
        wanted = np.zeros(len(manifest.parts), dtype=bool)
        spread = []
        for leaf in leaves:
            if manifest.kinds[leaf] == Leaf.VALUE:
                values.decode(manifest.detail(leaf))
                continue
            spec = manifest.detail(leaf)
            if is_sharded_tensor(spec):
                raise UnsupportedLeaf(manifest.paths[leaf], "a ShardedTensor is put together only in place")
            if is_dtensor(spec) and of_plain_tensors(spec):
                spread.append(leaf)
                continue
            try:
                self.kinds.promise(spec, self.build_context)
            except CannotCarry as reason:
                raise UnsupportedLeaf(manifest.paths[leaf], str(reason)) from reason
            wanted[manifest.first_parts[leaf] : manifest.first_parts[leaf + 1]] = True
        locals_ = {leaf: self._layout_here(leaf) for leaf in spread}
        memory = self._supply.kept
        if memory is None or not memory.fits(wanted, {leaf: size for leaf, (_, _, size) in locals_.items()}):
            extra = sum(
                int(np.prod(size)) * manifest.dtype_of(int(manifest.first_parts[leaf])).itemsize
                for leaf, (_, _, size) in locals_.items()
            )
            arena = allocate(manifest, wanted, self._supply, extra)
            local_tensors = {leaf: self._empty(leaf, size) for leaf, (_, _, size) in locals_.items()}
            memory = FreshMemory(wanted, arena, local_tensors, ())
        self._memory = memory = memory._replace(copies=tuple(self._copies.values()))
        for leaf in leaves:
            if manifest.kinds[leaf] == Leaf.VALUE:
                continue
            self.fresh[leaf] = []
            if leaf in locals_:
                layout, place, _ = locals_[leaf]
                blocks = [] if place is None else list(blocks_of(layout.runs(place)))
                first = self._tensor(0, leaf, 0).leaves[0][1]  # Leaves that are tied at the source are tied here too.
                local = memory.local_tensors.get(first, memory.local_tensors[leaf])
                self._fill(leaf, 0, local, blocks, place if layout.partial else None)
                continue
            for tensor, part in enumerate(range(*manifest.first_parts[leaf : leaf + 2].tolist())):
                shape = manifest.parts.shape(part)
                offset = int(manifest.parts.offset[part]) if manifest.parts.numel[part] else 0
                storage = memory.arena.storage(int(manifest.parts.storage[part]))
                strides = manifest.parts.stride(part)
                built = dense.over(storage, manifest.dtype_of(part), offset, shape, strides)
                # A dimension of stride 0 needs only one element.
                sizes = tuple(min(n, 1) if s == 0 else n for n, s in zip(shape, strides, strict=True))
                whole = Block((0,) * len(shape), sizes)
                self._fill(leaf, tensor, built, [(whole, whole.start)] if whole.numel else [], None)

    def _layout_here(self, leaf: int) -> tuple[Layout, Coordinate, tuple[int, ...]]:
        try:
            layout, place = DTensorCodec().layout_here(Spec(*self.manifest.detail(leaf)).meta, self.build_context)
        except CannotCarry as reason:
            raise UnsupportedLeaf(self.manifest.paths[leaf], str(reason)) from reason
        return layout, place, (0,) if place is None else layout.local_shape(place)

    def _empty(self, leaf: int, size: tuple[int, ...]) -> torch.Tensor:
        part = int(self.manifest.first_parts[leaf])
        storages = self.manifest.storages
        home = torch.device(storages.devices[int(storages.device[int(self.manifest.parts.storage[part])])])
        device = self._supply.device if home.type == self._supply.device.type else torch.device("cpu")
        return torch.empty(size, dtype=self.manifest.dtype_of(part), device=device)

    def _fill(
        self,
        leaf: int,
        tensor: int,
        fresh: torch.Tensor,
        blocks: Sequence[tuple[Block, tuple[int, ...]]],
        place: Coordinate,
    ) -> None:
        spot = Spot(fresh, leaf, fresh=True)
        self.spots.append(spot)
        self.fresh[leaf].append(spot)
        for block, at in blocks:
            if block.numel:
                self._need(self._tensor(0, leaf, tensor), block, None, fresh.element_size(), place, spot, at)

    # -- targets that share memory

    def check_collisions(self) -> None:
        """Refuse targets in which one element would get two different source elements."""
        found = find_collision(self._written(self.needs))
        if found is not None:
            # Leaves that no cohort holds are no mismatch: a source that holds them may say that they are tied.
            held = [need for need in self.needs if not self._is_held_by_none(need.tensor)]
            found = find_collision(self._written(held))
        if found is not None:
            paths = trees.paths(self.prepared.root)
            raise TargetMismatch([found.text(paths.__getitem__)])

    @staticmethod
    def _written(needs: Sequence[Need]) -> list[Written]:
        """The blocks of targets that the needed blocks are written to."""
        return [
            Written(spot.own, Block(at, need.block.sizes), spot.leaf, (number, spot.signs, spot.wire))
            for number, need in enumerate(needs)
            for spot, at in need.spots
            if not spot.fresh
        ]

    def _is_held_by_none(self, tensor: Global) -> bool:
        return all(self.cohorts[number].holds_none(leaf) for number, leaf in tensor.leaves)


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _may_be_tied(cohort: Cohort, leaf: int, first: int) -> bool:
    """Whether two leaves of a cohort are tied, or its sources hold nothing of either, so that they may be."""
    if cohort.aliases.get(leaf, leaf) == first:
        return True
    return cohort.holds_none(leaf) and cohort.holds_none(first)


def global_shape(leaf: Any) -> tuple[int, ...] | None:
    """The global shape of a target that is one tensor, plain or sharded; None for every other target."""
    if isinstance(leaf, ShardedTensor):
        return tuple(leaf.metadata().size)
    return tuple(leaf.shape) if isinstance(leaf, DTensor) or dense.is_plain(leaf) else None
