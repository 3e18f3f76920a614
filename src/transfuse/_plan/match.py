"""Matching an offered manifest with the receiver's target, before the receiver asks for anything.

:func:`match` compares every leaf, decides what to request where leaves share memory, and refuses targets in which one
element would get two different source elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from transfuse._errors import TargetMismatch, UnsupportedLeaf
from transfuse._limits import Limits
from transfuse._plan.collisions import Collision, Written, clash, folds
from transfuse._state import live_tensors, trees
from transfuse._state.leaves import dense, values
from transfuse._state.leaves.block import is_tensor
from transfuse._state.leaves.codec import BuildContext, CannotCarry, Shared
from transfuse._state.leaves.layout import Box
from transfuse._state.leaves.registry import Registry
from transfuse._state.live_tensors import PLAIN
from transfuse._state.manifest import Leaf, Manifest
from transfuse._state.memory_maps import Mappings
from transfuse._state.region import Budget, Ints, Region, cover, crowds
from transfuse._state.tensors import Bools

#: The problem with a target that has elements but no memory for them.
FREED = dense.FREED.format("the target's") + "; give it memory again first"

#: What to do about leaves that no source has.
KEEP_OWN = (
    "No source has what is only in the target: has the model grown, or is another optimizer used? "
    "Pass strict=False to keep the target's own values for these leaves"
)

#: The flags by which a tensor's memory holds the other sign of its values.
SIGNS = int(dense.Flags.CONJUGATE | dense.Flags.NEGATIVE)

#: The problem with a target whose memory is read-only or no longer mapped.
UNWRITABLE = "the target's memory cannot be written: {}; give it memory of its own, for example with clone()"


@dataclass
class Match:
    """An offered manifest matched with a target."""

    merged: trees.Merged
    target_leaves: list[Any]
    #: For each tensor of the manifest: the target's tensor that gets its bytes; None if the tensor arrives fresh.
    destinations: list[torch.Tensor | None]
    #: For each tensor: the address of its target's first item; 0 without a target in main memory that has elements.
    address: Ints
    #: For each tensor: whether its bytes can be copied into the target's memory as they are: the tensor and its target
    #: are both contiguous, and no sign has to be flipped.
    copies_as_bytes: Bools
    #: For each fresh tensor that is the same memory as a tensor with a target: the number of the latter. It is built
    #: as a view of the target.
    tied: dict[int, int] = field(default_factory=dict)
    #: Storages whose tensors the receiver requests one by one, and the tensors that it requests.
    apart: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)


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
    registry: Registry,
    strict: bool | None,
    limits: Limits,
) -> Match:
    """Match every leaf, or raise one error with all mismatches. Without a target everything arrives fresh."""
    prepared = target if isinstance(target, Prepared) else prepare(target, limits)
    found = compare(manifest, prepared, build_context=build_context, registry=registry, strict=strict)
    if isinstance(found, Match):
        return found
    raise found


def compare(
    manifest: Manifest, prepared: Prepared, *, build_context: BuildContext, registry: Registry, strict: bool | None
) -> Match | TargetMismatch | UnsupportedLeaf:
    """Match a state with a target in which it lands as it is; or return one error with all mismatches."""
    if prepared.target is None:
        merged = trees.Merged.all_of_source(manifest.root, len(manifest))
        empty = _Targets(manifest)
        result = Match(
            merged, [], [None] * len(manifest.tensors), address=empty.address, copies_as_bytes=empty.copies_as_bytes
        )
        return promise_fresh(manifest, result, build_context, registry) or result
    merged = trees.merge(manifest.root, prepared.root, keep_empty=strict is False)
    fitted = _fit(manifest, merged, prepared, build_context, registry)
    others = live_tensors.read_any(
        [tensor for row in fitted.others if (tensor := fitted.destinations[row]) is not None]
    )
    problems = merged.conflicts + fitted.problems + _unwritable(manifest, fitted, prepared.tensors, others)
    if not len(fitted.quick) and not fitted.others and not problems:
        nothing = nothing_matches(manifest, prepared, registry)
        if nothing is not None:
            return nothing
    lone = unpaired(manifest, merged, prepared, strict)
    if problems or lone:
        return TargetMismatch(problems + lone, advice=advice(lone, strict))
    targets = _Targets(manifest)
    targets.add(fitted.quick, prepared.tensors, fitted.target_rows)
    if fitted.others:
        targets.add(np.array(fitted.others, dtype=np.int64), others, np.arange(len(others)))
    result = Match(
        merged, prepared.leaves, fitted.destinations, address=targets.address, copies_as_bytes=targets.copies_as_bytes
    )
    problems = _tie(manifest, result, targets.placed)
    problems += _collisions(manifest, result, targets)
    if problems:
        return TargetMismatch(problems)
    return promise_fresh(manifest, result, build_context, registry) or result


class _Fitted(NamedTuple):
    """The targets that were found for tensors."""

    destinations: list[torch.Tensor | None]
    #: Tensors whose leaf is a plain tensor in both trees, and the row of each one's target in ``Prepared.tensors``.
    quick: Ints
    target_rows: Ints
    #: All other tensors that have a target.
    others: list[int]
    problems: list[str]


def _fit(
    manifest: Manifest, merged: trees.Merged, prepared: Prepared, build_context: BuildContext, registry: Registry
) -> _Fitted:
    """Compare all pairs of plain tensors in columns. Other leaves, and pairs that do not fit, one by one."""
    partner = np.array(merged.partner, dtype=np.int64)
    paired = np.flatnonzero(partner >= 0)
    target_rows = prepared.row[partner[paired]]
    plain = (manifest.codes[paired] == Leaf.TENSOR) & (target_rows >= 0)
    rows = manifest.first_tensors[paired[plain]]
    plain[plain] = _alike(manifest, rows, prepared.tensors, target_rows[plain])
    rows, targets = manifest.first_tensors[paired[plain]], partner[paired[plain]]
    destinations: list[torch.Tensor | None] = [None] * len(manifest.tensors)
    if len(rows) == len(destinations):
        destinations = list(map(prepared.leaves.__getitem__, targets.tolist()))
    else:
        for row, target in zip(rows.tolist(), targets.tolist(), strict=True):
            destinations[row] = prepared.leaves[target]
    fitted = _Fitted(destinations, rows, target_rows[plain], [], [])
    shared = Shared()
    for leaf in paired[~plain].tolist():
        why = _fit_leaf(
            manifest,
            leaf,
            prepared.leaves[merged.partner[leaf]],
            fitted,
            build_context=build_context,
            registry=registry,
            shared=shared,
        )
        fitted.problems.extend(f"{manifest.paths[leaf]}: {line}" for line in why)
    return fitted


def _alike(manifest: Manifest, rows: Ints, targets: live_tensors.LiveTensors, target_rows: Ints) -> Bools:
    """Which of these tensors may be written into these rows of the targets: same dtype and shape, enough memory."""
    tensors = manifest.tensors
    numbers = {dtype: i for i, dtype in enumerate(targets.dtypes)}
    known = np.array([numbers.get(dtype, -1) for dtype in manifest.dtypes], dtype=np.int64)
    alike: Bools = (tensors.ndim[rows] == targets.ndim[target_rows]) & ~targets.beyond[target_rows]
    if len(rows):
        alike &= known[tensors.dtype[rows]] == targets.dtype[target_rows]
    left = np.flatnonzero(alike)
    rows, target_rows = rows[left], target_rows[left]
    differ = tensors.sizes[tensors.dimensions(rows)] != targets.sizes[targets.dimensions(target_rows)]
    alike[np.repeat(left, tensors.ndim[rows])[differ]] = False
    return alike


def _fit_leaf(
    manifest: Manifest,
    leaf: int,
    target: Any,
    fitted: _Fitted,
    *,
    build_context: BuildContext,
    registry: Registry,
    shared: Shared,
) -> list[str]:
    """Record the targets of one leaf's tensors, and return what does not fit."""
    if manifest.kinds[leaf] == Leaf.VALUE:
        if not is_tensor(target):
            return []
        return [
            f"kind: source is a value of type {type(values.decode(manifest.detail(leaf))).__name__}, target is a tensor"
        ]
    try:
        found, why = registry.fit(manifest.detail(leaf), target, build_context, shared)
    except CannotCarry as reason:
        return [f"the target cannot be filled: {reason}"]
    if why:
        return why
    for row, destination in enumerate(found, int(manifest.first_tensors[leaf])):
        if destination is not None:
            why += _compare(manifest, row, destination)
            fitted.destinations[row] = destination
            fitted.others.append(row)
    return why


