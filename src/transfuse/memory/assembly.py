"""Assembly: a state put together from sources that hold it in other pieces, under other names, or as other types.

:func:`assemble` finds out what is needed here and which sources hold it, and cuts it into parcels that every source
which holds them sends alike. :class:`Assembled` is where they land.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from transfuse.errors import UnsupportedLeaf
from transfuse.limits import Limits
from transfuse.memory.needs import Catalogue, Late, Needs
from transfuse.memory.packing import Place
from transfuse.options import Options
from transfuse.plan import parcels
from transfuse.plan.cohorts import Cohort, Who
from transfuse.plan.holdings import Holdings
from transfuse.plan.linking import Link
from transfuse.plan.match import Prepared, prepare
from transfuse.plan.parcels import Parcels
from transfuse.plan.pieces import Pieces, split
from transfuse.plan.request import Picks, boxes_in, merged
from transfuse.plan.spots import Spot
from transfuse.state import trees
from transfuse.state.leaves import dense, values
from transfuse.state.leaves.codec import CannotCarry, Room
from transfuse.state.leaves.registry import Kinds
from transfuse.state.manifest import Leaf, Manifest
from transfuse.state.tensors import Bools, Ints, contiguous

__all__ = ["Assembled", "Assembly", "Portion", "assemble"]

#: So many paths are made in one go through the tree rather than one by one.
MANY = 16


class Portion(NamedTuple):
    """What one source can bring."""

    #: Of all parcels, which.
    held: Bools
    #: Their numbers, in the order in which the source numbers them.
    numbers: Ints
    #: What the source is asked for, and the boxes of it among all boxes.
    picks: Picks
    boxes: Ints
    fingerprint: int


class _Names(NamedTuple):
    """Columns of what is needed, as sources call it: the leaf in each cohort, which of its tensors, and as what."""

    leaf: Ints
    tensor: Ints
    ndim: Ints
    wires: list[torch.dtype | None]
    wire: Ints


class Assembly(NamedTuple):
    """A plan, and where it lands."""

    cut: Parcels
    landing: Assembled
    room: Room


def assemble(
    cohorts: Sequence[Cohort],
    prepared: Prepared,
    options: Options,
    *,
    late: Late | None = None,
    kinds: Kinds,
    limits: Limits,
    device: torch.device,
    parcel_bytes: int,
    kept: Any = None,
) -> Assembly:
    """Plan a receive from these cohorts, of which the first one's description is the state's.

    Raises :class:`TargetMismatch` with all mismatches, or :class:`NotCovered` if nobody holds what is needed.
    """
    links: Sequence[Link] | None = None
    if late is not None:
        target, links = late(Catalogue(cohorts))
        prepared = prepare(target, limits)
    main = cohorts[0].manifest
    room = Room(main.shared, main.coordinates, options.mesh, options.weights_only_objects)
    cast, atomic = options.cast, options.atomic
    needs = Needs(cohorts, prepared, room, kinds, cast=cast, atomic=atomic, device=device, limits=limits, kept=kept)
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
    cut = parcels.cut(pieces.boxes(item), parcel_bytes, all_staged=True)
    return Assembly(cut, Assembled(cohorts, needs, pieces, cut), room)


class Assembled:
    """The places of all pieces at the receiver, and what each source can bring."""

    def __init__(self, cohorts: Sequence[Cohort], needs: Needs, pieces: Pieces, cut: Parcels) -> None:
        self._cohorts = cohorts
        self._needs = needs
        self._pieces = pieces
        self._cut = cut
        self._portions: dict[tuple[int, tuple[int, ...]], Portion] = {}
        self._touched: Bools = np.zeros(len(pieces), dtype=bool)
        self._applied = False
        #: Where the pieces of each set of sources begin, and the last ones end.
        self._groups: Ints = np.searchsorted(pieces.group, np.arange(len(pieces.groups) + 1))
        self._locate()

    def _locate(self) -> None:
        """Where each piece lies, if it has one place only."""
        pieces, needs = self._pieces, self._needs.needs
        dims = pieces.start.shape[1]
        strides, begin = np.zeros((len(needs), dims), dtype=np.int64), np.zeros(len(needs), dtype=np.int64)
        base, item = np.zeros(len(needs), dtype=np.int64), np.ones(len(needs), dtype=np.int64)
        straight, once, converts, targeted = (np.zeros(len(needs), dtype=bool) for _ in range(4))
        for i, need in enumerate(needs):
            spot, at = need.spots[0]
            n = len(at)
            strides[i, :n], item[i], base[i] = spot.strides, spot.item, spot.address
            # From the beginning of the global tensor, had it the same strides.
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
        #: Which are one run of memory, in their own order.
        self._is_run: Bools = straight[number] & contiguous(pieces.sizes, strides[number])
        self.addresses: Ints = np.where(self._is_run & (base[number] > 0), base[number] + self._starts, 0)
        #: Which have one place only, and arrive as they lie there; which are converted as they land; and which lie in
        #: a target, that may hold the right bytes already.
        self.lie_once: Bools = once[number]
        self.convert: Bools = converts[number]
        self.held: Bools = self.lie_once & targeted[number]

    # -- what each source can bring

    def portion(self, rank: int) -> Portion:
        """What a source holds of what is needed."""
        number = next(i for i, cohort in enumerate(self._cohorts) if rank in cohort.members)
        theirs = tuple(i for i, who in enumerate(self._pieces.groups) if rank in who)
        known = self._portions.get((number, theirs))
        if known is None:
            known = self._portions[number, theirs] = self._portion(number, theirs)
        return known

    def _portion(self, number: int, theirs: Sequence[int]) -> Portion:
        """What a source of this cohort holds that is in these sets of sources. Replicas have the same."""
        pieces, edges, cut = self._pieces, self._groups, self._cut
        nothing = [np.zeros(0, dtype=np.int64)]
        boxes = np.concatenate([np.arange(edges[i], edges[i + 1]) for i in theirs] or nothing)
        # Parcels are in the order of their boxes, and of one set of sources each.
        firsts = np.searchsorted(cut.first, edges)
        numbers = np.concatenate([np.arange(firsts[i], firsts[i + 1]) for i in theirs] or nothing)
        held = np.zeros(len(cut), dtype=bool)
        held[numbers] = True
        need, group = pieces.need[boxes], pieces.group[boxes]
        names = self._names
        ndim = names.ndim[need]
        used = np.arange(pieces.start.shape[1]) < ndim[:, None]
        wanted = Picks.of(
            names.leaf[number][need],
            names.tensor[need],
            ndim,
            pieces.start[boxes][used],
            pieces.sizes[boxes][used],
            names.wires,
            names.wire[need],
            np.concatenate([[1], np.diff(group) != 0])[: len(boxes)],
        )
        return Portion(held, numbers, wanted, boxes, self._fingerprint(wanted, boxes, numbers))

    @cached_property
    def _names(self) -> _Names:
        needs = self._needs.needs
        leaf = np.full((len(self._cohorts), len(needs)), -1, dtype=np.int64)
        for i, need in enumerate(needs):
            for cohort, number in need.tensor.leaves:
                leaf[cohort, i] = number
        wires = list(dict.fromkeys(need.wire for need in needs))
        return _Names(
            leaf,
            np.array([need.tensor.number for need in needs], dtype=np.int64),
            np.array([len(need.block.start) for need in needs], dtype=np.int64),
            wires,
            np.array([wires.index(need.wire) for need in needs], dtype=np.int64),
        )

    def _fingerprint(self, wanted: Picks, boxes: Ints, numbers: Ints) -> int:
        """As the source will compute it, of the parcels that it cuts from its own boxes."""
        cut = self._cut
        mine = replace(cut.boxes, nbytes=cut.boxes.nbytes[boxes], item=cut.boxes.item[boxes])
        first = np.searchsorted(boxes, cut.first[numbers])
        theirs = replace(cut, boxes=mine, first=first, count=cut.count[numbers], low=cut.low[numbers])
        return parcels.fingerprint(theirs, wanted.fingerprint())

    def seen_from(self, portion: Portion, manifest: Manifest) -> Parcels:
        """The same parcels with their boxes in a source's memory, whose own description this is."""
        some = boxes_in(Holdings(manifest), portion.picks)
        n, at = len(self._pieces), portion.boxes

        def spread(column: Ints) -> Ints:
            result = np.zeros(n, dtype=np.int64)
            result[at] = column
            return result

        strided = {int(at[i]): box for i, box in some.strided.items()}
        casts = {int(at[i]): cast for i, cast in some.casts.items()}
        boxes = replace(
            self._cut.boxes, storage=spread(some.storage), start=spread(some.start), strided=strided, casts=casts
        )
        return replace(self._cut, boxes=boxes)

    @property
    def sources(self) -> Who:
        """The sources that hold anything of what is needed here."""
        return frozenset().union(*self._pieces.groups)

    def covered_by(self, ranks: Who) -> Bools:
        """Which parcels some of these sources can bring."""
        good = np.array([not who.isdisjoint(ranks) for who in self._pieces.groups], dtype=bool)
        return good[self._pieces.group[self._cut.first]] if len(self._cut) else np.zeros(0, dtype=bool)

    # -- Places

    def run(self, box: int, low: int, high: int) -> torch.Tensor | None:
        if not self._is_run[box]:
            return None
        spot, _ = self._needs.needs[int(self._pieces.need[box])].spots[0]
        start = int(self._starts[box])
        return dense.over(spot.tensor.untyped_storage(), torch.uint8, start + low, (high - low,), (1,))

    def places(self, box: int) -> list[Place]:
        need = self._needs.needs[int(self._pieces.need[box])]
        n = len(need.block.start)
        first, sizes = self._pieces.start[box, :n].tolist(), self._pieces.sizes[box, :n].tolist()
        result = []
        for spot, at in need.spots:
            offset = spot.offset + sum(
                (a + f - b) * s for a, f, b, s in zip(at, first, need.block.start, spot.strides, strict=True)
            )
            kind = dense.ITEM_TYPES[spot.item] if spot.wire is None else spot.tensor.dtype
            view = dense.over(spot.tensor.untyped_storage(), kind, offset, *merged(sizes, spot.strides))
            result.append(Place(view, 0, spot.signs, spot.wire))
        return result

    def fill_aside(self) -> None:
        """Begin with what the targets hold, where it is a copy that is written."""
        for spot in self._needs.spots:
            if spot.final is not None and spot.tensor.numel():
                dense.raw(spot.tensor).copy_(dense.raw(spot.final))

    # -- what has been touched

    def touch(self, boxes: Sequence[int] | Ints | slice) -> None:
        if isinstance(boxes, range) and boxes.step == 1:
            boxes = slice(boxes.start, boxes.stop)
        self._touched[boxes if isinstance(boxes, slice) else np.asarray(boxes, dtype=np.int64)] = True

    def _written(self) -> list[Spot]:
        if self._applied:
            return [spot for spot in self._needs.spots if not spot.fresh]
        if any(spot.final is not None for spot in self._needs.spots):
            return []
        needs = np.unique(self._pieces.need[self._touched]).tolist()
        spots = (spot for n in needs for spot, _ in self._needs.needs[n].spots)
        return list({id(spot): spot for spot in spots if not spot.fresh}.values())

    def torn(self) -> tuple[str, ...]:
        return tuple(self._paths(self._written()))

    def bump_versions(self) -> None:
        changed = []
        for spot in self._written():
            tensor = spot.own
            leaf = self._needs.prepared.leaves[spot.target]
            changed.append(tensor)
            if leaf is not tensor and isinstance(leaf, torch.Tensor) and not isinstance(leaf, ShardedTensor):
                changed.append(leaf)
        if changed:
            torch.autograd.graph.increment_version(changed)

    def _paths(self, spots: Iterable[Spot]) -> list[str]:
        """Paths of the leaves that these belong to: the targets' own, and those of leaves that have none."""
        numbers = {spot.target for spot in spots}
        targets: Sequence[str] = trees.paths(self._needs.prepared.root)
        fresh: Sequence[str] = self._cohorts[0].manifest.paths
        if len(numbers) > MANY:
            targets, fresh = list(targets), list(fresh)
        return [targets[n] if n >= 0 else fresh[~n] for n in sorted(numbers)]

    def paths_of(self, boxes: Sequence[int]) -> list[str]:
        return self._paths(
            spot for n in self._pieces.need[list(boxes)].tolist() for spot, _ in self._needs.needs[n].spots
        )

    def account(self, landed: Bools) -> tuple[Sequence[str], Sequence[str]]:
        """Paths of the leaves of which everything has landed, and of all others."""
        late = ~landed
        edges = np.zeros(len(self._pieces) + 1, dtype=np.int64)
        np.add.at(edges, self._cut.first[late], 1)
        np.add.at(edges, (self._cut.first + self._cut.count)[late], -1)
        needs = np.unique(self._pieces.need[np.cumsum(edges)[:-1] > 0]).tolist()
        missing = {spot.target for n in needs for spot, _ in self._needs.needs[n].spots}
        spots = self._needs.spots
        received = self._paths(spot for spot in spots if spot.target not in missing)
        return received, self._paths(spot for spot in spots if spot.target in missing)

    @property
    def stays(self) -> bool:
        """Whether what has landed is still there after a receive that failed: not what has landed aside."""
        return all(spot.final is None for spot in self._needs.spots)

    @property
    def fresh(self) -> Any:
        return self._needs.memory

    @property
    def fingerprint(self) -> int:
        """Of what lands where: a receive that goes on must have the same."""
        digest = xxhash.xxh3_64(parcels.fingerprint(self._cut, 0).to_bytes(8, "little"))
        for column in (self._pieces.need, self._pieces.start, self._pieces.sizes):
            digest.update(np.ascontiguousarray(column).data)
        for need in self._needs.needs:
            spots = [(spot.target, at) for spot, at in need.spots]
            digest.update(repr((need.tensor, need.block, need.wire, spots)).encode())
        return digest.intdigest()

    # -- the result

    def finish(self, room: Room, kinds: Kinds) -> Any:
        """Build the state from what has landed."""
        needs, manifest = self._needs, self._needs.manifest
        targets = needs.prepared.leaves
        built: dict[int, Any] = {}
        for leaf in range(len(manifest)):
            if manifest.kinds[leaf] == Leaf.VALUE:
                built[leaf] = values.decode(manifest.detail(leaf))
            elif leaf in needs.fresh:
                built[leaf] = self._build(leaf, needs.fresh[leaf], room, kinds)
            elif leaf in needs.partner:
                built[leaf] = targets[needs.partner[leaf]]
        ordered = []
        for origin in needs.origin:
            if origin >= 0:
                ordered.append(built[origin])
            elif ~origin in needs.replaced:
                number, leaf = needs.replaced[~origin]
                blob = number == 0 and leaf in needs.fresh
                ordered.append(built[leaf] if blob else values.decode(self._cohorts[number].manifest.detail(leaf)))
            else:
                ordered.append(targets[~origin])
        state = trees.unflatten(needs.root, ordered)
        self._examine(room, kinds)
        self._apply()
        for leaf, partner in needs.partner.items():
            spec = manifest.detail(leaf)
            if (
                manifest.kinds[leaf] == Leaf.COMPOSITE
                and spec[0] not in ("dtensor", "sharded")
                and leaf not in needs.fresh
            ):
                try:
                    kinds.settle(spec, targets[partner])
                except ValueError as error:
                    raise ValueError(f"leaf {manifest.paths[leaf]}: {error}") from error
        return state

    def _examine(self, room: Room, kinds: Kinds) -> None:
        """Before a target is written: whether what has landed aside for it makes sense."""
        aside: dict[int, list[torch.Tensor]] = {}
        for spot in self._needs.spots:
            if spot.final is not None:
                aside.setdefault(spot.target, []).append(spot.tensor)
        manifest = self._needs.manifest
        for leaf, partner in self._needs.partner.items():
            spec = manifest.detail(leaf)
            sharded = type(spec) is list and spec[0] in ("dtensor", "sharded")
            if manifest.kinds[leaf] == Leaf.COMPOSITE and not sharded and partner in aside:
                try:
                    kinds.examine(spec, iter(aside[partner]), room)
                except ValueError as error:
                    raise ValueError(f"leaf {manifest.paths[leaf]}: {error}") from error

    def _build(self, leaf: int, spots: Sequence[Spot], room: Room, kinds: Kinds) -> Any:
        manifest = self._needs.manifest
        first = int(manifest.first_parts[leaf])
        spec = manifest.detail(leaf)
        try:
            parts = [dense.dress(spot.tensor, int(manifest.parts.flags[first + k])) for k, spot in enumerate(spots)]
            return parts[0] if type(spec) is int else kinds.close(spec, iter(parts), room)
        except CannotCarry as reason:
            raise UnsupportedLeaf(manifest.paths[leaf], str(reason)) from reason
        except ValueError as error:
            raise ValueError(f"leaf {manifest.paths[leaf]}: {error}") from error

    def _apply(self) -> None:
        """What has landed aside goes into the targets."""
        aside = [spot for spot in self._needs.spots if spot.final is not None]
        self._applied = bool(aside)
        for spot in aside:
            if spot.final is not None and spot.tensor.numel():
                dense.raw(spot.final).copy_(dense.raw(spot.tensor))
