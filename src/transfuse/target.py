"""Where bytes land: the receiver's own tensors, or fresh storages.

:class:`Landing` knows the place of every box, which leaves have been touched, and how to build the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from transfuse import trees
from transfuse.errors import LimitExceeded, UnsupportedLeaf
from transfuse.leaves import dense, values
from transfuse.leaves.codec import CannotCarry, Room
from transfuse.leaves.kinds import Kinds
from transfuse.limits import Limits
from transfuse.manifest import Leaf, Manifest
from transfuse.matching import Match
from transfuse.places import Place, place_in_storage, place_in_tensor
from transfuse.plan import Boxes

__all__ = ["Landing"]


class Landing:
    """The places of all boxes at the receiver."""

    def __init__(
        self,
        manifest: Manifest,
        found: Match,
        boxes: Boxes,
        *,
        device: torch.device,
        atomic: bool,
        limits: Limits,
    ) -> None:
        self._manifest = manifest
        self._found = found
        self._boxes = boxes
        self._atomic = atomic
        self._destinations = [None] * len(manifest.parts) if atomic else found.destinations
        self._touched: set[int] = set()
        self._applied = False
        #: Parts whose bytes a contiguous target without sign bits holds in the same order.
        bits = int(dense.Flags.CONJUGATE | dense.Flags.NEGATIVE)
        self._as_lies: list[bool] = (manifest.parts.contiguous & (manifest.parts.flags & bits == 0)).tolist()
        self._storages = self._allocate(device, limits)

    def _allocate(self, device: torch.device, limits: Limits) -> dict[int, torch.UntypedStorage]:
        """One fresh storage for each storage that has a part without a target."""
        parts, storages = self._manifest.parts, self._manifest.storages
        fresh = np.array([d is None for d in self._destinations], dtype=bool)
        for part in self._found.tied if not self._atomic else ():
            fresh[part] = False
        needed = np.unique(parts.storage[fresh])
        # A fresh part that is empty needs a storage to look into, but none of its bytes.
        filled = np.unique(parts.storage[fresh & (parts.numel > 0)])
        total = int(storages.nbytes[filled].astype(float).sum())
        if total > limits.max_receive_bytes:
            raise LimitExceeded(
                f"the source offers {total} bytes of fresh tensors, more than max_receive_bytes="
                f"{limits.max_receive_bytes}; raise it, or receive in place"
            )
        result = {}
        sizes = np.zeros(len(storages), dtype=np.int64)
        sizes[filled] = storages.nbytes[filled]
        for number in needed.tolist():
            where = torch.device(storages.device_of(number))
            where = device if where.type == device.type else torch.device("cpu")
            try:
                result[number] = torch.empty(int(sizes[number]), dtype=torch.uint8, device=where).untyped_storage()
            except RuntimeError as error:
                raise LimitExceeded(
                    f"no memory for {total} bytes of fresh tensors; receive in place: {error}"
                ) from error
        return result

    # -- Places

    def run(self, box: int, low: int, high: int) -> torch.Tensor | None:
        if box in self._boxes.strided or box in self._boxes.also:
            return None
        part = int(self._boxes.part[box])
        target = None if part < 0 else self._destinations[part]
        if target is None:
            storage, start = self._storages[int(self._boxes.storage[box])], int(self._boxes.start[box])
        elif self._as_lies[part] and target.is_contiguous() and not target.is_conj() and not target.is_neg():
            storage, start = target.untyped_storage(), dense.offset_of(target) * target.element_size()
        else:
            return None
        return dense.over(storage, torch.uint8, start + low, (high - low,), (1,))

    def places(self, box: int) -> list[Place]:
        members = self._boxes.members(box)
        result: list[Place] = []
        for part in members:
            target = self._destinations[part]
            if target is not None:
                place = place_in_tensor(target, self._manifest.parts.form(part), int(self._manifest.parts.flags[part]))
                if not any(_same_place(place, other) for other in result):
                    result.append(place)
        storage = self._storages.get(int(self._boxes.storage[box]))
        if storage is not None and (not members or any(self._is_fresh(part) for part in members)):
            result.append(place_in_storage(storage, 0, self._boxes.box(box)))
        return result

    def _is_fresh(self, part: int) -> bool:
        return self._destinations[part] is None and (self._atomic or part not in self._found.tied)

    # -- what has been touched

    def touch(self, boxes: Sequence[int]) -> None:
        """Note that memory of these boxes is about to be written."""
        for box in boxes:
            self._touched.update(p for p in self._boxes.members(box) if self._destinations[p] is not None)

    def torn(self) -> tuple[str, ...]:
        """Paths of the target leaves that have been written to."""
        leaves = {self._manifest.leaf_of(part) for part in self._with_aliases()}
        return tuple(self._manifest.paths[leaf] for leaf in sorted(leaves))

    def _with_aliases(self) -> set[int]:
        """Touched parts, and those that see the same storage through a part that stands for them."""
        if not self._touched or not self._found.apart:
            return set(self._touched)
        storages = {int(self._manifest.parts.storage[p]) for p in self._touched} & set(self._found.apart)
        asked = set(self._found.wanted)
        return self._touched | {
            part
            for part, target in enumerate(self._destinations)
            if target is not None and int(self._manifest.parts.storage[part]) in storages and part not in asked
        }

    def bump_versions(self) -> None:
        """Tell autograd which targets have changed: their parts, and the composites around these."""
        parts = range(len(self._found.destinations)) if self._applied else sorted(self._with_aliases())
        written = []
        for part in parts:
            target = self._found.destinations[part]
            if target is not None:
                written += [target, self._found.target_leaves[self._found.merged.partner[self._manifest.leaf_of(part)]]]
        if written:
            torch.autograd.graph.increment_version(written)

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
        built = [self._part(part) for part in range(len(manifest.parts))] if self._atomic else None
        first_parts = manifest.first_parts.tolist()
        leaves: list[Any] = []
        settling: list[tuple[int, Any]] = []
        for leaf, kind in enumerate(manifest.kinds):
            partner = found.merged.partner[leaf]
            if kind == Leaf.VALUE:
                leaves.append(values.decode(manifest.detail(leaf)))
                continue
            numbers = range(first_parts[leaf], first_parts[leaf + 1])
            parts = (built[part] if built is not None else self._part(part) for part in numbers)
            if partner < 0 or any(found.destinations[part] is None for part in numbers):
                leaves.append(self._close(kinds, leaf, parts, room))
                continue
            if built is not None:
                self._examine(kinds, leaf, parts, room)
            leaves.append(found.target_leaves[partner])
            settling.append((leaf, found.target_leaves[partner]))
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
            storage = self._storages[int(p.storage[part])]
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
        for leaf, kind in enumerate(self._manifest.kinds):
            if kind == Leaf.COMPOSITE:
                for i in range(*self._manifest.first_parts[leaf : leaf + 2].tolist()):
                    if self._is_fresh(i):
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


def _same_place(one: Place, other: Place) -> bool:
    a, b = one.view, other.view
    return (
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() == b.storage_offset()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and one.signs == other.signs
    )
