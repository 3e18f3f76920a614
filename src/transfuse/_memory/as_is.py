"""The plan of a state that lands as it is: every tensor of the manifest in its own target, or in fresh memory.

The plan is made of columns, and ``row`` is the number of a tensor in them: most leaves become Python objects only when
the result is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from transfuse._memory.building import Builder, tensor_over
from transfuse._memory.fresh import FreshMemory, MemorySupply, allocate, say_where
from transfuse._memory.landing import Built, Landing
from transfuse._memory.packing import RegionPlace, place_in_storage, place_in_tensor
from transfuse._plan import parcels
from transfuse._plan.match import Match
from transfuse._plan.outline import Outline
from transfuse._plan.parcels import Parcels
from transfuse._plan.regions import Regions, lay_out
from transfuse._plan.shares import Everything
from transfuse._state import trees
from transfuse._state.leaves import dense
from transfuse._state.manifest import Leaf, Manifest
from transfuse._state.region import Ints
from transfuse._state.tensors import Bools


class ReusablePlan(NamedTuple):
    """What a plan leaves for the next receive of the same structure into a target with the same outline."""

    #: The match, without its tensors, and the number of each destination among the outline's tensors, or -1.
    found: Match
    numbers: list[int]
    regions: Regions
    cut: Parcels
    shares: Everything

    def match(self, outline: Outline, leaves: list[Any]) -> Match:
        """The match with the tensors and leaves of this target."""
        tensors: list[torch.Tensor | None] = [*outline.tensors, None]
        return replace(self.found, target_leaves=leaves, destinations=list(map(tensors.__getitem__, self.numbers)))


class AsIs(Landing):
    """Where every region lands at the receiver. The plan's tensors are the manifest's tensors."""

    def __init__(
        self,
        manifest: Manifest,
        found: Match,
        supply: MemorySupply,
        *,
        parcel_bytes: int,
        kept: ReusablePlan | None = None,
    ) -> None:
        self.manifest = manifest
        self._kept = kept
        self._found = found
        self._apart, self._wanted = found.apart, found.wanted
        self._regions = lay_out(manifest, self._apart, self._wanted) if kept is None else kept.regions
        self._destinations = found.destinations
        #: For each tensor, whether it is built over fresh memory.
        self._fresh: Bools = ~self.placed
        if found.tied:
            self._fresh[list(found.tied)] = False
        say_where(manifest, self._fresh, supply.device)
        memory = supply.kept
        if memory is None or not memory.fits(self._fresh, {}):
            memory = FreshMemory(self._fresh, allocate(manifest, self._fresh, supply), {})
        self.memory = memory
        self._arena = memory.arena
        #: Cut only after the allocation: the memory that could be allocated bounds the number of parcels.
        self.cut = parcels.cut(self._regions, parcel_bytes) if kept is None else kept.cut
        self.shares: Everything = kept.shares if kept else Everything(manifest, self.cut, self._apart, self._wanted)
        self.begin()

    def keep(self, outline: Outline) -> ReusablePlan | None:
        """What the next receive may use again; None if it must plan by itself."""
        if self._kept is not None:
            return self._kept
        numbers = outline.numbers_of(self._found.destinations)
        if numbers is None:
            return None
        found = replace(self._found, target_leaves=[], destinations=[])
        return ReusablePlan(found, numbers, self._regions, self.cut, self.shares)

    @property
    def fingerprint(self) -> int:
        return self.shares.fingerprint

    # -- a row for each region

    @cached_property
    def addresses(self) -> Ints:
        regions, found = self._regions, self._found
        # A union of overlapping tensors has no tensor of its own (-1), and lands in fresh memory.
        rows = np.maximum(regions.tensor, 0)
        placed = (regions.tensor >= 0) & self.placed[rows] if len(self.placed) else regions.tensor >= 0
        fresh = self._arena.address[regions.storage]
        result = np.where(~placed & (fresh > 0), fresh + regions.start, 0)
        if placed.any():
            result = np.where(placed & found.copies_as_bytes[rows], found.address[rows], result)
        result[[*regions.strided, *(region for region in regions.also if not self._is_one_place(region))]] = 0
        return result

    def _is_one_place(self, region: int) -> bool:
        """Whether all tensors of a region share one memory here too, with the source's layout."""
        members = list(self._regions.members(region))
        if not self.placed[members].any():
            return bool(self._fresh[members].all())
        addresses, copies_as_bytes = self._found.address[members], self._found.copies_as_bytes[members]
        # Memory of other devices has no address here, so its tensors do not count as the same.
        same = addresses[0] > 0 and bool((addresses == addresses[0]).all())
        return bool(same and self.placed[members].all() and copies_as_bytes.all())

    @cached_property
    def has_single_place(self) -> Bools:
        result = self.addresses > 0
        for region in np.flatnonzero(~result).tolist():
            places = self.places(region)
            result[region] = len(places) == 1 and not places[0].lead
        return result

    @cached_property
    def convert(self) -> Bools:
        return np.zeros(len(self._regions), dtype=bool)

    @cached_property
    def held(self) -> Bools:
        rows, placed = self._regions.tensor, self.placed
        return self.has_single_place & (rows >= 0) & (placed[np.maximum(rows, 0)] if len(placed) else rows >= 0)

    def run(self, region: int, low: int, high: int) -> torch.Tensor | None:
        if region in self._regions.strided or (region in self._regions.also and not self._is_one_place(region)):
            return None
        row = int(self._regions.tensor[region])
        target = None if row < 0 else self._destinations[row]
        if target is None:
            start = int(self._regions.start[region])
            return self._arena.bytes_of(int(self._regions.storage[region]))[start + low : start + high]
        if not self._found.copies_as_bytes[row]:
            return None
        start = dense.offset_of(target) * target.element_size()
        return dense.over(target.untyped_storage(), torch.uint8, start + low, (high - low,), (1,))

    def places(self, region: int) -> list[RegionPlace]:
        result: list[RegionPlace] = []
        for row in self._regions.members(region):
            target = self._destinations[row]
            if target is not None:
                place = self._place_in(target, row)
                if not any(_same_place(place, other) for other in result):
                    result.append(place)
        return result + self.fresh_places(region)

    def _place_in(self, target: torch.Tensor, row: int) -> RegionPlace:
        return place_in_tensor(target, self.manifest.tensors.form(row), int(self.manifest.tensors.flags[row]))

    def fresh_places(self, region: int) -> list[RegionPlace]:
        members, number = self._regions.members(region), int(self._regions.storage[region])
        if number not in self._arena or (members and not self._fresh[list(members)].any()):
            return []
        memory = self._arena.bytes_of(number)
        return [place_in_storage(memory.untyped_storage(), dense.offset_of(memory), self._regions.region(region))]

    @cached_property
    def in_targets(self) -> Bools:
        rows = self._regions.tensor
        result: Bools = (rows >= 0) & (self.placed[np.maximum(rows, 0)] if len(self.placed) else rows >= 0)
        for region in self._regions.also:
            result[region] = self.placed[list(self._regions.members(region))].any()
        return result

    @property
    def also_fresh(self) -> Sequence[int]:
        return [region for region in self._regions.also if self.in_targets[region] and self.fresh_places(region)]

    def scratch(self, leaf: int) -> tuple[list[torch.Tensor], list[tuple[int, RegionPlace]]]:
        tensors: list[torch.Tensor] = []
        places: list[tuple[int, RegionPlace]] = []
        for row in range(*self.manifest.first_tensors[leaf : leaf + 2].tolist()):
            target = self._destinations[row]
            assert target is not None
            tensors.append(target.detach().clone())
            regions = np.flatnonzero(self._regions.tensor == row).tolist()
            regions += [region for region, others in self._regions.also.items() if row in others]
            places += [(region, self._place_in(tensors[-1], row)) for region in regions]
        return tensors, places

    def tensors_of(self, chosen: Bools) -> Bools:
        regions, tensors = self._regions, self.manifest.tensors
        result = np.zeros(len(tensors), dtype=bool)
        members = regions.tensor[chosen]
        tangled = members < 0
        result[members[~tangled]] = True
        for region, others in regions.also.items():
            if chosen[region]:
                result[list(others)] = True
        if tangled.any():
            result |= np.isin(tensors.storage, regions.storage[chosen][tangled])
        if self._apart:
            # Tensors that were not wanted look into the storage through a tensor that was.
            apart = np.intersect1d(tensors.storage[result & self.placed], np.array(self._apart, dtype=np.int64))
            unasked = np.isin(tensors.storage, apart)
            unasked[self._wanted] = False
            result |= unasked
        return result

    # -- a row for each tensor

    @cached_property
    def placed(self) -> Bools:
        targets = self._found.destinations
        return np.fromiter((target is not None for target in targets), bool, len(targets))

    @cached_property
    def leaf(self) -> Ints:
        return self.manifest.leaves_of(np.arange(len(self.manifest.tensors), dtype=np.int64))

    @property
    def paths(self) -> Sequence[str]:
        return self.manifest.paths

    def targets(self, tensors: Ints) -> tuple[list[torch.Tensor], list[Any]]:
        found = self._found
        targets: list[Any] = list(map(found.destinations.__getitem__, tensors.tolist()))
        partners = map(found.merged.partner.__getitem__, self.manifest.leaves_of(tensors).tolist())
        return targets, list(map(found.target_leaves.__getitem__, partners))

    # -- the result

    def build(self, builder: Builder) -> Built:
        manifest, found = self.manifest, self._found
        partners = np.asarray(found.merged.partner, dtype=np.int64)
        codes = np.frombuffer(manifest.kinds, np.uint8)
        plain = codes == Leaf.TENSOR
        alone = plain & (partners < 0)
        tensors = self._build(manifest.first_tensors[:-1][alone])
        # A leaf without a partner (-1) gets the None at the end of the list for now.
        leaves: list[Any] = list(map([*found.target_leaves, None].__getitem__, found.merged.partner))
        for leaf, tensor in zip(np.flatnonzero(alone).tolist(), tensors, strict=True):
            leaves[leaf] = tensor
        settling: list[tuple[int, Any]] = []
        for leaf in np.flatnonzero(~plain).tolist():
            if codes[leaf] == Leaf.VALUE:
                leaves[leaf] = builder.leaf(leaf)
                continue
            partner = found.merged.partner[leaf]
            rows = range(*manifest.first_tensors[leaf : leaf + 2].tolist())
            if partner < 0 or any(found.destinations[row] is None for row in rows):
                leaves[leaf] = builder.leaf(leaf, map(self._tensor, rows))
                continue
            settling.append((leaf, leaves[leaf]))
        ordered = found.merged.arrange(leaves, found.target_leaves)
        return Built(trees.unflatten(found.merged.root, ordered), settling)

    def _build(self, rows: Ints) -> list[torch.Tensor]:
        """Build fresh tensors, each with its flags. The arena builds those that fill their slice of a mapping."""
        tensors, arena = self.manifest.tensors, self._arena
        storage = tensors.storage[rows]
        mappings = np.where(self._whole[rows], arena.mapping[storage], -1)
        columns = (
            mappings,
            arena.offset[storage],
            tensors.dtype[rows],
            tensors.first[rows],
            tensors.first[rows + 1],
            tensors.flags[rows],
        )
        sizes, dtypes = tensors.sizes.tolist(), self.manifest.dtypes
        result = []
        for row, mapping, offset, dtype, first, end, flags in zip(
            rows.tolist(), *(column.tolist() for column in columns), strict=True
        ):
            try:
                if mapping < 0:
                    tensor = self._tensor(row)
                else:
                    tensor = arena.tensor(mapping, offset, dtypes[dtype], sizes[first:end])
                    if flags:
                        tensor = dense.dress(tensor, flags)
            except ValueError as error:
                raise ValueError(f"leaf {self.manifest.paths[self.manifest.leaf_of(row)]}: {error}") from error
            result.append(tensor)
        return result

    @cached_property
    def _whole(self) -> Bools:
        """Whether a fresh tensor alone fills its slice of a mapping, in row-major order and with row-major strides."""
        tensors = self.manifest.tensors
        regular = np.ones(len(tensors.strides), dtype=bool)
        regular[:-1] = tensors.strides[:-1] == tensors.strides[1:] * tensors.sizes[1:]
        last = tensors.first[1:][tensors.ndim > 0] - 1
        regular[last] = tensors.strides[last] == 1
        result = self._fresh & (self._arena.mapping[tensors.storage] >= 0)
        result[np.repeat(np.arange(len(tensors)), tensors.ndim)[~regular]] = False
        users = np.bincount(tensors.storage, minlength=len(self.manifest.storages))
        nbytes = self.manifest.storages.nbytes[tensors.storage]
        result &= (users[tensors.storage] == 1) & (tensors.numel * tensors.item == nbytes)
        return result

    def _tensor(self, row: int) -> torch.Tensor:
        """Build one fresh tensor, with its flags."""
        known = self._inner.get(row)
        if known is not None:
            return known
        anchor = self._found.tied.get(row)
        if anchor is not None:
            target = self._destinations[anchor]
            assert target is not None
            return tensor_over(self.manifest, row, target.untyped_storage(), dense.offset_of(target))
        return tensor_over(self.manifest, row, self._arena.storage(int(self.manifest.tensors.storage[row])))

    @cached_property
    def _inner(self) -> dict[int, torch.Tensor]:
        """Tensors that several composite leaves share, each built as one object.

        Two jagged tensors have the same ragged size only if they hold the same offsets object.
        """
        tensors = self.manifest.tensors
        same: dict[tuple[Any, ...], list[int]] = {}
        for leaf in np.flatnonzero(np.frombuffer(self.manifest.kinds, np.uint8) == Leaf.COMPOSITE).tolist():
            for row in range(*self.manifest.first_tensors[leaf : leaf + 2].tolist()):
                if self._fresh[row]:
                    key = (
                        tensors.storage[row],
                        tensors.dtype[row],
                        tensors.flags[row],
                        tensors.offset[row],
                        tensors.shape(row),
                        tensors.stride(row),
                    )
                    same.setdefault(key, []).append(row)
        result: dict[int, torch.Tensor] = {}
        self.__dict__["_inner"] = result  # _tensor() reads this dict while it is filled.
        for rows in same.values():
            if len(rows) > 1:
                result.update(dict.fromkeys(rows, self._tensor(rows[0])))
        return result


def _same_place(one: RegionPlace, other: RegionPlace) -> bool:
    a, b = one.view, other.view
    return (
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() == b.storage_offset()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and one.signs == other.signs
    )
