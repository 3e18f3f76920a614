"""Matching an offered manifest with the receiver's target, before the receiver asks for anything.

:func:`match` compares every leaf, decides what to request where leaves share memory, and refuses targets in which one
element would get two different source elements.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from transfuse.errors import TargetMismatch, UnsupportedLeaf
from transfuse.limits import Limits
from transfuse.plan.collisions import Collision, Written, clash, folds
from transfuse.state import live_tensors, trees
from transfuse.state.leaves import dense, values
from transfuse.state.leaves.codec import BuildContext, CannotCarry, Shared
from transfuse.state.leaves.layout import Block
from transfuse.state.leaves.registry import Registry
from transfuse.state.live_tensors import PLAIN
from transfuse.state.manifest import Leaf, Manifest
from transfuse.state.memory_maps import Mappings
from transfuse.state.region import Budget, Region, cover, crowds
from transfuse.state.tensors import Bools, Ints

__all__ = ["FREED", "UNWRITABLE", "Match", "Prepared", "compare", "match", "nothing_matches", "prepare", "unpaired"]

#: The problem with a target that has elements but no memory for them.
FREED = dense.FREED.format("the target's") + "; give it memory again first"

#: The flags by which a tensor's memory holds the other sign of its values.
SIGNS = int(dense.Flags.CONJUGATE | dense.Flags.NEGATIVE)

#: The problem with a target whose memory is read-only or no longer mapped.
UNWRITABLE = "the target's memory cannot be written: {}; give it memory of its own, for example with clone()"


@dataclass
class Match:
    """An offered manifest matched with a target."""

    merged: trees.Merged
    target_leaves: list[Any]
    #: For each part of the manifest: the target's tensor that gets its bytes; None if the part arrives fresh.
    destinations: list[torch.Tensor | None]
    #: For each fresh part that is the same memory as a part with a target: that part. It is built as a view of the
    #: target.
    tied: dict[int, int]
    #: Storages whose parts the receiver requests one by one, and the parts that it requests.
    apart: list[int]
    wanted: list[int]
    #: For each part: the address of its target's first item; 0 without a target in main memory that has elements.
    address: Ints
    #: For each part: whether its bytes can be copied into the target's memory as they are: the part and its target are
    #: both contiguous, and no sign has to be flipped.
    as_lies: Bools


@dataclass(eq=False)
class Prepared:
    """A target taken apart, ready to be matched with any offer."""

    target: object | None
    root: trees.Node | None
    leaves: list[Any]
    #: The ordinary tensors among the leaves as columns, and for each leaf its row in ``tensors``, or -1.
    tensors: live_tensors.LiveTensors
    row: Ints


def prepare(target: object | None, limits: Limits) -> Prepared:
    """Take a target apart. This needs no offer, so the receiver does it while the source describes its state."""
    if target is None:
        return Prepared(None, None, [], live_tensors.read([]), np.zeros(0, dtype=np.int64))
    try:
        root, leaves = trees.flatten(target, max_depth=limits.max_depth)
    except UnsupportedLeaf as error:
        raise TargetMismatch([f"{error.path or '<root>'}: the target cannot be filled: {error.reason}"]) from error
    if set(map(type, leaves)) <= PLAIN:
        chosen, plain = np.arange(len(leaves)), leaves
    else:
        chosen = np.flatnonzero([type(leaf) in PLAIN for leaf in leaves])
        plain = [leaves[i] for i in chosen.tolist()]
    try:
        tensors = live_tensors.read(plain, roles=False)
    except live_tensors.Unusual:
        ordinary = np.array([dense.is_ordinary(tensor) for tensor in plain], dtype=bool)
        chosen = chosen[ordinary]
        tensors = live_tensors.read_any([leaves[i] for i in chosen.tolist()])
    row = np.full(len(leaves), -1, dtype=np.int64)
    row[chosen] = np.arange(len(chosen))
    return Prepared(target, root, leaves, tensors, row)


def match(
    manifest: Manifest,
    target: object | Prepared | None,
    *,
    build_context: BuildContext,
    kinds: Registry,
    strict: bool,
    limits: Limits,
) -> Match:
    """Match every leaf, or raise one error with all mismatches. Without a target everything arrives fresh."""
    prepared = target if isinstance(target, Prepared) else prepare(target, limits)
    found = compare(manifest, prepared, build_context=build_context, kinds=kinds, strict=strict)
    if isinstance(found, Match):
        return found
    raise found


def compare(
    manifest: Manifest, prepared: Prepared, *, build_context: BuildContext, kinds: Registry, strict: bool
) -> Match | TargetMismatch | UnsupportedLeaf:
    """Match a state with a target in which it lands as it is; or return one error with all mismatches."""
    if prepared.target is None:
        merged = trees.Merged.all_of_source(manifest.root, len(manifest))
        empty = _Targets(manifest)
        result = Match(merged, [], [None] * len(manifest.parts), {}, [], [], empty.address, empty.as_lies)
        return _promise_fresh(manifest, result, build_context, kinds) or result
    merged = trees.merge(manifest.root, prepared.root)
    fitted = _fit(manifest, merged, prepared, build_context, kinds)
    others = live_tensors.read_any(
        [tensor for part in fitted.others if (tensor := fitted.destinations[part]) is not None]
    )
    problems = merged.conflicts + fitted.problems + _unwritable(manifest, fitted, prepared.tensors, others)
    if not len(fitted.quick) and not fitted.others and not problems:
        nothing = nothing_matches(manifest, prepared, kinds)
        if nothing is not None:
            return nothing
    if strict:
        problems += unpaired(manifest, merged, prepared)
    if problems:
        return TargetMismatch(problems)
    targets = _Targets(manifest)
    targets.add(fitted.quick, prepared.tensors, fitted.rows)
    if fitted.others:
        targets.add(np.array(fitted.others, dtype=np.int64), others, np.arange(len(others)))
    result = Match(merged, prepared.leaves, fitted.destinations, {}, [], [], targets.address, targets.as_lies)
    problems = _tie(manifest, result, targets.placed)
    problems += _collisions(manifest, result, targets)
    if problems:
        return TargetMismatch(problems)
    return _promise_fresh(manifest, result, build_context, kinds) or result


class _Fitted(NamedTuple):
    """The targets that were found for parts."""

    destinations: list[torch.Tensor | None]
    #: Parts whose leaf is a plain tensor in both trees, and the row of each one's target in ``Prepared.tensors``.
    quick: Ints
    rows: Ints
    #: All other parts that have a target.
    others: list[int]
    problems: list[str]


def _fit(
    manifest: Manifest, merged: trees.Merged, prepared: Prepared, build_context: BuildContext, kinds: Registry
) -> _Fitted:
    """Compare all pairs of plain tensors in columns. Other leaves, and pairs that do not fit, one by one."""
    partner = np.array(merged.partner, dtype=np.int64)
    paired = np.flatnonzero(partner >= 0)
    row = prepared.row[partner[paired]]
    plain = (manifest.codes[paired] == Leaf.TENSOR) & (row >= 0)
    parts = manifest.first_parts[paired[plain]]
    plain[plain] = _alike(manifest, parts, prepared.tensors, row[plain])
    parts, targets = manifest.first_parts[paired[plain]], partner[paired[plain]]
    destinations: list[torch.Tensor | None] = [None] * len(manifest.parts)
    if len(parts) == len(destinations):
        destinations = list(map(prepared.leaves.__getitem__, targets.tolist()))
    else:
        for part, target in zip(parts.tolist(), targets.tolist(), strict=True):
            destinations[part] = prepared.leaves[target]
    fitted = _Fitted(destinations, parts, row[plain], [], [])
    shared = Shared()
    for leaf in paired[~plain].tolist():
        why = _fit_leaf(manifest, leaf, prepared.leaves[merged.partner[leaf]], fitted, build_context, kinds, shared)
        fitted.problems.extend(f"{manifest.paths[leaf]}: {line}" for line in why)
    return fitted


def _alike(manifest: Manifest, parts: Ints, tensors: live_tensors.LiveTensors, rows: Ints) -> Bools:
    """Which of these parts may be written into the tensor in the given row: same dtype, same shape, enough memory."""
    ours = manifest.parts
    numbers = {dtype: i for i, dtype in enumerate(tensors.dtypes)}
    known = np.array([numbers.get(dtype, -1) for dtype in manifest.dtypes], dtype=np.int64)
    alike: Bools = (ours.ndim[parts] == tensors.ndim[rows]) & ~tensors.beyond[rows]
    if len(parts):
        alike &= known[ours.dtype[parts]] == tensors.dtype[rows]
    left = np.flatnonzero(alike)
    parts, rows = parts[left], rows[left]
    differ = ours.sizes[ours.dimensions(parts)] != tensors.sizes[tensors.dimensions(rows)]
    alike[np.repeat(left, ours.ndim[parts])[differ]] = False
    return alike


def _fit_leaf(
    manifest: Manifest,
    leaf: int,
    target: Any,
    fitted: _Fitted,
    build_context: BuildContext,
    kinds: Registry,
    shared: Shared,
) -> list[str]:
    """Record the targets of one leaf's parts, and return what does not fit."""
    if manifest.kinds[leaf] == Leaf.VALUE:
        if not isinstance(target, torch.Tensor):
            return []
        return [
            f"kind: source is a value of type {type(values.decode(manifest.detail(leaf))).__name__}, target is a tensor"
        ]
    try:
        found, why = kinds.fit(manifest.detail(leaf), target, build_context, shared)
    except CannotCarry as reason:
        return [f"the target cannot be filled: {reason}"]
    if why:
        return why
    for part, destination in enumerate(found, int(manifest.first_parts[leaf])):
        if destination is not None:
            why += _compare(manifest, part, destination)
            fitted.destinations[part] = destination
            fitted.others.append(part)
    return why