def _compare(manifest: Manifest, row: int, target: torch.Tensor) -> list[str]:
    found = []
    shape, dtype = manifest.tensors.shape(row), manifest.dtype_of(row)
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
    found = {int(fitted.quick[i]): why for i, why in quick.faults(fitted.target_rows, memory, write=True).items()}
    rest = others.faults(np.arange(len(others)), memory, write=True)
    found |= {fitted.others[i]: why for i, why in rest.items()}
    lines = (f"{manifest.paths[manifest.leaf_of(p)]}: {UNWRITABLE.format(why)}" for p, why in sorted(found.items()))
    return list(dict.fromkeys(lines))


class _Targets:
    """Columns of the targets, one row for each tensor of the manifest."""

    def __init__(self, manifest: Manifest) -> None:
        n = len(manifest.tensors)
        self._tensors = manifest.tensors
        self.placed = np.zeros(n, dtype=bool)
        self.device = np.full(n, -1, dtype=np.int64)
        self.devices: list[str] = []
        self.start, self.end = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
        #: Which targets have elements that share memory with each other.
        self.folded = np.zeros(n, dtype=bool)
        self.address = np.zeros(n, dtype=np.int64)
        self.copies_as_bytes = np.zeros(n, dtype=bool)

    def add(self, rows: Ints, targets: live_tensors.LiveTensors, target_rows: Ints) -> None:
        """Record that the tensors in these rows of the manifest go into those rows of the targets."""
        self.placed[rows] = True
        self.device[rows] = targets.device[target_rows] + len(self.devices)
        self.devices += targets.devices
        self.start[rows], self.end[rows] = targets.address[target_rows], targets.end[target_rows]
        self.folded[rows] = (targets.overlapping | targets.repeated)[target_rows]
        self.address[rows] = np.where(targets.on_cpu[target_rows], targets.address[target_rows], 0)
        signs = (targets.flags[target_rows] ^ self._tensors.flags[rows]) & SIGNS
        self.copies_as_bytes[rows] = targets.contiguous[target_rows] & self._tensors.contiguous[rows] & (signs == 0)


