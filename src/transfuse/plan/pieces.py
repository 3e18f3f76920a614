"""Pieces: what is needed, cut where its holders change. Pure, and in columns: there may be millions.

Tensors of the same shape and sharding are cut alike, so each such pattern is worked out once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from transfuse.errors import NotCovered, TargetMismatch
from transfuse.plan.cohorts import Cohort, Who
from transfuse.plan.holdings import Holding, Spread, Whole
from transfuse.plan.regions import Boxes
from transfuse.plan.spots import Need
from transfuse.state.leaves.layout import Block
from transfuse.state.tensors import Ints

__all__ = ["Pieces", "split"]

#: More pieces than these are refused: each takes memory at both ends.
MAX_PIECES = 1 << 23
#: So many blocks that nobody holds are named.
MAX_NAMED = 1000


@dataclass(eq=False)
class Pieces:
    """Columns of blocks that a set of sources holds whole, those of one set together. Dimensions beyond a tensor's
    own are of size 1.
    """

    #: What each is a piece of.
    need: Ints
    #: Where each begins in the global tensor, and its sizes.
    start: Ints
    sizes: Ints
    #: The set of sources that hold it; what fewest hold comes first, since nobody else will bring it.
    group: Ints
    groups: list[Who]

    def __len__(self) -> int:
        return len(self.need)

    def boxes(self, item: Ints) -> Boxes:
        """As boxes of which only the size is known: where they lie is each end's own business."""
        nowhere = np.zeros(len(self), dtype=np.int64)
        item = item[self.need]
        return Boxes(nowhere, self.group, nowhere, self.sizes.prod(axis=1) * item, item, nowhere - 1, {}, {})


class _Pattern(NamedTuple):
    """How a block is cut: where each piece begins, its sizes, and who holds it."""

    start: Ints
    sizes: Ints
    group: Ints


def split(cohorts: Sequence[Cohort], needs: Sequence[Need]) -> Pieces:
    """Cut what is needed; :class:`NotCovered` names what nobody holds."""
    dims = max([len(need.block.start) for need in needs], default=0) or 1
    patterns: dict[tuple[Any, ...], int] = {}
    found: list[_Pattern] = []
    groups: dict[Who, int] = {}
    which: list[int] = []
    total = 0
    for need in needs:
        holdings = [(cohorts[i], cohorts[i].holdings.of(leaf, need.tensor.number)) for i, leaf in need.tensor.leaves]
        key = (need.block, need.place, tuple((id(cohort), _identity(holding)) for cohort, holding in holdings))
        number = patterns.get(key)
        if number is None:
            number = patterns[key] = len(found)
            found.append(_cut(need, holdings, groups, dims))
        which.append(number)
        total += len(found[number].group)
        if total > MAX_PIECES:
            raise TargetMismatch([f"the two shardings cut the state into more than {MAX_PIECES} pieces"])
    nobody = groups.get(frozenset())
    if nobody is not None:
        raise NotCovered(_name_missing(cohorts, needs, [found[number] for number in which], nobody))
    return _lay_out(which, found, list(groups), dims)


def _identity(holding: Holding) -> object:
    """What holdings that are cut alike have in common."""
    if isinstance(holding, Spread):
        return id(holding.layout)
    return Whole if isinstance(holding, Whole) else id(holding)


def _cut(need: Need, holdings: Sequence[tuple[Cohort, Holding]], groups: dict[Who, int], dims: int) -> _Pattern:
    block = need.block
    edges = [
        [low, *sorted({cut for _, h in holdings for cut in h.cuts(d, low, low + size)}), low + size]
        for d, (low, size) in enumerate(zip(block.start, block.sizes, strict=True))
    ]
    rows, numbers = [], []
    for chosen in product(*map(pairwise, edges)):
        piece = Block(tuple(a for a, _ in chosen), tuple(b - a for a, b in chosen))
        who: Who = frozenset()
        for cohort, holding in holdings:
            some = cohort.who(holding, piece, need.place)
            who = who | some if who else some
        rows.append((piece.start, piece.sizes))
        numbers.append(groups.setdefault(who, len(groups)))
        if len(rows) > MAX_PIECES:
            raise TargetMismatch([f"the two shardings cut a tensor into more than {MAX_PIECES} pieces"])
    columns = np.array(rows, dtype=np.int64).reshape(len(rows), 2, len(block.start))
    start, sizes = np.zeros((len(rows), dims), dtype=np.int64), np.ones((len(rows), dims), dtype=np.int64)
    start[:, : len(block.start)], sizes[:, : len(block.start)] = columns[:, 0], columns[:, 1]
    return _Pattern(start, sizes, np.array(numbers, dtype=np.int64))


def _lay_out(which: Sequence[int], found: Sequence[_Pattern], groups: list[Who], dims: int) -> Pieces:
    """All pieces in one, sorted by their holders."""
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
    cohorts: Sequence[Cohort], needs: Sequence[Need], patterns: Sequence[_Pattern], nobody: int
) -> list[str]:
    lines: list[str] = []
    for need, pattern in zip(needs, patterns, strict=True):
        dims = len(need.block.start)
        for row in np.flatnonzero(pattern.group == nobody).tolist():
            if len(lines) < MAX_NAMED:
                number, leaf = need.tensor.leaves[0]
                block = Block(tuple(pattern.start[row, :dims].tolist()), tuple(pattern.sizes[row, :dims].tolist()))
                place = "" if need.place is None else f" in place {need.place} of the mesh"
                lines.append(f"{cohorts[number].names[leaf]}: nobody holds {block}{place}")
    return lines
