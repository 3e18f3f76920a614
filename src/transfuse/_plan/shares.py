"""Shares: which parcels of a receive each source can send.

If the state lands as it is, each source's share is everything: :class:`Everything`. Otherwise each needed block is cut
where its holders change (:func:`split`), and a source's share is the pieces that it holds: :class:`SharesOfPieces`.
Pure, and in columns: there may be millions of pieces. Tensors of the same shape and sharding are cut alike, so each
such pattern is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from transfuse._errors import NotCovered, TargetMismatch
from transfuse._plan import parcels
from transfuse._plan.cohorts import Cohort, SourceRanks
from transfuse._plan.destinations import NeededBlock
from transfuse._plan.holdings import Holding, Holdings, Spread, Whole
from transfuse._plan.parcels import Parcels
from transfuse._plan.regions import Regions
from transfuse._plan.wanted_blocks import WantedBlocks, regions_in
from transfuse._state.leaves.layout import Box
from transfuse._state.manifest import Manifest
from transfuse._state.region import Ints
from transfuse._state.tensors import Bools

#: The most pieces of a plan: each piece takes memory at both ends.
MAX_PIECES = 1 << 23
#: The most blocks that an error names.
MAX_NAMED = 1000


class Share(Protocol):
    """What one source can send, and how the receiver asks for it."""

    @property
    def is_everything(self) -> bool:
        """Whether the source has the whole state in the form in which it lands here."""

    @property
    def held(self) -> Bools:
        """For each parcel of the receive, whether the source holds it."""

    @property
    def order(self) -> Ints | None:
        """The receiver's numbers of the source's parcels, in the source's order; None if both number alike."""

    @property
    def fingerprint(self) -> int:
        """A digest of the source's parcels. The source must compute the same digest of the parcels that it derives."""

    @property
    def wanted_blocks(self) -> WantedBlocks | None:
        """The blocks that the receiver wants from the source; None for the whole state as the source described it."""

    @property
    def apart(self) -> list[int]:
        """Storages of which the receiver requests only some tensors."""

    @property
    def tensors(self) -> list[int]:
        """The tensors that the receiver requests of the storages in ``apart``."""

    def ours(self, run: range) -> Sequence[int]:
        """The receiver's numbers of the parcels that have the numbers ``run`` at the source."""

    def theirs(self, numbers: Sequence[int]) -> Sequence[int]:
        """The source's numbers of the parcels that have these ``numbers`` at the receiver."""

    def seen_from_source(self, describe: Callable[[], Manifest]) -> tuple[Manifest, Parcels]:
        """The source's own manifest, and all parcels with their regions in the source's memory.

        ``describe`` reads that manifest. It is called only if the manifest is not known yet.
        """


class Shares(Protocol):
    """The shares of all sources."""

    @property
    def joinable(self) -> bool:
        """Whether a source that comes late can take part: its share does not depend on the other sources."""

    def of(self, rank: int) -> Share: ...

    def covered_by(self, ranks: SourceRanks) -> Bools:
        """For each parcel, whether one of these sources can send it."""


class Everything:
    """The state lands as it is, so each source's share is everything. One object is the share of all sources."""

    is_everything = joinable = True
    order = wanted_blocks = None

    def __init__(self, manifest: Manifest, cut: Parcels, apart: list[int], tensors: list[int]) -> None:
        self.apart, self.tensors = apart, tensors
        self._manifest, self._cut = manifest, cut

    def of(self, rank: int) -> Everything:
        return self

    @cached_property
    def held(self) -> Bools:
        return np.ones(len(self._cut), dtype=bool)

    @cached_property
    def fingerprint(self) -> int:
        return parcels.fingerprint(self._cut)

    def ours(self, run: range) -> Sequence[int]:
        return run

    def theirs(self, numbers: Sequence[int]) -> Sequence[int]:
        return numbers

    def seen_from_source(self, describe: Callable[[], Manifest]) -> tuple[Manifest, Parcels]:
        return self._manifest, self._cut

    def covered_by(self, ranks: SourceRanks) -> Bools:
        return np.full(len(self._cut), bool(ranks))


