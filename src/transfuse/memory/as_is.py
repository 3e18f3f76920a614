"""The plan of a state that lands as it is: every tensor of the manifest in its own target, or in fresh memory.

A *part* is one tensor of the manifest. The plan is made of columns: most leaves become Python objects only when the
result is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from transfuse.memory import landing
from transfuse.memory.arena import FreshMemory, Supply, allocate
from transfuse.memory.landing import Built, Copy
from transfuse.memory.packing import Place, place_in_storage, place_in_tensor
from transfuse.plan import parcels
from transfuse.plan.match import Match
from transfuse.plan.regions import lay_out
from transfuse.plan.shares import Everything
from transfuse.state import trees
from transfuse.state.leaves import dense, values
from transfuse.state.leaves.codec import BuildContext
from transfuse.state.leaves.registry import Registry
from transfuse.state.manifest import Leaf, Manifest
from transfuse.state.tensors import Bools, Ints

__all__ = ["AsIs"]


class AsIs:
    """Where every region lands at the receiver. The plan's tensors are the manifest's parts."""

    def __init__(
        self,
        manifest: Manifest,
        found: Match,
        supply: Supply,
        *,
        parcel_bytes: int,
        atomic: bool,
    ) -> None:
        self.manifest = manifest
        self.atomic = atomic
        self._found = found
        #: With ``atomic`` every storage lands whole in fresh memory, so no storage is apart.
        self._apart, self._wanted = ([], []) if atomic else (found.apart, found.wanted)
        self._regions = regions = lay_out(manifest, self._apart, self._wanted)
        self._destinations = [None] * len(manifest.parts) if atomic else found.destinations
        #: For each part, whether its bytes land in a target.
        self._in_target: Bools = np.zeros(len(manifest.parts), dtype=bool) if atomic else self.placed
        #: For each part, whether it is built over fresh memory.
        self._fresh: Bools = ~self._in_target
        if found.tied and not atomic:
            self._fresh[list(found.tied)] = False
        memory = supply.kept
        if memory is None or not memory.fits(self._fresh, {}):
            memory = FreshMemory(self._fresh, allocate(manifest, self._fresh, supply), {}, ())
        self.memory = memory
        self._arena = memory.arena
        #: With ``atomic``, all parts, once they are built.
        self._built: list[torch.Tensor] | None = None
        #: Cut only after the allocation: the memory that could be allocated bounds the number of parcels.
        self.cut = parcels.cut(regions, parcel_bytes)
        self.shares = Everything(manifest, self.cut, self._apart, self._wanted)

    @property
    def fingerprint(self) -> int:
        return self.shares.fingerprint

    # -- a row for each region

    @cached_property
    def addresses(self) -> Ints:
        regions, found = self._regions, self._found
        # A union of overlapping parts has no part of its own (-1), and lands in fresh memory.
        part = np.maximum(regions.part, 0)
        placed = (regions.part >= 0) & self._in_target[part] if len(self._in_target) else regions.part >= 0
        fresh = self._arena.address[regions.storage]
        result = np.where(~placed & (fresh > 0), fresh + regions.start, 0)
        if placed.any():
            result = np.where(placed & found.as_lies[part], found.address[part], result)
        result[[*regions.strided, *(region for region in regions.also if not self._is_one_place(region))]] = 0
        return result

    def _is_one_place(self, region: int) -> bool:
        """Whether all parts of a region share one memory here too, with the source's layout."""
        members = list(self._regions.members(region))
        if not self._in_target[members].any():
            return bool(self._fresh[members].all())
        addresses, as_lies = self._found.address[members], self._found.as_lies[members]
        # Memory of other devices has no address here, so its parts do not count as the same.
        same = addresses[0] > 0 and bool((addresses == addresses[0]).all())
        return bool(same and self._in_target[members].all() and as_lies.all())

    @cached_property
    def lie_once(self) -> Bools:
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
        # A copy can begin with its target's bytes only if the two have the same layout.
        has_target = self.placed & self._found.as_lies if self.atomic else self.placed
        part = self._regions.part
        return self.lie_once & (part >= 0) & (has_target[np.maximum(part, 0)] if len(has_target) else part >= 0)

    def run(self, region: int, low: int, high: int) -> torch.Tensor | None:
        if region in self._regions.strided or (region in self._regions.also and not self._is_one_place(region)):
            return None
        part = int(self._regions.part[region])
        target = None if part < 0 else self._destinations[part]
        if target is None:
            start = int(self._regions.start[region])
            return self._arena.bytes_of(int(self._regions.storage[region]))[start + low : start + high]
        if not self._found.as_lies[part]:
            return None
        start = dense.offset_of(target) * target.element_size()
        return dense.over(target.untyped_storage(), torch.uint8, start + low, (high - low,), (1,))

    def places(self, region: int) -> list[Place]:
        members = self._regions.members(region)
        result: list[Place] = []
        for part in members:
            target = self._destinations[part]
            if target is not None:
                place = place_in_tensor(target, self.manifest.parts.form(part), int(self.manifest.parts.flags[part]))
                if not any(_same_place(place, other) for other in result):
                    result.append(place)
        number = int(self._regions.storage[region])
        if number in self._arena and (not members or self._fresh[list(members)].any()):
            memory = self._arena.bytes_of(number)
            result.append(
                place_in_storage(memory.untyped_storage(), dense.offset_of(memory), self._regions.region(region))
            )
        return result

    def tensors_of(self, chosen: Bools) -> Bools:
        regions, parts = self._regions, self.manifest.parts
        result = np.zeros(len(parts), dtype=bool)
        members = regions.part[chosen]
        tangled = members < 0
        result[members[~tangled]] = True
        for region, others in regions.also.items():
            if chosen[region]:
                result[list(others)] = True
        if tangled.any():
            result |= np.isin(parts.storage, regions.storage[chosen][tangled])
        if self._apart:
            # Parts that were not wanted look into the storage through a part that was.
            apart = np.intersect1d(parts.storage[result & self._in_target], np.array(self._apart, dtype=np.int64))
            unasked = np.isin(parts.storage, apart)
            unasked[self._wanted] = False
            result |= unasked
        return result

    # -- a row for each part

    @cached_property
    def placed(self) -> Bools:
        targets = self._found.destinations
        return np.fromiter((target is not None for target in targets), bool, len(targets))

    @cached_property
    def leaf(self) -> Ints:
        return self.manifest.leaves_of(np.arange(len(self.manifest.parts), dtype=np.int64))

    @property
    def paths(self) -> Sequence[str]:
        return self.manifest.paths

    def targets(self, tensors: Ints) -> tuple[list[torch.Tensor], list[Any]]:
        found = self._found
        targets: list[Any] = list(map(found.destinations.__getitem__, tensors.tolist()))
        partners = map(found.merged.partner.__getitem__, self.manifest.leaves_of(tensors).tolist())
        return targets, list(map(found.target_leaves.__getitem__, partners))

    def copies(self) -> Iterator[Copy]:
        flags, as_lies = self.manifest.parts.flags, self._found.as_lies
        for part, target in enumerate(self._found.destinations if self.atomic else ()):
            if target is not None and target.numel():
                tensor = self._part(part) if self._built is None else self._built[part]
                signs = dense.signs_between(target, int(flags[part]))
                yield Copy(target, tensor, signs, bool(as_lies[part]))

    # -- the result

    def build(self, build_context: BuildContext, kinds: Registry) -> Built:
        manifest, found = self.manifest, self._found
        partners = np.asarray(found.merged.partner, dtype=np.int64)
        codes = np.frombuffer(manifest.kinds, np.uint8)
        plain = codes == Leaf.TENSOR
        alone = plain & (partners < 0)
        built = self._built = self._build(np.arange(len(manifest.parts), dtype=np.int64)) if self.atomic else None
        numbers = manifest.first_parts[:-1][alone]
        tensors = self._build(numbers) if built is None else [built[part] for part in numbers.tolist()]
        # A leaf without a partner (-1) gets the None at the end of the list for now.
        leaves: list[Any] = list(map([*found.target_leaves, None].__getitem__, found.merged.partner))
        for leaf, tensor in zip(np.flatnonzero(alone).tolist(), tensors, strict=True):
            leaves[leaf] = tensor
        settling: list[tuple[int, Any]] = []
        for leaf in np.flatnonzero(~plain).tolist():
            if codes[leaf] == Leaf.VALUE:
                leaves[leaf] = values.decode(manifest.detail(leaf))
                continue
            partner = found.merged.partner[leaf]
            own = range(*manifest.first_parts[leaf : leaf + 2].tolist())
            parts = (built[part] if built is not None else self._part(part) for part in own)
            if partner < 0 or any(found.destinations[part] is None for part in own):
                leaves[leaf] = landing.close(manifest, leaf, parts, build_context, kinds)
                continue
            if built is not None:
                landing.examine(manifest, leaf, parts, build_context, kinds)
            settling.append((leaf, leaves[leaf]))
        ordered = found.merged.arrange(leaves, found.target_leaves)
        return Built(trees.unflatten(found.merged.root, ordered), settling)

    def _build(self, parts: Ints) -> list[torch.Tensor]:
        """Build these fresh parts, each with its flags. The arena builds parts that fill their slice of a mapping."""
        p, arena = self.manifest.parts, self._arena
        storage = p.storage[parts]
        blocks = np.where(self._whole[parts], arena.block[storage], -1)
        columns = (blocks, arena.offset[storage], p.dtype[parts], p.first[parts], p.first[parts + 1], p.flags[parts])
        sizes, dtypes = p.sizes.tolist(), self.manifest.dtypes
        result = []
        for part, block, offset, dtype, first, end, flags in zip(
            parts.tolist(), *(column.tolist() for column in columns), strict=True
        ):
            try:
                if block < 0:
                    tensor = self._part(part)
                else:
                    tensor = arena.tensor(block, offset, dtypes[dtype], sizes[first:end])
                    if flags:
                        tensor = dense.dress(tensor, flags)
            except ValueError as error:
                raise ValueError(f"leaf {self.manifest.paths[self.manifest.leaf_of(part)]}: {error}") from error
            result.append(tensor)
        return result

    @cached_property
    def _whole(self) -> Bools:
        """Whether a fresh part alone fills its slice of a mapping, in row-major order and with row-major strides."""
        p = self.manifest.parts
        regular = np.ones(len(p.strides), dtype=bool)
        regular[:-1] = p.strides[:-1] == p.strides[1:] * p.sizes[1:]
        last = p.first[1:][p.ndim > 0] - 1
        regular[last] = p.strides[last] == 1
        result = self._fresh & (self._arena.block[p.storage] >= 0)
        result[np.repeat(np.arange(len(p)), p.ndim)[~regular]] = False
        users = np.bincount(p.storage, minlength=len(self.manifest.storages))
        result &= (users[p.storage] == 1) & (p.numel * p.item == self.manifest.storages.nbytes[p.storage])
        return result

    def _part(self, part: int) -> torch.Tensor:
        """Build one fresh part, with its flags."""
        p = self.manifest.parts
        known = self._inner.get(part)
        if known is not None:
            return known
        anchor = self._found.tied.get(part) if not self.atomic else None
        if anchor is not None:
            target = self._destinations[anchor]
            assert target is not None
            storage, offset = target.untyped_storage(), dense.offset_of(target)
        else:
            storage = self._arena.storage(int(p.storage[part]))
            offset = int(p.offset[part]) if p.numel[part] else 0
        tensor = dense.over(storage, self.manifest.dtype_of(part), offset, p.shape(part), p.stride(part))
        return dense.dress(tensor, int(p.flags[part]))

    @cached_property
    def _inner(self) -> dict[int, torch.Tensor]:
        """Parts that several composite leaves share, each built as one object.

        Two jagged tensors have the same ragged size only if they hold the same offsets object.
        """
        p = self.manifest.parts
        same: dict[tuple[Any, ...], list[int]] = {}
        for leaf in np.flatnonzero(np.frombuffer(self.manifest.kinds, np.uint8) == Leaf.COMPOSITE).tolist():
            for i in range(*self.manifest.first_parts[leaf : leaf + 2].tolist()):
                if self._fresh[i]:
                    key = (p.storage[i], p.dtype[i], p.flags[i], p.offset[i], p.shape(i), p.stride(i))
                    same.setdefault(key, []).append(i)
        result: dict[int, torch.Tensor] = {}
        self.__dict__["_inner"] = result  # _part() reads this dict while it is filled.
        for numbers in same.values():
            if len(numbers) > 1:
                result.update(dict.fromkeys(numbers, self._part(numbers[0])))
        return result


def _same_place(one: Place, other: Place) -> bool:
    a, b = one.view, other.view
    return (
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() == b.storage_offset()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and one.signs == other.signs
    )
