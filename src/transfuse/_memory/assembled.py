"""The plan of a state that the receiver assembles from blocks: its sources have other shards, names or dtypes.

:func:`assemble` finds the needed blocks, cuts each one into pieces by the sources that hold it, and packs the pieces
into parcels. A parcel has the same bytes from every source that holds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from transfuse._memory.building import Builder
from transfuse._memory.fresh import FreshMemory, FreshTensors, MemorySupply
from transfuse._memory.landing import Built, Landing
from transfuse._memory.packing import RegionPlace
from transfuse._options import Options
from transfuse._plan import parcels
from transfuse._plan.apply_rules import BlockPair
from transfuse._plan.catalogue import Catalogue, Late
from transfuse._plan.cohorts import Cohort
from transfuse._plan.destinations import Destination
from transfuse._plan.match import Prepared, prepare
from transfuse._plan.needed_blocks import NeededBlocks
from transfuse._plan.outline import Outline
from transfuse._plan.parcels import Parcels
from transfuse._plan.shares import Pieces, SharesOfPieces, split
from transfuse._plan.wanted_blocks import merged
from transfuse._state import trees
from transfuse._state.leaves import dense, values
from transfuse._state.leaves.codec import BuildContext
from transfuse._state.leaves.registry import Registry
from transfuse._state.leaves.spec import is_sharded
from transfuse._state.manifest import Leaf
from transfuse._state.region import Ints
from transfuse._state.tensors import Bools, contiguous

#: In the place of a target's tensor, in a plan that is kept.
_NO_TENSOR = torch.empty(0)

#: For more leaves than this, walk the tree once for all paths instead of once for each path.
MANY = 16


def assemble(
    cohorts: Sequence[Cohort],
    prepared: Prepared,
    build_context: BuildContext,
    registry: Registry,
    options: Options,
    supply: MemorySupply,
    *,
    parcel_bytes: int,
    late: Late | None = None,
) -> Assembly:
    """Plan a receive from these cohorts. The first cohort's manifest describes the result.

    Raises :class:`TargetMismatch` with all mismatches, or :class:`NotCovered` if no source holds a needed block.
    """
    links: Sequence[BlockPair] | None = None
    if late is not None:
        target, links = late(Catalogue(cohorts))
        prepared = prepare(target, supply.limits)
    fresh = FreshTensors(cohorts[0].manifest, supply)
    needed = NeededBlocks(cohorts, prepared, build_context, registry, options, fresh)
    if links is not None:
        needed.linked(None, options.strict, links)
    elif prepared.target is None:
        needed.all_fresh()
    elif options.map_path is None:
        needed.merged(options.strict)
    else:
        needed.linked(options.map_path, options.strict)
    needed.check_collisions()
    pieces = split(cohorts, needed.blocks)
    item = np.array([need.item for need in needed.blocks], dtype=np.int64)
    cut = parcels.cut(pieces.regions(item), parcel_bytes, all_staged=True)
    return Assembly(cohorts, needed, fresh.memory, pieces, cut)


class _Located(NamedTuple):
    """Where each piece lies, in columns."""

    #: The byte of its storage at which the piece begins, and whether it is one run of memory in its own order.
    starts: Ints
    is_run: Bools
    addresses: Ints
    #: Whether it has one place only and lies there as it travels; whether the receiver converts it as it lands; whether
    #: it lies in a target, which may hold the right bytes already.
    once: Bools
    converts: Bools
    held: Bools


class Assembly(Landing):
    """Where every piece lands at the receiver. The plan's tensors are the destinations; its leaves have one or more."""

    def __init__(
        self, cohorts: Sequence[Cohort], needed: NeededBlocks, memory: FreshMemory, pieces: Pieces, cut: Parcels
    ) -> None:
        self.manifest = needed.manifest
        self.cut = cut
        self.shares = SharesOfPieces(cohorts, needed.blocks, pieces, cut)
        self.memory = memory
        self._cohorts = cohorts
        self._needed = needed
        self._pieces = pieces
        #: Once kept: for each destination, the number of its tensor in the target's outline.
        self._numbers: list[int] = []
        self._located = self._locate()
        self.begin()

    def keep(self, outline: Outline) -> Assembly | None:
        """This plan without its tensors, for the next receive; None if that receive must plan by itself."""
        needed = self._needed
        if needed.fresh:
            return None  # The next receive needs other memory.
        if not self._numbers:
            numbers = outline.numbers_of([destination.tensor for destination in needed.destinations])
            if numbers is None:
                return None
            self._numbers = numbers
        for destination in needed.destinations:
            destination.tensor = _NO_TENSOR
        needed.prepared = replace(needed.prepared, target=None, leaves=[])
        self.begin()  # The next receive begins with nothing written, and nothing of this one is held.
        return self

    def bind(self, cohorts: Sequence[Cohort], prepared: Prepared, outline: Outline) -> None:
        """Give a plan that was kept the tensors of this target, and the sources' values of today."""
        for destination, number in zip(self._needed.destinations, self._numbers, strict=True):
            destination.tensor = outline.tensors[number]
        self.manifest = self._needed.manifest = cohorts[0].manifest
        self._cohorts = cohorts
        self._needed.prepared = prepared

    @property
    def fingerprint(self) -> int:
        digest = xxhash.xxh3_64(parcels.fingerprint(self.cut, 0).to_bytes(8, "little"))
        for column in (self._pieces.need, self._pieces.start, self._pieces.sizes):
            digest.update(np.ascontiguousarray(column).data)
        for need in self._needed.blocks:
            destinations = [(destination.fresh, destination.leaf, at) for destination, at in need.destinations]
            digest.update(repr((need.tensor, need.block, need.wire, destinations)).encode())
        return digest.intdigest()

    # -- a row for each region: a piece

    def _locate(self) -> _Located:
        """Where each piece lies, for pieces that have one place only."""
        pieces, blocks = self._pieces, self._needed.blocks
        dims = pieces.start.shape[1]
        strides, begin = np.zeros((len(blocks), dims), dtype=np.int64), np.zeros(len(blocks), dtype=np.int64)
        base, item = np.zeros(len(blocks), dtype=np.int64), np.ones(len(blocks), dtype=np.int64)
        straight, once, converts, targeted = (np.zeros(len(blocks), dtype=bool) for _ in range(4))
        for i, need in enumerate(blocks):
            destination, at = need.destinations[0]
            n = len(at)
            strides[i, :n], item[i], base[i] = destination.strides, destination.item, destination.address
            # The offset that the global tensor's first element would have with the strides of this destination.
            begin[i] = destination.offset + sum(
                (a - b) * s for a, b, s in zip(at, need.block.start, destination.strides, strict=True)
            )
            converts[i] = any(other.wire is not None for other, _ in need.destinations)
            once[i] = len(need.destinations) == 1 and not converts[i]
            straight[i] = once[i] and destination.signs is None
            targeted[i] = not destination.fresh
        number = pieces.need
        starts = (begin[number] + (pieces.start * strides[number]).sum(axis=1)) * item[number]
        is_run = straight[number] & contiguous(pieces.sizes, strides[number])
        addresses = np.where(is_run & (base[number] > 0), base[number] + starts, 0)
        return _Located(starts, is_run, addresses, once[number], converts[number], once[number] & targeted[number])

    @property
    def addresses(self) -> Ints:
        return self._located.addresses

    @property
    def has_single_place(self) -> Bools:
        return self._located.once

    @property
    def convert(self) -> Bools:
        return self._located.converts

    @property
    def held(self) -> Bools:
        return self._located.held

    def run(self, region: int, low: int, high: int) -> torch.Tensor | None:
        if not self._located.is_run[region]:
            return None
        destination, _ = self._needed.blocks[int(self._pieces.need[region])].destinations[0]
        start = int(self._located.starts[region])
        return dense.over(destination.tensor.untyped_storage(), torch.uint8, start + low, (high - low,), (1,))

    def places(self, region: int) -> list[RegionPlace]:
        need = self._needed.blocks[int(self._pieces.need[region])]
        return [self._place_in(destination, at, region) for destination, at in need.destinations]

    def _place_in(self, destination: Destination, at: tuple[int, ...], region: int) -> RegionPlace:
        """The place of a piece in a tensor in which its block begins at ``at``."""
        begin = self._needed.blocks[int(self._pieces.need[region])].block.start
        first, sizes = (column[region, : len(begin)].tolist() for column in (self._pieces.start, self._pieces.sizes))
        offset = destination.offset + sum(
            (a + f - b) * s for a, f, b, s in zip(at, first, begin, destination.strides, strict=True)
        )
        kind = dense.ITEM_TYPES[destination.item] if destination.wire is None else destination.tensor.dtype
        view = dense.over(destination.tensor.untyped_storage(), kind, offset, *merged(sizes, destination.strides))
        return RegionPlace(view, 0, destination.signs, destination.wire)

    def fresh_places(self, region: int) -> list[RegionPlace]:
        need = self._needed.blocks[int(self._pieces.need[region])]
        return [self._place_in(one, at, region) for one, at in need.destinations if one.fresh]

    @property
    def in_targets(self) -> Bools:
        blocks = self._needed.blocks
        placed = np.array([any(not one.fresh for one, _ in need.destinations) for need in blocks], dtype=bool)
        result: Bools = placed[self._pieces.need]
        return result

    @property
    def also_fresh(self) -> Sequence[int]:
        both = [len({one.fresh for one, _ in need.destinations}) > 1 for need in self._needed.blocks]
        return np.flatnonzero(np.array(both, dtype=bool)[self._pieces.need]).tolist()

    def scratch(self, leaf: int) -> tuple[list[torch.Tensor], list[tuple[int, RegionPlace]]]:
        tensors: list[torch.Tensor] = []
        places: list[tuple[int, RegionPlace]] = []
        for destination in self._needed.destinations:
            if destination.fresh or destination.leaf != self._needed.partner[leaf]:
                continue
            copy = replace(destination, tensor=destination.tensor.detach().clone())
            tensors.append(copy.tensor)
            for number, need in enumerate(self._needed.blocks):
                for one, at in need.destinations:
                    if one is destination or (destination in need.tied and one.is_same(destination)):
                        pieces = np.flatnonzero(self._pieces.need == number).tolist()
                        places += [(region, self._place_in(copy, at, region)) for region in pieces]
        return tensors, places

    def tensors_of(self, regions: Bools) -> Bools:
        chosen = np.zeros(len(self._needed.blocks), dtype=bool)
        chosen[self._pieces.need[regions]] = True
        need, destination = self._where_blocks_land
        result = np.zeros(len(self._needed.destinations), dtype=bool)
        result[destination[chosen[need]]] = True
        return result

    @cached_property
    def _where_blocks_land(self) -> tuple[Ints, Ints]:
        """All pairs of a needed block and a destination that gets it, as two columns."""
        numbers = {id(destination): i for i, destination in enumerate(self._needed.destinations)}
        pairs = [
            (number, numbers[id(destination)])
            for number, need in enumerate(self._needed.blocks)
            for destination in (*(destination for destination, _ in need.destinations), *need.tied)
        ]
        need, destination = np.array(pairs, dtype=np.int64).reshape(len(pairs), 2).T
        return need, destination

    # -- a row for each destination

    @cached_property
    def placed(self) -> Bools:
        return np.array([not destination.fresh for destination in self._needed.destinations], dtype=bool)

    @cached_property
    def _leaves(self) -> dict[tuple[bool, int], int]:
        """The number of each leaf that has a destination, targets first."""
        found = sorted({(destination.fresh, destination.leaf) for destination in self._needed.destinations})
        return {leaf: i for i, leaf in enumerate(found)}

    @cached_property
    def leaf(self) -> Ints:
        numbers = [self._leaves[destination.fresh, destination.leaf] for destination in self._needed.destinations]
        return np.array(numbers, dtype=np.int64)

    @cached_property
    def paths(self) -> Sequence[str]:
        """The path of each leaf: the target's path, or the source's path if the leaf has no target."""
        targets: Sequence[str] = trees.paths(self._needed.prepared.root)
        fresh: Sequence[str] = self.manifest.paths
        if len(self._leaves) > MANY:
            targets, fresh = list(targets), list(fresh)
        return [fresh[leaf] if is_fresh else targets[leaf] for is_fresh, leaf in self._leaves]

    def targets(self, tensors: Ints) -> tuple[list[torch.Tensor], list[Any]]:
        chosen, leaves = [self._needed.destinations[i] for i in tensors.tolist()], self._needed.prepared.leaves
        return [destination.tensor for destination in chosen], [leaves[destination.leaf] for destination in chosen]

    # -- the result

    def build(self, builder: Builder) -> Built:
        needed, manifest = self._needed, self.manifest
        targets = needed.prepared.leaves
        built: list[Any] = [None] * len(manifest)
        for leaf in range(len(manifest)):
            if manifest.kinds[leaf] == Leaf.VALUE or leaf in needed.fresh:
                built[leaf] = builder.leaf(leaf, self._fresh_tensors(leaf))
            elif leaf in needed.partner:
                built[leaf] = targets[needed.partner[leaf]]
        replaced = list(targets)
        for target, (number, leaf) in needed.replaced.items():
            blob = number == 0 and leaf in needed.fresh
            replaced[target] = built[leaf] if blob else values.decode(self._cohorts[number].manifest.detail(leaf))
        state = trees.unflatten(needed.result.root, needed.result.arrange(built, replaced))
        settling = [
            (leaf, targets[partner])
            for leaf, partner in needed.partner.items()
            if leaf not in needed.fresh and self._is_unsharded_composite(leaf)
        ]
        return Built(state, settling)

    def _is_unsharded_composite(self, leaf: int) -> bool:
        return self.manifest.kinds[leaf] == Leaf.COMPOSITE and not is_sharded(self.manifest.detail(leaf))

    def _fresh_tensors(self, leaf: int) -> Iterator[torch.Tensor]:
        tensors, first = self.manifest.tensors, self.manifest.first_tensors
        for destination, flags in zip(
            self._needed.fresh[leaf], tensors.flags[first[leaf] : first[leaf + 1]], strict=True
        ):
            yield dense.dress(destination.tensor, int(flags))