@dataclass(eq=False)
class Pieces:
    """Columns of pieces of needed blocks. A set of sources holds each piece whole. Pieces are sorted by these sets.

    All rows have the same number of dimensions; those beyond a tensor's own have size 1.
    """

    #: The number of the needed block that each is a piece of.
    need: Ints
    #: Where each piece begins in the global tensor, and its sizes.
    start: Ints
    sizes: Ints
    #: The number of the set of holders. Pieces with the fewest holders come first, because few sources can send them.
    group: Ints
    groups: list[SourceRanks]
    #: Whether each piece is packed alone, so that parcels can be told apart by piece.
    alone: bool = False

    def __len__(self) -> int:
        return len(self.need)

    def regions(self, item: Ints) -> Regions:
        """The pieces as regions of which only the sizes are known: each end knows only its own memory."""
        nowhere = np.zeros(len(self), dtype=np.int64)
        item = item[self.need]
        space = np.arange(len(self)) if self.alone else self.group
        return Regions(nowhere, space, nowhere, self.sizes.prod(axis=1) * item, item, nowhere - 1, strided={}, also={})


class _Pattern(NamedTuple):
    """How a needed block is cut: where each piece begins, its sizes, and the number of its set of holders."""

    start: Ints
    sizes: Ints
    group: Ints


def split(cohorts: Sequence[Cohort], needs: Sequence[NeededBlock]) -> Pieces:
    """Cut the needed blocks into pieces; :class:`NotCovered` names pieces that nobody holds."""
    dims = max([len(need.block.start) for need in needs], default=0) or 1
    patterns: dict[tuple[Any, ...], int] = {}
    found: list[_Pattern] = []
    groups: dict[SourceRanks, int] = {}
    which: list[int] = []
    total = 0
    for need in needs:
        holdings = [(cohorts[i], cohorts[i].holdings.of(leaf, need.tensor.number)) for i, leaf in need.tensor.leaves]
        key = (need.block, need.coordinate, tuple((id(cohort), _identity(holding)) for cohort, holding in holdings))
        number = patterns.get(key)
        if number is None:
            number = patterns[key] = len(found)
            found.append(_cut(need, holdings, groups, dims))
        which.append(number)
        total += len(found[number].group)
        if total > MAX_PIECES:
            raise TargetMismatch(
                [
                    f"the shardings of source and target together cut the state into more than {MAX_PIECES} pieces; "
                    "receive into a sharding that is closer to the source's"
                ]
            )
    nobody = groups.get(frozenset())
    if nobody is not None:
        raise NotCovered(_name_missing(cohorts, needs, [found[number] for number in which], nobody))
    return _lay_out(which, found, list(groups), dims)


def _identity(holding: Holding) -> object:
    """A key that is equal for holdings that are cut alike."""
    if isinstance(holding, Spread):
        return id(holding.layout)
    return Whole if isinstance(holding, Whole) else id(holding)


def _cut(
    need: NeededBlock, holdings: Sequence[tuple[Cohort, Holding]], groups: dict[SourceRanks, int], dims: int
) -> _Pattern:
    block = need.block
    edges = [
        [low, *sorted({cut for _, h in holdings for cut in h.cuts(d, low, low + size)}), low + size]
        for d, (low, size) in enumerate(zip(block.start, block.sizes, strict=True))
    ]
    rows, numbers = [], []
    for chosen in product(*map(pairwise, edges)):
        piece = Box(tuple(a for a, _ in chosen), tuple(b - a for a, b in chosen))
        who: SourceRanks = frozenset()
        for cohort, holding in holdings:
            some = cohort.who(holding, piece, need.coordinate)
            who = who | some if who else some
        rows.append((piece.start, piece.sizes))
        numbers.append(groups.setdefault(who, len(groups)))
        if len(rows) > MAX_PIECES:
            raise TargetMismatch(
                [
                    f"the shardings of source and target together cut a tensor into more than {MAX_PIECES} pieces; "
                    "receive into a sharding that is closer to the source's"
                ]
            )
    columns = np.array(rows, dtype=np.int64).reshape(len(rows), 2, len(block.start))
    start, sizes = np.zeros((len(rows), dims), dtype=np.int64), np.ones((len(rows), dims), dtype=np.int64)
    start[:, : len(block.start)], sizes[:, : len(block.start)] = columns[:, 0], columns[:, 1]
    return _Pattern(start, sizes, np.array(numbers, dtype=np.int64))