def nothing_matches(manifest: Manifest, prepared: Prepared, registry: Registry) -> TargetMismatch | None:
    """An error with the likely reason why no tensor matches; None if neither side has a tensor."""
    if not _has_tensors(manifest, registry) and not any(map(is_tensor, prepared.leaves)):
        return None
    return TargetMismatch(
        _likely_prefix(manifest.paths[:1000], list(trees.paths(prepared.root)), prepared.leaves),
        intro="not one tensor of the target matches the source",
    )


def unpaired(
    manifest: Manifest,
    merged: trees.Merged,
    prepared: Prepared,
    strict: bool | None,
    others: Collection[int] = (),
    only_there: Sequence[str] = (),
) -> list[str]:
    """A line for each leaf that only one side has and that ``strict`` does not allow.

    ``others`` are leaves of the target that further sources bring, ``only_there`` the paths of leaves that only further
    sources have. A list of values is replaced by the source's, whatever its length: with ``strict=None`` its values
    need no counterpart.
    """
    if strict is False:
        return []
    problems = []
    if strict:
        paths = [manifest.paths[i] for i, j in enumerate(merged.partner) if j < 0]
        missing = list(dict.fromkeys([*paths, *only_there]))
        problems = [f"{path}: missing in the target" for path in missing[:100]]
        if len(missing) > 100:
            problems.append(f"{len(missing) - 100} more missing in the target")
    alone = list(merged.only_in_target) if len(merged.origin) > len(merged.partner) else []
    alone += [leaf for leaf in merged.beyond if strict or is_tensor(prepared.leaves[leaf])]
    target_paths = trees.paths(prepared.root)
    return problems + [f"{target_paths[leaf]}: only in the target" for leaf in alone if leaf not in others]


