"""Assembly: a state put together from sources that hold it in other pieces, under other names, or as other types.

:func:`assemble` compares every leaf with its target, finds out which sources hold which of the blocks that are needed
here, and cuts these into parcels that every source which holds them sends alike. :class:`Assembled` is where they land.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from transfuse import parcels, trees
from transfuse.boxes import canonical, crowds
from transfuse.cohorts import Cohort
from transfuse.errors import NotCovered, TargetMismatch, UnsupportedLeaf
from transfuse.holdings import Spread
from transfuse.leaves import dense, values
from transfuse.leaves.codec import CannotCarry, Coordinate, Room, Shared, tensor_type
from transfuse.leaves.distributed import DTensorCodec, layout_of, partial_remedy
from transfuse.leaves.kinds import Kinds
from transfuse.limits import Limits
from transfuse.manifest import Leaf, Manifest
from transfuse.matching import Prepared, nothing_matches, prepare, unpaired
from transfuse.parcels import Parcels
from transfuse.parts import Bools, Ints
from transfuse.picks import Picks, boxes_in, merged
from transfuse.places import Place, Signs
from transfuse.plan import Boxes
from transfuse.renaming import Link, Linked, MapPath, link
from transfuse.sharding import Block, Layout, blocks_of, intersect
from transfuse.target import allocate

__all__ = ["Assembled", "Assembly", "Portion", "assemble"]

#: More pieces than these are refused: each is an object at both ends.
MAX_PIECES = 1 << 20

#: So many paths are made in one go through the tree rather than one by one.
MANY = 16

Who = frozenset[int]


class _Tensor(NamedTuple):
    """A tensor of the sources' state: its number within its leaf, and the leaf in each cohort that has it."""

    leaves: tuple[tuple[int, int], ...]
    number: int


@dataclass(eq=False)
class Spot:
    """A tensor that blocks land in: a target's, or a fresh one."""

    tensor: torch.Tensor
    #: The number of the target leaf, or ~ the first cohort's leaf that has none.
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


class _Need(NamedTuple):
    """A block of a tensor that is needed here, as what it travels, and where it lands."""

    tensor: _Tensor
    block: Block
    #: None: as the source has it.
    wire: torch.dtype | None
    item: int
    #: Only sources in this place of the mesh have the right values (of a Partial DTensor).
    place: Coordinate
    spots: list[tuple[Spot, tuple[int, ...]]]


class Portion(NamedTuple):
    """What one source can bring."""

    #: Of all parcels, which.
    held: Bools
    #: Their numbers, in the order in which the source numbers them.
    numbers: Ints
    #: What the source is asked for, and the boxes of it among all boxes.
    picks: Picks
    boxes: Ints
    fingerprint: int


class Assembly(NamedTuple):
    """A plan, and where it lands."""

    cut: Parcels
    landing: Assembled
    room: Room


class _Piece(NamedTuple):
    """A block that a set of sources holds whole: a box of the plan."""

    tensor: _Tensor
    block: Block
    wire: torch.dtype | None
    item: int
    spots: list[tuple[Spot, tuple[int, ...]]]
    group: int


def assemble(
    cohorts: Sequence[Cohort],
    prepared: Prepared,
    *,
    map_path: MapPath | None,
    cast: bool,
    strict: bool,
    atomic: bool,
    late: Late | None = None,
    mesh: Any,
    weights_only_objects: bool,
    kinds: Kinds,
    limits: Limits,
    device: torch.device,
    parcel_bytes: int,
    kept: Any = None,
) -> Assembly:
    """Plan a receive from these cohorts, of which the first one's description is the state's.

    Raises :class:`TargetMismatch` with all mismatches, or :class:`NotCovered` if nobody holds what is needed.
    """
    links: Sequence[Link] | None = None
    if late is not None:
        target, links = late(Catalogue(cohorts))
        prepared = prepare(target, limits)
    main = cohorts[0].manifest
    room = Room(main.shared, main.coordinates, mesh, weights_only_objects)
    needs = _Needs(cohorts, prepared, room, kinds, cast=cast, atomic=atomic, device=device, limits=limits, kept=kept)
    if links is not None:
        needs.linked(None, strict, links)
    elif prepared.target is None:
        needs.all_fresh()
    elif map_path is None and len(cohorts) == 1:
        needs.merged(strict)
    else:
        needs.linked(map_path, strict)
    needs.check_collisions()
    pieces, groups = _split(cohorts, needs.needs, needs.paths)
    cut = parcels.cut(_boxes(pieces), parcel_bytes, all_staged=True)
    landing = Assembled(cohorts, needs, pieces, groups, cut, kinds)
    return Assembly(cut, landing, room)


