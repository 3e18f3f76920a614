"""Where bytes land: the receiver's own tensors, or fresh storages.

:class:`Landing` knows the place of every box, which leaves have been touched, and how to build the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import compress
from operator import is_not
from typing import Any, NamedTuple

import numpy as np
import torch

from transfuse.errors import LimitExceeded, UnsupportedLeaf
from transfuse.limits import Limits
from transfuse.memory.accounts import account
from transfuse.memory.arena import Arena
from transfuse.memory.packing import Place, place_in_storage, place_in_tensor
from transfuse.plan import parcels
from transfuse.plan.match import Match
from transfuse.plan.regions import Boxes
from transfuse.state import trees
from transfuse.state.leaves import dense, values
from transfuse.state.leaves.codec import CannotCarry, Room
from transfuse.state.leaves.registry import Kinds
from transfuse.state.manifest import Leaf, Manifest
from transfuse.state.tensors import Bools, Ints

__all__ = ["Fresh", "Landing", "allocate"]


class Fresh(NamedTuple):
    """Fresh memory, and which parts of a manifest are built over it."""

    arena: Arena
    parts: Bools

    def fits(self, parts: Bools) -> bool:
        """Whether it is the memory for these parts of the same manifest."""
        return bool(np.array_equal(self.parts, parts))


class Landing:
    """The places of all boxes at the receiver."""

    def __init__(
        self,
        manifest: Manifest,
        found: Match,
        boxes: Boxes,
        parcel_bytes: int,
        *,
        device: torch.device,
        atomic: bool,
        limits: Limits,
        kept: Fresh | None = None,
    ) -> None:
        self._manifest = manifest
        self._found = found
        self._boxes = boxes
        self._atomic = atomic
        self._destinations = [None] * len(manifest.parts) if atomic else found.destinations
        #: For each part, whether its bytes go into a target.
        self._placed: Bools = np.fromiter((d is not None for d in self._destinations), bool, len(manifest.parts))
        #: For each part, whether it is built over fresh memory.
        self._fresh: Bools = ~self._placed
        if found.tied and not atomic:
            self._fresh[list(found.tied)] = False
        #: For each box, whether memory of it may have been written.
        self._touched: Bools = np.zeros(len(boxes), dtype=bool)
        self._applied = False
        if kept is not None and kept.fits(self._fresh):
            self._arena = kept.arena
        else:
            self._arena = allocate(manifest, self._fresh, device, limits)
        #: Only now: what can be allocated bounds how many parcels there are.
        self.cut = parcels.cut(boxes, parcel_bytes)

    @property
    def fingerprint(self) -> int:
        """Of what lands where: a receive that goes on must have the same."""
        return parcels.fingerprint(self.cut)

    @property
    def stays(self) -> bool:
        """Whether what has landed is still there after a receive that failed."""
        return True

    @property
    def fresh(self) -> Fresh:
        """What a later receive of the same state may go on with."""
        return Fresh(self._arena, self._fresh)

    # -- Places

    @cached_property
    def addresses(self) -> Ints:
        """For each box, the address of its first byte if its only place is one run of main memory; otherwise 0."""
        boxes, found = self._boxes, self._found
        # A tangle has no part, and is fresh.
        part = np.maximum(boxes.part, 0)
        placed = (boxes.part >= 0) & self._placed[part] if len(self._placed) else boxes.part >= 0
        fresh = self._arena.address[boxes.storage]
        result = np.where(~placed & (fresh > 0), fresh + boxes.start, 0)
        if placed.any():
            result = np.where(placed & found.as_lies[part], found.address[part], result)
        result[[*boxes.strided, *(box for box in boxes.also if not self._is_one_place(box))]] = 0
        return result

    def _is_one_place(self, box: int) -> bool:
        """Whether the parts of a box that has several are one memory here too, and lie in it as at the source."""
        members = list(self._boxes.members(box))
        if not self._placed[members].any():
            return bool(self._fresh[members].all())
        addresses, as_lies = self._found.address[members], self._found.as_lies[members]
        # Without an address, outside main memory, nothing is known to be the same.
        same = addresses[0] > 0 and bool((addresses == addresses[0]).all())
        return bool(same and self._placed[members].all() and as_lies.all())

    def run(self, box: int, low: int, high: int) -> torch.Tensor | None:
        if box in self._boxes.strided or (box in self._boxes.also and not self._is_one_place(box)):
            return None
        part = int(self._boxes.part[box])
        target = None if part < 0 else self._destinations[part]
        if target is None:
            start = int(self._boxes.start[box])
            return self._arena.bytes_of(int(self._boxes.storage[box]))[start + low : start + high]
        if not self._found.as_lies[part]:
            return None
        start = dense.offset_of(target) * target.element_size()
        return dense.over(target.untyped_storage(), torch.uint8, start + low, (high - low,), (1,))

    def places(self, box: int) -> list[Place]:
        members = self._boxes.members(box)
        result: list[Place] = []
        for part in members:
            target = self._destinations[part]
            if target is not None:
                place = place_in_tensor(target, self._manifest.parts.form(part), int(self._manifest.parts.flags[part]))
                if not any(_same_place(place, other) for other in result):
                    result.append(place)
        number = int(self._boxes.storage[box])
        if number in self._arena and (not members or self._fresh[list(members)].any()):
            memory = self._arena.bytes_of(number)
            result.append(place_in_storage(memory.untyped_storage(), dense.offset_of(memory), self._boxes.box(box)))
        return result

    @cached_property
    def lie_once(self) -> Bools:
        """Which boxes have one place only, and there lie only once: looking at it says all there is to say."""
        result = self.addresses > 0
        for box in np.flatnonzero(~result).tolist():
            places = self.places(box)
            result[box] = len(places) == 1 and not places[0].lead
        return result

    @cached_property
    def convert(self) -> Bools:
        """Which boxes are converted as they land: none."""
        return np.zeros(len(self._boxes), dtype=bool)

    @cached_property
    def held(self) -> Bools:
        """Which boxes lie in a target, that may hold the right bytes already."""
        has_target = np.fromiter((t is not None for t in self._found.destinations), bool, len(self._found.destinations))
        if self._atomic:
            has_target &= self._found.as_lies  # As is copied aside.
        part = self._boxes.part
        return self.lie_once & (part >= 0) & (has_target[np.maximum(part, 0)] if len(has_target) else part >= 0)

    def fill_aside(self) -> None:
        """Begin with what the targets hold, where it is a copy that is written."""
        if not self._atomic:
            return
        for part, target in enumerate(self._found.destinations):
            if target is not None and target.numel() and self._found.as_lies[part]:
                dense.raw(self._part(part)).copy_(dense.raw(target))

    # -- what has been touched

    def touch(self, boxes: Sequence[int] | Ints | slice) -> None:
        """Note that memory of these boxes is about to be written."""
        if isinstance(boxes, range) and boxes.step == 1:
            boxes = slice(boxes.start, boxes.stop)
        self._touched[boxes if isinstance(boxes, slice) else np.asarray(boxes, dtype=np.int64)] = True

    def torn(self) -> tuple[str, ...]:
        """Paths of the target leaves that have been written to."""
        parts = self._all_placed() if self._applied else self._written()
        return tuple(self._manifest.paths[leaf] for leaf in np.unique(self._manifest.leaves_of(parts)).tolist())

    def _all_placed(self) -> Ints:
        targets = self._found.destinations
        return np.array([part for part, target in enumerate(targets) if target is not None], dtype=np.int64)

    def _written(self) -> Ints:
        """Parts whose targets have been touched, or see the same storage through a part that stands for them."""
        boxes, found = self._boxes, self._found
        written = np.zeros(len(self._placed), dtype=bool)
        members = boxes.part[self._touched]
        written[members[members >= 0]] = True
        for box, others in boxes.also.items():
            if self._touched[box]:
                written[list(others)] = True
        written &= self._placed
        if found.apart and written.any():
            storage = self._manifest.parts.storage
            apart = np.intersect1d(storage[written], np.array(found.apart, dtype=np.int64))
            unasked = self._placed & np.isin(storage, apart)
            unasked[found.wanted] = False
            written |= unasked
        return np.flatnonzero(written)

    def bump_versions(self) -> None:
        """Tell autograd which targets have changed: their parts, and the composites around these."""
        found = self._found
        numbers = self._all_placed() if self._applied else self._written()
        if not len(numbers):
            return
        targets = list(map(found.destinations.__getitem__, numbers.tolist()))
        partners = map(found.merged.partner.__getitem__, self._manifest.leaves_of(numbers).tolist())
        leaves = list(map(found.target_leaves.__getitem__, partners))
        torch.autograd.graph.increment_version(targets + list(compress(leaves, map(is_not, leaves, targets))))

    def account(self, landed: Bools) -> tuple[Sequence[str], Sequence[str]]:
        """Paths of the leaves of which everything has landed, and of all others."""
        return account(self._manifest, self.cut, landed, self._found.apart, self._found.wanted)

    def paths_of(self, boxes: Sequence[int]) -> list[str]:
        """Paths of the leaves that these boxes hold."""
        leaves: set[int] = set()
        for box in boxes:
            members: Sequence[int] = self._boxes.members(box)
            if not members:
                members = np.flatnonzero(self._manifest.parts.storage == self._boxes.storage[box]).tolist()
            leaves.update(self._manifest.leaf_of(part) for part in members)
        return [self._manifest.paths[leaf] for leaf in sorted(leaves)]

    # -- the result

    def finish(self, room: Room, kinds: Kinds) -> Any:
        """Build the state from what has landed."""
        manifest, found = self._manifest, self._found
        partners = np.asarray(found.merged.partner, dtype=np.int64)
        codes = np.frombuffer(manifest.kinds, np.uint8)
        plain = codes == Leaf.TENSOR
        alone = plain & (partners < 0)
        built = self._build(np.arange(len(manifest.parts), dtype=np.int64)) if self._atomic else None
        numbers = manifest.first_parts[:-1][alone]
        tensors = self._build(numbers) if built is None else [built[part] for part in numbers.tolist()]
        # A leaf without a partner (-1) gets the None at the end first.
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
                leaves[leaf] = self._close(kinds, leaf, parts, room)
                continue
            if built is not None:
                self._examine(kinds, leaf, parts, room)
            settling.append((leaf, leaves[leaf]))
        ordered = [leaves[o] if o >= 0 else found.target_leaves[~o] for o in found.merged.origin]
        state = trees.unflatten(found.merged.root, ordered)
        # Atomic: whatever could fail has been done, and only now the first target is written.
        if built is not None:
            self._apply(built)
        for leaf, target in settling:
            self._settle(kinds, leaf, target)
        return state

    def _settle(self, kinds: Kinds, leaf: int, target: Any) -> None:
        try:
            kinds.settle(self._manifest.detail(leaf), target)
        except ValueError as error:
            raise ValueError(f"leaf {self._manifest.paths[leaf]}: {error}") from error

    def _examine(self, kinds: Kinds, leaf: int, parts: Iterator[torch.Tensor], room: Room) -> None:
        try:
            kinds.examine(self._manifest.detail(leaf), parts, room)
        except ValueError as error:
            raise ValueError(f"leaf {self._manifest.paths[leaf]}: {error}") from error

    def _close(self, kinds: Kinds, leaf: int, parts: Iterator[torch.Tensor], room: Room) -> Any:
        try:
            return kinds.close(self._manifest.detail(leaf), parts, room)
        except CannotCarry as reason:
            raise UnsupportedLeaf(self._manifest.paths[leaf], str(reason)) from reason
        except ValueError as error:
            raise ValueError(f"leaf {self._manifest.paths[leaf]}: {error}") from error

    def _build(self, parts: Ints) -> list[torch.Tensor]:
        """Fresh parts, each with its flags. Those that are the whole of a piece of a block come from there."""
        p, arena = self._manifest.parts, self._arena
        storage = p.storage[parts]
        blocks = np.where(self._whole[parts], arena.block[storage], -1)
        columns = (blocks, arena.offset[storage], p.dtype[parts], p.first[parts], p.first[parts + 1], p.flags[parts])
        sizes, dtypes = p.sizes.tolist(), self._manifest.dtypes
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
                raise ValueError(f"leaf {self._manifest.paths[self._manifest.leaf_of(part)]}: {error}") from error
            result.append(tensor)
        return result

    @cached_property
    def _whole(self) -> Bools:
        """Fresh parts that have a piece of a block to themselves and fill it in row-major order, strides included."""
        p = self._manifest.parts
        regular = np.ones(len(p.strides), dtype=bool)
        regular[:-1] = p.strides[:-1] == p.strides[1:] * p.sizes[1:]
        last = p.first[1:][p.ndim > 0] - 1
        regular[last] = p.strides[last] == 1
        result = self._fresh & (self._arena.block[p.storage] >= 0)
        result[np.repeat(np.arange(len(p)), p.ndim)[~regular]] = False
        users = np.bincount(p.storage, minlength=len(self._manifest.storages))
        result &= (users[p.storage] == 1) & (p.numel * p.item == self._manifest.storages.nbytes[p.storage])
        return result

    def _part(self, part: int) -> torch.Tensor:
        """A part that has arrived fresh, with its flags."""
        p = self._manifest.parts
        known = self._inner.get(part)
        if known is not None:
            return known
        anchor = self._found.tied.get(part) if not self._atomic else None
        if anchor is not None:
            target = self._destinations[anchor]
            assert target is not None
            storage, offset = target.untyped_storage(), dense.offset_of(target)
        else:
            storage = self._arena.storage(int(p.storage[part]))
            offset = int(p.offset[part]) if p.numel[part] else 0
        tensor = dense.over(storage, self._manifest.dtype_of(part), offset, p.shape(part), p.stride(part))
        return dense.dress(tensor, int(p.flags[part]))

    @cached_property
    def _inner(self) -> dict[int, torch.Tensor]:
        """Parts that several composites have in common, each as one object.

        Jagged tensors are of the same ragged size only if they hold the very same offsets object.
        """
        p = self._manifest.parts
        same: dict[tuple[Any, ...], list[int]] = {}
        for leaf in np.flatnonzero(np.frombuffer(self._manifest.kinds, np.uint8) == Leaf.COMPOSITE).tolist():
            for i in range(*self._manifest.first_parts[leaf : leaf + 2].tolist()):
                if self._fresh[i]:
                    key = (p.storage[i], p.dtype[i], p.flags[i], p.offset[i], p.shape(i), p.stride(i))
                    same.setdefault(key, []).append(i)
        result: dict[int, torch.Tensor] = {}
        self.__dict__["_inner"] = result  # While these are built, none is known.
        for numbers in same.values():
            if len(numbers) > 1:
                result.update(dict.fromkeys(numbers, self._part(numbers[0])))
        return result

    def _apply(self, built: list[torch.Tensor]) -> None:
        self._applied = True
        for part, target in enumerate(self._found.destinations):
            if target is not None and target.numel():
                mine, theirs = dense.raw(target), dense.raw(built[part])
                place = place_in_tensor(target, self._manifest.parts.form(part), int(self._manifest.parts.flags[part]))
                if place.signs is not None:
                    theirs = theirs.clone(memory_format=torch.contiguous_format)
                    place.signs.flip(theirs.view(-1))
                for d in range(target.ndim):
                    if target.stride(d) == 0:  # Repeated in the source too: one of its elements is all of them.
                        mine, theirs = mine.narrow(d, 0, 1), theirs.narrow(d, 0, 1)
                mine.copy_(theirs)


def allocate(manifest: Manifest, fresh: Bools, device: torch.device, limits: Limits, extra_bytes: int = 0) -> Arena:
    """One fresh storage for each storage that has a fresh part. ``extra_bytes`` are allocated elsewhere."""
    parts, storages = manifest.parts, manifest.storages
    needed = np.zeros(len(storages), dtype=bool)
    needed[parts.storage[fresh]] = True
    # A fresh part that is empty needs a storage to look into, but none of its bytes.
    filled = np.zeros(len(storages), dtype=bool)
    filled[parts.storage[fresh & (parts.numel > 0)]] = True
    total = int(storages.nbytes[filled].astype(float).sum()) + extra_bytes
    if total > limits.max_receive_bytes:
        raise LimitExceeded(
            f"the source offers {total} bytes of fresh tensors, more than max_receive_bytes="
            f"{limits.max_receive_bytes}; raise it, or receive in place"
        )
    cpu = torch.device("cpu")
    homes = [device if torch.device(name).type == device.type else cpu for name in storages.devices]
    try:
        return Arena(np.where(filled, storages.nbytes, 0), needed, homes, storages.device)
    except RuntimeError as error:
        raise LimitExceeded(f"no memory for {total} bytes of fresh tensors; receive in place: {error}") from error


def _same_place(one: Place, other: Place) -> bool:
    a, b = one.view, other.view
    return (
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() == b.storage_offset()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and one.signs == other.signs
    )
