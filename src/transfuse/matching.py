"""Matching an offered manifest with the target that a callback gave, before anything is asked for.

:func:`match` compares every leaf, decides what becomes of memory that leaves share, and refuses targets of which one
element would get two different source elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch

from transfuse import trees
from transfuse.boxes import Box, Budget, canonical, cover, runs
from transfuse.errors import TargetMismatch, UnsupportedLeaf
from transfuse.leaves import dense, values
from transfuse.leaves.codec import CannotCarry, Room, Shared
from transfuse.leaves.kinds import Kinds
from transfuse.limits import Limits
from transfuse.manifest import Leaf, Manifest

__all__ = ["Match", "match"]

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
            if anchor is not None and _shift(manifest, anchor, found.destinations[anchor]) is not None:
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
        form = canonical(target.shape, target.stride())
        if len(found_runs) + prod(form.sizes) // (form.sizes[-1] if form.strides[-1:] == (1,) else 1) > MAX_RUNS:
            path = manifest.paths[manifest.leaf_of(part)]
            return [f"{path}: its target interleaves too finely with others to be checked"]
        box = Box(dense.start_of(target), target.element_size(), form.sizes, form.strides)
        found_runs += [(low, high, part) for low, high in runs(box)]
    found_runs.sort()
    for (_, end, one), (start, _, other) in pairwise(found_runs):
        if start < end and one != other:
            paths = manifest.paths
            return [
                f"{paths[manifest.leaf_of(one)]} and {paths[manifest.leaf_of(other)]}: their targets share memory, but "
                "the source holds different elements for them; untie the targets, or tie the source"
            ]
    return []