def _lay_out(which: Sequence[int], found: Sequence[_Pattern], groups: list[SourceRanks], dims: int) -> Pieces:
    """All pieces of all needed blocks, sorted by their sets of holders."""
    ranked = sorted(groups, key=lambda who: (len(who), sorted(who)))
    rank = {who: i for i, who in enumerate(ranked)}
    order_of = np.array([rank[who] for who in groups], dtype=np.int64)
    empty = np.zeros((0, dims), dtype=np.int64)
    group = np.concatenate([order_of[found[n].group] for n in which] or [empty[:, 0]])
    need = np.repeat(np.arange(len(which)), [len(found[n].group) for n in which]) if which else empty[:, 0]
    order = np.argsort(group, kind="stable")
    start = np.concatenate([found[n].start for n in which] or [empty])[order]
    sizes = np.concatenate([found[n].sizes for n in which] or [empty])[order]
    return Pieces(need[order], start, sizes, group[order], ranked)


def _name_missing(
    cohorts: Sequence[Cohort], needs: Sequence[NeededBlock], patterns: Sequence[_Pattern], nobody: int
) -> list[str]:
    lines: list[str] = []
    for need, pattern in zip(needs, patterns, strict=True):
        dims = len(need.block.start)
        for row in np.flatnonzero(pattern.group == nobody).tolist():
            if len(lines) < MAX_NAMED:
                number, leaf = need.tensor.leaves[0]
                block = Box(tuple(pattern.start[row, :dims].tolist()), tuple(pattern.sizes[row, :dims].tolist()))
                where = "" if need.coordinate is None else f" at coordinate {need.coordinate} of the mesh"
                lines.append(f"{cohorts[number].names[leaf]}: nobody holds {block}{where}")
    return lines


@dataclass(eq=False)
class _ShareOfPieces:
    """The pieces that one source holds."""

    held: Bools
    #: The receiver's numbers of the source's parcels, in the source's order.
    order: Ints
    wanted_blocks: WantedBlocks
    #: For each wanted block, the number of its region among all regions of the receive.
    regions: Ints
    fingerprint: int
    cut: Parcels
    #: The parcels as they lie in sources' memory, by the digest of the source's structure.
    seen: dict[bytes, Parcels] = field(default_factory=dict)
    is_everything = False

    @property
    def apart(self) -> list[int]:
        return []

    @property
    def tensors(self) -> list[int]:
        return []

    def ours(self, run: range) -> Sequence[int]:
        found: list[int] = self.order[run.start : run.stop].tolist()
        return found

    def theirs(self, numbers: Sequence[int]) -> Sequence[int]:
        found: list[int] = np.searchsorted(self.order, np.asarray(numbers, dtype=np.int64)).tolist()
        return found

    def seen_from_source(self, describe: Callable[[], Manifest]) -> tuple[Manifest, Parcels]:
        manifest, cut, at = describe(), self.cut, self.regions
        if manifest.structure in self.seen:
            return manifest, self.seen[manifest.structure]
        some = regions_in(Holdings(manifest), self.wanted_blocks)

        def spread(column: Ints) -> Ints:
            result = np.zeros(len(cut.regions), dtype=np.int64)
            result[at] = column
            return result

        strided = {int(at[i]): region for i, region in some.strided.items()}
        casts = {int(at[i]): cast for i, cast in some.casts.items()}
        regions = replace(
            cut.regions, storage=spread(some.storage), start=spread(some.start), strided=strided, casts=casts
        )
        seen = replace(cut, regions=regions)
        if manifest.structure:
            self.seen[manifest.structure] = seen
        return manifest, seen