def advice(lone: Sequence[str], strict: bool | None) -> str:
    """What to do about leaves that only one side has."""
    return KEEP_OWN if lone and strict is None else ""


def _has_tensors(manifest: Manifest, registry: Registry) -> bool:
    composites = np.flatnonzero(manifest.codes == Leaf.COMPOSITE).tolist()
    return Leaf.TENSOR in manifest.kinds or any(not registry.is_blob(manifest.detail(leaf)) for leaf in composites)


def _likely_prefix(source: list[str], target: list[str], target_leaves: list[Any]) -> list[str]:
    """Lines that say why no tensor matched. A prefix on one side's names is the most likely reason."""
    tensors = [path for path, leaf in zip(target, target_leaves, strict=True) if is_tensor(leaf)]
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


def promise_fresh(
    manifest: Manifest, found: Match, build_context: BuildContext, registry: Registry
) -> UnsupportedLeaf | None:
    """Check, before a byte moves, that every leaf that this receiver must build can be built; or return the error."""
    detailed = np.flatnonzero(manifest.codes != Leaf.TENSOR).tolist()
    for leaf, detail in zip(detailed, manifest.details, strict=True):
        if manifest.kinds[leaf] == Leaf.VALUE:
            values.decode(detail)
        elif found.merged.partner[leaf] < 0 or _is_blob(manifest, found, leaf):
            try:
                registry.promise(detail, build_context)
            except CannotCarry as reason:
                refusal = UnsupportedLeaf(manifest.paths[leaf], str(reason))
                refusal.__cause__ = reason
                return refusal
    return None


def _is_blob(manifest: Manifest, found: Match, leaf: int) -> bool:
    """Whether a leaf is built anew although it has a partner: numpy arrays, long bytes, objects."""
    first, end = manifest.first_tensors[leaf], manifest.first_tensors[leaf + 1]
    return any(found.destinations[row] is None for row in range(first, end))


# -------------------------------------------------------------------------------------------- memory that is shared


def _tie(manifest: Manifest, found: Match, placed: Bools) -> list[str]:
    """For storages that several tensors share: decide what to request, and which fresh ones become views of targets."""
    tensors = manifest.tensors
    shown = tensors.numel > 0
    # Storages of which some memory is in two tensors, or twice in one tensor that overlaps itself.
    tangled_storages = np.zeros(len(manifest.storages), dtype=bool)
    tangled_storages[tensors.storage[shown & (~tensors.alone | tensors.overlapping)]] = True
    has_target = np.zeros(len(manifest.storages), dtype=bool)
    has_target[tensors.storage[placed]] = True
    by_storage: dict[int, list[int]] = {}
    for row in np.flatnonzero(shown & (tangled_storages & has_target)[tensors.storage]).tolist():
        by_storage.setdefault(int(tensors.storage[row]), []).append(row)
    problems = []
    for storage, numbers in by_storage.items():
        regions = {row: tensors.region(row) for row in numbers}
        inside = [row for row in numbers if found.destinations[row] is not None]
        outside = [row for row in numbers if found.destinations[row] is None]
        for row in outside:
            anchor = next((p for p in inside if regions[p][0] == regions[row][0]), None)
            if anchor is not None and _shift(manifest, anchor, found.destinations[anchor]) is not None:
                found.tied[row] = anchor
            elif any(
                regions[p][0].start < regions[row][0].end and regions[row][0].start < regions[p][0].end for p in inside
            ):
                paths = manifest.paths
                problems.append(
                    f"{paths[manifest.leaf_of(row)]}: has no target, but shares memory with "
                    f"{paths[manifest.leaf_of(inside[0])]}, which has one; give it a target too"
                )
        tangled = any(not members for _, members in cover([(row, *regions[row]) for row in numbers], Budget()))
        if tangled or found.tied.keys() & set(outside):
            found.apart.append(storage)
            found.wanted += _choose(manifest, found, inside, regions)
            found.wanted += [row for row in outside if row not in found.tied]
    found.wanted.sort()
    return problems


