"""Where bytes land: the receiver's own tensors, or fresh storages.

:func:`match` compares an offered manifest with the target that a callback gave, before anything is asked for;
:class:`Landing` then knows the place of every box, which leaves have been touched, and how to build the result.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from transfuse import trees
from transfuse.boxes import Box, Budget, canonical, cover
from transfuse.errors import LimitExceeded, TargetMismatch, UnsupportedLeaf
from transfuse.leaves import dense, values
from transfuse.leaves.codec import CannotCarry, Room, Shared
from transfuse.leaves.kinds import Kinds
from transfuse.limits import Limits
from transfuse.manifest import Leaf, Manifest
from transfuse.places import Place, place_in_storage, place_in_tensor
from transfuse.plan import Boxes

__all__ = ["Landing", "Match", "match"]

logger = logging.getLogger("transfuse")

#: Targets that interleave in memory are compared run by run up to this many runs; beyond, they are refused.
MAX_RUNS = 1 << 20


@dataclass
class Match:
    """An offered manifest laid over a target."""

    merged: trees.Merged
    target_leaves: list[Any]
    #: For each part of the manifest: the target's tensor that gets its bytes, or None for a fresh one.
    destinations: list[torch.Tensor | None]
    #: Fresh parts that are the same memory as a part with a target: built as views of that target.
    tied: dict[int, int]
    #: Storages whose parts are asked for one by one, and which.
    apart: list[int]
    wanted: list[int]


def match(
    manifest: Manifest,
    target: object | None,
    *,
    room: Room,
    kinds: Kinds,
    strict: bool,
    limits: Limits,
) -> Match:
    """Compare every leaf; raise one error with all mismatches. Without a target everything arrives fresh."""
    if target is None:
        merged = trees.Merged(manifest.root, list(range(len(manifest))), [-1] * len(manifest), [])
        result = Match(merged, [], [None] * len(manifest.parts), {}, [], [])
        _promise_fresh(manifest, result, room, kinds)
        return result
    try:
        target_root, target_leaves = trees.flatten(target, max_depth=limits.max_depth)
    except UnsupportedLeaf as error:
        raise TargetMismatch([f"{error.path or '<root>'}: the target is {error.reason}"]) from error
    merged = trees.merge(manifest.root, target_root)
    destinations, problems, matched = _fit(manifest, merged, target_leaves, room, kinds)
    problems = merged.conflicts + problems
    if (
        not matched
        and not problems
        and (_has_tensors(manifest, kinds) or any(isinstance(leaf, torch.Tensor) for leaf in target_leaves))
    ):
        raise TargetMismatch(
            _likely_prefix(manifest.paths[:1000], list(trees.paths(target_root)), target_leaves),
            intro="not one tensor of the target matches the source",
        )
    if strict:
        missing = [i for i, j in enumerate(merged.partner) if j < 0]
        problems += [f"{manifest.paths[i]}: missing in the target" for i in missing[:100]]
        if len(missing) > 100:
            problems.append(f"{len(missing) - 100} more missing in the target")
        extra = [~origin for origin in merged.origin if origin < 0]
        if extra:
            target_paths = trees.paths(target_root)
            problems += [f"{target_paths[j]}: only in the target" for j in extra]
    if problems:
        raise TargetMismatch(problems)
    result = Match(merged, target_leaves, destinations, {}, [], [])
    problems = _tie(manifest, result)
    problems += _collisions(manifest, result)
    if problems:
        raise TargetMismatch(problems)
    _promise_fresh(manifest, result, room, kinds)
    return result


def _fit(
    manifest: Manifest, merged: trees.Merged, target_leaves: list[Any], room: Room, kinds: Kinds
) -> tuple[list[torch.Tensor | None], list[str], int]:
    destinations: list[torch.Tensor | None] = [None] * len(manifest.parts)
    problems: list[str] = []
    matched = 0
    shared = Shared()
    first_parts = manifest.first_parts.tolist()
    for leaf, partner in enumerate(merged.partner):
        if partner < 0:
            continue
        target = target_leaves[partner]
        if manifest.kinds[leaf] == Leaf.VALUE:
            if isinstance(target, torch.Tensor):
                source = type(values.decode(manifest.detail(leaf))).__name__
                problems.append(f"{manifest.paths[leaf]}: kind: source is a {source}, target is a tensor")
            continue
        try:
            fitted, why = kinds.fit(manifest.detail(leaf), target, room, shared)
        except CannotCarry as reason:
            fitted, why = [], [f"the target is {reason}"]
        if not why:
            for part, destination in enumerate(fitted, first_parts[leaf]):
                if destination is not None:
                    why += _compare(manifest, part, destination)
                    destinations[part] = destination
                    matched += 1
        problems += [f"{manifest.paths[leaf]}: {line}" for line in why]
    return destinations, problems, matched


def _compare(manifest: Manifest, part: int, target: torch.Tensor) -> list[str]:
    found = []
    shape, dtype = manifest.parts.shape(part), manifest.dtype_of(part)
    if shape != tuple(target.shape):
        found.append(f"shape: source {shape}, target {tuple(target.shape)}")
    if dtype != target.dtype:
        found.append(f"dtype: source {dtype}, target {target.dtype}")
    if not found and target.numel():
        reach = 1 + sum((n - 1) * s for n, s in zip(target.shape, target.stride(), strict=True))
        if (target.storage_offset() + reach) * target.element_size() > target.untyped_storage().nbytes():
            found.append("the target's storage has been freed or shrunk")
    return found


def _has_tensors(manifest: Manifest, kinds: Kinds) -> bool:
    return any(
        kind == Leaf.TENSOR or (kind == Leaf.COMPOSITE and not kinds.is_blob(manifest.detail(leaf)))
        for leaf, kind in enumerate(manifest.kinds)
    )


def _likely_prefix(source: list[str], target: list[str], target_leaves: list[Any]) -> list[str]:
    """Lines that say why nothing matched, and which prefix is the likely reason."""
    tensors = [path for path, leaf in zip(target, target_leaves, strict=True) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        return ["the state_dict callback returned no tensors (was it called before the model was built?)"]
    if not source:
        return [f"the source's state is empty; the target has for example {tensors[0]}"]
    tally: Counter[tuple[str, str]] = Counter()
    for side, ours, others in (("target", tensors, source), ("source", source, tensors)):
        names = {_last_key(path) for path in others}
        for path in ours:
            name = _last_key(path)
            for cut in (i + 1 for i, letter in enumerate(name) if letter == "."):
                if name[cut:] in names:
                    tally[side, name[:cut]] += 1
    examples = f"source has for example {source[0]}, target {tensors[0]}"
    if not tally:
        return [examples]
    (side, prefix), count = tally.most_common(1)[0]
    return [f"{examples}; the {side}'s names carry the prefix {prefix!r} ({count} would match without it): strip it"]


def _last_key(path: str) -> str:
    return path.rpartition("[")[2].strip("]'\"")


def _promise_fresh(manifest: Manifest, found: Match, room: Room, kinds: Kinds) -> None:
    """Make sure, before a byte moves, that every leaf that will be built here can be built."""
    for leaf, kind in enumerate(manifest.kinds):
        if kind == Leaf.VALUE:
            values.decode(manifest.detail(leaf))
        elif kind == Leaf.COMPOSITE and (found.merged.partner[leaf] < 0 or _is_blob(manifest, found, leaf)):
            try:
                kinds.promise(manifest.detail(leaf), room)
            except CannotCarry as reason:
                raise UnsupportedLeaf(manifest.paths[leaf], str(reason)) from reason


def _is_blob(manifest: Manifest, found: Match, leaf: int) -> bool:
    """Whether a leaf with a partner is built anew all the same: numpy arrays, long bytes, objects."""
    first, end = manifest.first_parts[leaf], manifest.first_parts[leaf + 1]
    return any(found.destinations[part] is None for part in range(first, end))


# -------------------------------------------------------------------------------------------- memory that is shared


def _tie(manifest: Manifest, found: Match) -> list[str]:
    """For storages that several parts share: what is asked for, and which fresh parts become views of targets."""
    parts = manifest.parts
    placed = np.array([d is not None for d in found.destinations], dtype=bool)
    shown = parts.numel > 0
    users = np.bincount(parts.storage[shown], minlength=len(manifest.storages))
    has_target = np.zeros(len(manifest.storages), dtype=bool)
    has_target[parts.storage[placed]] = True
    shared = users[parts.storage] > 1
    for part in np.flatnonzero(shown & ~shared & ~parts.contiguous).tolist():
        shared[part] = parts.form(part).overlapping  # It shares memory with itself.
    by_storage: dict[int, list[int]] = {}
    for part in np.flatnonzero(shown & shared & has_target[parts.storage]).tolist():
        by_storage.setdefault(int(parts.storage[part]), []).append(part)
    problems = []
    for storage, numbers in by_storage.items():
        boxes = {part: parts.box(part) for part in numbers}
        inside = [part for part in numbers if found.destinations[part] is not None]
        outside = [part for part in numbers if found.destinations[part] is None]
        for part in outside:
            anchor = next((p for p in inside if boxes[p][0] == boxes[part][0]), None)
            if anchor is not None and _is_image(manifest, anchor, found.destinations[anchor]):
                found.tied[part] = anchor
            elif any(boxes[p][0].start < boxes[part][0].end and boxes[part][0].start < boxes[p][0].end for p in inside):
                paths = manifest.paths
                problems.append(
                    f"{paths[manifest.leaf_of(part)]}: has no target, but shares memory with "
                    f"{paths[manifest.leaf_of(inside[0])]}, which has one; give it a target too"
                )
        tangled = any(not members for _, members in cover([(part, *boxes[part]) for part in numbers], Budget()))
        if tangled or found.tied.keys() & set(outside):
            found.apart.append(storage)
            found.wanted += _choose(manifest, found, inside, boxes)
            found.wanted += [part for part in outside if part not in found.tied]
    found.wanted.sort()
    return problems


def _choose(manifest: Manifest, found: Match, inside: list[int], boxes: dict[int, tuple[Box, bool]]) -> list[int]:
    """Parts to ask for so that every target gets its bytes: an image inside a larger image comes with it."""
    chosen: list[int] = []
    for part in sorted(inside, key=lambda p: -boxes[p][0].nbytes):
        box, mine = boxes[part][0], found.destinations[part]
        for other in chosen:
            larger, theirs = boxes[other][0], found.destinations[other]
            if (
                larger.contiguous
                and larger.start <= box.start
                and box.end <= larger.end
                and _shift(manifest, part, mine) is not None
                and _shift(manifest, part, mine) == _shift(manifest, other, theirs)
            ):
                break
        else:
            chosen.append(part)
    return chosen


def _is_image(manifest: Manifest, part: int, target: torch.Tensor | None) -> bool:
    return _shift(manifest, part, target) is not None


def _shift(manifest: Manifest, part: int, target: torch.Tensor | None) -> tuple[Any, ...] | None:
    """If a target lies in its memory just as its source part does in its storage: by how much it is shifted."""
    if target is None:
        return None
    parts = manifest.parts
    same = all(n == 1 or s == t for n, s, t in zip(parts.shape(part), parts.stride(part), target.stride(), strict=True))
    bits = dense.Flags.CONJUGATE | dense.Flags.NEGATIVE
    if not same or (dense.flags_of(target) ^ int(parts.flags[part])) & bits:
        return None
    start = dense.start_of(target)
    return int(parts.storage[part]), target.device, start - int(parts.start[part])


def _collisions(manifest: Manifest, found: Match) -> list[str]:
    """Refuse targets of which one element would get two different source elements."""
    spans: list[tuple[str, int, int, int]] = []
    problems: list[str] = []
    for part, target in enumerate(found.destinations):
        if target is None or not target.numel():
            continue
        item = target.element_size()
        start = dense.start_of(target)
        reach = 1 + sum((n - 1) * s for n, s in zip(target.shape, target.stride(), strict=True))
        spans.append((str(target.device), start, start + reach * item, part))
        if not target.is_contiguous():
            form, theirs = canonical(target.shape, target.stride()), manifest.parts.form(part)
            repeats = set(form.repeated) - set(theirs.repeated)
            if (repeats or form.overlapping) and _shift(manifest, part, target) is None:
                path = manifest.paths[manifest.leaf_of(part)]
                problems.append(
                    f"{path}: elements of the target share memory (strides {target.stride()}) and would each get "
                    "several different source elements; give it a target with memory of its own"
                )
    spans.sort()
    group: list[tuple[str, int, int, int]] = []
    reach_end = -1
    for span in spans:
        if group and (span[0] != group[0][0] or span[1] >= reach_end):
            problems += _clash(manifest, found, group)
            group, reach_end = [], -1
        group.append(span)
        reach_end = max(reach_end, span[2])
    return problems + _clash(manifest, found, group)


def _clash(manifest: Manifest, found: Match, group: Sequence[tuple[str, int, int, int]]) -> list[str]:
    """Check targets whose reaches in memory overlap."""
    if len(group) < 2:
        return []
    numbers = [part for *_, part in group]
    shifts = {_shift(manifest, part, found.destinations[part]) for part in numbers}
    if len(shifts) == 1 and None not in shifts:
        return []  # The targets' memory is an image of the source's: aliases meet their own aliases.
    # The same target for the same source part counts once; any others must not touch each other.
    once: dict[tuple[Any, ...], int] = {}
    for part in numbers:
        target = found.destinations[part]
        assert target is not None
        key = (int(manifest.parts.storage[part]), *manifest.parts.box(part)[0], manifest.parts.form(part).order)
        bits = (int(manifest.parts.flags[part]), dense.flags_of(target))
        layout = (target.untyped_storage().data_ptr(), target.storage_offset(), target.shape, target.stride())
        once.setdefault((key, bits, layout), part)
    found_runs: list[tuple[int, int, int]] = []
    for part in once.values():
        target = found.destinations[part]
        assert target is not None
        form, item = canonical(target.shape, target.stride()), target.element_size()
        start = dense.start_of(target)
        sizes, strides, width = list(form.sizes), list(form.strides), item
        if strides and strides[-1] == 1:
            width *= sizes.pop()
            strides.pop()
        if len(found_runs) + int(np.prod(sizes, dtype=np.float64)) > MAX_RUNS:
            return [
                f"{manifest.paths[manifest.leaf_of(part)]}: its target interleaves too finely with others to be checked"
            ]
        starts = np.array([start], dtype=np.int64)
        for size, stride in zip(sizes, strides, strict=True):
            starts = (starts[:, None] + np.arange(size, dtype=np.int64) * (stride * item)).ravel()
        found_runs += [(at, at + width, part) for at in starts.tolist()]
    found_runs.sort()
    for (_, end, one), (start, _, other) in pairwise(found_runs):
        if start < end and one != other:
            paths = manifest.paths
            return [
                f"{paths[manifest.leaf_of(one)]} and {paths[manifest.leaf_of(other)]}: their targets share memory, but "
                "the source holds different elements for them; untie the targets, or tie the source"
            ]
    return []


# ---------------------------------------------------------------------------------------------------------- landing


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

    _applied = False

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