def _compare(manifest: Manifest, part: int, target: torch.Tensor) -> list[str]:
    found = []
    shape, dtype = manifest.parts.shape(part), manifest.dtype_of(part)
    if shape != tuple(target.shape):
        found.append(f"shape: source {shape}, target {tuple(target.shape)}")
    if dtype != target.dtype:
        found.append(f"dtype: source {dtype}, target {target.dtype}")
    if not found and target.numel() and not dense.has_memory(target):
        found.append(FREED)
    return found


def _unwritable(
    manifest: Manifest, fitted: _Fitted, quick: live_tensors.LiveTensors, others: live_tensors.LiveTensors
) -> list[str]:
    """Lines for targets whose memory is mapped read-only or not at all: a write there would end the process."""
    memory = Mappings()
    found = {int(fitted.quick[i]): why for i, why in quick.faults(fitted.rows, memory, write=True).items()}
    rest = others.faults(np.arange(len(others)), memory, write=True)
    found |= {fitted.others[i]: why for i, why in rest.items()}
    lines = (f"{manifest.paths[manifest.leaf_of(p)]}: {UNWRITABLE.format(why)}" for p, why in sorted(found.items()))
    return list(dict.fromkeys(lines))


class _Targets:
    """Columns of the targets, one row for each part of the manifest."""

    def __init__(self, manifest: Manifest) -> None:
        n = len(manifest.parts)
        self._parts = manifest.parts
        self.placed = np.zeros(n, dtype=bool)
        self.device = np.full(n, -1, dtype=np.int64)
        self.devices: list[str] = []
        self.start, self.end = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
        #: Which targets have elements that share memory with each other.
        self.folded = np.zeros(n, dtype=bool)
        self.address = np.zeros(n, dtype=np.int64)
        self.as_lies = np.zeros(n, dtype=bool)

    def add(self, parts: Ints, tensors: live_tensors.LiveTensors, rows: Ints) -> None:
        """Record that these parts go into the tensors in these rows."""
        self.placed[parts] = True
        self.device[parts] = tensors.device[rows] + len(self.devices)
        self.devices += tensors.devices
        self.start[parts], self.end[parts] = tensors.address[rows], tensors.end[rows]
        self.folded[parts] = (tensors.overlapping | tensors.repeated)[rows]
        self.address[parts] = np.where(tensors.on_cpu[rows], tensors.address[rows], 0)
        signs = (tensors.flags[rows] ^ self._parts.flags[parts]) & SIGNS
        self.as_lies[parts] = tensors.contiguous[rows] & self._parts.contiguous[parts] & (signs == 0)