class Catalogue:
    """All leaves that the sources have, by their dotted paths."""

    def __init__(self, cohorts: Sequence[Cohort]) -> None:
        self._cohorts = cohorts
        found: dict[str, tuple[int, int]] = {}
        self.names: list[str] = []
        self.rows: list[tuple[int, int]] = []
        for number, cohort in enumerate(cohorts):
            for leaf, path in enumerate(trees.dotted(cohort.manifest.root)):
                if number and path in found:
                    continue  # The other cohorts' is the same.
                found[path] = number, leaf
                self.names.append(path)
                self.rows.append((number, leaf))

    @cached_property
    def shapes(self) -> list[tuple[int, ...] | None]:
        """The global shape of each leaf that is a tensor."""
        return [self._cohorts[number].shape(leaf) for number, leaf in self.rows]

    def dtype(self, leaf: int) -> torch.dtype:
        number, own = self.rows[leaf]
        return self._cohorts[number].dtype(own, 0)

    def value(self, leaf: int) -> Any:
        """Of a leaf that is no tensor. ``ValueError`` for bytes that travel as data."""
        number, own = self.rows[leaf]
        if not self._cohorts[number].is_value(own):
            raise ValueError(f"{self.names[leaf]} is no plain value")
        return values.decode(self._cohorts[number].manifest.detail(own))


Late = Callable[[Catalogue], tuple[object, list[Link]]]