class _Names(NamedTuple):
    """Columns of the needed blocks in the sources' terms: the leaf in each cohort, the tensor in it, the wire dtype."""

    leaf: Ints
    tensor: Ints
    ndim: Ints
    wires: list[torch.dtype | None]
    wire: Ints


class SharesOfPieces:
    """Each source's share is the pieces that it holds. Replicas have the same share."""

    joinable = False

    def __init__(self, cohorts: Sequence[Cohort], needs: Sequence[NeededBlock], pieces: Pieces, cut: Parcels) -> None:
        self._cohorts = cohorts
        self._needs = needs
        self._pieces = pieces
        self._cut = cut
        self._known: dict[tuple[int, tuple[int, ...]], _ShareOfPieces] = {}
        #: Where the pieces of each set of sources begin, and at the end the number of pieces.
        self._groups: Ints = np.searchsorted(pieces.group, np.arange(len(pieces.groups) + 1))

    def of(self, rank: int) -> Share:
        number = next(i for i, cohort in enumerate(self._cohorts) if rank in cohort.members)
        theirs = tuple(i for i, who in enumerate(self._pieces.groups) if rank in who)
        known = self._known.get((number, theirs))
        if known is None:
            known = self._known[number, theirs] = self._share(number, theirs)
        return known

    def covered_by(self, ranks: SourceRanks) -> Bools:
        good = np.array([not who.isdisjoint(ranks) for who in self._pieces.groups], dtype=bool)
        return good[self._pieces.group[self._cut.first]] if len(self._cut) else np.zeros(0, dtype=bool)

    def _share(self, number: int, theirs: Sequence[int]) -> _ShareOfPieces:
        """The share of a source of cohort ``number`` that is in the sets of sources ``theirs``."""
        pieces, edges, cut = self._pieces, self._groups, self._cut
        nothing = [np.zeros(0, dtype=np.int64)]
        regions = np.concatenate([np.arange(edges[i], edges[i + 1]) for i in theirs] or nothing)
        # Parcels are in the order of their regions, and each has pieces of one set of sources.
        firsts = np.searchsorted(cut.first, edges)
        order = np.concatenate([np.arange(firsts[i], firsts[i + 1]) for i in theirs] or nothing)
        held = np.zeros(len(cut), dtype=bool)
        held[order] = True
        need, group = pieces.need[regions], pieces.group[regions]
        names = self._names
        ndim = names.ndim[need]
        used = np.arange(pieces.start.shape[1]) < ndim[:, None]
        wanted_blocks = WantedBlocks.of(
            leaf=names.leaf[number][need],
            tensor=names.tensor[need],
            ndim=ndim,
            starts=pieces.start[regions][used],
            sizes=pieces.sizes[regions][used],
            wires=names.wires,
            wire=names.wire[need],
            begins=np.concatenate([[1], (np.diff(group) != 0) | pieces.alone])[: len(regions)],
        )
        return _ShareOfPieces(
            held, order, wanted_blocks, regions, self._fingerprint(wanted_blocks, regions, order), cut
        )

    @cached_property
    def _names(self) -> _Names:
        needs = self._needs
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

    def _fingerprint(self, wanted_blocks: WantedBlocks, regions: Ints, order: Ints) -> int:
        """The fingerprint that the source will compute of the parcels that it cuts from its own regions."""
        cut = self._cut
        mine = replace(cut.regions, nbytes=cut.regions.nbytes[regions], item=cut.regions.item[regions])
        first = np.searchsorted(regions, cut.first[order])
        theirs = replace(cut, regions=mine, first=first, count=cut.count[order], low=cut.low[order])
        return parcels.fingerprint(theirs, wanted_blocks.fingerprint())