def nothing_matches(manifest: Manifest, prepared: Prepared, kinds: Registry) -> TargetMismatch | None:
    """An error with the likely reason why no tensor matches; None if neither side has a tensor."""
    if not _has_tensors(manifest, kinds) and not any(isinstance(leaf, torch.Tensor) for leaf in prepared.leaves):
        return None
    return TargetMismatch(
        _likely_prefix(manifest.paths[:1000], list(trees.paths(prepared.root)), prepared.leaves),
        intro="not one tensor of the target matches the source",
    )


def unpaired(manifest: Manifest, merged: trees.Merged, prepared: Prepared) -> list[str]:
    """A line for each leaf that only one side has. With ``strict`` these are errors."""
    missing = [i for i, j in enumerate(merged.partner) if j < 0]
    problems = [f"{manifest.paths[i]}: missing in the target" for i in missing[:100]]
    if len(missing) > 100:
        problems.append(f"{len(missing) - 100} more missing in the target")
    target_paths = trees.paths(prepared.root)
    return problems + [f"{target_paths[leaf]}: only in the target" for leaf in merged.only_in_target]


def _has_tensors(manifest: Manifest, kinds: Registry) -> bool:
    composites = np.flatnonzero(manifest.codes == Leaf.COMPOSITE).tolist()
    return Leaf.TENSOR in manifest.kinds or any(not kinds.is_blob(manifest.detail(leaf)) for leaf in composites)