class _Needs:
    """What is needed here, leaf by leaf."""

    def __init__(
        self,
        cohorts: Sequence[Cohort],
        prepared: Prepared,
        room: Room,
        kinds: Kinds,
        *,
        cast: bool,
        atomic: bool,
        device: torch.device,
        limits: Limits,
        kept: Any,
    ) -> None:
        self.cohorts = cohorts
        self.manifest = cohorts[0].manifest
        self.prepared = prepared
        self.room = room
        self.kinds = kinds
        self.needs: list[_Need] = []
        self.spots: list[Spot] = []
        self.problems: list[str] = []
        #: The result: its tree, and for each of its leaves a leaf of the first cohort, or ~ a target's.
        self.root: trees.Node | None = None
        self.origin: list[int] = []
        #: For leaves of the first cohort: their target, and the fresh tensors of those (or of blobs) that have none.
        self.partner: dict[int, int] = {}
        self.fresh: dict[int, list[Spot]] = {}
        #: For targets: a leaf, in the cohort of this number, whose value replaces it.
        self.replaced: dict[int, tuple[int, int]] = {}
        self._cast, self._atomic = cast, atomic
        self._device, self._limits, self._kept = device, limits, kept
        self._shared = Shared()
        self._known: dict[tuple[Any, ...], _Need] = {}
        self._aliases: dict[int, int] | None = None
        self._matched = 0
        self.memory: _Memory | None = None

    # -- which leaf goes where

    @cached_property
    def paths(self) -> Mapping[_Tensor, str]:
        return _Paths(self.cohorts)

    def all_fresh(self) -> None:
        manifest = self.manifest
        self.root, self.origin = manifest.root, list(range(len(manifest)))
        self._make_fresh(range(len(manifest)))

    def merged(self, strict: bool) -> None:
        """Leaves go where they are in the target's tree; what only the source has arrives fresh."""
        found = trees.merge(self.manifest.root, self.prepared.root)
        self.problems += found.conflicts
        alone = []
        for leaf, partner in enumerate(found.partner):
            if partner < 0:
                alone.append(leaf)
            else:
                self.partner[leaf] = partner
                self._pair(0, leaf, partner)
        self.root, self.origin = found.root, found.origin
        if strict:
            self.problems += unpaired(self.manifest, found, self.prepared)
        self._raise(found.partner)
        blobs = [leaf for leaf in self.partner if leaf in self.fresh]
        self._make_fresh([*alone, *blobs])

    def linked(self, map_path: MapPath | None, strict: bool, links: Sequence[Link] | None = None) -> None:
        """Leaves go where rules say. The result is the target's tree; what else the sources have stays with them."""
        targets, sources = self.prepared, Catalogue(self.cohorts)
        if links is not None:
            linked = Linked(list(links), [], [], [])
        else:
            mine = [_global_shape(leaf) for leaf in targets.leaves]
            linked = link(map_path, sources.names, sources.shapes, trees.dotted(targets.root), mine)
        self.problems += linked.problems
        if not linked.problems:
            for one in linked.links:
                self._pair(*sources.rows[one.source], one.target, one)
        if strict:
            names, paths = sources.names, trees.paths(targets.root)
            self.problems += [f"{names[source]}: missing in the target" for source in linked.unused[:100]]
            self.problems += [f"{paths[target]}: only in the target" for target in linked.untouched[:100]]
        self._raise([])
        self.root, self.origin = targets.root, [~i for i in range(len(targets.leaves))]

    def _raise(self, partner: Sequence[int]) -> None:
        if self.problems:
            raise TargetMismatch(self.problems)
        if not self._matched:
            nothing_matches(self.manifest, self.prepared, self.kinds)

    # -- one leaf and its target

    def _pair(self, number: int, leaf: int, partner: int, link: Link | None = None) -> None:
        target = self.prepared.leaves[partner]
        cohort = self.cohorts[number]
        if isinstance(target, AsyncCollectiveTensor):
            target = target.wait()
        if cohort.is_value(leaf):
            if isinstance(target, torch.Tensor):
                kind = type(values.decode(cohort.manifest.detail(leaf))).__name__
                self._problem(partner, f"kind: source is a {kind}, target is a tensor")
            self.replaced[partner] = number, leaf
            return
        detail = cohort.manifest.detail(leaf)
        if cohort.manifest.kinds[leaf] == Leaf.COMPOSITE and self.kinds.is_blob(detail):
            if isinstance(target, torch.Tensor):
                self._problem(partner, f"kind: source is a {detail[0]}, target is a tensor")
            elif number or link is not None:
                self._problem(partner, f"kind: a {detail[0]} is not renamed")
            else:
                self.fresh[leaf] = []
            return
        self._matched += 1
        try:
            found = self._open(cohort, leaf, target)
        except CannotCarry as reason:
            self._problem(partner, f"the target is {reason}")
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
        """For a Partial DTensor, which place in the mesh has the right values."""
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
        """Leaves of several tensors, or of kinds that have no shards: all of each, as it is."""
        cohort = self.cohorts[number]
        if number or link is not None:
            whole = link is None or not any((*link.source_start, *link.target_start))
            if not whole:
                self._problem(partner, f"kind: a {type(target).__name__} is neither split nor concatenated")
                return
        spec = cohort.manifest.detail(leaf)
        try:
            found, why = self.kinds.fit(spec, target, self.room, self._shared)
        except CannotCarry as reason:
            found, why = [], [f"the target is {reason}"]
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
        """A target's global shape, its tensors with the blocks that they hold, and its layout; None for a composite."""
        spec = cohort.manifest.detail(leaf)
        plain = type(spec) is int
        sharded = not plain and spec[0] in ("dtensor", "sharded")
        if sharded and any(child != 0 for child in spec[3]):
            raise CannotCarry(f"to get a {spec[0]} of other than plain tensors, which comes only from its own shard")
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
            opened = DTensorCodec().open(target, self._shared)
            layout = layout_of(opened.meta, self._shared.items)
            place = self._shared.coordinates[opened.meta.mesh]
            blocks = [] if place is None else list(blocks_of(layout.runs(place)))
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
            raise CannotCarry(f"a {kind}, the source a tensor")
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
        """Note what is needed for the tensors of one target."""
        cohort = self.cohorts[number]
        theirs = cohort.dtype(leaf, tensor)
        window = Block(link.target_start, link.sizes)
        for mine, blocks in tensors:
            wire, why = self._wire(theirs, mine.dtype)
            if why:
                self._problem(partner, why)
                return
            if mine.numel() and not _has_memory(mine):
                self._problem(partner, "the target's storage has been freed or shrunk")
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
        """As what items travel, if source and target have different types, or why they do not fit."""
        if theirs == mine:
            return None, ""
        if not self._cast:
            hint = "; cast=True converts" if theirs.is_floating_point and mine.is_floating_point else ""
            return None, f"dtype: source {theirs}, target {mine}{hint}"
        if not (theirs.is_floating_point and mine.is_floating_point):
            return None, f"dtype: source {theirs}, target {mine}; only floating types are converted"
        # Where fewer bytes travel.
        return (mine if mine.itemsize < theirs.itemsize else theirs), ""

    def _spot(
        self, mine: torch.Tensor, partner: int, number: int, leaf: int, tensor: int, wire: torch.dtype | None
    ) -> Spot:
        manifest = self.cohorts[number].manifest
        first, end = manifest.first_parts[leaf : leaf + 2].tolist()
        flags = int(manifest.parts.flags[first + tensor]) if first + tensor < end else 0
        differ = dense.flags_of(mine) ^ flags
        conjugate, negative = bool(differ & dense.Flags.CONJUGATE), bool(differ & dense.Flags.NEGATIVE)
        signs = Signs(mine.dtype, conjugate, negative) if conjugate or negative else None
        if wire is not None and (signs is not None or flags & (dense.Flags.CONJUGATE | dense.Flags.NEGATIVE)):
            self._problem(partner, "dtype: a tensor with its sign elsewhere is not converted; resolve_neg() it first")
        converted = wire if wire is not None and wire != mine.dtype else None
        final = None
        if self._atomic:
            # Of the same raw memory: bits that say where the sign is stay with the target.
            mine, final = torch.empty(mine.shape, dtype=mine.dtype, device=mine.device), mine
        spot = Spot(mine, partner, signs, converted, final)
        self.spots.append(spot)
        return spot

    def _tensor(self, number: int, leaf: int, tensor: int) -> _Tensor:
        """The tensor, or the first one of which it is an alias (tied weights)."""
        if len(self.cohorts) > 1:
            path = self.cohorts[number].names[leaf]
            rows = ((i, cohort.numbers.get(path)) for i, cohort in enumerate(self.cohorts))
            return _Tensor(tuple((i, found) for i, found in rows if found is not None), tensor)
        if self._aliases is None:
            self._aliases = _aliases(self.manifest)
        part = int(self.manifest.first_parts[leaf]) + tensor
        first = self._aliases.get(part)
        if first is not None:
            leaf = self.manifest.leaf_of(first)
            tensor = first - int(self.manifest.first_parts[leaf])
        return _Tensor(((0, leaf),), tensor)

    def _need(
        self,
        tensor: _Tensor,
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
            known = self._known[key] = _Need(tensor, block, wire, item, place, [])
            self.needs.append(known)
        for other, there in known.spots:
            if _same_memory(other, spot) and there == at:
                return  # Tied here too.
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
            name = "" if type(spec) is int else spec[0]
            if name == "sharded":
                raise UnsupportedLeaf(manifest.paths[leaf], "a ShardedTensor is put together only in place")
            if name == "dtensor" and all(child == 0 for child in spec[3]):
                spread.append(leaf)
                continue
            try:
                self.kinds.promise(spec, self.room)
            except CannotCarry as reason:
                raise UnsupportedLeaf(manifest.paths[leaf], str(reason)) from reason
            wanted[manifest.first_parts[leaf] : manifest.first_parts[leaf + 1]] = True
        locals_ = {leaf: self._layout_here(leaf) for leaf in spread}
        memory = self._kept if isinstance(self._kept, _Memory) else None
        if memory is None or not memory.fits(wanted, {leaf: size for leaf, (_, _, size) in locals_.items()}):
            extra = sum(
                int(np.prod(size)) * manifest.dtype_of(int(manifest.first_parts[leaf])).itemsize
                for leaf, (_, _, size) in locals_.items()
            )
            arena = allocate(manifest, wanted, self._device, self._limits, extra)
            memory = _Memory(wanted, arena, {leaf: self._empty(leaf, size) for leaf, (_, _, size) in locals_.items()})
        self.memory = memory
        for leaf in leaves:
            if manifest.kinds[leaf] == Leaf.VALUE:
                continue
            self.fresh[leaf] = []
            if leaf in locals_:
                layout, place, _ = locals_[leaf]
                blocks = [] if place is None else list(blocks_of(layout.runs(place)))
                self._fill(leaf, 0, memory.locals[leaf], blocks, place if layout.partial else None)
                continue
            for tensor, part in enumerate(range(*manifest.first_parts[leaf : leaf + 2].tolist())):
                shape = manifest.parts.shape(part)
                offset = int(manifest.parts.offset[part]) if manifest.parts.numel[part] else 0
                storage = memory.arena.storage(int(manifest.parts.storage[part]))
                built = dense.over(storage, manifest.dtype_of(part), offset, shape, manifest.parts.stride(part))
                whole = Block((0,) * len(shape), shape)
                self._fill(leaf, tensor, built, [(whole, whole.start)] if whole.numel else [], None)

    def _layout_here(self, leaf: int) -> tuple[Layout, Coordinate, tuple[int, ...]]:
        try:
            layout, place = DTensorCodec().layout_here(self.manifest.detail(leaf)[2], self.room)
        except CannotCarry as reason:
            raise UnsupportedLeaf(self.manifest.paths[leaf], str(reason)) from reason
        return layout, place, (0,) if place is None else layout.local_shape(place)

    def _empty(self, leaf: int, size: tuple[int, ...]) -> torch.Tensor:
        part = int(self.manifest.first_parts[leaf])
        storages = self.manifest.storages
        home = torch.device(storages.devices[int(storages.device[int(self.manifest.parts.storage[part])])])
        device = self._device if home.type == self._device.type else torch.device("cpu")
        return torch.empty(size, dtype=self.manifest.dtype_of(part), device=device)

    def _fill(
        self,
        leaf: int,
        tensor: int,
        fresh: torch.Tensor,
        blocks: Sequence[tuple[Block, tuple[int, ...]]],
        place: Coordinate,
    ) -> None:
        spot = Spot(fresh, ~leaf)
        self.spots.append(spot)
        self.fresh[leaf].append(spot)
        for block, at in blocks:
            if block.numel:
                self._need(self._tensor(0, leaf, tensor), block, None, fresh.element_size(), place, spot, at)

    # -- targets that share memory

    def check_collisions(self) -> None:
        """Refuse targets of which one element would get two different source elements."""
        rows = [
            (spot.final if spot.final is not None else spot.tensor, spot.target, need, at)
            for need in self.needs
            for spot, at in need.spots
            if not spot.fresh
        ]
        if not rows:
            return
        paths = trees.paths(self.prepared.root)
        names: dict[str, int] = {}
        space = np.array([names.setdefault(str(t.device), len(names)) for t, _, _, _ in rows], dtype=np.int64)
        spans = [_span(t, at, need.block.sizes) for t, _, need, at in rows]
        start, end = (np.array(column, dtype=np.int64) for column in zip(*spans, strict=True))
        for crowd in crowds(space, start, end):
            members = [rows[i] for i in crowd.tolist()]
            if _interleave(members):
                continue
            first, second = paths[members[0][1]], paths[members[1][1]]
            raise TargetMismatch(
                [f"{first} and {second}: their targets share memory, but get different elements; untie the targets"]
            )
        for t, target, need, _ in rows:
            form = canonical(need.block.sizes, t.stride())
            if form.repeated or form.overlapping:
                text = f"elements of the target share memory (strides {t.stride()}); give it memory of its own"
                raise TargetMismatch([f"{paths[target]}: {text}"])


class _Memory(NamedTuple):
    """Fresh memory, which a later receive of the same state may go on with."""

    parts: Bools
    arena: Any
    locals: dict[int, torch.Tensor]

    def fits(self, parts: Bools, sizes: Mapping[int, tuple[int, ...]]) -> bool:
        mine = {leaf: tuple(tensor.shape) for leaf, tensor in self.locals.items()}
        return bool(np.array_equal(self.parts, parts)) and mine == dict(sizes)


class _Paths(Mapping[_Tensor, str]):
    """The path of each tensor, made when somebody reads it."""

    def __init__(self, cohorts: Sequence[Cohort]) -> None:
        self._cohorts = cohorts

    def __getitem__(self, tensor: _Tensor) -> str:
        number, leaf = tensor.leaves[0]
        return self._cohorts[number].manifest.paths[leaf]

    def __iter__(self) -> Iterator[_Tensor]:
        raise TypeError("not to be counted")

    def __len__(self) -> int:
        raise TypeError("not to be counted")


def _global_shape(leaf: Any) -> tuple[int, ...] | None:
    if isinstance(leaf, ShardedTensor):
        return tuple(leaf.metadata().size)
    return tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None


def _has_memory(tensor: torch.Tensor) -> bool:
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return bool((tensor.storage_offset() + reach) * tensor.element_size() <= tensor.untyped_storage().nbytes())


def _same_memory(one: Spot, other: Spot) -> bool:
    a, b = one.final if one.final is not None else one.tensor, other.final if other.final is not None else other.tensor
    return (
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() == b.storage_offset()
        and a.stride() == b.stride()
        and a.dtype == b.dtype
        and one.signs == other.signs
        and one.wire == other.wire
        and a.untyped_storage().data_ptr() != 0
    )


def _span(tensor: torch.Tensor, at: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, int]:
    """The bytes that a block of a tensor reaches over."""
    item, strides = tensor.element_size(), tensor.stride()
    start = dense.start_of(tensor) + item * sum(a * s for a, s in zip(at, strides, strict=True))
    return start, start + item * (1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)))