def _choose(manifest: Manifest, found: Match, inside: list[int], regions: dict[int, tuple[Region, bool]]) -> list[int]:
    """The tensors to request so that every target gets its bytes.

    A tensor is not requested if it lies inside a larger requested one, and its target in the same way inside the larger
    one's target: it arrives together with the larger one.
    """
    chosen: list[int] = []
    for row in sorted(inside, key=lambda p: -regions[p][0].nbytes):
        region, mine = regions[row][0], found.destinations[row]
        for other in chosen:
            larger, theirs = regions[other][0], found.destinations[other]
            if (
                larger.contiguous
                and larger.start <= region.start
                and region.end <= larger.end
                and _shift(manifest, row, mine) is not None
                and _shift(manifest, row, mine) == _shift(manifest, other, theirs)
            ):
                break
        else:
            chosen.append(row)
    return chosen


def _shift(manifest: Manifest, row: int, target: torch.Tensor | None) -> tuple[Any, ...] | None:
    """The distance between a target's address and its tensor's offset in the storage, with storage and device.

    None if the target has other strides or signs than the tensor. Targets of equal shift lie to each other as their
    tensors do.
    """
    if target is None:
        return None
    tensors = manifest.tensors
    dims = zip(tensors.shape(row), tensors.stride(row), target.stride(), strict=True)
    same = all(n == 1 or s == t for n, s, t in dims)
    if not same or (dense.flags_of(target) ^ int(tensors.flags[row])) & SIGNS:
        return None
    start = dense.start_of(target)
    return int(tensors.storage[row]), target.device, start - int(tensors.start[row])


def _collisions(manifest: Manifest, found: Match, targets: _Targets) -> list[str]:
    """A line for each collision: targets in which one element would get two different source elements."""
    filled = targets.placed & (manifest.tensors.numel > 0)
    folded = (_written(manifest, found, row) for row in np.flatnonzero(filled & targets.folded).tolist())
    collisions = [Collision(written) for written in folded if folds(written)]
    rows = np.flatnonzero(filled)
    names = sorted(set(targets.devices))
    device = np.array([names.index(name) for name in targets.devices], dtype=np.int64)[targets.device[rows]]
    for crowd in crowds(device, targets.start[rows], targets.end[rows]):
        one = clash([_written(manifest, found, row) for row in rows[crowd].tolist()])
        if one is not None:
            collisions.append(one)
    return [collision.text(lambda row: manifest.paths[manifest.leaf_of(row)]) for collision in collisions]


def _written(manifest: Manifest, found: Match, row: int) -> Written:
    """A tensor's target, and the source of what is written into it."""
    tensors, target = manifest.tensors, found.destinations[row]
    assert target is not None
    form = tensors.form(row)
    source = (
        int(tensors.storage[row]),
        *tensors.region(row)[0],
        form.order,
        int(tensors.flags[row]),
        dense.flags_of(target),
    )
    whole = Box((0,) * target.ndim, tuple(target.shape))
    return Written(target, whole, row, source, _shift(manifest, row, target), form.repeated)