def _likely_prefix(source: list[str], target: list[str], target_leaves: list[Any]) -> list[str]:
    """Lines that say why no tensor matched. A prefix on one side's names is the most likely reason."""
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


def _promise_fresh(
    manifest: Manifest, found: Match, build_context: BuildContext, kinds: Registry
) -> UnsupportedLeaf | None:
    """Check, before a byte moves, that every leaf that this receiver must build can be built; or return the error."""
    detailed = np.flatnonzero(manifest.codes != Leaf.TENSOR).tolist()
    for leaf, detail in zip(detailed, manifest.details, strict=True):
        if manifest.kinds[leaf] == Leaf.VALUE:
            values.decode(detail)
        elif found.merged.partner[leaf] < 0 or _is_blob(manifest, found, leaf):
            try:
                kinds.promise(detail, build_context)
            except CannotCarry as reason:
                refusal = UnsupportedLeaf(manifest.paths[leaf], str(reason))
                refusal.__cause__ = reason
                return refusal
    return None


def _is_blob(manifest: Manifest, found: Match, leaf: int) -> bool:
    """Whether a leaf is built anew although it has a partner: numpy arrays, long bytes, objects."""
    first, end = manifest.first_parts[leaf], manifest.first_parts[leaf + 1]
    return any(found.destinations[part] is None for part in range(first, end))


# -------------------------------------------------------------------------------------------- memory that is shared