def _interleave(members: Sequence[tuple[torch.Tensor, int, _Need, tuple[int, ...]]]) -> bool:
    """Whether blocks whose reaches overlap have no element in common: blocks of one tensor, side by side."""
    if len({(t.untyped_storage().data_ptr(), t.storage_offset(), t.stride()) for t, _, _, _ in members}) > 1:
        seen: set[int] = set()
        for t, _, need, at in members:
            index = dense.raw(t)
            for d, (a, n) in enumerate(zip(at, need.block.sizes, strict=True)):
                index = index.narrow(d, a, n)
            if index.numel() > MAX_PIECES:
                return False
            places = _places(index)
            if seen & places:
                return False
            seen |= places
        return True
    blocks = [Block(at, need.block.sizes) for _, _, need, at in members]
    return not any(intersect(a, b) for i, a in enumerate(blocks) for b in blocks[i + 1 :])


def _places(view: torch.Tensor) -> set[int]:
    place = np.array([dense.start_of(view)], dtype=np.int64)
    for n, s in zip(view.shape, view.stride(), strict=True):
        place = (place[:, None] + np.arange(n) * (s * view.element_size())).ravel()
    return set(place.tolist())


def _aliases(manifest: Manifest) -> dict[int, int]:
    """Parts that are the very same memory as an earlier part, and that part."""
    parts = manifest.parts
    used = np.bincount(parts.storage, minlength=len(manifest.storages)) if len(parts) else np.zeros(0, dtype=np.int64)
    result: dict[int, int] = {}
    first: dict[tuple[Any, ...], int] = {}
    for part in np.flatnonzero((used > 1)[parts.storage] & (parts.numel > 0)).tolist() if len(parts) else ():
        key = (
            int(parts.storage[part]),
            int(parts.offset[part]),
            int(parts.dtype[part]),
            int(parts.flags[part]) & (dense.Flags.CONJUGATE | dense.Flags.NEGATIVE),
            parts.shape(part),
            parts.stride(part),
            repr(manifest.detail(manifest.leaf_of(part))),
        )
        if key in first:
            result[part] = first[key]
        else:
            first[key] = part
    return result


