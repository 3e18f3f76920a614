"""The plan of a state that the receiver assembles from blocks: its sources have other shards, names or dtypes.

:func:`assemble` finds the needed blocks, cuts each one into pieces by the sources that hold it, and packs the pieces
into parcels. A parcel has the same bytes from every source that holds it. A *spot* is a destination: a tensor here in
which blocks land.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
import xxhash

from transfuse.memory import landing
from transfuse.memory.arena import Supply
from transfuse.memory.landing import Built, Copy
from transfuse.memory.needed_blocks import Catalogue, Late, Needs
from transfuse.memory.packing import Place
from transfuse.options import Options
from transfuse.plan import parcels
from transfuse.plan.apply_rules import Link
from transfuse.plan.cohorts import Cohort
from transfuse.plan.destinations import Spot
from transfuse.plan.match import Prepared, prepare
from transfuse.plan.parcels import Parcels
from transfuse.plan.shares import Pieces, SharesOfPieces, split
from transfuse.plan.wanted_blocks import merged
from transfuse.state import trees
from transfuse.state.leaves import dense, values
from transfuse.state.leaves.codec import BuildContext
from transfuse.state.leaves.registry import Registry
from transfuse.state.leaves.spec import is_sharded
from transfuse.state.manifest import Leaf
from transfuse.state.tensors import Bools, Ints, contiguous

__all__ = ["Assembly", "assemble"]

#: For more leaves than this, walk the tree once for all paths instead of once for each path.
MANY = 16


def assemble(
    cohorts: Sequence[Cohort],
    prepared: Prepared,
    build_context: BuildContext,
    kinds: Registry,
    options: Options,
    supply: Supply,
    *,
    parcel_bytes: int,
    late: Late | None = None,
) -> Assembly:
    """Plan a receive from these cohorts. The first cohort's manifest describes the result.

    Raises :class:`TargetMismatch` with all mismatches, or :class:`NotCovered` if no source holds a needed block.
    """
    links: Sequence[Link] | None = None
    if late is not None:
        target, links = late(Catalogue(cohorts))
        prepared = prepare(target, supply.limits)
    needs = Needs(cohorts, prepared, build_context, kinds, options, supply)
    if links is not None:
        needs.linked(None, options.strict, links)
    elif prepared.target is None:
        needs.all_fresh()
    elif options.map_path is None:
        needs.merged(options.strict)
    else:
        needs.linked(options.map_path, options.strict)
    needs.check_collisions()
    pieces = split(cohorts, needs.needs)
    item = np.array([need.item for need in needs.needs], dtype=np.int64)
    cut = parcels.cut(pieces.regions(item), parcel_bytes, all_staged=True)
    return Assembly(cohorts, needs, pieces, cut)


class Assembly:
    """Where every piece lands at the receiver. The plan's tensors are the spots, its leaves those that have a spot."""

    def __init__(self, cohorts: Sequence[Cohort], needs: Needs, pieces: Pieces, cut: Parcels) -> None:
        self.manifest = needs.manifest
        self.cut = cut
        self.shares = SharesOfPieces(cohorts, needs.needs, pieces, cut)
        self.memory = needs.memory
        self.atomic = needs.atomic
        self._cohorts = cohorts
        self._needs = needs
        self._pieces = pieces
        self._locate()

    @property
    def fingerprint(self) -> int:
        digest = xxhash.xxh3_64(parcels.fingerprint(self.cut, 0).to_bytes(8, "little"))
        for column in (self._pieces.need, self._pieces.start, self._pieces.sizes):
            digest.update(np.ascontiguousarray(column).data)
        for need in self._needs.needs:
            spots = [(spot.fresh, spot.leaf, at) for spot, at in need.spots]
            digest.update(repr((need.tensor, need.block, need.wire, spots)).encode())
        return digest.intdigest()

    # -- a row for each region: a piece

    def _locate(self) -> None:
        """Compute where each piece lies, for pieces that have one place only."""
        pieces, needs = self._pieces, self._needs.needs
        dims = pieces.start.shape[1]
        strides, begin = np.zeros((len(needs), dims), dtype=np.int64), np.zeros(len(needs), dtype=np.int64)
        base, item = np.zeros(len(needs), dtype=np.int64), np.ones(len(needs), dtype=np.int64)
        straight, once, converts, targeted = (np.zeros(len(needs), dtype=bool) for _ in range(4))
        for i, need in enumerate(needs):
            spot, at = need.spots[0]
            n = len(at)
            strides[i, :n], item[i], base[i] = spot.strides, spot.item, spot.address
            # The offset that the global tensor's first element would have with the strides of this spot.
            begin[i] = spot.offset + sum(
                (a - b) * s for a, b, s in zip(at, need.block.start, spot.strides, strict=True)
            )
            converts[i] = any(other.wire is not None for other, _ in need.spots)
            once[i] = len(need.spots) == 1 and not converts[i]
            straight[i] = once[i] and spot.signs is None
            targeted[i] = not spot.fresh
        number = pieces.need
        #: For each piece, the byte of its storage at which it begins.
        self._starts: Ints = (begin[number] + (pieces.start * strides[number]).sum(axis=1)) * item[number]
        #: For each piece, whether it is one run of memory in its own order.
        self._is_run: Bools = straight[number] & contiguous(pieces.sizes, strides[number])
        self.addresses: Ints = np.where(self._is_run & (base[number] > 0), base[number] + self._starts, 0)
        #: For each piece: whether it has one place only and lies there as it travels; whether the receiver converts it
        #: as it lands; whether it lies in a target, which may hold the right bytes already.
        self.lie_once: Bools = once[number]
        self.convert: Bools = converts[number]
        self.held: Bools = self.lie_once & targeted[number]

    def run(self, region: int, low: int, high: int) -> torch.Tensor | None:
        if not self._is_run[region]:
            return None
        spot, _ = self._needs.needs[int(self._pieces.need[region])].spots[0]
        start = int(self._starts[region])
        return dense.over(spot.tensor.untyped_storage(), torch.uint8, start + low, (high - low,), (1,))

    def places(self, region: int) -> list[Place]:
        need = self._needs.needs[int(self._pieces.need[region])]
        n = len(need.block.start)
        first, sizes = self._pieces.start[region, :n].tolist(), self._pieces.sizes[region, :n].tolist()
        result = []
        for spot, at in need.spots:
            offset = spot.offset + sum(
                (a + f - b) * s for a, f, b, s in zip(at, first, need.block.start, spot.strides, strict=True)
            )
            kind = dense.ITEM_TYPES[spot.item] if spot.wire is None else spot.tensor.dtype
            view = dense.over(spot.tensor.untyped_storage(), kind, offset, *merged(sizes, spot.strides))
            result.append(Place(view, 0, spot.signs, spot.wire))
        return result

    def tensors_of(self, regions: Bools) -> Bools:
        needs = np.zeros(len(self._needs.needs), dtype=bool)
        needs[self._pieces.need[regions]] = True
        need, spot = self._spots_of_needs
        result = np.zeros(len(self._needs.spots), dtype=bool)
        result[spot[needs[need]]] = True
        return result

    @cached_property
    def _spots_of_needs(self) -> tuple[Ints, Ints]:
        """All pairs of a needed block and a spot that gets it, as two columns."""
        numbers = {id(spot): i for i, spot in enumerate(self._needs.spots)}
        pairs = [
            (number, numbers[id(spot)])
            for number, need in enumerate(self._needs.needs)
            for spot in (*(spot for spot, _ in need.spots), *need.tied)
        ]
        need, spot = np.array(pairs, dtype=np.int64).reshape(len(pairs), 2).T
        return need, spot

    # -- a row for each spot

    @cached_property
    def placed(self) -> Bools:
        return np.array([not spot.fresh for spot in self._needs.spots], dtype=bool)

    @cached_property
    def _leaves(self) -> dict[tuple[bool, int], int]:
        """The number of each leaf that has a spot, targets first."""
        found = sorted({(spot.fresh, spot.leaf) for spot in self._needs.spots})
        return {leaf: i for i, leaf in enumerate(found)}

    @cached_property
    def leaf(self) -> Ints:
        return np.array([self._leaves[spot.fresh, spot.leaf] for spot in self._needs.spots], dtype=np.int64)

    @cached_property
    def paths(self) -> Sequence[str]:
        """The path of each leaf: the target's path, or the source's path if the leaf has no target."""
        targets: Sequence[str] = trees.paths(self._needs.prepared.root)
        fresh: Sequence[str] = self.manifest.paths
        if len(self._leaves) > MANY:
            targets, fresh = list(targets), list(fresh)
        return [fresh[leaf] if is_fresh else targets[leaf] for is_fresh, leaf in self._leaves]

    def targets(self, tensors: Ints) -> tuple[list[torch.Tensor], list[Any]]:
        spots = [self._needs.spots[i] for i in tensors.tolist()]
        return [spot.own for spot in spots], [self._needs.prepared.leaves[spot.leaf] for spot in spots]

    def copies(self) -> Iterator[Copy]:
        for spot in self._needs.spots:
            if spot.final is not None and spot.tensor.numel():
                # The copy has the target's signs already: they were flipped as the bytes landed in the copy.
                yield Copy(spot.final, spot.tensor, None, True)

    # -- the result

    def build(self, build_context: BuildContext, kinds: Registry) -> Built:
        needs, manifest = self._needs, self.manifest
        targets = needs.prepared.leaves
        built: list[Any] = [None] * len(manifest)
        for leaf in range(len(manifest)):
            if manifest.kinds[leaf] == Leaf.VALUE:
                built[leaf] = values.decode(manifest.detail(leaf))
            elif leaf in needs.fresh:
                built[leaf] = self._build(leaf, needs.fresh[leaf], build_context, kinds)
            elif leaf in needs.partner:
                built[leaf] = targets[needs.partner[leaf]]
        replaced = list(targets)
        for target, (number, leaf) in needs.replaced.items():
            blob = number == 0 and leaf in needs.fresh
            replaced[target] = built[leaf] if blob else values.decode(self._cohorts[number].manifest.detail(leaf))
        state = trees.unflatten(needs.result.root, needs.result.arrange(built, replaced))
        self._examine(build_context, kinds)
        settling = [
            (leaf, targets[partner])
            for leaf, partner in needs.partner.items()
            if leaf not in needs.fresh and self._is_unsharded_composite(leaf)
        ]
        return Built(state, settling)

    def _is_unsharded_composite(self, leaf: int) -> bool:
        return self.manifest.kinds[leaf] == Leaf.COMPOSITE and not is_sharded(self.manifest.detail(leaf))

    def _examine(self, build_context: BuildContext, kinds: Registry) -> None:
        """Check the copies of composite leaves for consistency, before any target is written."""
        aside: dict[int, list[torch.Tensor]] = {}
        for spot in self._needs.spots:
            if spot.final is not None:
                aside.setdefault(spot.leaf, []).append(spot.tensor)
        for leaf, partner in self._needs.partner.items():
            if partner in aside and self._is_unsharded_composite(leaf):
                landing.examine(self.manifest, leaf, iter(aside[partner]), build_context, kinds)

    def _build(self, leaf: int, spots: Sequence[Spot], build_context: BuildContext, kinds: Registry) -> Any:
        manifest = self.manifest
        first = int(manifest.first_parts[leaf])
        try:
            parts = [dense.dress(spot.tensor, int(manifest.parts.flags[first + k])) for k, spot in enumerate(spots)]
        except ValueError as error:
            raise ValueError(f"leaf {manifest.paths[leaf]}: {error}") from error
        if manifest.kinds[leaf] == Leaf.TENSOR:
            return parts[0]
        return landing.close(manifest, leaf, iter(parts), build_context, kinds)