def _tie(manifest: Manifest, found: Match, placed: Bools) -> list[str]:
    """For storages that several parts share: decide what to request, and which fresh parts become views of targets."""
    parts = manifest.parts
    shown = parts.numel > 0
    # Storages of which some memory is in two parts, or twice in one part that overlaps itself.
    tangled_storages = np.zeros(len(manifest.storages), dtype=bool)
    tangled_storages[parts.storage[shown & (~parts.alone | parts.overlapping)]] = True
    has_target = np.zeros(len(manifest.storages), dtype=bool)
    has_target[parts.storage[placed]] = True
    by_storage: dict[int, list[int]] = {}
    for part in np.flatnonzero(shown & (tangled_storages & has_target)[parts.storage]).tolist():
        by_storage.setdefault(int(parts.storage[part]), []).append(part)
    problems = []
    for storage, numbers in by_storage.items():
        regions = {part: parts.region(part) for part in numbers}
        inside = [part for part in numbers if found.destinations[part] is not None]
        outside = [part for part in numbers if found.destinations[part] is None]
        for part in outside:
            anchor = next((p for p in inside if regions[p][0] == regions[part][0]), None)
            if anchor is not None and _shift(manifest, anchor, found.destinations[anchor]) is not None:
                found.tied[part] = anchor
            elif any(
                regions[p][0].start < regions[part][0].end and regions[part][0].start < regions[p][0].end
                for p in inside
            ):
                paths = manifest.paths
                problems.append(
                    f"{paths[manifest.leaf_of(part)]}: has no target, but shares memory with "
                    f"{paths[manifest.leaf_of(inside[0])]}, which has one; give it a target too"
                )
        tangled = any(not members for _, members in cover([(part, *regions[part]) for part in numbers], Budget()))
        if tangled or found.tied.keys() & set(outside):
            found.apart.append(storage)
            found.wanted += _choose(manifest, found, inside, regions)
            found.wanted += [part for part in outside if part not in found.tied]
    found.wanted.sort()
    return problems


def _choose(manifest: Manifest, found: Match, inside: list[int], regions: dict[int, tuple[Region, bool]]) -> list[int]:
    """The parts to request so that every target gets its bytes.

    A part is not requested if it lies inside a larger requested part, and its target in the same way inside the larger
    one's target: it arrives together with the larger part.
    """
    chosen: list[int] = []
    for part in sorted(inside, key=lambda p: -regions[p][0].nbytes):
        region, mine = regions[part][0], found.destinations[part]
        for other in chosen:
            larger, theirs = regions[other][0], found.destinations[other]
            if (
                larger.contiguous
                and larger.start <= region.start
                and region.end <= larger.end
                and _shift(manifest, part, mine) is not None
                and _shift(manifest, part, mine) == _shift(manifest, other, theirs)
            ):
                break
        else:
            chosen.append(part)
    return chosen


def _shift(manifest: Manifest, part: int, target: torch.Tensor | None) -> tuple[Any, ...] | None:
    """The distance between a target's address and its part's offset in the storage, with storage and device.

    None if the target has other strides or signs than the part. Targets of equal shift lie to each other as their parts
    do.
    """
    if target is None:
        return None
    parts = manifest.parts
    same = all(n == 1 or s == t for n, s, t in zip(parts.shape(part), parts.stride(part), target.stride(), strict=True))
    if not same or (dense.flags_of(target) ^ int(parts.flags[part])) & SIGNS:
        return None
    start = dense.start_of(target)
    return int(parts.storage[part]), target.device, start - int(parts.start[part])


def _collisions(manifest: Manifest, found: Match, targets: _Targets) -> list[str]:
    """A line for each collision: targets in which one element would get two different source elements."""
    filled = targets.placed & (manifest.parts.numel > 0)
    rows = (_written(manifest, found, part) for part in np.flatnonzero(filled & targets.folded).tolist())
    collisions = [Collision(row) for row in rows if folds(row)]
    parts = np.flatnonzero(filled)
    names = sorted(set(targets.devices))
    device = np.array([names.index(name) for name in targets.devices], dtype=np.int64)[targets.device[parts]]
    for crowd in crowds(device, targets.start[parts], targets.end[parts]):
        one = clash([_written(manifest, found, part) for part in parts[crowd].tolist()])
        if one is not None:
            collisions.append(one)
    return [collision.text(lambda part: manifest.paths[manifest.leaf_of(part)]) for collision in collisions]


def _written(manifest: Manifest, found: Match, part: int) -> Written:
    """A part's target, and the source of what is written into it."""
    parts, target = manifest.parts, found.destinations[part]
    assert target is not None
    form = parts.form(part)
    source = (
        int(parts.storage[part]),
        *parts.region(part)[0],
        form.order,
        int(parts.flags[part]),
        dense.flags_of(target),
    )
    whole = Block((0,) * target.ndim, tuple(target.shape))
    return Written(target, whole, part, source, _shift(manifest, part, target), form.repeated)