# ------------------------------------------------------------------------------------------------------- the plan


def _split(
    cohorts: Sequence[Cohort], needs: Sequence[_Need], paths: Mapping[_Tensor, str]
) -> tuple[list[_Piece], list[Who]]:
    """Cut what is needed where its holders change; the pieces, and the sources that hold those of each group.

    What fewest sources hold comes first: nobody else will bring it.
    """
    found: dict[Who, list[_Piece]] = {}
    missing: list[str] = []
    count = 0
    for need in needs:
        block = need.block
        holdings = [(cohorts[i], cohorts[i].holdings.of(leaf, need.tensor.number)) for i, leaf in need.tensor.leaves]
        edges = [
            [low, *sorted({cut for _, h in holdings for cut in h.cuts(d, low, low + size)}), low + size]
            for d, (low, size) in enumerate(zip(block.start, block.sizes, strict=True))
        ]
        whole = all(len(some) == 2 for some in edges)
        for chosen in product(*(pairwise(some) for some in edges)):
            count += 1
            if count > MAX_PIECES:
                raise TargetMismatch([f"the two shardings cut the state into more than {MAX_PIECES} pieces"])
            piece = block if whole else Block(tuple(a for a, _ in chosen), tuple(b - a for a, b in chosen))
            who: Who = frozenset()
            for cohort, holding in holdings:
                some_who = cohort.who(holding, piece, need.place)
                who = some_who if not who else who | some_who
            if not who:
                missing.append(f"{paths[need.tensor]}: nobody holds {piece}" + _of_place(need.place))
                continue
            shift = tuple(map(int.__sub__, piece.start, block.start))
            spots = need.spots if whole else [(spot, tuple(map(int.__add__, at, shift))) for spot, at in need.spots]
            found.setdefault(who, []).append(_Piece(need.tensor, piece, need.wire, need.item, spots, 0))
    if missing:
        raise NotCovered(missing)
    groups = sorted(found, key=lambda who: (len(who), sorted(who)))
    pieces = [piece._replace(group=i) for i, who in enumerate(groups) for piece in found[who]]
    return pieces, groups


def _of_place(place: Coordinate) -> str:
    return "" if place is None else f" of place {place} in the mesh"


def _boxes(pieces: Sequence[_Piece]) -> Boxes:
    """The pieces as boxes of which only the size is known: where they lie is each end's own business."""
    rows = [(piece.block.numel * piece.item, piece.item, piece.group) for piece in pieces]
    nbytes, item, group = np.array(rows, dtype=np.int64).reshape(-1, 3).T.copy()
    nowhere = np.zeros(len(pieces), dtype=np.int64)
    return Boxes(nowhere, group, nowhere, nbytes, item, nowhere - 1, {}, {})


# --------------------------------------------------------------------------------------------------- where it lands


class Assembled:
    """The places of all pieces at the receiver, and what each source can bring."""

    def __init__(
        self,
        cohorts: Sequence[Cohort],
        needs: _Needs,
        pieces: Sequence[_Piece],
        groups: Sequence[Who],
        cut: Parcels,
        kinds: Kinds,
    ) -> None:
        self._cohorts = cohorts
        self._needs = needs
        self._pieces = pieces
        self._groups = groups
        self._cut = cut
        self._kinds = kinds
        self._touched: Bools = np.zeros(len(pieces), dtype=bool)
        self._applied = False
        self.addresses: Ints = np.zeros(len(pieces), dtype=np.int64)
        #: For pieces that are one run of memory: the byte of the storage at which they begin.
        self._starts: dict[int, int] = {}
        for i, piece in enumerate(pieces):
            if len(piece.spots) == 1:
                (spot, at), sizes = piece.spots[0], piece.block.sizes
                if spot.wire is None and spot.signs is None and merged(sizes, spot.strides)[1] in ((), (1,)):
                    start = (spot.offset + sum(a * s for a, s in zip(at, spot.strides, strict=True))) * spot.item
                    self._starts[i] = start
                    self.addresses[i] = spot.address + start if spot.address else 0

    # -- what each source can bring

    def portion(self, rank: int) -> Portion:
        """What a source holds of what is needed."""
        number = next(i for i, cohort in enumerate(self._cohorts) if rank in cohort.members)
        theirs = np.array([rank in who for who in self._groups], dtype=bool)
        group = self._cut.boxes.space
        boxes = np.flatnonzero(theirs[group]) if len(group) else group
        held = theirs[group[self._cut.first]] if len(self._cut) else np.zeros(0, dtype=bool)
        rows, dtypes = [], []
        for piece in map(self._pieces.__getitem__, boxes.tolist()):
            leaf = next(leaf for i, leaf in piece.tensor.leaves if i == number)
            rows.append((leaf, piece.tensor.number, piece.block))
            dtypes.append(piece.wire)
        begins = np.concatenate([[1], np.diff(group[boxes]) != 0])[: len(boxes)]
        wanted = Picks.of(rows, dtypes, begins.tolist())
        numbers = np.flatnonzero(held)
        return Portion(held, numbers, wanted, boxes, self._fingerprint(wanted, boxes, numbers))

    def _fingerprint(self, wanted: Picks, boxes: Ints, numbers: Ints) -> int:
        """As the source will compute it, of the parcels that it cuts from its own boxes."""
        cut = self._cut
        mine = replace(
            cut.boxes, nbytes=cut.boxes.nbytes[boxes], item=cut.boxes.item[boxes], storage=boxes, start=boxes
        )
        first = np.searchsorted(boxes, cut.first[numbers])
        return parcels.fingerprint(
            replace(cut, boxes=mine, first=first, count=cut.count[numbers], low=cut.low[numbers]), wanted.fingerprint()
        )

    def seen_from(self, portion: Portion, manifest: Manifest) -> Parcels:
        """The same parcels with their boxes in a source's memory, whose own description this is."""
        some = boxes_in(manifest, portion.picks)
        n, at = len(self._pieces), portion.boxes

        def spread(column: Ints) -> Ints:
            result = np.zeros(n, dtype=np.int64)
            result[at] = column
            return result

        strided = {int(at[i]): box for i, box in some.strided.items()}
        casts = {int(at[i]): cast for i, cast in some.casts.items()}
        boxes = replace(
            self._cut.boxes, storage=spread(some.storage), start=spread(some.start), strided=strided, casts=casts
        )
        return replace(self._cut, boxes=boxes)

    def covered_by(self, ranks: Who) -> Bools:
        """Which parcels some of these sources can bring."""
        group = self._cut.boxes.space[self._cut.first] if len(self._cut) else self._cut.first
        return np.array([bool(who & ranks) for who in self._groups], dtype=bool)[group]

    @property
    def sources(self) -> Who:
        """The sources that hold anything that is needed here."""
        return frozenset().union(*self._groups)

    # -- Places

    def run(self, box: int, low: int, high: int) -> torch.Tensor | None:
        start = self._starts.get(box)
        if start is None:
            return None
        spot = self._pieces[box].spots[0][0]
        return dense.over(spot.tensor.untyped_storage(), torch.uint8, start + low, (high - low,), (1,))

    def places(self, box: int) -> list[Place]:
        piece = self._pieces[box]
        result = []
        for spot, at in piece.spots:
            offset = spot.offset + sum(a * s for a, s in zip(at, spot.strides, strict=True))
            kind = dense.ITEM_TYPES[spot.item] if spot.wire is None else spot.tensor.dtype
            sizes, strides = merged(piece.block.sizes, spot.strides)
            view = dense.over(spot.tensor.untyped_storage(), kind, offset, sizes, strides)
            result.append(Place(view, 0, spot.signs, spot.wire))
        return result

    def converts(self, box: int) -> bool:
        """Whether what lands is not what has arrived."""
        return any(spot.wire is not None for spot, _ in self._pieces[box].spots)

    def lies_once(self, box: int) -> bool:
        return len(self._pieces[box].spots) == 1 and not self.converts(box)

    def holds(self, box: int) -> bool:
        """Whether a box lies in a target, which may hold the right bytes already."""
        return self.lies_once(box) and not self._pieces[box].spots[0][0].fresh

    def fill_aside(self) -> None:
        """Begin with what the targets hold, where it is a copy that is written."""
        for spot in self._needs.spots:
            if spot.final is not None and spot.tensor.numel():
                dense.raw(spot.tensor).copy_(dense.raw(spot.final))

    # -- what has been touched

    def touch(self, boxes: Sequence[int] | Ints | slice) -> None:
        if isinstance(boxes, range) and boxes.step == 1:
            boxes = slice(boxes.start, boxes.stop)
        self._touched[boxes if isinstance(boxes, slice) else np.asarray(boxes, dtype=np.int64)] = True

    def _written(self) -> list[Spot]:
        if self._applied:
            return [spot for spot in self._needs.spots if not spot.fresh]
        if any(spot.final is not None for spot in self._needs.spots):
            return []
        touched = (self._pieces[i] for i in np.flatnonzero(self._touched).tolist())
        return list({id(spot): spot for piece in touched for spot, _ in piece.spots if not spot.fresh}.values())

    def torn(self) -> tuple[str, ...]:
        return tuple(self._paths(self._written()))

    def bump_versions(self) -> None:
        changed = []
        for spot in self._written():
            tensor = spot.final if spot.final is not None else spot.tensor
            leaf = self._needs.prepared.leaves[spot.target]
            changed.append(tensor)
            if leaf is not tensor and isinstance(leaf, torch.Tensor) and not isinstance(leaf, ShardedTensor):
                changed.append(leaf)
        if changed:
            torch.autograd.graph.increment_version(changed)

    def _paths(self, spots: Iterable[Spot]) -> list[str]:
        """Paths of the leaves that these belong to: the targets' own, and those of leaves that have none."""
        numbers = {spot.target for spot in spots}
        targets, fresh = trees.paths(self._needs.prepared.root), self._cohorts[0].manifest.paths
        if len(numbers) > MANY:
            targets, fresh = list(targets), list(fresh)
        return [targets[n] if n >= 0 else fresh[~n] for n in sorted(numbers)]

    def paths_of(self, boxes: Sequence[int]) -> list[str]:
        return self._paths(spot for box in boxes for spot, _ in self._pieces[box].spots)

    def account(self, landed: Bools) -> tuple[Sequence[str], Sequence[str]]:
        """Paths of the leaves of which everything has landed, and of all others."""
        late = np.flatnonzero(~landed)
        first, count = self._cut.first[late].tolist(), self._cut.count[late].tolist()
        boxes = {box for low, n in zip(first, count, strict=True) for box in range(low, low + n)}
        missing = {spot.target for box in boxes for spot, _ in self._pieces[box].spots}
        spots = self._needs.spots
        received = self._paths(spot for spot in spots if spot.target not in missing)
        return received, self._paths(spot for spot in spots if spot.target in missing)

    @property
    def fresh(self) -> Any:
        return self._needs.memory

    @property
    def fingerprint(self) -> int:
        """Of what lands where: a receive that goes on must have the same."""
        digest = xxhash.xxh3_64()
        for piece in self._pieces:
            digest.update(repr((piece.tensor, piece.block, piece.wire, piece.group)).encode())
            digest.update(repr([(spot.target, at) for spot, at in piece.spots]).encode())
        return digest.intdigest()

    # -- the result

    def finish(self, room: Room, kinds: Kinds) -> Any:
        """Build the state from what has landed."""
        needs, manifest = self._needs, self._needs.manifest
        targets = needs.prepared.leaves
        built: dict[int, Any] = {}
        for leaf in range(len(manifest)):
            if manifest.kinds[leaf] == Leaf.VALUE:
                built[leaf] = values.decode(manifest.detail(leaf))
            elif leaf in needs.fresh:
                built[leaf] = self._build(leaf, needs.fresh[leaf], room, kinds)
            elif leaf in needs.partner:
                built[leaf] = targets[needs.partner[leaf]]
        ordered = []
        for origin in needs.origin:
            if origin >= 0:
                ordered.append(built[origin])
            elif ~origin in needs.replaced:
                number, leaf = needs.replaced[~origin]
                ordered.append(values.decode(self._cohorts[number].manifest.detail(leaf)))
            else:
                ordered.append(targets[~origin])
        state = trees.unflatten(needs.root, ordered)
        self._apply()
        for leaf, partner in needs.partner.items():
            spec = manifest.detail(leaf)
            if (
                manifest.kinds[leaf] == Leaf.COMPOSITE
                and spec[0] not in ("dtensor", "sharded")
                and leaf not in needs.fresh
            ):
                try:
                    kinds.settle(spec, targets[partner])
                except ValueError as error:
                    raise ValueError(f"leaf {manifest.paths[leaf]}: {error}") from error
        return state

    def _build(self, leaf: int, spots: Sequence[Spot], room: Room, kinds: Kinds) -> Any:
        manifest = self._needs.manifest
        first = int(manifest.first_parts[leaf])
        spec = manifest.detail(leaf)
        try:
            parts = [dense.dress(spot.tensor, int(manifest.parts.flags[first + k])) for k, spot in enumerate(spots)]
            return parts[0] if type(spec) is int else kinds.close(spec, iter(parts), room)
        except CannotCarry as reason:
            raise UnsupportedLeaf(manifest.paths[leaf], str(reason)) from reason
        except ValueError as error:
            raise ValueError(f"leaf {manifest.paths[leaf]}: {error}") from error

    def _apply(self) -> None:
        """What has landed aside goes into the targets."""
        aside = [spot for spot in self._needs.spots if spot.final is not None]
        self._applied = bool(aside)
        for spot in aside:
            if spot.final is not None and spot.tensor.numel():
                dense.raw(spot.final).copy_(dense.raw(spot.tensor))
